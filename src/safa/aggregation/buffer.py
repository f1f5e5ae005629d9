"""A buffer of deltas (FedBuff; Nguyen et al., AISTATS 2022): what clients changed is added to the global model."""

from __future__ import annotations

import torch
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.aggregation.rows import blocks
from safa.protocol.records import Rule

__all__ = ["Buffer"]


class Buffer(Aggregator):
    """w(v) = w(v-1) + sum a (u - its base model): an update counts for what its training changed."""

    name = "buffer"
    rules = frozenset({Rule.DELTA, Rule.AVERAGE})

    def step(self, step: Step) -> Tensor:
        """The next global model; with no updates, the one before it."""
        model, total = self.versions.model, None
        for part in step.updates:
            if len(part):
                change = _weighted_deltas(part)
                total = change if total is None else total.double().add_(change.double())
        return model if total is None else total.to(model).add_(model)


def _weighted_deltas(updates: Updates) -> Tensor:
    """The weighted sum of what training changed, in the precision of the updates."""
    weight, total = torch.from_numpy(updates.weight).to(updates.rows), torch.zeros_like(updates.rows[0])
    for rows, columns in blocks(len(updates), total):
        total[columns].addmv_(updates.deltas_in(rows, columns).T, weight[rows])
    return total
