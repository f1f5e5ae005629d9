"""FedCompass (Li et al., ICLR 2024): clients are given as much work as lets them arrive in groups.

A client that begins joins the group in whose time it can do most of its work, at least the share Qmin/Qmax of it. If
there is none, it begins a group of its own: its work is such that the group arrives about when the fastest client of
another group could be back from its next attempt, or all of it. A client that is early waits. The group is over when
its last client has arrived, or `late_factor` (lambda) times the group's time has passed: a version is made, and those
who waited are sent it together. One that comes later is answered at once. A change counts
server_lr * n_k/n * (1 + lag)^-1/2; with the paper's server_lr of 1, all clients together make one full step.

Where this differs from that paper: every change goes into the version that is made next, whichever group makes it,
and not into that of its own group only, because a record says of every update what it goes into. Nobody is woken when
a group's time is over: the next arrival, or the next record, finds that out. All a client's local work is Qmax, in
shares and not in whole steps. A record is closed every ceil(C*m) arrivals, as for all protocols without rounds.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.continuous import Continuous, Staleness
from safa.protocol.events import Dispatch
from safa.protocol.records import Ids, Rule

__all__ = ["FedCompass"]


class FedCompass(Continuous):
    """Clients get the amount of work with which they arrive in groups, and are merged group by group."""

    name = "fedcompass"
    rule = Rule.DELTA
    one_event_at_a_time = True

    def __init__(
        self,
        sizes: ArrayLike,
        *,
        fraction: float,
        step_ratio: float = 0.2,
        late_factor: float = 1.2,
        server_lr: float = 1.0,
        round_limit_s: float = math.inf,
    ) -> None:
        """`step_ratio` is Qmin/Qmax, the least share of its work that a client is asked for; `late_factor` lambda."""
        if not 0 < step_ratio <= 1:
            raise SafaError(f"step_ratio must be above 0 and at most 1, not {step_ratio}")
        if not late_factor >= 1:
            raise SafaError(f"late_factor must be at least 1, not {late_factor}")
        if not server_lr > 0:
            raise SafaError(f"server_lr must be above 0, not {server_lr}")
        self.step_ratio, self.late_factor, self.server_lr = step_ratio, late_factor, server_lr
        self.staleness = Staleness("polynomial", 0.5, 0.0, 0.0)
        self._due_s = np.empty(0)  # when its group is to arrive: clients with the same time are a group
        self._latest_s = np.empty(0)  # when its group is over
        self._waits = np.empty(0, dtype=np.bool_)  # for the rest of its group
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

    def _fresh_client(self) -> dict[str, Any]:
        return super()._fresh_client() | {"_due_s": -math.inf, "_latest_s": -math.inf, "_waits": False}

    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        """As the others without rounds; who waits for a group that is not over is left alone."""
        self._release()
        dispatch = super()._invite(draws, expected_s)
        return Dispatch(
            sync=dispatch.sync[~self._waits[dispatch.sync]], resume=dispatch.resume, deprecated=dispatch.deprecated
        )

    def _accept(self, clients: Ids, bases: Ids) -> Ids:
        """One client has arrived: merge its change, and release every group that is over."""
        super()._accept(clients, bases)
        self._waits[clients] = True
        released = self._release()
        self.version += int(len(released) > 0)
        self.versions[released] = self.version
        return released

    def _merge(self, clients: Ids, bases: Ids) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        share = self.sizes[clients] / self.sizes[self.active].sum()
        weight = self.server_lr * share * self.staleness(self.version - bases)
        return weight, np.full(len(clients), self.version + 1), bases

    def _release(self) -> Ids:
        """Let those wait no longer whose group is complete or over, and say who they are."""
        missing = self._due_s[self.active & self._expected]
        over = self._waits & ((self._latest_s < self.now) | ~np.isin(self._due_s, missing))
        self._waits[over] = False
        self._due_s[over] = self._latest_s[over] = -math.inf
        return np.flatnonzero(over & self.active)

    def _work(self, clients: Ids) -> NDArray[np.float64]:
        return np.array([self._join(client) or self._found(client) for client in clients.tolist()])

    def _join(self, client: int) -> float:
        """Let a client join the group for which it can do most of its work, and return the share; 0 where none fits."""
        members = self._members()
        share = self._share_until(client, self._due_s[members])
        share[(share < self.step_ratio) | (share > 1)] = 0.0
        best = int(share.argmax()) if len(share) else -1
        if best < 0 or not share[best]:
            return 0.0
        self._due_s[client], self._latest_s[client] = self._due_s[members[best]], self._latest_s[members[best]]
        return float(share[best])

    def _found(self, client: int) -> float:
        """Let a client begin a group, and return the share of its work that it does.

        It is to arrive about when the fastest client of another group could be back once more.
        """
        members = self._members()
        groups, first, own = np.unique(self._due_s[members], return_index=True, return_inverse=True)
        fastest_s = np.full(len(groups), math.inf)
        np.minimum.at(fastest_s, own, self._expected_s[members])
        share = self._share_until(client, self._latest_s[members[first]] + fastest_s)
        most = float(share[share <= 1].max(initial=-math.inf))
        work = 1.0 if most == -math.inf else max(self.step_ratio, most)
        fixed_s, work_s = self._fixed_s[client], self._expected_s[client] - self._fixed_s[client]
        takes_s = fixed_s + work * work_s
        self._due_s[client], self._latest_s[client] = self.now + takes_s, self.now + self.late_factor * takes_s
        return work

    def _members(self) -> Ids:
        """The clients of all groups that are not over."""
        return np.flatnonzero(self._latest_s > self.now)

    def _share_until(self, client: int, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of its work that a client can do until each of these times; none where nobody knows."""
        fixed_s, work_s = self._fixed_s[client], self._expected_s[client] - self._fixed_s[client]
        return np.asarray((at_s - self.now - fixed_s) / work_s if work_s > 0 else np.full(len(at_s), math.inf))
