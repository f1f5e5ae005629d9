"""What is learnt: a model, a loss, metrics and data. Bring your own in a few lines, as `docs/data.md` shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from safa.errors import SafaError

__all__ = ["Data", "Measure", "Metric", "Problem"]

Data = tuple[Tensor, Tensor]
"""Inputs and targets, with the samples along the first dimension."""

Measure = Callable[[Tensor, Tensor], Tensor | float]
"""A number, or one for each of several classes, from (output, target) of a whole set."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TAKEN = ("loss", "held", "round", "time")


@dataclass(frozen=True)
class Metric:
    """A measure, and whether more of it is better."""

    measure: Measure
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A learning problem. Everything that is trained or measured comes from here."""

    model: Callable[[], nn.Module]
    """Makes a fresh model. Random initial weights come from torch's global generator, which the caller seeds."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """The loss of a batch, from (output, target). One that is a mean over the samples is the fastest to train."""
    metrics: Mapping[str, Metric | Measure] = field(default_factory=dict)
    """What is measured beside the loss, by name, the main one first. A bare function is better the higher it is."""
    train: Data
    test: Data
    shards: Sequence[NDArray[np.int64]] | None = None
    """For every client, which training samples are its own, where the data come in such parts."""
    columns: Mapping[str, ArrayLike] = field(default_factory=dict)
    """Further facts about the training samples, one value for each, by name: who wrote it, where it was taken."""
    kernel: str | None = None
    """The name of a hand-written gradient, where there is one for this model and loss; a wrong one is refused."""

    def __post_init__(self) -> None:
        for name, (inputs, targets) in (("train", self.train), ("test", self.test)):
            if len(inputs) != len(targets) or not len(inputs):
                raise SafaError(f"the {name} data have {len(inputs)} inputs and {len(targets)} targets")
        if not isinstance(self.metrics, Mapping):
            raise SafaError(f"metrics are functions by name, not {self.metrics!r}")
        for name in self.metrics:
            if not _NAME.fullmatch(name) or name in _TAKEN:
                raise SafaError(
                    f"a metric needs a name of letters, digits and _, other than {', '.join(_TAKEN)}: {name!r}"
                )

    def start_model(self, seed: int) -> nn.Module:
        """w(0), the same for the same seed; torch's global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    @property
    def directions(self) -> dict[str, str]:
        """The metrics by name, the main one first: "higher" or "lower", whichever is better."""
        lower = {
            name for name, metric in self.metrics.items() if isinstance(metric, Metric) and not metric.higher_is_better
        }
        return {name: "lower" if name in lower else "higher" for name in self.metrics}

    def measure(self, output: Tensor, target: Tensor) -> dict[str, float]:
        """All metrics of a set by name; one of a number per class is NAME_0, NAME_1, ... and their mean without NaN."""
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            values = _values(name, metric.measure if isinstance(metric, Metric) else metric, output, target)
            several = values.flatten().tolist() if values.ndim else []
            found[name] = float(values.nanmean()) if several else float(values)
            found |= {f"{name}_{place}": one for place, one in enumerate(several)}
        return found


def _values(name: str, measure: Measure, output: Tensor, target: Tensor) -> Tensor:
    """What a metric comes to, in double precision."""
    try:
        value = measure(output, target)
    except Exception as error:
        raise SafaError(f"the metric {name} failed: {type(error).__name__}: {error}") from error
    try:
        values = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    if not values.numel():
        raise SafaError(f"the metric {name} must be a number, or a tensor of one for each class, not {value!r}")
    return values
