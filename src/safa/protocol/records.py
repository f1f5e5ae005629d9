"""The round record: the only thing about a round that other packages see.

A protocol closes a round by yielding one immutable `RoundRecord`. A client's update is a function of (client, base
version, share of the work) alone, so a record that lists who committed, from which base, after how much work and with
what verdict is enough to train, to measure and to draw everything later; it holds no model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["EndedBy", "Ids", "RecordOrder", "Refusal", "RoundRecord", "Rule", "Verdict"]

Ids = NDArray[np.int64]
"""Client numbers, 0 to m-1, in a one-dimensional array."""


# Compare arrays with the `value` of a member. With a member, numpy asks its class for attributes, which in Python 3.11
# runs Python code, and drops every exception that is raised there: Ctrl-C, too.


class Verdict(IntEnum):
    """What became of an update that arrived."""

    PICKED = 0
    """It goes into the global model."""
    UNDRAFTED = 1
    """It is kept (the bypass, Eq. 8) and counts from the next aggregation on."""
    REFUSED = 2
    """It is thrown away; `RoundRecord.refusal` says why."""


class Refusal(IntEnum):
    """Why something that a client sent was not taken. Refusing changes no state."""

    NONE = 0
    """It was taken."""
    UNKNOWN_CLIENT = 1
    """No client of that number ever enrolled."""
    RETIRED_CLIENT = 2
    """The client has retired."""
    FUTURE_VERSION = 3
    """Its base version is newer than any that the client was given."""
    SECOND_COMMIT = 4
    """The client has committed in this round already."""
    ABANDONED = 5
    """Its base version is not the one that the client was given to train: an abandoned attempt."""
    NOT_EXPECTED = 6
    """The server does not expect an update from this client: it was not asked, or is too late."""
    LATE = 7
    """It came after the selection was over, and the protocol has no bypass."""


class Rule(StrEnum):
    """How a new global model is made of the updates; `RoundRecord.weight` and `into` give the numbers."""

    CACHE = "cache"
    """Eq. 6-8: the weighted sum of one cached entry per client."""
    AVERAGE = "average"
    """w(v) = (1 - sum of weights) w(v-1) + sum of weight * update, over the updates that go into v."""
    DELTA = "delta"
    """w(v) = w(v-1) + sum of weight * (update - its base model), over the updates that go into v."""
    OWN = "own"
    """Every client trains on from its own last model; the cache of those is summed when a version is made."""


class EndedBy(StrEnum):
    """Why a round was closed."""

    QUOTA = "quota"
    NOBODY_LEFT = "nobody left"
    DEADLINE = "deadline"


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundRecord:
    """One closed round, as the server saw it, with what the edge around the protocol measured.

    The arrays `client`, `base`, `verdict`, `refusal`, `arrival_s`, `weight`, `into` and `work` have one element per
    update that came in, in order of arrival.
    """

    round: int
    """t, from 1."""
    rule: Rule
    opened_s: float
    closed_s: float
    ended_by: EndedBy
    version: int
    """The global version after the close."""
    clients: int
    """m, enrolled and not retired."""
    quota: int
    """How many updates the round wanted, ceil(C*m)."""
    trained: int
    """How many clients were at work for this round when it opened."""
    version_variance: float
    """Variance of the versions that those clients trained from (V_t of Eq. 10); under the paper clock, those of them
    that did not crash in the round."""
    uploads: int
    """How many models were uploaded."""
    sent: Ids
    """Who was sent the global model (a client more than once where the protocol answers every arrival)."""
    sent_version: Ids
    """The version that each of `sent` was given."""
    deprecated: Ids
    """Those of `sent` that were forced to start over because they lagged too far behind."""
    client: Ids
    base: Ids
    """The global version that the update was trained from."""
    verdict: NDArray[np.int8]
    refusal: NDArray[np.int8]
    arrival_s: NDArray[np.float64]
    weight: NDArray[np.float64]
    """Its coefficient under `rule`; 0 where it was not picked (an undrafted entry keeps its share of the cache)."""
    into: Ids
    """The global version that it goes into, -1 where none."""
    work: NDArray[np.float64]
    """The share of its full local work that the client was asked for when it began, above 0 and at most 1; where the
    update was refused, what its client was asked for last."""
    crashed: Ids
    """Whose work was cut short in this round, and not taken up again before its end."""
    joined: Ids
    """Who enrolled, or came back, since the last round."""
    joined_size: NDArray[np.float64]
    """Their n_k."""
    left: Ids
    """Who retired since the last round."""
    distribution_s: float = 0.0
    """T_dist (Eq. 19): how long the server's link was busy with sending `sent`."""
    bytes_down: float = 0.0
    bytes_up: float = 0.0
    work_done: float = 0.0
    """Local work accounted for in this round, in mini-batches."""
    work_lost: float = 0.0
    """That part of it which was thrown away."""
    diverged: int = 0
    """Updates that were dropped after training because they held a NaN or an infinite number."""
    loss: float | None = None
    """Loss of the global model on the test set after the round, where it was evaluated."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The problem's metrics of that model on the test set, by name; empty where it was not evaluated."""

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            getattr(self, name).flags.writeable = False

    @property
    def length_s(self) -> float:
        """The round's length (Eq. 17)."""
        return self.closed_s - self.opened_s

    @property
    def picked(self) -> Ids:
        """P(t), in order of arrival."""
        return self._with(Verdict.PICKED)

    @property
    def undrafted(self) -> Ids:
        """Q(t), in order of arrival."""
        return self._with(Verdict.UNDRAFTED)

    @property
    def refused(self) -> Ids:
        """Whose updates were refused, in order of arrival."""
        return self._with(Verdict.REFUSED)

    def _with(self, verdict: Verdict) -> Ids:
        return np.asarray(self.client[self.verdict == verdict.value], dtype=np.int64)

    def to_json(self) -> str:
        """One line of JSON; the same record gives the same bytes."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return json.dumps(values, default=np.ndarray.tolist, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read back what `to_json` wrote; a `ValueError` says in a sentence what is wrong with anything else."""
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError("it is not JSON") from None
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        record = cls(**_checked(values))
        _check_updates(record)
        return record


