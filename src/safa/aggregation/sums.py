"""The weighted sum of a step's updates, and the models that are that sum and what is left of the old model."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step

__all__ = ["Averaging", "WeightedSum"]


class WeightedSum:
    """The weighted sum of rows that come part by part.

    A part is summed in the precision of its rows, the parts in double precision; so a single part is the plain product
    of its weights and its rows.
    """

    def __init__(self, parts: Iterable[tuple[NDArray[np.float64], Tensor]]) -> None:
        """Of weights [K] and rows [K, d], part by part."""
        self.total: Tensor | None = None
        """The sum, in double precision; None where there were no rows."""
        self.weight = 0.0
        """The sum of the weights, as they were given."""
        self.rounded = 0.0
        """The sum of the weights, as they were used: in the precision of the rows."""
        for weight, rows in parts:
            if len(weight):
                self._add(weight, rows)

    def _add(self, weight: NDArray[np.float64], rows: Tensor) -> None:
        rounded = rows.new_tensor(weight)
        part = (rounded @ rows).double()
        self.total = part if self.total is None else self.total + part
        self.weight += float(weight.sum())
        self.rounded += float(rounded.sum())


class Averaging(Aggregator):
    """w(v) = (1 - sum a) w(v-1) + sum a u, with the record's weights a, times a factor that a subclass may give."""

    def step(self, step: Step) -> Tensor:
        """The next global model; with no updates, the one before it."""
        model = self.versions.model
        found = WeightedSum((part.weight, part.rows) for part in step.updates)
        if found.total is None:
            return model
        factor = self._factor(step, found.weight)
        return (1 - factor * found.rounded) * model + (factor * found.total).to(model)

    def _factor(self, step: Step, found: float) -> float:
        """What the weights are multiplied by; `found` is the sum of those whose updates are there."""
        return 1.0
