"""The round record: the only thing about a round that other rooms see.

A protocol closes a round by yielding one immutable `RoundRecord`. A client's update is a function of (client, base
version) alone, so a record that lists who committed, from which base and with what verdict is enough to train, to
measure and to draw everything later; no model travels with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["EndedBy", "Ids", "Refusal", "RoundRecord", "Rule", "Verdict"]

Ids = NDArray[np.int64]
"""Client numbers, 0 to m-1, in a one-dimensional array."""


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
    """Its base version is not the one that the client was told to train: an abandoned attempt."""
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

    The arrays `client`, `base`, `verdict`, `refusal`, `arrival_s`, `weight` and `into` have one element per update
    that came in, in order of arrival.
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
    """Variance of the versions that those clients trained from (V_t of Eq. 10)."""
    uploads: int
    """How many models travelled up."""
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
    crashed: Ids
    """Whose work was cut short in this round."""
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
    accuracy: float | None = None

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
        return np.asarray(self.client[self.verdict == verdict], dtype=np.int64)

    def to_json(self) -> str:
        """One line of JSON; the same record gives the same bytes."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return json.dumps(values, default=np.ndarray.tolist, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Read back what `to_json` wrote."""
        values: dict[str, Any] = json.loads(line)
        for name, dtype in _ARRAYS.items():
            values[name] = np.array(values[name], dtype=dtype)
        return cls(**values | {"rule": Rule(values["rule"]), "ended_by": EndedBy(values["ended_by"])})


_ARRAYS: dict[str, type] = {
    "sent": np.int64,
    "sent_version": np.int64,
    "deprecated": np.int64,
    "client": np.int64,
    "base": np.int64,
    "verdict": np.int8,
    "refusal": np.int8,
    "arrival_s": np.float64,
    "weight": np.float64,
    "into": np.int64,
    "crashed": np.int64,
    "joined": np.int64,
    "joined_size": np.float64,
    "left": np.int64,
}