class RecordOrder:
    """Checks, one record after the other, that they make a run: in order, and about clients that exist."""

    def __init__(self, *, rule: Rule, clients: int) -> None:
        """`rule` is that of the run's protocol; at most `clients` are there before the first round."""
        self._rule, self._most = rule, clients
        self.round = self._version = self._enrolled = 0
        self.at_start = 0
        """How many clients there were before the first round."""
        self.known = 0
        """How many clients there ever were."""

    def check(self, record: RoundRecord) -> None:
        """Take in the next record; a `ValueError` says in a sentence what is wrong with it."""
        if record.round != self.round + 1:
            raise ValueError(f"round must be {self.round + 1}, not {record.round}")
        if record.rule is not self._rule:
            raise ValueError(f"rule must be {self._rule.value!r}, as that of the protocol, not {record.rule.value!r}")
        most = self._version + max(1, len(record.client))
        if not self._version <= record.version <= most:
            raise ValueError(f"version must be from {self._version} to {most}, not {record.version}")
        self._count_clients(record)
        _check_clients(record, self.known)
        self.round, self._version = record.round, record.version

    def _count_clients(self, record: RoundRecord) -> None:
        came = len(record.joined) - len(record.left)
        if not self.round:
            self.at_start = self.known = self._enrolled = record.clients - came
            if not 0 <= self.at_start <= self._most:
                raise ValueError(f"clients must be at most {self._most} before the first round, not {self.at_start}")
        elif record.clients != self._enrolled + came:
            raise ValueError(f"clients must be {self._enrolled + came} after who joined and left, not {record.clients}")
        self._enrolled = record.clients
        self.known += int(np.count_nonzero(record.joined >= self.known))


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record in their proper types, each by itself in order."""
    known = {item.name: item for item in fields(RoundRecord)}
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ValueError(f"there is a field {_shown(unknown[0])}, which no record has")
    found: dict[str, Any] = {}
    for name, item in known.items():
        if name in values:
            found[name] = _checked_field(name, str(item.type), values[name])
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"there is no {name}")
    return found


def _checked_field(name: str, kind: str, value: Any) -> Any:
    if name in _ARRAYS:
        return _checked_array(name, value)
    if name in _CHOICES:
        if value not in list(_CHOICES[name]):
            raise ValueError(f"{name} must be one of {', '.join(_CHOICES[name])}, not {_shown(value)}")
        return _CHOICES[name](value)
    if kind == "float | None":
        if value is not None and not _is_score(value):
            raise ValueError(f"{name} must be a number or null, not {_shown(value)}")
        return value
    if name == "metrics":
        if not isinstance(value, dict) or not all(map(_is_score, value.values())):
            raise ValueError(f"metrics must be numbers by name, not {_shown(value)}")
        return value
    whole = kind == "int"
    if type(value) not in ((int,) if whole else (int, float)):
        raise ValueError(f"{name} must be a {'whole ' * whole}number, not {_shown(value)}")
    if not 0 <= value < (_MOST if whole else _LONGEST):
        raise ValueError(f"{name} must be at least 0 and finite, not {_shown(value)}")
    return value


def _is_score(value: Any) -> bool:
    """Whether it can be a loss or a metric; that of a model that diverged may be any number."""
    return type(value) is float or (type(value) is int and abs(value) <= _MOST)


def _checked_array(name: str, value: Any) -> NDArray[Any]:
    dtype, least, most = _ARRAYS[name]
    whole = np.issubdtype(dtype, np.integer)
    if not isinstance(value, list) or not set(map(type, value)) <= ({int} if whole else {int, float}):
        raise ValueError(f"{name} must be a list of {'whole ' * whole}numbers")
    try:
        array = np.array(value, dtype=np.int64 if whole else np.float64)
    except OverflowError:
        raise ValueError(f"{name} holds a number that is too large") from None
    if len(array) and not (np.isfinite(array).all() and least <= array.min() and array.max() <= most):
        raise ValueError(f"{name} must hold numbers from {least} to {most} only")
    return array.astype(dtype, copy=False)


def _check_updates(record: RoundRecord) -> None:
    """What the fields of a record say of each other."""
    for group in _GROUPS:
        lengths = {name: len(getattr(record, name)) for name in group}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the lists {', '.join(group)} must be of one length, not {list(lengths.values())}")
    if record.round < 1:
        raise ValueError(f"round must be at least 1, not {record.round}")
    if record.closed_s < record.opened_s:
        raise ValueError(f"closed_s must not be before opened_s, {record.opened_s}, not {record.closed_s}")
    if record.loss is None and record.metrics:
        raise ValueError("metrics must be empty where loss is null")
    if len(record.work) and record.work.min() <= 0:
        raise ValueError("work must be above 0")
    refused = record.verdict == Verdict.REFUSED.value
    if not np.array_equal(refused, record.refusal != Refusal.NONE.value):
        raise ValueError("refusal must be above 0 where verdict is 2, and only there")
    if len(record.sent) and record.sent_version.max() > record.version:
        raise ValueError(f"sent_version must be at most the version, {record.version}")
    taken = ~refused
    if taken.any() and not (record.base[taken].min() >= 0 and record.base[taken].max() <= record.version):
        raise ValueError(f"base must be from 0 to the version, {record.version}, of an update that was taken")
    if len(record.into) and record.into.max() > record.version + 1:
        raise ValueError(f"into must be at most the version that comes next, {record.version + 1}")
    if np.any(taken & (record.into >= 0) & (record.base >= record.into)):
        raise ValueError("into must be above base: an update goes into a later version than it was trained from")
    if len(record.deprecated) and not np.isin(record.deprecated, record.sent).all():
        raise ValueError("deprecated must name clients out of sent")


def _check_clients(record: RoundRecord, known: int) -> None:
    """Whether all clients of a record exist. Only an update that was refused as a stranger's may name any number."""
    strangers = record.refusal == Refusal.UNKNOWN_CLIENT.value
    named: Mapping[str, Ids] = {
        "sent": record.sent,
        "client": record.client[~strangers],
        "crashed": record.crashed,
        "joined": record.joined,
        "left": record.left,
    }
    for name, ids in named.items():
        if len(ids) and not (ids.min() >= 0 and ids.max() < known):
            wrong = int(ids[(ids < 0) | (ids >= known)][0])
            raise ValueError(f"{name} names client {wrong}, but there are {known}, counted from 0")
    for name in ("joined", "left"):
        if len(np.unique(named[name])) < len(named[name]):
            raise ValueError(f"{name} names a client twice")


