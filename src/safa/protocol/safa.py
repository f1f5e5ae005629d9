"""SAFA, the semi-asynchronous protocol (Wu et al., IEEE TC 2020, Section III).

Round t = 1, 2, ... The global version after round t is t; w(0) is the start model. Client k holds a local model of
version v_k. The server's part of a round, in the order of Algorithm 2:

1. **Distribute** (Eq. 3). Clients that committed in the round before (up-to-date, v = t-1) and clients that lag too far
   behind (deprecated, v < t - tau) take w(t-1). All others (tolerable) keep their model and continue training.
2. **Select** (Algorithm 1, CFCFM). The round wants ceil(C*m) updates. An update from a client that was not picked in
   round t-1 goes to P at once; one from a client that was picked then goes to Q. The round ends when P is full, at
   T_lim, or when nobody is left to wait for; what P lacks then is filled from Q in order of arrival.
3. **Aggregate** (Eq. 6-8). The cache holds one entry per client. Entries of P := their updates; entries of deprecated
   clients := w(t-1); w(t) = the sum of n_k/n times entry k over all clients. Only then entries of Q := their updates
   (the bypass), to count from round t+1 on.

This file decides; the arithmetic of step 3 is done by whoever holds the models, from the record: `verdict` tells P
(picked) from Q (undrafted), `deprecated` the entries to overwrite, and `weight` is n_k/n.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.events import Dispatch
from safa.protocol.machine import Protocol, Settlement
from safa.protocol.records import Ids, Rule, Verdict

__all__ = ["Safa"]


class Safa(Protocol):
    """All clients train; the first C*m updates close the round, those not picked last time first."""

    name = "safa"
    rule = Rule.CACHE
    has_bypass = True

    def __init__(
        self, sizes: ArrayLike, *, fraction: float, lag_tolerance: int = 5, round_limit_s: float = math.inf
    ) -> None:
        """`lag_tolerance` is tau: how many versions a client may lag behind before it has to start over."""
        if lag_tolerance < 1:
            raise SafaError(f"lag_tolerance must be a whole number of rounds, at least 1, not {lag_tolerance}")
        self.lag_tolerance = lag_tolerance
        self._picked_last = np.empty(0, dtype=np.bool_)  # P(t-1)
        self._priority = 0  # how many updates from outside P(t-1) have come in
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

    def _fresh_client(self) -> dict[str, Any]:
        return super()._fresh_client() | {"_picked_last": False}

    @property
    def uses_draws(self) -> bool:
        """All clients train, so that nobody is drawn; a protocol that is derived from this one may."""
        return type(self)._invite is not Safa._invite

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        """Eq. 3: up-to-date and deprecated clients are synchronised, tolerable ones continue."""
        self._priority = 0
        up_to_date = self.active & (self.versions == self.round - 1)
        deprecated = self.active & (self.versions < self.round - self.lag_tolerance)
        sync = up_to_date | deprecated
        return Dispatch(
            sync=np.flatnonzero(sync),
            resume=np.flatnonzero(self.active & ~sync),
            deprecated=np.flatnonzero(deprecated),
        )

    def _enough(self, clients: Ids) -> int | None:
        """Algorithm 1: the round has enough when P is full of clients that were not picked last time."""
        priority = np.flatnonzero(~self._picked_last[clients])
        missing = self.quota - self._priority
        return int(priority[missing - 1]) + 1 if missing <= len(priority) else None

    def _has_enough(self) -> bool:
        return self._priority >= self.quota

    def _accept(self, clients: Ids, bases: Ids) -> Ids:
        self._priority += int(np.count_nonzero(~self._picked_last[clients]))
        return super()._accept(clients, bases)

    def _settle(self, clients: Ids, late: NDArray[np.bool_]) -> Settlement:
        """Algorithm 1, last part: fill P from Q in order of arrival; what is left of Q is undrafted."""
        in_time = np.flatnonzero(~late)
        first = ~self._picked_last[clients[in_time]]
        by_rank = np.concatenate([in_time[first], in_time[~first]])
        picked = np.zeros(len(clients), dtype=np.bool_)
        picked[by_rank[: self.quota]] = True
        self._picked_last[:] = False
        self._picked_last[clients[picked]] = True
        self.version = self.round
        verdict = np.where(picked, np.int8(Verdict.PICKED.value), np.int8(Verdict.UNDRAFTED.value))
        present = self.sizes if self.active.all() else self.sizes[self.active]
        weight = np.where(picked, self.sizes[clients] / present.sum(), 0.0)
        return verdict, weight, np.where(picked, self.version, -1)
