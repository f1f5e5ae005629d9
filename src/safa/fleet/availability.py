"""When clients are online: by a trace, or for so many hours a day."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from safa.streams import stream

__all__ = ["DAY_S", "Availability", "daily_times"]

DAY_S = 86_400.0
_SPREAD_H = 5.4
_LEAST_S = 1e-6  # a time online of which less is left is over: it is what rounding leaves

_Ids = NDArray[np.int64]
_Seconds = NDArray[np.float64]


def daily_times(count: int, *, seed: int, hours: float) -> tuple[_Seconds, _Seconds]:
    """Rows of (client, from, until), by client and time, and the period of each client: a day, which begins at night.

    Every client is online for so many hours in a row, at the same time every day. The middle of that time is normal
    around midnight, when the run starts, with a standard deviation of 5.4 hours. With 8 hours, four times as many
    clients are online at midnight as at noon, as Bonawitz et al. (2019, Section 9) saw it of phones.
    """
    middle_s = stream(seed, "time of the day").normal(0.0, _SPREAD_H * 3600, count)
    start_s = np.mod(middle_s - hours * 1800, DAY_S)
    end_s = start_s + hours * 3600
    client = np.arange(count, dtype=np.float64)
    over = end_s > DAY_S  # past midnight: the end of the day and the beginning of the next one
    rows = np.column_stack([client, start_s, np.minimum(end_s, DAY_S)])
    early = np.column_stack([client[over], np.zeros(np.count_nonzero(over)), end_s[over] - DAY_S])
    everything = np.concatenate([early, rows])
    return everything[np.lexsort((everything[:, 1], everything[:, 0]))], np.full(count, DAY_S)


class Availability:
    """Times online: rows of (client, from, until), by client and time.

    With `period_s`, a number for each client, its times online repeat after so many seconds.
    """

    def __init__(self, trace: _Seconds, period_s: _Seconds | None = None) -> None:
        self.trace = trace
        self._span = float(trace[:, 2].max()) + 1.0 if len(trace) else 1.0
        self._starts = trace[:, 0] * self._span + trace[:, 1]
        self.period_s = period_s

    def offline_s(self, clients: _Ids, at_s: _Seconds) -> _Seconds:
        """When each client, online or not at that time, is next offline: at once if it is not online."""
        if not len(self.trace):
            return at_s
        if self.period_s is None:
            return np.maximum(self._until_s(clients, at_s), at_s)
        period_s = self.period_s[clients]
        past_s = np.mod(at_s, period_s)
        until_s = self._until_s(clients, past_s)
        # Online to the end of a period and from the start of the next one, a client is not offline in between.
        first_s = np.maximum(self._until_s(clients, np.zeros(len(clients))), 0.0)
        until_s = np.where(until_s >= period_s, period_s + first_s, until_s)
        until_s = np.where(first_s >= period_s, np.inf, until_s)
        return np.maximum(at_s - past_s + until_s, at_s)

    def online(self, clients: _Ids, at_s: _Seconds) -> tuple[_Seconds, _Seconds]:
        """From when on each client is online, not before that time, and until when (inf: never, and for ever)."""
        from_s, until_s = at_s.copy(), self.offline_s(clients, at_s).copy()
        away = np.flatnonzero(until_s - at_s < _LEAST_S)
        from_s[away], until_s[away] = self._next(clients[away], at_s[away])
        return from_s, until_s

    def _next(self, clients: _Ids, at_s: _Seconds) -> tuple[_Seconds, _Seconds]:
        """The next time online of clients that are offline."""
        if not len(self.trace):
            return np.full(len(clients), np.inf), np.full(len(clients), np.inf)
        period_s = np.full(len(clients), np.inf) if self.period_s is None else self.period_s[clients]
        past_s = np.mod(at_s, period_s)
        later, later_is_own = self._row(self._place(clients, past_s) + 1, clients)
        first, first_is_own = self._row(np.searchsorted(self.trace[:, 0], clients), clients)
        start_s = np.where(later_is_own, later[:, 1], period_s + first[:, 1])
        end_s = np.where(later_is_own, later[:, 2], period_s + first[:, 2])
        goes_on_s = np.where(first[:, 1] == 0, first[:, 2], 0.0)  # into the next period
        end_s = np.where(later_is_own & (end_s >= period_s), period_s + goes_on_s, end_s)
        begin_s = at_s - past_s
        from_s = np.where(first_is_own, np.maximum(begin_s + start_s, at_s), np.inf)
        return from_s, np.where(first_is_own, begin_s + end_s, np.inf)

    def _row(self, place: _Ids, clients: _Ids) -> tuple[_Seconds, NDArray[np.bool_]]:
        """The rows at these places, and whether each is of the client."""
        rows = self.trace[np.minimum(place, len(self.trace) - 1)]
        return rows, (place < len(self.trace)) & (rows[:, 0] == clients)

    def _until_s(self, clients: _Ids, at_s: _Seconds) -> _Seconds:
        """The end of the time online that each client has begun last (-inf: none)."""
        place = self._place(clients, at_s)
        own = (place >= 0) & (self.trace[place, 0] == clients)
        return np.where(own, self.trace[place, 2], -np.inf)

    def _place(self, clients: _Ids, at_s: _Seconds) -> _Ids:
        """The row of the last time online that had begun by then, of whichever client."""
        return np.searchsorted(self._starts, clients * self._span + np.minimum(at_s, self._span), side="right") - 1
