"""The mechanism that all protocols share; their rules are in the files beside this one.

A protocol is a pure state machine over arrays with one element per client. It reads no clock, draws no random number
and holds no model: time, random numbers and estimates are arguments, and it yields a `RoundRecord`. A round goes

    open_round  ->  receive, receive, ...  ->  close_round

`receive` takes events one at a time or in batches of any size, with the same outcome: it stops right behind the event
that ends the round and leaves the rest to the next one. A client's word is checked before anything is changed, and
what does not fit is refused by name.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import MisuseError, SafaError
from safa.protocol.events import Dispatch, Events, Receipt
from safa.protocol.records import EndedBy, Ids, Refusal, RoundRecord, Rule, Verdict

__all__ = ["Protocol", "Settlement", "nobody", "quota_of"]

Settlement = tuple[NDArray[np.int8], NDArray[np.float64], NDArray[np.int64]]
"""For every good update of a round: its verdict, its weight, and the version that it goes into."""


_LEAST_WORK = 0.01  # the least share of its work that a client is asked for; a trainer makes one step at least
_AT_A_TIME = 1000  # events that are taken notice of at once, where a round wants fewer updates
_AGGREGATORS = {Rule.CACHE: "cache", Rule.AVERAGE: "mean", Rule.DELTA: "buffer", Rule.OWN: "own"}


def nobody() -> Ids:
    """An empty set of clients."""
    return np.empty(0, dtype=np.int64)


def quota_of(fraction: float, clients: int) -> int:
    """ceil(C*m), with the rounding error of the product forgiven (0.1 * 30 is 3, not 4)."""
    return math.ceil(fraction * clients - 1e-9)


class Protocol(ABC):
    """One federated protocol: who trains, whose update counts, when a round ends.

    A subclass says three things: whom to set to work (`_invite`), where in a row of good updates the round has enough
    (`_enough`; by default never, so that it waits for all), and what becomes of them (`_settle`).
    """

    name: ClassVar[str]
    """What it is called on the command line."""
    rule: ClassVar[Rule] = Rule.AVERAGE
    """What the weights in its records mean."""
    one_by_one: ClassVar[bool] = False
    """Whether every version is made of a single update."""
    has_bypass: ClassVar[bool] = False
    """Whether an update that comes after the selection can be kept."""
    answers_arrivals: ClassVar[bool] = False
    """Whether a client that commits is sent the latest model at once, in mid-round."""
    one_event_at_a_time: ClassVar[bool] = False
    """Whether `_accept` is given one update at a time: where it answers others than those that it is given."""
    work_cap: float = 0.0
    """A client is asked for as much of its work as it does in so many times the median client's time (0: for all)."""
    normalise_work: bool = False
    """Whether the weight of an update is divided by the share of its work (`Rule.DELTA`)."""
    run_settings: ClassVar[tuple[str, ...]] = ()
    """For a protocol of another package: its parameters that are to be filled from the run's settings of that name,
    besides those that it has from a class of this package."""

    def __init__(self, sizes: ArrayLike, *, fraction: float, round_limit_s: float = math.inf) -> None:
        """Enrol one client per element of `sizes` (n_k); `fraction` is C, `round_limit_s` is T_lim."""
        if not 0 < fraction <= 1:
            raise SafaError(f"fraction must be above 0 and at most 1, not {fraction}")
        if not round_limit_s > 0:
            raise SafaError(f"round_limit_s must be above 0 seconds, not {round_limit_s}")
        self.fraction = fraction
        self.round_limit_s = round_limit_s
        self.round = 0
        self.version = 0
        self.now = -math.inf
        self.opened_s = -math.inf
        self.is_open = False
        self.sizes = np.empty(0, dtype=np.float64)
        self.active = np.empty(0, dtype=np.bool_)
        self.versions = np.empty(0, dtype=np.int32)
        self.work = np.empty(0, dtype=np.float64)
        """The share of its full local work that each client was asked for when its last attempt began."""
        self._expected_s = np.empty(0, dtype=np.float64)  # how long all its work takes it, 0 where nobody knows
        self._fixed_s = np.empty(0, dtype=np.float64)  # the part of that which does not depend on the work
        self._most_work = np.empty(0, dtype=np.float64)  # the share of it that the work cap allows
        self._under_way = np.empty(0, dtype=np.bool_)  # it was set to work, and has not committed since
        self._expected = np.empty(0, dtype=np.bool_)  # an update from it would be taken
        self._awaited = np.empty(0, dtype=np.bool_)  # the round waits for it
        self._committed = np.empty(0, dtype=np.bool_)  # it has committed in this round
        self._waiting_for = 0
        self._joined: list[Ids] = []
        self._left: list[Ids] = []
        self._log: list[tuple[Events, NDArray[np.int8], NDArray[np.bool_], NDArray[np.float64]]] = []
        self._sent: list[tuple[Ids, Ids]] = []  # who was sent the model, and which version
        self._opening: tuple[Dispatch, float] | None = None
        self.enrol(sizes)
        self._joined.clear()

    @property
    def aggregator(self) -> str:
        """The name of the aggregator that makes its global models, unless another one is chosen."""
        return _AGGREGATORS[self.rule]

    # -- the fleet ---------------------------------------------------------------------------------------------------

    @property
    def clients(self) -> int:
        """How many clients ever enrolled; their numbers are 0 to this, exclusive."""
        return len(self.sizes)

    @property
    def quota(self) -> int:
        """How many updates a round wants: ceil(C*m), m being the clients that have not retired."""
        return quota_of(self.fraction, int(np.count_nonzero(self.active)))

    def enrol(self, sizes: ArrayLike) -> Ids:
        """Add clients between two rounds and return their numbers. They start from the latest global model."""
        new = _checked_sizes(sizes)
        self._between_rounds("enrol clients")
        numbers = np.arange(self.clients, self.clients + len(new), dtype=np.int64)
        self.sizes = np.concatenate([self.sizes, new])
        for name, value in self._fresh_client().items():
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.full(len(new), value, dtype=old.dtype)]))
        self._joined.append(numbers)
        return numbers

    def retire(self, clients: ArrayLike) -> None:
        """Take clients out between two rounds. Their numbers and versions are kept for their return."""
        leaving = self._known(clients)
        self._between_rounds("retire clients")
        self.active[leaving] = False
        self._expected[leaving] = False
        self._left.append(leaving)

    def readmit(self, clients: ArrayLike) -> None:
        """Take retired clients back between two rounds, with the version that each one had."""
        returning = self._known(clients)
        self._between_rounds("take clients back")
        self.active[returning] = True
        self._joined.append(returning)

    def resize(self, clients: ArrayLike, sizes: ArrayLike) -> None:
        """Change the n_k of clients between two rounds; a client whose n_k is that already is left alone.

        In the next record a client that is there has left and joined, with its new size: so weights follow from the
        records alone. One that has joined since the last round is in it with the new size only, and so is one that has
        retired, when it comes back. What a client is at work on, and its version, stay as they are.
        """
        numbers, new = np.atleast_1d(np.asarray(clients, dtype=np.int64)), _checked_sizes(sizes)
        if len(numbers) != len(new) or len(self._known(numbers)) != len(numbers):
            raise MisuseError(f"{len(numbers)} different clients need a size each, not {len(new)}")
        self._between_rounds("change sizes")
        changed = numbers[self.sizes[numbers] != new]
        self.sizes[numbers] = new
        there = changed[self.active[changed] & ~np.isin(changed, np.concatenate([nobody(), *self._joined]))]
        if len(there):
            self._left.append(there)
            self._joined.append(there)

    def _fresh_client(self) -> dict[str, Any]:
        """The state of a client that has just enrolled, by the name of the array that holds it."""
        return {
            "active": True,
            "versions": self.version,
            "work": 1.0,
            "_expected_s": 0.0,
            "_fixed_s": 0.0,
            "_most_work": 1.0,
            "_under_way": False,
            "_expected": False,
            "_awaited": False,
            "_committed": False,
        }

    def _known(self, clients: ArrayLike) -> Ids:
        numbers = np.unique(np.atleast_1d(np.asarray(clients, dtype=np.int64)))
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < self.clients:
            raise MisuseError(f"clients are numbered 0 to {self.clients - 1}, not {numbers[0]} to {numbers[-1]}")
        return numbers

    def _between_rounds(self, what: str) -> None:
        if self.is_open:
            raise MisuseError(f"cannot {what} while round {self.round} is open")

    # -- a round -----------------------------------------------------------------------------------------------------

    def open_round(
        self, *, now: float, draws: ArrayLike, expected_s: ArrayLike, fixed_s: ArrayLike | None = None
    ) -> Dispatch:
        """Open the next round and say whom to set to work.

        `draws` gives every client a random number between 0 and 1, drawn by the caller; `expected_s` says how long
        the caller thinks that each client takes for all its work (0: unknown), and `fixed_s` how much of that would
        pass with no work at all, as for the links (without: nothing). Protocols that do not need them ignore them.
        """
        drawn = np.asarray(draws, dtype=np.float64)
        estimates = np.asarray(expected_s, dtype=np.float64)
        fixed = np.zeros(self.clients) if fixed_s is None else np.asarray(fixed_s, dtype=np.float64)
        if not drawn.shape == estimates.shape == fixed.shape == self.sizes.shape:
            raise MisuseError(
                f"draws, expected_s and fixed_s need one number for each of {self.clients} clients, "
                f"not {drawn.shape}, {estimates.shape} and {fixed.shape}"
            )
        self._between_rounds("open a round")
        self._not_before(now)
        self.round += 1
        self.is_open = True
        self.now = self.opened_s = now
        self._expected_s, self._fixed_s = estimates, fixed
        self._cap_work()
        dispatch = self._invite(drawn, estimates)
        self.versions[dispatch.sync] = self.version
        idle = np.flatnonzero(~self._under_way[dispatch.resume])
        self._begin(np.concatenate([dispatch.sync, dispatch.resume[idle]]))
        self._set_to_work(dispatch)
        versions = np.concatenate([self.versions[dispatch.sync], self.versions[dispatch.resume]])
        self._opening = dispatch, float(np.var(versions)) if len(versions) else 0.0
        self._sent = [(dispatch.sync, np.full(len(dispatch.sync), self.version, dtype=np.int64))]
        self._log = []
        return dispatch

    def _set_to_work(self, dispatch: Dispatch) -> None:
        """Wait for everybody who is at work in the round that opens."""
        self._committed[:] = False
        self._expected[:] = False
        self._expected[dispatch.sync] = True
        self._expected[dispatch.resume] = True
        self._awaited[:] = self._expected
        self._under_way[:] = self._expected
        self._waiting_for = len(dispatch.sync) + len(dispatch.resume)

    def _begin(self, clients: Ids) -> None:
        """These clients begin an attempt: ask for its work."""
        shares = np.asarray(self._work(clients), dtype=np.float64)
        if shares.shape != clients.shape or not np.all((shares > 0) & (shares <= 1)):
            raise MisuseError(
                f"{self.name} must ask each of {len(clients)} clients for a share of its work above 0 and at most 1, "
                f"not for {shares}"
            )
        self.work[clients] = np.minimum(shares, self._most_work[clients])
        self._under_way[clients] = True

    def _cap_work(self) -> None:
        """Find out how much of its work each client does in `work_cap` times the time of the median client."""
        if self.work_cap:
            known = self._expected_s[self.active & (self._expected_s > 0)]
            self._most_work = self._share_within(self.work_cap * float(np.median(known)) if len(known) else math.inf)

    def _share_within(self, limit_s: float) -> NDArray[np.float64]:
        """The share of its work that each client does in so much time; all, where nobody knows how long it takes."""
        work_s = self._expected_s - self._fixed_s
        share = np.divide(limit_s - self._fixed_s, work_s, out=np.ones(self.clients), where=work_s > 0)
        return np.clip(share, _LEAST_WORK, 1.0)

    def _capped_s(self, clients: Ids) -> NDArray[np.float64]:
        """How long these clients take for what the work cap leaves of their work."""
        share, full_s, fixed_s = self._most_work[clients], self._expected_s[clients], self._fixed_s[clients]
        return np.where(share < 1, fixed_s + share * (full_s - fixed_s), full_s)

    @property
    def asks_for_parts(self) -> bool:
        """Whether it may ask a client for less than its full local work."""
        return self.work_cap > 0 or type(self)._work is not Protocol._work

    @property
    def least_work(self) -> NDArray[np.float64]:
        """The share of its work that each client is asked for at least, if it begins while this round is open."""
        return self._most_work if type(self)._work is Protocol._work else np.zeros(self.clients)

    @property
    def deadline(self) -> float:
        """When the open round must be closed at the latest (T_lim)."""
        return self.opened_s + self.round_limit_s

    @property
    def uses_draws(self) -> bool:
        """Whether it makes anything of the random numbers that `open_round` is given."""
        return True

    @property
    def waiting_for(self) -> int:
        """How many clients the open round still waits for."""
        return self._waiting_for

    def expects(self, client: int) -> bool:
        """Whether an update of that client would be taken in the open round."""
        return self.is_open and bool(self._expected[client])

    @property
    def done(self) -> bool:
        """Whether the open round has what it wants, or nobody is left to wait for: close it now."""
        return self.is_open and (self._waiting_for == 0 or self._has_enough())

    def receive(self, events: Events, *, late: bool = False) -> Receipt:
        """Take notice of events, up to the one that ends the round or the first one behind the deadline.

        With `late`, they are updates that came too late for the selection but before the close: the bypass takes
        them, where the protocol has one, and the round being done is no obstacle.
        """
        if not self.is_open:
            raise MisuseError("no round is open: events between rounds belong to the next one")
        if len(events):
            self._not_before(float(events.at_s[0]))
            if not (np.all(np.diff(events.at_s) >= 0) and np.isfinite(events.at_s[-1])):
                raise MisuseError("events must come in order of time, each at a finite time")
        refusals: list[NDArray[np.int8]] = []
        sync: list[tuple[Ids, NDArray[np.float64]]] = []
        rest = events[: int(np.searchsorted(events.at_s, self.deadline, side="right"))]
        most = 1 if self.one_event_at_a_time else max(self.quota, _AT_A_TIME)
        while len(rest) and (late or not self.done):
            some = rest[:most]
            refusal, answered = self._receive_run(some[: self._first_repetition(some.client)], late)
            refusals.append(refusal)
            sync.append(answered)
            rest = rest[len(refusal) :]
        return Receipt(
            np.concatenate([np.empty(0, np.int8), *refusals]),
            np.concatenate([nobody(), *(clients for clients, _ in sync)]),
            np.concatenate([np.empty(0), *(at_s for _, at_s in sync)]),
        )

    def _receive_run(self, events: Events, late: bool) -> tuple[NDArray[np.int8], tuple[Ids, NDArray[np.float64]]]:
        """`receive` for events of clients that are all different."""
        refusal = self._judge(events, late)
        good = (refusal == Refusal.NONE.value) & ~events.lost
        if not late:
            end = self._end_of_round(events, refusal, good)
            events, refusal, good = events[:end], refusal[:end], good[:end]
        clients, bases = events.client[good], events.base[good]
        gone = events.client[refusal == Refusal.NONE.value]
        self._waiting_for -= int(np.count_nonzero(self._awaited[gone]))
        self._awaited[gone] = False
        self._expected[clients] = False
        self._committed[clients] = True
        self._under_way[clients] = False
        self._log.append((events, refusal, np.full(len(events), late), self._asked_of(events.client)))
        self.now = float(events.at_s[-1])
        answered = self._accept(clients, bases) if len(clients) else nobody()
        if len(answered):
            self._begin(answered)
            self._expected[answered] = True
            self._awaited[answered] = True
            self._waiting_for += len(answered)
            self._sent.append((answered, self.versions[answered].astype(np.int64)))
        return refusal, (answered, np.broadcast_to(events.at_s[good], answered.shape) if len(answered) else np.empty(0))

    def _asked_of(self, clients: Ids) -> NDArray[np.float64]:
        """The share of its work that each client was asked for; 1 for a stranger."""
        if not self.asks_for_parts:
            return np.ones(len(clients))
        known = (clients >= 0) & (clients < self.clients)
        shares = np.ones(len(clients))
        shares[known] = self.work[clients[known]]
        return shares

    def _knows(self, clients: Ids) -> bool:
        """Whether clients of all these numbers have enrolled."""
        return len(clients) > 0 and bool(clients.min() >= 0 and clients.max() < self.clients)

    def _first_repetition(self, clients: Ids) -> int:
        """How many clients come before the first one that occurs a second time."""
        if self._knows(clients):
            place, own = np.empty(self.clients, dtype=np.int64), np.arange(len(clients))
            place[clients] = own
            if np.array_equal(place[clients], own):
                return len(clients)
        order = np.argsort(clients, kind="stable")
        again = order[1:][clients[order[1:]] == clients[order[:-1]]]
        return int(again.min()) if len(again) else len(clients)

    def _judge(self, events: Events, late: bool) -> NDArray[np.int8]:
        """For every event, whether it can be taken; the first reason that applies is given."""
        refusal = np.zeros(len(events), dtype=np.int8)
        left = np.arange(len(events))
        if self._knows(events.client) and not (late and not self.has_bypass):
            client = events.client
            own = events.base == self.versions[client]
            left = np.flatnonzero(~(self.active[client] & self._expected[client] & own) | events.lost)
        if len(left):  # nothing is wrong with any of the others, and as a rule there are no more
            refusal[left] = self._refusal(events[left], late)
        return refusal

    def _refusal(self, events: Events, late: bool) -> NDArray[np.int8]:
        """`_judge` for events of which it is not plain that they can be taken."""
        known = (events.client >= 0) & (events.client < self.clients)
        client = np.where(known, events.client, 0)
        if not self.clients:
            return np.full(len(events), Refusal.UNKNOWN_CLIENT.value, dtype=np.int8)
        own = events.base == self.versions[client]
        too_late = late and not self.has_bypass
        reasons = [
            (~known, Refusal.UNKNOWN_CLIENT),
            (~self.active[client], Refusal.RETIRED_CLIENT),
            (events.lost & ~self._awaited[client], Refusal.NOT_EXPECTED),
            (events.lost, Refusal.NONE),
            (events.base > self.versions[client], Refusal.FUTURE_VERSION),
            (self._expected[client] & own, Refusal.LATE if too_late else Refusal.NONE),
            (self._committed[client], Refusal.SECOND_COMMIT),
            (~own, Refusal.ABANDONED),
        ]
        return np.select(
            [condition for condition, _ in reasons],
            [np.int8(reason.value) for _, reason in reasons],
            np.int8(Refusal.NOT_EXPECTED.value),
        )

    def _end_of_round(self, events: Events, refusal: NDArray[np.int8], good: NDArray[np.bool_]) -> int:
        """How many of the events belong to this round: up to the one that gives it enough, or leaves nobody."""
        good_ones = np.flatnonzero(good)
        enough = self._enough(events.client[good_ones])
        end = len(events) if enough is None else int(good_ones[enough - 1]) + 1
        taken = np.flatnonzero(refusal == Refusal.NONE.value)
        was_awaited = self._awaited[events.client[taken]].astype(np.int64)
        stays = good[taken].astype(np.int64) if self.answers_arrivals else 0
        left = self._waiting_for + np.cumsum(stays - was_awaited)
        empty = np.flatnonzero(left == 0)
        return min(end, int(taken[empty[0]]) + 1) if len(empty) else end

    def close_round(self, *, now: float) -> RoundRecord:
        """Close the round, make the next global version, and yield what happened."""
        if not self.is_open:
            raise MisuseError("no round is open")
        self._not_before(now)
        if not self.done and now < self.deadline:
            raise MisuseError(f"round {self.round} still waits for {self._waiting_for} clients until {self.deadline} s")
        record = self._record(now)
        self.is_open = False
        self.now = now
        self._joined, self._left, self._log, self._sent, self._opening = [], [], [], [], None
        return record

    def record_so_far(self) -> RoundRecord:
        """The record of the open round as it is, where versions are made in mid-round (`answers_arrivals`).

        What it says of an update, the record of the closed round says, too.
        """
        if not self.is_open or not self.answers_arrivals:
            raise MisuseError(f"{self.name} makes no version before a round is closed, or no round is open")
        return self._record(self.now)

    def _record(self, now: float) -> RoundRecord:
        assert self._opening is not None
        dispatch, variance = self._opening
        quota = self.quota
        ended_by = self._ended_by()
        events, refusal, late, work = self._arrivals()
        taken = np.flatnonzero(refusal == Refusal.NONE.value)
        verdict = np.full(len(events), Verdict.REFUSED.value, dtype=np.int8)
        weight = np.zeros(len(events))
        into = np.full(len(events), -1, dtype=np.int64)
        verdict[taken], weight[taken], into[taken] = self._settle(events.client[taken], late[taken])
        if self.normalise_work:
            weight /= work
        joined, left = self._came_and_left()
        return RoundRecord(
            round=self.round,
            rule=self.rule,
            opened_s=self.opened_s,
            closed_s=now,
            ended_by=ended_by,
            version=self.version,
            clients=int(np.count_nonzero(self.active)),
            quota=quota,
            trained=len(dispatch.sync) + len(dispatch.resume),
            version_variance=variance,
            uploads=self._uploads(len(events)),
            sent=np.concatenate([clients for clients, _ in self._sent]),
            sent_version=np.concatenate([versions for _, versions in self._sent]),
            deprecated=dispatch.deprecated,
            client=events.client,
            base=events.base,
            verdict=verdict,
            refusal=refusal,
            arrival_s=events.at_s,
            weight=weight,
            into=into,
            work=work,
            crashed=np.flatnonzero(self._expected & ~self._awaited),
            joined=joined,
            joined_size=self.sizes[joined],
            left=left,
        )

    def _came_and_left(self) -> tuple[Ids, Ids]:
        """Who joined and who left since the last round, a client once at most in each.

        One that did both as often as the other is in both; else only what it did last counts.
        """
        joined, left = (np.concatenate([nobody(), *parts]) for parts in (self._joined, self._left))
        if not (len(joined) and len(left)):
            return joined, left
        came, went = (np.bincount(ids, minlength=self.clients) for ids in (joined, left))
        return _first_of_each(joined[came[joined] >= went[joined]]), _first_of_each(left[went[left] >= came[left]])

    def _ended_by(self) -> EndedBy:
        """What ends the round, if it is closed now."""
        if self._has_enough():
            return EndedBy.QUOTA
        return EndedBy.DEADLINE if self._waiting_for else EndedBy.NOBODY_LEFT

    def _arrivals(self) -> tuple[Events, NDArray[np.int8], NDArray[np.bool_], NDArray[np.float64]]:
        """All updates of the round in order of arrival: the refusal of each, whether it came late, its work."""
        events = Events.concatenate([events for events, *_ in self._log])
        refusal = np.concatenate([np.empty(0, np.int8), *(refusal for _, refusal, _, _ in self._log)])
        late = np.concatenate([np.empty(0, np.bool_), *(late for _, _, late, _ in self._log)])
        work = np.concatenate([np.empty(0), *(work for *_, work in self._log)])
        arrived = np.flatnonzero(~events.lost)
        return events[arrived], refusal[arrived], late[arrived], work[arrived]

    def _not_before(self, now: float) -> None:
        if not self.now <= now < math.inf:
            raise MisuseError(f"time cannot go from {self.now} s to {now} s")

    # -- the state, as a whole ---------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """A copy of everything that the protocol knows, to be kept or compared."""
        return copy.deepcopy(vars(self))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to a snapshot of a protocol of the same kind."""
        vars(self).update(copy.deepcopy(snapshot))

    # -- what a protocol says for itself -----------------------------------------------------------------------------

    @abstractmethod
    def _invite(self, draws: NDArray[np.float64], expected_s: NDArray[np.float64]) -> Dispatch:
        """Whom to set to work in the round that is being opened."""

    def _work(self, clients: Ids) -> NDArray[np.float64]:
        """The share of its full local work, above 0 and at most 1, that each of these clients is asked for.

        It is asked when they begin an attempt: when a round opens, right after `_invite`, or when an arrival is
        answered. What it says holds until their updates come in, however many rounds that takes.
        """
        return np.ones(len(clients))

    def _enough(self, clients: Ids) -> int | None:
        """How many of these good updates, in order, complete the round; None where they do not."""
        return None

    def _has_enough(self) -> bool:
        """Whether the updates so far complete the round."""
        return False

    def _accept(self, clients: Ids, bases: Ids) -> Ids:
        """Take note of good updates, in order; return whom to send the latest model at once."""
        self.versions[clients] = self.round
        return nobody()

    @abstractmethod
    def _settle(self, clients: Ids, late: NDArray[np.bool_]) -> Settlement:
        """Make the next version; of each good update, say the verdict, its weight and the version that it goes into.

        Where versions are made in mid-round (`answers_arrivals`), this changes nothing: it may be asked at any time.
        """

    def _uploads(self, arrivals: int) -> int:
        """How many models were uploaded in this round."""
        return arrivals


def _checked_sizes(sizes: ArrayLike) -> NDArray[np.float64]:
    array = np.atleast_1d(np.asarray(sizes, dtype=np.float64))
    if array.ndim != 1 or not np.all(np.isfinite(array) & (array > 0)):
        raise SafaError("every client needs a size n_k that is a number above 0")
    return array


def _first_of_each(clients: Ids) -> Ids:
    _, first = np.unique(clients, return_index=True)
    return clients[np.sort(first)]
