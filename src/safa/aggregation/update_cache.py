"""Caches of updates: what the training of every client changed last counts for it while it is silent.

An entry is a delta, the update less the model that it was trained from. MIFA and FedVARP hold one per client. Both
papers keep the entry of a client for as long as it is silent, however old it is. So do these, also where a protocol
deprecates a client (Eq. 3): that concerns the model that the client trains from next, not what it has contributed. An
update that was undrafted (Eq. 8) replaces the entry of its client before the step that follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safa.aggregation.aggregator import Step, Updates
from safa.aggregation.row_per_client import RowPerClient, each_client_once, weighted
from safa.protocol.records import Ids, Rule

__all__ = ["FedVarp", "Mifa", "UpdateCache"]


class UpdateCache(RowPerClient):
    """The latest delta D_k of every client is its row.

    The weights of `Rule.DELTA` say how far each update moves the model. Here the cache decides that, so it is refused.
    """

    rules = frozenset({Rule.AVERAGE, Rule.CACHE})
    keeps_entries = True
    table = "updates"

    def keep(self, updates: Updates) -> None:
        """Entries of these clients := what their training changed."""
        shares = self._shares()
        for some in each_client_once(updates):
            share = shares[some.client]
            for rows, columns, change in self._replace(some.client, some.deltas_in):
                self._sum[columns].add_(weighted(share[rows], change))

    def entries(self, clients: Ids) -> Tensor:
        """The deltas of these clients; zero for one that has sent nothing."""
        return self._rows_of(clients)


class Mifa(UpdateCache):
    """MIFA (Gu et al. 2021): w := w + server_step * sum of c_k D_k over all clients present, c_k = n_k / n.

    The paper weighs all clients alike, which is the same where their n_k are equal. The weights of the record are not
    used: a client that sends nothing counts as much as one that does.
    """

    name = "mifa"

    def _direction(self, step: Step) -> tuple[Tensor, float]:
        for part in step.updates:
            self.keep(part)
        return self._sum, self._one_over_n()


class FedVarp(UpdateCache):
    """FedVARP (Jhunjhunwala et al. 2022): the entries reduce the variance that comes from who takes part.

    w := w + server_step * (sum over participants i of a_i (D_i - y_i) + sum over all present j of c_j y_j), then
    y_i := D_i. y are the entries, a_i the weights of the record scaled to sum to 1, and c_j = n_j / n. The paper weighs
    all alike, which is the same where n_k are equal. Undrafted updates become entries before the step and do not take
    part.
    """

    name = "fedvarp"

    def _direction(self, step: Step) -> tuple[Tensor, float]:
        direction, replaced = torch.zeros_like(self._sum), torch.zeros_like(self._sum)
        total, shares = 0.0, self._shares()
        for part in step.updates:
            for some in each_client_once(part):
                weight, share = some.weight * some.picked, shares[some.client]
                for rows, columns, change in self._replace(some.client, some.deltas_in):
                    direction[columns].add_(weighted(weight[rows], change))
                    replaced[columns].add_(weighted((share * some.picked)[rows], change))
                    self._sum[columns].add_(weighted((share * ~some.picked)[rows], change))
                total += float(some.weight[some.picked].sum())
        if total:
            direction /= total
        direction.add_(self._sum, alpha=self._one_over_n())
        self._sum += replaced
        return direction, 1.0
