"""Clients that come back from a crash by themselves, after a delay that belongs to the fleet and not to a round.

A client that crashed is away until its return, and then takes its attempt up again, in another stretch, without being
told. If it is back before the server would notice its loss, the server never knows. Else the server hears of the loss,
and its update may still come, in this round or in a later one. A client that is sent a model while it is away begins
when it is back; that, too, the server notices as a loss if it takes that long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from safa.fleet import Fleet
from safa.protocol import Dispatch, Events
from safa.protocol.records import Ids
from safa.simulation.devices import Devices

__all__ = ["ReturningDevices"]

_MOST_STRETCHES = 300
_AT_A_TIME = 2000  # events, of which a few hundred as a rule come before a lost client may be heard of again


class ReturningDevices(Devices):
    """The clients' side of the causal clock, where crashed clients return by themselves.

    What the arrays say of a client holds for the present. What the server hears of it next is found out ahead, by going
    through its stretches up to there (`_foresee`).
    """

    def __init__(self, fleet: Fleet, *, detection_delay_s: float, keep_progress: bool) -> None:
        super().__init__(fleet, detection_delay_s=detection_delay_s, keep_progress=keep_progress)
        clients = len(fleet)
        self._back_s = np.full(clients, np.inf)  # when it is back after the stretch is cut short
        self._noticed = np.zeros(clients, dtype=np.bool_)  # the server has heard that it was
        self._absent_s = np.full(clients, -np.inf)  # until when it was away when it threw its attempt away
        self._loss = np.zeros(clients, dtype=np.bool_)  # what the server hears next is a loss
        self._again_s = np.full(clients, np.inf)  # before this, it does not hear of the client once more
        self._course: tuple[NDArray[Any], ...] = (
            self._before_s, self._begin_s, self._cut_s, self._back_s, self._ordinal, self._noticed,
        )  # fmt: skip

    def open_round(
        self,
        dispatch: Dispatch,
        versions: NDArray[np.int32],
        work: NDArray[np.float64],
        *,
        now: float,
        begin_s: float,
    ) -> None:
        """A round opens: who is synchronised starts at `begin_s`, everybody else continues, or returns in time."""
        self.work_done = self.work_lost = 0.0
        self._catch_up(*self._at_work(now))
        self._abandon(dispatch.sync[self._busy[dispatch.sync]], now)
        self.start(dispatch.sync, versions, work, begin_s, upload=dispatch.upload)
        idle = dispatch.resume[~self._busy[dispatch.resume]]
        self.start(idle, versions, work, now, upload=dispatch.upload, download=False)
        gone = dispatch.resume[np.isinf(self._back_s[dispatch.resume]) & (self._cut_s[dispatch.resume] <= now)]
        self._next_s[gone] = now + self._detection_delay_s  # who is never back is found lost in every round
        self._loss[gone] = True

    def pending(self, until_s: float, *, most: int, within_s: float = np.inf) -> Events:
        """What the server hears next, in order, up to the time when it may hear of one of these clients once more."""
        within_s = within_s if within_s == np.inf else min(within_s, self._detection_delay_s)
        events = super().pending(until_s, most=min(most, _AT_A_TIME), within_s=within_s)
        again_s = self._again_s[events.client[events.lost]].min(initial=np.inf)
        return events[: int(np.searchsorted(events.at_s, again_s))]

    def _are_losses(self, clients: Ids) -> NDArray[np.bool_]:
        return self._loss[clients]

    def heard(self, events: Events, accepted: NDArray[np.bool_]) -> None:
        """The server took notice of these events; it will hear of a lost client again."""
        self._catch_up(events.client, self._next_s[events.client])
        super().heard(events, accepted)
        lost = events.client[events.lost]
        self._noticed[lost] = True
        self._foresee(lost)

    def crashed(self, now: float) -> Ids:
        """Who is away now."""
        self._catch_up(*self._at_work(now))
        return super().crashed(now)

    def _at_work(self, now: float) -> tuple[Ids, NDArray[np.float64]]:
        """Who has an attempt under way, and that time for each."""
        clients = np.flatnonzero(self._busy)
        return clients, np.full(len(clients), now)

    def _abandon(self, clients: Ids, now: float) -> None:
        away = clients[self._cut_s[clients] <= now]
        self._absent_s[away] = self._back_s[away]
        super()._abandon(clients, now)

    def _stretch(self, clients: Ids, begin_s: NDArray[np.float64] | float, left_s: NDArray[np.float64]) -> None:
        """Begin an attempt. One that is away at that time is cut short at once, and begins when the client is back."""
        begin_s = np.broadcast_to(begin_s, clients.shape)
        there_s = self._fleet.faults.online_s(clients, np.maximum(begin_s, self._absent_s[clients]))
        self._begin_s[clients] = self._cut_s[clients] = begin_s
        self._back_s[clients] = there_s
        self._noticed[clients] = False
        there = np.flatnonzero(there_s <= begin_s)
        self._work_on(clients[there], begin_s[there])
        self._foresee(clients)

    def _work_on(self, clients: Ids, begin_s: NDArray[np.float64]) -> None:
        """These clients, who are there, begin their next stretch."""
        number = self._ordinal[clients]
        cut_s, back_s = self._fleet.faults.stretch(clients, begin_s, self._left_s(clients), number)
        self._ordinal[clients] = number + 1
        self._begin_s[clients] = begin_s
        self._cut_s[clients] = cut_s
        self._back_s[clients] = back_s
        self._noticed[clients] = False

    def _come_back(self, clients: Ids) -> None:
        """These clients are back and take their attempt up again."""
        self._before_s[clients] = self._elapsed(clients, np.inf) if self._keep_progress else 0.0
        self._work_on(clients, self._back_s[clients])

    def _catch_up(self, clients: Ids, until_s: NDArray[np.float64]) -> None:
        """Bring what is known of these clients up to that time: who is back by then is at work again."""
        while True:
            back = np.flatnonzero((self._cut_s[clients] < np.inf) & (self._back_s[clients] <= until_s))
            if not len(back):
                return
            clients, until_s = clients[back], until_s[back]
            if not self._keep_progress:
                work = float(self._worked(clients, np.inf).sum())
                self.work_done += work
                self.work_lost += work
            self._come_back(clients)

    def _foresee(self, clients: Ids) -> None:
        """Find out what the server hears of these clients next: go through their stretches, then put all back.

        One that is cut short too often, such as whenever it has been online for a while, will never be heard of.
        """
        present = [array[clients] for array in self._course]
        going = self._unheard_of(clients)
        for _ in range(_MOST_STRETCHES):
            if not len(going):
                break
            self._come_back(going)
            going = self._unheard_of(going)
        for array, values in zip(self._course, present, strict=True):
            array[clients] = values

    def _unheard_of(self, clients: Ids) -> Ids:
        """Note what the server hears of the stretches at hand; return whose crash it does not hear of."""
        cut_s, back_s = self._cut_s[clients], self._back_s[clients]
        arrives, loss_s = cut_s == np.inf, cut_s + self._detection_delay_s
        is_loss = ~arrives & ~self._noticed[clients] & (loss_s < back_s)
        end_s = self._begin_s[clients] + self._left_s(clients)
        self._next_s[clients] = np.where(arrives, end_s, np.where(is_loss, loss_s, np.inf))
        self._loss[clients] = is_loss
        self._again_s[clients] = back_s
        return clients[np.flatnonzero(~arrives & ~is_loss & (back_s < np.inf))]
