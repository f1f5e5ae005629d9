"""What is learnt: a model, a loss, an accuracy and data. Bring your own in five lines, as `docs/learning.md` shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from safa.errors import SafaError

__all__ = ["Data", "Problem"]

Data = tuple[Tensor, Tensor]
"""Inputs and targets, with the samples along the first dimension."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A learning problem. Everything that is trained or measured comes from here."""

    model: Callable[[], nn.Module]
    """Makes a fresh model. Random initial weights come from torch's global generator, which the caller seeds."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """The loss of a batch, from (output, target). One that is a mean over the samples is the fastest to train."""
    accuracy: Callable[[Tensor, Tensor], Tensor | float]
    """Accuracy on a set, from (output, target)."""
    train: Data
    test: Data
    kernel: str | None = None
    """The name of a hand-written gradient, where there is one for this model and loss; a wrong one is refused."""

    def __post_init__(self) -> None:
        for name, (inputs, targets) in (("train", self.train), ("test", self.test)):
            if len(inputs) != len(targets) or not len(inputs):
                raise SafaError(f"the {name} data have {len(inputs)} inputs and {len(targets)} targets")

    def start_model(self, seed: int) -> nn.Module:
        """w(0), the same for the same seed; torch's global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()
