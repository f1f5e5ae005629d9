"""A buffer of deltas (FedBuff; Nguyen et al., AISTATS 2022): what clients changed is added to the global model."""

from __future__ import annotations

from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step
from safa.aggregation.sums import weighted_sum
from safa.protocol.records import Rule

__all__ = ["Buffer"]


class Buffer(Aggregator):
    """w(v) = w(v-1) + sum a (u - its base model): an update counts for what its training changed."""

    name = "buffer"
    rules = frozenset({Rule.DELTA, Rule.AVERAGE})

    def step(self, step: Step) -> Tensor:
        """The next global model; with no updates, the one before it."""
        model = self.versions.model
        found = weighted_sum((part.weight, part.deltas) for part in step.updates)
        return model if found is None else model + found[0].to(model)
