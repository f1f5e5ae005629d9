"""Two habits of the paper's experiments, wrapped around any aggregator.

Whatever a step makes, the best model so far by *test* loss is sent out: this looks at the test set, which nobody who
wants to know how good a model is may do. And where there is an entry per client, it begins with what the client trains
in one epoch from w(0). Both are needed to reproduce the printed tables and for nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Step, Updates
from safa.aggregation.rows import Versions, rows_that_fit
from safa.aggregation.wrapper import Wrapper
from safa.errors import SafaError
from safa.protocol.records import Ids

__all__ = ["AsPrinted"]

_ROWS_PER_UPDATE = 6  # what an update takes: its start, itself, and what is made of them on the way

Evaluate = Callable[[Tensor], float]
Train = Callable[[Ids, Tensor, int], Tensor]


class AsPrinted(Wrapper):
    """The best model so far by test loss, of an aggregator whose entries begin with one epoch of training."""

    name = "as-printed"
    caution = "the model is chosen by its loss on the test set, as in the paper; use this for reproduction only"
    not_deployed = "the paper's habits (safa.paper.habits:AsPrinted) cannot be deployed: devices start from one model"

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin with no best model yet."""
        super().begin(versions, sizes, memory_mb=memory_mb)
        self._clients = len(sizes)
        self._loss, self._best = math.nan, versions.model

    def prepare(self, *, evaluate: Evaluate, train: Train | None) -> None:
        """Keep the means of judging a model, and train the first entries."""
        if train is None:
            raise SafaError(self.not_deployed)
        super().prepare(evaluate=evaluate, train=train)
        self._evaluate = evaluate
        if self.keeps_entries:
            self._train_entries(train)

    def _train_entries(self, train: Train) -> None:
        """The entry of every client := what it trains in one epoch from w(0), in parts that fit the memory."""
        start = self.versions.model
        most = rows_that_fit(start, self.memory_mb, times=_ROWS_PER_UPDATE)
        for first in range(0, self._clients, most):
            clients = np.arange(first, min(first + most, self._clients))
            starts = start.expand(len(clients), -1)
            self.inner.keep(_entries(clients, train(clients, starts, 1), starts, self.versions.latest))

    def step(self, step: Step) -> Tensor:
        """The model that the aggregator inside makes if its test loss is the lowest so far, else the best so far."""
        model = self.inner.step(step)
        loss = self._evaluate(model)
        if math.isnan(self._loss) or loss < self._loss:
            self._loss, self._best = loss, model
        return self._best

    def kept(self) -> dict[str, Tensor]:
        """The best model and its loss."""
        return {"best": self._best.cpu(), "loss": torch.tensor(self._loss, dtype=torch.float64)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        super().restore(state)
        self._best = state["best"].to(self.versions.model.device, copy=True)
        self._loss = float(state["loss"])


def _entries(clients: Ids, rows: Tensor, starts: Tensor, version: int) -> Updates:
    """Updates that change no coefficient; those with a NaN or an infinite number are left out."""
    sound = torch.isfinite(rows).all(dim=1)
    kept = clients[sound.cpu().numpy()]
    base, weight, picked = np.full(len(kept), version), np.zeros(len(kept)), np.zeros(len(kept), np.bool_)
    return Updates(kept, base, weight, picked, rows[sound], starts[sound])
