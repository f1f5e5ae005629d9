"""FedSecant, this package's own protocol: FedBuff's buffer without anything to set, and clients that are remembered.

Every client is always at work, none is refused, abandoned or made to start over, and one that commits is sent the
latest model at once. A version is made of K = max(2, ceil(sqrt(n))) updates, where n clients are at work: all but those
that have been away for more than twice as long as their work takes. In it an update counts (1 + lag)^-1/4 / K; a
record is closed every K updates, so that there is no C to set. A client that would take longer
than three times the median client's time is asked for less work, so that no entry gets very old. FedBuff's exponent is
1/2; a stale update that has been moved to where the model is now is worth more.

What is remembered, and how an old entry is brought to where the model is now, is the aggregator's part (`secant`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.continuous import Staleness
from safa.protocol.events import Dispatch
from safa.protocol.fedbuff import FedBuff
from safa.protocol.records import RoundRecord, Verdict

__all__ = ["FedSecant"]


class FedSecant(FedBuff):
    """A buffer of sqrt(n) changes, where n clients are at work, corrected by what each client sent last."""

    name = "fedsecant"
    work_cap = 3.0

    def __init__(
        self, sizes: ArrayLike, *, exponent: float = 0.25, overdue: float = 2.0, round_limit_s: float = math.inf
    ) -> None:
        """An update counts (1 + lag)^-exponent / K.

        Whoever has not answered after `overdue` times as long as its work takes is not at work.
        """
        if not 0 <= exponent < math.inf:
            raise SafaError(f"exponent must be a number, at least 0, not {exponent}")
        if not overdue >= 1:
            raise SafaError(f"overdue must be a number, at least 1, not {overdue}")
        self.overdue = overdue
        self._began_s = np.empty(0)  # when it began what it is at; infinite for a client that has not begun
        super().__init__(sizes, fraction=1.0, buffer_size=2, round_limit_s=round_limit_s)
        self.staleness = Staleness("polynomial", exponent, 0.0, 0.0)

    @property
    def aggregator(self) -> str:
        """A cache of changes and their bases, moved by a secant."""
        return "secant"

    @property
    def quota(self) -> int:
        """A record has as many updates as a version."""
        return self.buffer_size

    def _fresh_client(self) -> dict[str, Any]:
        return super()._fresh_client() | {"_began_s": math.inf}

    def close_round(self, *, now: float) -> RoundRecord:
        """Close the record; whoever has committed in it began anew at that time."""
        record = super().close_round(now=now)
        taken = record.verdict != Verdict.REFUSED
        self._began_s[record.client[taken]] = record.arrival_s[taken]
        return record

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        """As FedBuff; K follows the number of clients at work, and is never below what the buffer holds already."""
        clients = int(np.count_nonzero(self.active & ~self._is_away()))
        self.buffer_size = max(2, math.isqrt(max(clients - 1, 0)) + 1, self._buffered + 1)
        dispatch = super()._invite(draws, expected_s)
        self._began_s[dispatch.sync] = self.now
        return dispatch

    def _is_away(self) -> NDArray[np.bool_]:
        """Who has been at its work for much longer than it takes; nobody of whom that is not known."""
        takes_s = self._capped_s(np.arange(self.clients))
        return np.asarray((takes_s > 0) & (self.now - self._began_s > self.overdue * takes_s))
