"""FedStale (Rodio and Neglia, 2024): between fresh updates alone (FedAvg) and those of everybody (FedVARP)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Step, Updates
from safa.aggregation.row_per_client import each_client_once, weighted
from safa.aggregation.rows import Versions
from safa.aggregation.update_cache import UpdateCache
from safa.errors import SafaError
from safa.protocol.records import Rule

__all__ = ["FedStale"]


class FedStale(UpdateCache):
    """w := w + A * (sum over all present j of c_j beta h_j + sum over participants i of c_i (D_i - beta h_i) / p_i).

    Then h_i := D_i. h are the entries, c_j = n_j/n (the paper: all alike), and p_i is how often client i takes part:
    its updates so far by the steps since it came. With beta = 0 entries do not count, with beta = 1 and equal p_i it is
    FedVARP. What is not in the paper, whose rounds are synchronous: A is server_step times the sum of the record's
    weights, which is 1 with FedAvg and holds FedBuff's staleness and step size; and a client may take part several
    times in a step, when each update is compared with the one before it.
    """

    name = "fedstale"
    rules = frozenset({Rule.AVERAGE, Rule.DELTA})

    def __init__(self, *, server_step: float = 1.0, beta: float = 0.5) -> None:
        """`beta` is how much an entry counts, from 0 to 1."""
        super().__init__(server_step=server_step)
        if not 0 <= beta <= 1:
            raise SafaError(f"beta must be from 0 to 1, not {beta!r}")
        self.beta = beta

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin without an entry."""
        super().begin(versions, sizes, memory_mb=memory_mb)
        self._updates, self._steps = np.zeros(len(sizes)), np.zeros(len(sizes))  # of each client, since it came

    def _direction(self, step: Step) -> tuple[Tensor, float]:
        direction, replaced = torch.zeros_like(self._sum), torch.zeros_like(self._sum)
        self._steps[self._active] += 1
        for part in step.updates:
            self.keep(part.part(~part.picked))
            for some in each_client_once(part.part(part.picked)):
                share, weight = self._shares()[some.client], self._weights(some)
                for rows, columns, change in self._replace(some.client, some.deltas_in):
                    direction[columns].add_(weighted(weight[rows], change), alpha=self.beta)
                    fresh = weighted(weight[rows], some.deltas_in(rows, columns))
                    direction[columns].add_(fresh, alpha=1 - self.beta)
                    replaced[columns].add_(weighted(share[rows], change))
        direction.add_(self._sum, alpha=self.beta)
        self._sum += replaced
        return direction, step.weight * self._one_over_n()

    def _weights(self, updates: Updates) -> NDArray[np.float64]:
        """n_i / p_i; these updates count in p_i."""
        clients = updates.client
        self._updates[clients] += 1
        return np.asarray(self._shares()[clients] * self._steps[clients] / self._updates[clients], dtype=np.float64)

    def _make_room(self, count: int) -> None:
        new = np.zeros(max(0, count - len(self._steps)))
        self._updates, self._steps = np.append(self._updates, new), np.append(self._steps, new)
        super()._make_room(count)

    def state(self) -> dict[str, Tensor]:
        """Also how often every client took part."""
        counts = {"updates": self._updates, "steps": self._steps}
        return super().state() | {name: torch.from_numpy(count.copy()) for name, count in counts.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        super().restore(state)
        self._updates, self._steps = (state[name].numpy().copy() for name in ("updates", "steps"))
