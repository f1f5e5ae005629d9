"""What FedAsync and FedBuff share: nobody waits for anybody.

Every client is always at work. One that commits is sent the latest model at once. There are no rounds; a record is
closed every ceil(C*m) arrivals, so that these protocols can be compared in the same tables as the others.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.events import Dispatch
from safa.protocol.machine import Protocol, Settlement, nobody
from safa.protocol.records import Ids, RoundRecord, Verdict

__all__ = ["STALENESSES", "Continuous", "Staleness"]

STALENESSES = ("constant", "polynomial", "hinge")


class Staleness:
    """s(lag): an update counts the less the more versions it lags behind (Xie et al. 2019, Section 5)."""

    def __init__(self, kind: str, exponent: float, hinge_slope: float, hinge_lag: float) -> None:
        if kind not in STALENESSES:
            raise SafaError(f"staleness must be one of {', '.join(STALENESSES)}, not {kind!r}")
        if not (exponent >= 0 and hinge_slope >= 0 and hinge_lag >= 0):
            raise SafaError(
                "staleness_exponent, hinge_slope and hinge_lag must not be negative, "
                f"not {exponent}, {hinge_slope}, {hinge_lag}"
            )
        self.kind, self.exponent, self.hinge_slope, self.hinge_lag = kind, exponent, hinge_slope, hinge_lag

    def __call__(self, lag: NDArray[np.int64]) -> NDArray[np.float64]:
        """The factor for each lag; 1 for none."""
        if self.kind == "constant":
            return np.ones(len(lag))
        if self.kind == "polynomial":
            return np.asarray((1.0 + lag) ** -self.exponent, dtype=np.float64)
        beyond = np.maximum(0.0, lag - self.hinge_lag)
        return np.asarray(1.0 / (1.0 + self.hinge_slope * beyond), dtype=np.float64)


class Continuous(Protocol):
    """A protocol without rounds: every arrival is merged or buffered, and answered with the latest model."""

    answers_arrivals = True

    def __init__(self, sizes: ArrayLike, *, fraction: float, round_limit_s: float = math.inf) -> None:
        self._arrived = 0  # in this record
        self._merges: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        self._arrived = 0
        self._merges = []
        idle = self.active & ~self._expected
        return Dispatch(
            sync=np.flatnonzero(idle), resume=np.flatnonzero(self.active & self._expected), deprecated=nobody()
        )

    def _enough(self, clients: Ids) -> int | None:
        missing = self.quota - self._arrived
        return missing if missing <= len(clients) else None

    def _has_enough(self) -> bool:
        return self._arrived >= self.quota

    def _accept(self, clients: Ids, bases: Ids) -> Ids:
        self._arrived += len(clients)
        weight, into, latest = self._merge(clients, bases)
        self._merges.append((weight, into))
        self.versions[clients] = latest
        return clients

    def close_round(self, *, now: float) -> RoundRecord:
        """Close the record; the merges of the next one are counted anew."""
        record = super().close_round(now=now)
        self._merges = []
        return record

    @abstractmethod
    def _merge(self, clients: Ids, bases: Ids) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """Merge updates in order: the weight of each, the version it goes into, the latest version right after it."""

    def _settle(self, clients: Ids, late: NDArray[np.bool_]) -> Settlement:
        weights = np.concatenate([np.empty(0), *(weight for weight, _ in self._merges)])
        into = np.concatenate([nobody(), *(into for _, into in self._merges)])
        return np.full(len(clients), Verdict.PICKED.value, dtype=np.int8), weights, into
