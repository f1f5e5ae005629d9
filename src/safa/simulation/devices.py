"""What every client is doing in causal time: at most one attempt each, held as arrays over the clients.

An attempt is download, training, upload; of the training, the share that the client was asked for. It advances in
stretches: a crash ends a stretch, the client's return begins the next one. Every client at work has exactly one thing
coming: its update arrives, or the server finds it lost.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from safa.fleet import Fleet
from safa.protocol import Dispatch, Events
from safa.protocol.records import Ids

__all__ = ["Devices"]


class Devices:
    """The clients' side of the causal clock."""

    def __init__(self, fleet: Fleet, *, detection_delay_s: float, keep_progress: bool) -> None:
        clients = len(fleet)
        self._fleet = fleet
        self._detection_delay_s = detection_delay_s
        self._keep_progress = keep_progress
        self._busy = np.zeros(clients, dtype=np.bool_)
        self._base = np.zeros(clients, dtype=np.int64)
        self._batches = np.zeros(clients)  # the mini-batches of the attempt
        self._train_s = np.zeros(clients)  # how long they take
        self._lead_s = np.zeros(clients)  # the part of the attempt that comes before training
        self._full_s = np.zeros(clients)  # the whole attempt, without breaks
        self._before_s = np.zeros(clients)  # what was done of it in earlier stretches
        self._begin_s = np.zeros(clients)  # when this stretch began
        self._cut_s = np.full(clients, np.inf)  # when it is cut short
        self._next_s = np.full(clients, np.inf)  # when the server hears of it next
        self._ordinal = np.zeros(clients, dtype=np.int64)  # of the stretch, in this round
        self._round = 0
        self.work_done = 0.0
        self.work_lost = 0.0

    def open_round(
        self,
        dispatch: Dispatch,
        versions: NDArray[np.int32],
        work: NDArray[np.float64],
        *,
        now: float,
        begin_s: float,
    ) -> None:
        """A round opens: who is synchronised starts at `begin_s`, who crashed is back, the rest continue."""
        self._round += 1
        self._ordinal[:] = 0
        self.work_done = self.work_lost = 0.0
        crashed = self._busy & (self._cut_s <= now)
        resuming = np.zeros(len(self._busy), dtype=np.bool_)
        resuming[dispatch.resume] = True
        self._abandon(np.flatnonzero(crashed & ~resuming), now)
        self._abandon(dispatch.sync[self._busy[dispatch.sync]], now)
        self.start(dispatch.sync, versions, work, np.full(len(dispatch.sync), begin_s), upload=dispatch.upload)
        self._return(np.flatnonzero(crashed & resuming), now)
        idle = dispatch.resume[~self._busy[dispatch.resume]]
        self.start(idle, versions, work, np.full(len(idle), now), upload=dispatch.upload, download=False)
        if self._fleet.faults.every_round:
            self._go_on(np.flatnonzero(self._busy & (self._ordinal == 0)), now)

    def start(
        self,
        clients: Ids,
        versions: NDArray[np.int32],
        work: NDArray[np.float64],
        begin_s: NDArray[np.float64],
        *,
        upload: bool = True,
        download: bool = True,
    ) -> None:
        """These clients begin a new attempt, from the versions that they hold now, of the work asked for now."""
        fleet = self._fleet
        self._busy[clients] = True
        self._base[clients] = versions[clients]
        self._before_s[clients] = 0.0
        self._lead_s[clients] = fleet.down_s[clients] if download else 0.0
        self._batches[clients] = work[clients] * fleet.batches[clients]
        self._train_s[clients] = work[clients] * fleet.train_s[clients]
        self._full_s[clients] = self._lead_s[clients] + self._train_s[clients]
        if upload:
            self._full_s[clients] += fleet.up_s[clients]
        self._stretch(clients, begin_s)

    def pending(self, until_s: float, *, most: int, within_s: float = np.inf) -> Events:
        """What the server hears next, in order, up to that time: about so many events, within a span of the first."""
        ready = np.flatnonzero(self._next_s <= min(until_s, sys.float_info.max))
        times = self._next_s[ready]
        if len(ready) > most:
            early = times <= np.partition(times, most)[most]
            ready, times = ready[early], times[early]
        if within_s < np.inf and len(ready):
            soon = (times < times.min() + within_s) | (times == times.min())
            ready, times = ready[soon], times[soon]
        order = np.argsort(times, kind="stable")
        clients = ready[order]
        return Events(clients, self._base[clients], times[order], self._cut_s[clients] < np.inf)

    def heard(self, events: Events, accepted: NDArray[np.bool_]) -> None:
        """The server took notice of these events; a client whose update arrived is idle now."""
        self._next_s[events.client] = np.inf
        arrived = events.client[~events.lost]
        self._busy[arrived] = False
        self.work_done += float(self._batches[arrived].sum())
        self.work_lost += float(self._batches[events.client[~events.lost & ~accepted]].sum())

    def crashed(self, now: float) -> Ids:
        """Whose work was cut short since the round opened."""
        return np.flatnonzero(self._busy & (self._cut_s <= now))

    def _abandon(self, clients: Ids, now: float) -> None:
        """These clients throw their attempt away."""
        work = float(self._worked(clients, now).sum())
        self.work_done += work
        self.work_lost += work
        self._busy[clients] = False
        self._next_s[clients] = np.inf
        self._cut_s[clients] = np.inf

    def _return(self, clients: Ids, now: float) -> None:
        """These clients are back after a crash and take their attempt up again."""
        if self._keep_progress:
            self._before_s[clients] = self._elapsed(clients, now)
        else:
            work = float(self._worked(clients, now).sum())
            self.work_done += work
            self.work_lost += work
            self._before_s[clients] = 0.0
        self._stretch(clients, np.full(len(clients), now))

    def _go_on(self, clients: Ids, now: float) -> None:
        """These clients, under way, are exposed to the faults of another round."""
        self._before_s[clients] = self._elapsed(clients, now)
        self._stretch(clients, np.maximum(self._begin_s[clients], now))

    def _stretch(self, clients: Ids, begin_s: NDArray[np.float64]) -> None:
        """Begin a stretch of work and find out how it ends."""
        left_s = self._full_s[clients] - self._before_s[clients]
        cut_s = self._fleet.faults.crash_times(
            clients, begin_s, left_s, round_number=self._round, ordinal=self._ordinal[clients]
        )
        self._ordinal[clients] += 1
        self._begin_s[clients] = begin_s
        self._cut_s[clients] = cut_s
        self._next_s[clients] = np.where(cut_s < np.inf, cut_s + self._detection_delay_s, begin_s + left_s)

    def _elapsed(self, clients: Ids, now: float) -> NDArray[np.float64]:
        """Seconds of the attempt that are done by now."""
        until = np.minimum(self._cut_s[clients], now)
        return np.asarray(self._before_s[clients] + np.maximum(0.0, until - self._begin_s[clients]), dtype=np.float64)

    def _worked(self, clients: Ids, now: float) -> NDArray[np.float64]:
        """Mini-batches of the attempt that are done by now."""
        trained_s = np.clip(self._elapsed(clients, now) - self._lead_s[clients], 0.0, self._train_s[clients])
        return np.asarray(trained_s * self._fleet.speeds[clients])
