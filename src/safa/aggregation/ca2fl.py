"""CA2FL (Wang, Cao, Wu, Chen and Chen, ICLR 2024): the latest update of every client calibrates a buffer of deltas."""

from __future__ import annotations

from torch import Tensor

from safa.aggregation.aggregator import Step
from safa.aggregation.update_cache import FedVarp
from safa.protocol.records import Rule

__all__ = ["Ca2fl"]


class Ca2fl(FedVarp):
    """w := w + sum of a_i (D_i - h_i) + (sum of a_i) * sum over all present j of n_j/n h_j, then h_i := D_i.

    a_i are the weights of the record. With FedBuff's, without staleness, that is the paper's rule: a step of
    server_lr times the mean of D_i - h_i over the K updates of the buffer plus the mean of all entries. What differs:
    FedBuff's staleness weights, which the paper does not have, are used; entries are weighed by n_k/n (the paper: all
    alike); of several updates of a client in one step, each is compared with the one before it. `server_step` scales
    the step.
    """

    name = "ca2fl"
    rules = frozenset({Rule.AVERAGE, Rule.DELTA})

    def _direction(self, step: Step) -> tuple[Tensor, float]:
        direction, _ = super()._direction(step)
        return direction, step.weight
