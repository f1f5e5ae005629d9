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

_SAMPLED = 64  # one client in so many tells when about the next events come
_MANY = 10_000  # events from which on sorting by digits is faster


class Devices:
    """The clients' side of the causal clock."""

    def __init__(self, fleet: Fleet, *, detection_delay_s: float, keep_progress: bool) -> None:
        clients = len(fleet)
        self._fleet = fleet
        self._detection_delay_s = detection_delay_s
        self._keep_progress = keep_progress
        self._busy = np.zeros(clients, dtype=np.bool_)
        self._base = np.zeros(clients, dtype=np.int32)
        self._share = np.zeros(clients)  # of the full local work that the attempt was asked for
        self._lead_s = np.zeros(clients)  # the part of the attempt that comes before training
        self._full_s = np.zeros(clients)  # the whole attempt, without breaks
        self._before_s = np.zeros(clients)  # what was done of it in earlier stretches
        self._begin_s = np.zeros(clients)  # when this stretch began
        self._cut_s = np.full(clients, np.inf)  # when it is cut short
        self._next_s = np.full(clients, np.inf)  # when the server hears of it next
        self._ordinal = np.zeros(clients, dtype=np.int32)  # of the stretch, in this round
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
        self.start(dispatch.sync, versions, work, begin_s, upload=dispatch.upload)
        self._return(np.flatnonzero(crashed & resuming), now)
        idle = np.flatnonzero(resuming & ~self._busy)
        self.start(idle, versions, work, now, upload=dispatch.upload, download=False)
        if self._fleet.faults.every_round:
            self._go_on(np.flatnonzero(self._busy & (self._ordinal == 0)), now)

    def start(
        self,
        clients: Ids,
        versions: NDArray[np.int32],
        work: NDArray[np.float64],
        begin_s: NDArray[np.float64] | float,
        *,
        upload: bool = True,
        download: bool = True,
    ) -> None:
        """These clients begin a new attempt, from the versions that they hold now, of the work asked for now."""
        fleet, share = self._fleet, work[clients]
        lead_s = fleet.down_s[clients] if download else np.zeros(len(clients))
        full_s = lead_s + share * fleet.train_s[clients]
        if upload:
            full_s += fleet.up_s[clients]
        self._busy[clients] = True
        self._base[clients] = versions[clients]
        self._before_s[clients] = 0.0
        self._share[clients] = share
        self._lead_s[clients] = lead_s
        self._full_s[clients] = full_s
        self._stretch(clients, begin_s, full_s)

    def pending(self, until_s: float, *, most: int, within_s: float = np.inf) -> Events:
        """What the server hears next, in order, up to that time: about so many events, within a span of the first."""
        ready = self._first(min(until_s, sys.float_info.max), most)
        times = self._next_s[ready]
        if within_s < np.inf and len(ready):
            soon = (times < times.min() + within_s) | (times == times.min())
            ready, times = ready[soon], times[soon]
        base, lost = self._base[ready].astype(np.int64), self._are_losses(ready)
        return Events(ready, base, times, lost)[_in_order(times)]

    def _are_losses(self, clients: Ids) -> NDArray[np.bool_]:
        """Whether what the server hears of these clients next is that they are lost."""
        return np.asarray(self._cut_s[clients] < np.inf)

    def _first(self, until_s: float, most: int) -> Ids:
        """Of whom the server hears up to that time: of about `most` at most, those that it hears of first."""
        ready = np.flatnonzero(self._next_s <= self._soon_s(until_s, most))
        if len(ready) <= most:
            ready = np.flatnonzero(self._next_s <= until_s)
        if len(ready) <= most:
            return ready
        times = self._next_s[ready]
        return np.asarray(ready[times <= np.partition(times, most)[most]], dtype=np.int64)

    def _soon_s(self, until_s: float, most: int) -> float:
        """A time by which the server hears of somewhat more than `most` clients, as a sample of them says."""
        sample, expected = self._next_s[::_SAMPLED], most / _SAMPLED
        place = int(expected + 4 * expected**0.5) + 1
        return min(until_s, float(np.partition(sample, place)[place])) if place < len(sample) else until_s

    def heard(self, events: Events, accepted: NDArray[np.bool_]) -> None:
        """The server took notice of these events; a client whose update arrived is idle now."""
        self._next_s[events.client] = np.inf
        arrived = events.client[np.flatnonzero(~events.lost)]
        self._busy[arrived] = False
        self.work_done += self._batches(arrived)
        self.work_lost += self._batches(events.client[np.flatnonzero(~(events.lost | accepted))])

    def _batches(self, clients: Ids) -> float:
        """Mini-batches of whole attempts."""
        return float((self._share[clients] * self._fleet.batches[clients]).sum())

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
        self._stretch(clients, now, self._left_s(clients))

    def _go_on(self, clients: Ids, now: float) -> None:
        """These clients, under way, are exposed to the faults of another round."""
        self._before_s[clients] = self._elapsed(clients, now)
        self._stretch(clients, np.maximum(self._begin_s[clients], now), self._left_s(clients))

    def _left_s(self, clients: Ids) -> NDArray[np.float64]:
        """Seconds of the attempt that its earlier stretches have left."""
        return np.asarray(self._full_s[clients] - self._before_s[clients])

    def _stretch(self, clients: Ids, begin_s: NDArray[np.float64] | float, left_s: NDArray[np.float64]) -> None:
        """Begin a stretch of so much work and find out how it ends."""
        ordinal = self._ordinal[clients]
        begin_s = np.broadcast_to(begin_s, clients.shape)
        cut_s = self._fleet.faults.crash_times(clients, begin_s, left_s, round_number=self._round, ordinal=ordinal)
        self._ordinal[clients] = ordinal + 1
        self._begin_s[clients] = begin_s
        self._cut_s[clients] = cut_s
        next_s, cut = begin_s + left_s, np.flatnonzero(cut_s < np.inf)
        next_s[cut] = cut_s[cut] + self._detection_delay_s
        self._next_s[clients] = next_s

    def _elapsed(self, clients: Ids, now: float) -> NDArray[np.float64]:
        """Seconds of the attempt that are done by now."""
        until = np.minimum(self._cut_s[clients], now)
        return np.asarray(self._before_s[clients] + np.maximum(0.0, until - self._begin_s[clients]), dtype=np.float64)

    def _worked(self, clients: Ids, now: float) -> NDArray[np.float64]:
        """Mini-batches of the attempt that are done by now."""
        full_s = self._share[clients] * self._fleet.train_s[clients]
        trained_s = np.clip(self._elapsed(clients, now) - self._lead_s[clients], 0.0, full_s)
        return np.asarray(trained_s * self._fleet.speeds[clients])


def _in_order(times: NDArray[np.float64]) -> Ids:
    """The places of these times in order, level ones by place: what a stable sort gives.

    Where they are many, they are sorted by two digits of 16 bits, each in linear time; those leave few level.
    """
    if len(times) < _MANY or not np.ptp(times):
        return np.argsort(times, kind="stable")
    digits = ((times - times.min()) / np.ptp(times) * (2**32 - 1)).astype(np.int64)
    order = np.argsort(digits.astype(np.uint16), kind="stable")
    order = order[np.argsort((digits >> 16).astype(np.uint16)[order], kind="stable")]
    level = np.flatnonzero(np.diff(digits[order]) == 0)
    level = np.union1d(level, level + 1)
    some = order[level]
    order[level] = some[np.argsort(times[some], kind="stable")]
    return order
