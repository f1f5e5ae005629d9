"""The weighted sum of a step's updates, and the models that are that sum and what is left of the old model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step

__all__ = ["Averaging", "weighted_sum"]

Part = tuple[NDArray[np.float64], Tensor]
"""Weights [K] and rows [K, d]."""


def weighted_sum(parts: Iterable[Part]) -> tuple[Tensor, float] | None:
    """The weighted sum of rows that come part by part, in double precision, and that of the weights; None without any.

    A part is summed in the precision of its rows; so a single part is the plain product of its weights and its rows.
    """
    total, whole = None, 0.0
    for weight, rows in parts:
        if len(weight):
            part = (torch.from_numpy(weight).to(rows) @ rows).double()
            total = part if total is None else total + part
            whole += float(weight.sum())
    return None if total is None else (total, whole)


class Averaging(Aggregator):
    """w(v) = (1 - sum a) w(v-1) + sum a u, with the record's weights a, times a factor that a subclass may give."""

    def step(self, step: Step) -> Tensor:
        """The next global model; with no updates, the one before it."""
        parts: Iterator[Part] = ((part.weight, part.rows) for part in step.updates if len(part))
        first = list(islice(parts, 2))
        if not first:
            return self.versions.model
        return self._mean_of(step, *first[0]) if len(first) == 1 else self._mean_of_parts(step, chain(first, parts))

    def _mean_of(self, step: Step, weight: NDArray[np.float64], rows: Tensor) -> Tensor:
        """Where the updates are there all at once, as a rule."""
        used = torch.from_numpy(weight * self._factor(step, float(weight.sum()))).to(rows)
        return ((1 - float(used.sum())) * self.versions.model).addmv_(rows.T, used)

    def _mean_of_parts(self, step: Step, parts: Iterable[Part]) -> Tensor:
        """Where they do not fit the memory: what the weights are multiplied by is known in the end."""
        found = weighted_sum(parts)
        assert found is not None
        total, whole = found
        factor = self._factor(step, whole)
        return (1 - factor * whole) * self.versions.model + (factor * total).to(self.versions.model)

    def _factor(self, step: Step, found: float) -> float:
        """What the weights are multiplied by; `found` is the sum of those whose updates are there."""
        return 1.0
