"""FedSecant, this package's own protocol: FedBuff's buffer without anything to set, and clients that are remembered.

Every client is always at work, none is refused, abandoned or made to start over, and one that commits is sent the
latest model at once. A version is made of K = max(2, ceil(sqrt(n)), ceil(n / 10)) updates, where n, the concurrency, is
how many updates the server takes in while a client is at work, for the median update: m of m clients that are equally
fast and always there, fewer where some crash or stay away. So a model is never more than about ten versions old when
the median client's update of it comes in. In a version an update counts (1 + lag)^-1/4 / K; a record is closed every K
updates, so that there is no C to set. A client that would take longer than three times the median client's time is
asked for less work, so that no entry gets very old. FedBuff's exponent is 1/2; a stale update that has been moved to
where the model is now is worth more.

What is remembered, how an old entry is brought to where the model is now, and that an update which is unusually long is
shortened, is the aggregator's part (`secant`).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.continuous import Staleness
from safa.protocol.events import Dispatch
from safa.protocol.fedbuff import FedBuff
from safa.protocol.records import RoundRecord, Verdict

__all__ = ["FedSecant"]

_MOST_VERSIONS = 10  # while the median client is at work


class FedSecant(FedBuff):
    """FedBuff that chooses K by the concurrency and corrects changes by what each client sent last; nothing to set."""

    name = "fedsecant"
    work_cap = 3.0

    def __init__(
        self, sizes: ArrayLike, *, exponent: float = 0.25, adaptation: float = 0.25, round_limit_s: float = math.inf
    ) -> None:
        """An update counts (1 + lag)^-exponent / K.

        `adaptation` is how far a record changes the concurrency: 0 leaves it at the number of clients, with 1 it is
        that of the last record.
        """
        if not 0 <= exponent < math.inf:
            raise SafaError(f"exponent must be a number, at least 0, not {exponent}")
        if not 0 <= adaptation <= 1:
            raise SafaError(f"adaptation must be from 0 to 1, not {adaptation}")
        self.adaptation = adaptation
        self._concurrency = 1.0  # as a share of the clients
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

    def close_round(self, *, now: float) -> RoundRecord:
        """Close the record; the lags of its updates say how many clients are at work."""
        record = super().close_round(now=now)
        taken = (record.verdict != Verdict.REFUSED.value) & (record.base > 0)  # lags are short at first
        if np.any(taken):
            lag = float(np.median((record.into - 1 - record.base)[taken])) + 0.5
            share = min(1.0, lag * self.buffer_size / max(1, int(np.count_nonzero(self.active))))
            self._concurrency += self.adaptation * (share - self._concurrency)
        return record

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        """As FedBuff; K follows the concurrency, and is never below what the buffer holds already."""
        clients = self._concurrency * int(np.count_nonzero(self.active))
        self.buffer_size = max(2, _ceil(math.sqrt(clients)), _ceil(clients / _MOST_VERSIONS), self._buffered + 1)
        return super()._invite(draws, expected_s)


def _ceil(number: float) -> int:
    """The next whole number, with rounding errors forgiven."""
    return math.ceil(number - 1e-9)
