"""SCAFFOLD (Karimireddy et al., ICML 2020, Algorithm 1, option II): control variates against the drift of clients.

Every client has a control variate c_k, an estimate of its gradient, and c is their mean. A client takes its steps along
(gradient - c_k + c), which for clients that hold different data points the same way. After training, c_k := c_k - c +
(x - y_k) / (steps * learning rate), x being the model that it was sent and y_k its update.

The learner trains an update when it is needed, with the control variates of that moment. These are the ones that the
client would have been sent only if the update starts from the latest model.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from safa.aggregation.aggregator import Step, Updates
from safa.aggregation.row_per_client import RowPerClient, weighted
from safa.errors import SafaError
from safa.protocol.records import Ids, Rule

__all__ = ["Scaffold"]


class Scaffold(RowPerClient):
    """w := w + server_step * sum of a_i (y_i - w) over the participants, whose gradients are corrected by c - c_i.

    a_i are the weights of the record scaled to sum to 1, and c is the sum of n_k / n times c_k over the clients present
    (the paper weighs all alike, which is the same where n_k are equal). The row of a client is its c_k.
    """

    name = "scaffold"
    rules = frozenset({Rule.AVERAGE})
    corrects = True
    table = "controls"
    caution = "SCAFFOLD sends control variates of the size of the model both ways, which bytes and times do not count"
    not_deployed = "the aggregator scaffold cannot be deployed: devices are sent no control variates"

    def correction(self, clients: Ids) -> Tensor:
        """c - c_k for each of these clients."""
        return (self._mean() - self._rows_of(clients).double()).to(self.versions.model.dtype)

    def _direction(self, step: Step) -> tuple[Tensor, float]:
        """The mean of the deltas. c stays as it is until all are there, since later parts are trained with it, too."""
        change, moved, total = torch.zeros_like(self._sum), torch.zeros_like(self._sum), 0.0
        for part in step.updates:
            self._check(part)
            share = self._shares()[part.client]
            controls = self._controls(part)
            for rows, columns, difference in self._replace(part.client, lambda *block, new=controls: new[block]):
                change[columns].add_(weighted(share[rows], difference))
                moved[columns].add_(weighted(part.weight[rows], part.deltas_in(rows, columns)))
            total += float(part.weight.sum())
        self._sum += change
        return moved, 1 / total if total else 1.0

    def _controls(self, updates: Updates) -> Tensor:
        """c_k := c_k - c + (x - y_k) / (steps * learning rate); a client whose learning rate is 0 keeps its own."""
        size = torch.from_numpy(updates.step_size).to(self._sum).unsqueeze(1)
        own = self._rows_of(updates.client).double()
        new = own - self._mean() - updates.deltas.double() / size
        return torch.where(size > 0, new, own).to(self.versions.model.dtype)

    def _check(self, updates: Updates) -> None:
        if np.any(updates.base != self.versions.latest):
            raise SafaError("the aggregator scaffold needs a protocol whose updates all start from the latest model")
