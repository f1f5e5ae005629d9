"""What every client did in every round, from records alone: the arrays behind the map of clients and rounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.protocol.records import Ids, RoundRecord, Rule, Verdict

__all__ = ["ClientMap", "State", "Turnarounds", "client_map", "lag", "turnaround_s"]


class State(IntEnum):
    """What a client did in a round."""

    IDLE = 0
    """It was not at work."""
    TRAINING = 1
    """It was at work, and nothing of it came in."""
    PICKED = 2
    """Its update came in and goes into the global model."""
    UNDRAFTED = 3
    """Its update came in and was kept for the next aggregation."""
    CRASHED = 4
    """Its work was cut short."""
    REFUSED = 5
    """Its update came in and was thrown away."""
    ABSENT = 6
    """It was not enrolled."""


_STATE_OF = {Verdict.PICKED: State.PICKED, Verdict.UNDRAFTED: State.UNDRAFTED, Verdict.REFUSED: State.REFUSED}


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientMap:
    """Arrays of [rounds, clients]. Where several updates of a client came in, the last one that was taken counts."""

    rounds: Ids
    """The number of each round."""
    opened_s: NDArray[np.float64]
    """When each round was opened."""
    clients: Ids
    """The number of each client."""
    state: NDArray[np.int8]
    """What it did, a `State`."""
    deprecated: NDArray[np.bool_]
    """Whether it was forced to start over."""
    base: NDArray[np.int32]
    """The version that its update was trained from, or that it is at work on; -1 where it is idle or not known."""
    lag: NDArray[np.int32]
    """How many versions behind its update is; -1 where none came in."""
    arrival_s: NDArray[np.float64]
    """When its update came in; NaN where none did."""

    def rows(self, places: ArrayLike) -> ClientMap:
        """The map of some of its rounds, by place."""
        chosen = np.asarray(places, dtype=np.int64)
        return ClientMap(
            rounds=self.rounds[chosen],
            opened_s=self.opened_s[chosen],
            clients=self.clients,
            state=self.state[chosen],
            deprecated=self.deprecated[chosen],
            base=self.base[chosen],
            lag=self.lag[chosen],
            arrival_s=self.arrival_s[chosen],
        )


def client_map(records: Iterable[RoundRecord], clients: ArrayLike | None = None, *, every: int = 1) -> ClientMap:
    """What every client did in every round; `clients` names those of interest, in the order wanted (all by default).

    Of so many rounds as `every` says only the first is kept, so that a long run needs no more memory than its map.
    A record names who was sent a model, whose update came in and who crashed. Between that, a client that was sent a
    model is at work until its update comes in or it crashes; and where as many were at work as are enrolled
    (`trained`), everyone is, as in SAFA after a crash. A client that crashed after its update came in counts by its
    update. In fully local training a client that works past the time limit without a crash is not named by the records,
    and shown as idle.
    """
    tracker = _Tracker()
    wanted = None if clients is None else np.asarray(clients, dtype=np.int64)
    rounds: list[tuple[int, float]] = []
    rows: list[_Row] = []
    for place, record in enumerate(records):
        row = tracker.add(record)
        if place % every == 0:
            rounds.append((record.round, record.opened_s))
            rows.append(row.of(wanted))
    chosen = np.arange(tracker.known, dtype=np.int64) if wanted is None else wanted
    rows = [row.of(np.arange(len(chosen))) for row in rows]  # clients that came later were absent before
    shape = len(rows), len(chosen)
    return ClientMap(
        rounds=np.array([number for number, _ in rounds], dtype=np.int64),
        opened_s=np.array([opened_s for _, opened_s in rounds], dtype=np.float64),
        clients=chosen,
        state=np.array([row.state for row in rows], dtype=np.int8).reshape(shape),
        deprecated=np.array([row.deprecated for row in rows], dtype=np.bool_).reshape(shape),
        base=np.array([row.base for row in rows], dtype=np.int32).reshape(shape),
        lag=np.array([row.lag for row in rows], dtype=np.int32).reshape(shape),
        arrival_s=np.array([row.arrival_s for row in rows], dtype=np.float64).reshape(shape),
    )


@dataclass(frozen=True)
class _Row:
    """One round of the map."""

    state: NDArray[np.int8]
    deprecated: NDArray[np.bool_]
    base: NDArray[np.int32]
    lag: NDArray[np.int32]
    arrival_s: NDArray[np.float64]

    def of(self, clients: Ids | None) -> _Row:
        """The row of these clients; who is not known yet is absent."""
        if clients is None:
            return self
        more = max(0, int(clients.max(initial=-1)) + 1 - len(self.state))
        return _Row(
            state=_padded(self.state, more, State.ABSENT)[clients],
            deprecated=_padded(self.deprecated, more, False)[clients],
            base=_padded(self.base, more, -1)[clients],
            lag=_padded(self.lag, more, -1)[clients],
            arrival_s=_padded(self.arrival_s, more, np.nan)[clients],
        )


def _padded(values: NDArray[Any], more: int, value: float) -> NDArray[Any]:
    return np.pad(values, (0, more), constant_values=value) if more else values


class _Tracker:
    """Follows every client from round to round."""

    def __init__(self) -> None:
        self.known = 0
        self._enrolled = np.zeros(0, dtype=np.bool_)
        self._busy = np.zeros(0, dtype=np.bool_)
        self._held = np.zeros(0, dtype=np.int32)  # the version that it was given last

    def add(self, record: RoundRecord) -> _Row:
        """Take in the next round: what each client did in it."""
        self._enrol(record)
        self._busy[record.sent] = True
        self._held[record.sent] = record.sent_version  # the last one counts
        if record.trained >= record.clients:
            self._busy[self._enrolled] = True
        state = np.where(self._busy, State.TRAINING.value, State.IDLE.value).astype(np.int8)
        state[record.crashed] = State.CRASHED.value
        base = np.where(self._busy, self._held, np.int32(-1))
        base[record.crashed] = self._held[record.crashed]
        lags, arrival_s = np.full(self.known, -1, dtype=np.int32), np.full(self.known, np.nan)
        deprecated = np.zeros(self.known, dtype=np.bool_)
        deprecated[record.deprecated] = True
        there = (record.client >= 0) & (record.client < self.known)
        for taken in (False, True):  # one that was taken comes before one that was refused
            of_these = there & ((record.verdict != Verdict.REFUSED.value) == taken)
            client = record.client[of_these]
            state[client] = _STATES[record.verdict[of_these]]
            base[client] = record.base[of_these]
            lags[client] = np.minimum(lag(record)[of_these], np.iinfo(np.int32).max)
            arrival_s[client] = record.arrival_s[of_these]
        state[~self._enrolled & (state == State.IDLE.value)] = State.ABSENT.value
        self._busy[record.crashed] = False
        self._busy[record.client[there]] = False
        return _Row(state, deprecated, base, lags, arrival_s)

    def _enrol(self, record: RoundRecord) -> None:
        """Keep count of who is enrolled; at the first record it is everyone who is not said to have joined since.

        A client that has both left and joined is as it was before: what has changed is its size, or it came and went.
        """
        if not self.known:
            self._grow(record.clients + len(record.left))
            self._enrolled[:] = ~np.isin(np.arange(self.known), record.joined)
        self._grow(max(int(ids.max(initial=-1)) + 1 for ids in (record.joined, record.sent, record.left)))
        left = np.setdiff1d(record.left, record.joined)
        self._enrolled[left] = self._busy[left] = False
        self._held[left] = -1
        self._enrolled[np.setdiff1d(record.joined, record.left)] = True

    def _grow(self, known: int) -> None:
        more = max(0, known - self.known)
        self.known += more
        self._enrolled = np.concatenate([self._enrolled, np.zeros(more, dtype=np.bool_)])
        self._busy = np.concatenate([self._busy, np.zeros(more, dtype=np.bool_)])
        self._held = np.concatenate([self._held, np.full(more, -1, dtype=np.int32)])


_STATES = np.array([_STATE_OF[verdict] for verdict in sorted(Verdict)], dtype=np.int8)


def lag(record: RoundRecord) -> NDArray[np.int64]:
    """How many versions behind each update is that came in: 0 if it was trained from the latest one."""
    into = np.where(record.into >= 0, record.into, record.version)
    return np.maximum(0, into - 1 - record.base)


def turnaround_s(records: Iterable[RoundRecord]) -> NDArray[np.float64]:
    """The median time that each client took for an update, as seen in the records; NaN where none came in."""
    turnarounds = Turnarounds()
    for record in records:
        turnarounds.add(record)
    return turnarounds.medians()


class Turnarounds:
    """The times that clients took for their updates, as seen in the records, one after the other.

    A client is taken to start when the version that it trains from was made, or when its last update came in if that
    was later. Fully local training makes no versions; there, it starts when the round opens.
    """

    def __init__(self) -> None:
        self._made = np.zeros(1)  # when each version was made
        self._last = np.zeros(0)  # when each client's last update came in
        self._clients, self._spans = [np.empty(0, dtype=np.int64)], [np.empty(0)]

    def add(self, record: RoundRecord) -> None:
        """Take in the next round."""
        taken = np.flatnonzero(record.verdict != Verdict.REFUSED.value)
        taken = taken[np.argsort(record.client[taken], kind="stable")]
        client, at_s = record.client[taken], record.arrival_s[taken]
        self._last = _longer(self._last, max(record.clients, int(client.max(initial=-1)) + 1))
        self._made = made = _longer(self._made, record.version + 1)
        given = np.flatnonzero((record.into >= 0) & (record.into <= record.version))
        made[record.into[given]] = record.arrival_s[given]
        before = self._last[client]
        before[1:] = np.where(client[1:] == client[:-1], at_s[:-1], before[1:])
        start = record.opened_s if record.rule is Rule.OWN else made[np.minimum(record.base[taken], record.version)]
        self._clients.append(client)
        self._spans.append(at_s - np.maximum(start, before))
        if not np.any(record.sent_version == record.version):  # else it was made, and sent out, before the close
            made[record.version] = record.closed_s
        self._last[client] = at_s

    def medians(self) -> NDArray[np.float64]:
        """The median of each client; NaN where no update of it came in."""
        return _medians(np.concatenate(self._clients), np.concatenate(self._spans), len(self._last))


def _longer(array: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    return np.concatenate([array, np.zeros(max(0, length - len(array)))])


def _medians(clients: Ids, values: NDArray[np.float64], length: int) -> NDArray[np.float64]:
    """The median of each client's values; NaN where it has none."""
    order = np.lexsort((values, clients))
    ordered = values[order]
    starts = np.searchsorted(clients[order], np.arange(length + 1))
    count = np.diff(starts)
    has = count > 0
    medians = np.full(length, np.nan)
    middle = starts[:-1][has]
    medians[has] = (ordered[middle + (count[has] - 1) // 2] + ordered[middle + count[has] // 2]) / 2
    return medians
