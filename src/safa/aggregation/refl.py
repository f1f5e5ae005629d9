"""REFL's staleness weights (Abdelmoniem et al., EuroSys 2023): stale updates that differ from the others count more."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step
from safa.aggregation.rows import blocks
from safa.errors import SafaError
from safa.protocol.records import Rule

__all__ = ["Refl"]


class Refl(Aggregator):
    """w := w + A * the mean of D_i with the weights 1 of a fresh update (lag 0) and, of a stale one,

    (1 - beta) / (lag + 1) + beta (1 - exp(-L / L_max)), where L is by how much it would change the mean of the fresh
    ones, |D - that mean|^2 up to a factor that all of a step share, and L_max the largest L of the step. A is the sum
    of the record's weights. They are not used otherwise, since FedBuff's hold its own staleness. The paper has rounds,
    so that there are always fresh updates; in a step without any, L is taken from the mean of all. It needs all updates
    of a step at once.
    """

    name = "refl"
    rules = frozenset({Rule.AVERAGE, Rule.DELTA})
    compares = True

    def __init__(self, *, beta: float = 0.35) -> None:
        """`beta` is the part of a stale update's weight that comes from how much it differs, from 0 to 1."""
        if not 0 <= beta <= 1:
            raise SafaError(f"beta must be from 0 to 1, not {beta!r}")
        self.beta = beta

    def step(self, step: Step) -> Tensor:
        """The model moved by the weighted mean; without updates it stays as it is."""
        parts = [part for part in step.updates if len(part)]
        model = self.versions.model
        if not parts:
            return model
        lag = self.versions.latest - np.concatenate([part.base for part in parts])
        deltas = parts[0].deltas if len(parts) == 1 else torch.cat([part.deltas for part in parts])
        weight = self._weights(lag, deltas)
        used = torch.from_numpy(step.weight / weight.sum() * weight).to(deltas)
        return torch.addmv(model, deltas.T, used)

    def _weights(self, lag: NDArray[np.int64], deltas: Tensor) -> NDArray[np.float64]:
        stale = lag > 0
        if not stale.any():
            return np.ones(len(lag))
        fresh = deltas if stale.all() else deltas[torch.from_numpy(~stale).to(deltas.device)]
        apart = np.where(stale, _squared_distances(deltas, fresh.mean(0)), 0.0)
        boost = 1 - np.exp(-apart / (apart.max() or 1.0))
        return np.where(stale, (1 - self.beta) / (lag + 1) + self.beta * boost, 1.0)


def _squared_distances(rows: Tensor, point: Tensor) -> NDArray[np.float64]:
    """Of every row from a point."""
    found = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for some, columns in blocks(len(rows), point):
        found[some] += (rows[some, columns] - point[columns]).square_().sum(1, dtype=torch.float64)
    return found.cpu().numpy()
