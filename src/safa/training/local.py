"""The updates of simulated clients: how much each of them trains, and with which learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from safa.runs.schedule import Schedule
from safa.training.batches import Ids
from safa.training.trainer import Amount, Trainer

__all__ = ["LocalTraining"]


def _share_of(work: NDArray[np.float64], steps: Ids) -> Ids:
    """How many of so many steps a share of the work is, one at least."""
    return np.maximum(1, np.rint(work * steps)).astype(np.int64)


class LocalTraining:
    """The updates of simulated clients, which are trained when they are asked for."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        epochs: int,
        local_steps: int = 0,
        batches: Ids | None = None,
        lr: float = 0.0,
        schedule: Schedule | None = None,
        rounds: int = 1,
        own_models: bool = False,
    ) -> None:
        """An update takes so many epochs, each of as many mini-batches as `batches` says of every client, or steps.

        Without `batches` and `lr`, nobody may be asked for a part of its work, nor for the size of its steps. With
        `own_models`, clients start from no version but from models of their own, and rounds count their updates.
        """
        self._trainer, self._epochs, self._local_steps, self._lr = trainer, epochs, local_steps, lr
        self._batches = np.empty(0, dtype=np.int64) if batches is None else batches
        self._own_models, self._schedule, self._rounds = own_models, schedule or Schedule.parse("constant"), rounds

    def updates(
        self,
        clients: Ids,
        bases: Ids,
        start: Tensor,
        *,
        rounds: Ids,
        work: NDArray[np.float64],
        correction: Tensor | None = None,
    ) -> Tensor:
        """The updates [K, d] of these clients, who start from the rows of `start`.

        `rounds` are the rounds in which they begin, by which the learning rate goes, and `work` the shares of their
        full work that they do. `correction` [K, d] is added to every gradient.
        """
        amount: Amount = {**self.amount(clients, bases, rounds, work), "correction": correction}
        return self._trainer.train(clients, start, **amount)

    def amount(self, clients: Ids, bases: Ids, rounds: Ids, work: NDArray[np.float64]) -> Amount:
        """What a trainer has to know of the work that is asked for."""
        whole = not self._local_steps and bool(np.all(work == 1.0))
        return {
            "epochs": self._epochs if whole else None,
            "steps": None if whole else self._steps(clients, work),
            "lr": None if self._schedule.is_constant else self._rates(rounds),
            "bases": rounds - 1 if self._own_models else bases,
        }

    def step_sizes(self, clients: Ids, rounds: Ids, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """For each of these clients, the number of its steps times their learning rate."""
        return self._steps(clients, work) * self._rates(rounds)

    def _steps(self, clients: Ids, work: NDArray[np.float64]) -> Ids:
        full = np.full(len(clients), self._local_steps) if self._local_steps else self._epochs * self._batches[clients]
        return _share_of(work, full)

    def _rates(self, rounds: Ids) -> NDArray[np.float64]:
        return self._lr * self._schedule.factor(rounds, self._rounds)

    def train(self, clients: Ids, start: Tensor, epochs: int) -> Tensor:
        """The same with another number of epochs, from the first version."""
        return self._trainer.train(clients, start, epochs=epochs)

    def discard(self, clients: Ids, bases: Ids) -> None:
        """These updates will never be asked for: there is nothing to do."""

    def state(self) -> dict[str, Tensor]:
        """There is nothing to be kept."""
        return {}

    def tables(self) -> dict[str, Any]:
        """There are no rows to be kept."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """There was nothing to be kept."""
