"""TimelyFL (Zhang et al., CVPR Workshops 2023): a round takes a fixed time, and everyone does what fits into it.

A random C-fraction is drawn. The interval of the round is the time that its k-th fastest client is expected to take
for all its work, k being a share of those drawn (`interval_share`). A slower client is asked for the part of its work
that fits, so that nobody is left out and no update is stale; the updates are averaged by size, as in FedAvg.

Two things differ from that paper. There, a slow client first makes fewer epochs and then trains fewer layers, and a
fast one makes more epochs than the others; here everyone trains the whole model, and all its work is the most that a
client is asked for. There, the round closes when the interval is over; here it closes when everyone has reported, at
`late_factor` times the interval at the latest, since the time for sending the models is not in the estimates.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.events import Dispatch
from safa.protocol.fedavg import FedAvg
from safa.protocol.machine import quota_of
from safa.protocol.records import Ids

__all__ = ["TimelyFL"]


class TimelyFL(FedAvg):
    """A random C-fraction; slow clients do the part of their work that fits into the round."""

    name = "timelyfl"

    def __init__(
        self,
        sizes: ArrayLike,
        *,
        fraction: float,
        interval_share: float = 0.5,
        late_factor: float = 1.2,
        round_limit_s: float = math.inf,
    ) -> None:
        """`interval_share` is k/n, the share of those drawn that have the time for all their work."""
        if not 0 < interval_share <= 1:
            raise SafaError(f"interval_share must be above 0 and at most 1, not {interval_share}")
        if not late_factor >= 1:
            raise SafaError(f"late_factor must be at least 1, not {late_factor}")
        self.interval_share, self.late_factor = interval_share, late_factor
        self.interval_s = math.inf
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

    @property
    def deadline(self) -> float:
        """When the open round must be closed at the latest."""
        return min(super().deadline, self.opened_s + self.late_factor * self.interval_s)

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        dispatch = super()._invite(draws, expected_s)
        times = self._capped_s(dispatch.sync)
        times = np.sort(np.where(times > 0, times, math.inf))
        place = quota_of(self.interval_share, len(times)) - 1
        self.interval_s = float(times[place]) if len(times) else math.inf
        return dispatch

    def _work(self, clients: Ids) -> NDArray[np.float64]:
        return self._share_within(self.interval_s)[clients]