def _shown(value: Any) -> str:
    """A value in an error message: short, on one line."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


_MOST, _LONGEST = 2**63, 1e300
_ANY = -(2**63), 2**63 - 1
_CLIENTS = 0, 2**63 - 1
_NUMBERS = -_LONGEST, _LONGEST
_CHOICES: dict[str, type[Rule] | type[EndedBy]] = {"rule": Rule, "ended_by": EndedBy}
_GROUPS = (
    ("client", "base", "verdict", "refusal", "arrival_s", "weight", "into", "work"),
    ("sent", "sent_version"),
    ("joined", "joined_size"),
)
_ARRAYS: dict[str, tuple[type, float, float]] = {
    "sent": (np.int64, *_CLIENTS),
    "sent_version": (np.int64, *_CLIENTS),
    "deprecated": (np.int64, *_CLIENTS),
    "client": (np.int64, *_ANY),
    "base": (np.int64, *_ANY),
    "verdict": (np.int8, min(Verdict), max(Verdict)),
    "refusal": (np.int8, min(Refusal), max(Refusal)),
    "arrival_s": (np.float64, *_NUMBERS),
    "weight": (np.float64, *_NUMBERS),
    "into": (np.int64, -1, 2**63 - 1),
    "work": (np.float64, 0, 1),
    "crashed": (np.int64, *_CLIENTS),
    "joined": (np.int64, *_CLIENTS),
    "joined_size": (np.float64, 0, _LONGEST),
    "left": (np.int64, *_CLIENTS),
}
"""Fields that are arrays, with the type of their numbers and the least and the greatest that is allowed."""
