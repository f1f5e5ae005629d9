"""What a trainer is asked for: local work of clients, by the models that they start from.

A trainer takes these models as rows, and returns what the clients make of them: E passes over a client's own samples in
mini-batches of B (Algorithm 2, the client's part), or so many mini-batch steps. Samples are gone through in their given
order, or in a new one every epoch. `safa.training.batched` trains many clients as one computation,
`safa.training.threaded` and `safa.training.processes` side by side, and `safa.training.serial` one after the other, as
the oracle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.errors import MisuseError
from safa.training.allocation import keep_freed_memory
from safa.training.batches import Batches, Ids
from safa.training.layout import Layout

__all__ = ["Amount", "LocalTrainer", "Trainer", "Work"]


class Amount(TypedDict, total=False):
    """How much each of K clients trains, and how. Either `epochs` or `steps` is given."""

    epochs: int | None
    """All of them make so many passes over their samples."""
    steps: Ids | None
    """Each makes its own number of mini-batch steps."""
    lr: NDArray[np.float64] | None
    """The learning rate of each; without, all have that of the optimiser."""
    bases: Ids | None
    """The versions that they start from, on which the order of shuffled samples depends."""
    correction: Tensor | None
    """[K, d], added to every gradient."""


class Trainer(Protocol):
    """Turns models that clients start from into their updates."""

    layout: Layout

    def train(self, clients: Ids, start: Tensor, **amount: Unpack[Amount]) -> Tensor:
        """The updates [K, d] of these K clients, who start from the rows of `start` [K, d]."""


@dataclass(frozen=True, eq=False)
class Work:
    """What each of K clients is to do."""

    clients: Ids
    steps: Ids
    in_epochs: int
    """The same in epochs, where all clients make so many; 0 where they do not."""
    bases: Ids
    lr: Tensor | None
    """[K, 1]"""
    correction: Tensor | None
    """[K, trained numbers of a row]"""

    def __getitem__(self, part: Ids | slice) -> Work:
        index = torch.from_numpy(part) if isinstance(part, np.ndarray) else part
        lr, correction = (None if values is None else values[index] for values in (self.lr, self.correction))
        return Work(self.clients[part], self.steps[part], self.in_epochs, self.bases[part], lr, correction)


class LocalTrainer(ABC):
    """A trainer that has the samples of its clients at hand."""

    layout: Layout
    _batches: Batches

    def train(self, clients: Ids, start: Tensor, **amount: Unpack[Amount]) -> Tensor:
        """The updates [K, d] of these K clients, who start from the rows of `start` [K, d]."""
        if start.device.type == "cpu":
            keep_freed_memory()
        return self._train(self._work(clients, start, amount), start)

    def _work(self, clients: Ids, start: Tensor, amount: Amount) -> Work:
        epochs, steps, bases = amount.get("epochs"), amount.get("steps"), amount.get("bases")
        lr, correction = amount.get("lr"), amount.get("correction")
        if (epochs is None) == (steps is None):
            raise MisuseError("local work is given in epochs or in steps")
        return Work(
            clients,
            self._batches.per_epoch(clients) * (epochs or 0) if steps is None else steps,
            epochs or 0,
            np.zeros_like(clients) if bases is None else bases,
            None if lr is None else torch.from_numpy(lr).to(start).unsqueeze(1),
            None if correction is None else correction[:, : self.layout.trained].to(start),
        )

    @abstractmethod
    def _train(self, work: Work, start: Tensor) -> Tensor:
        """The updates [K, d] of clients that start from the rows of `start` and have this to do."""
