"""What goes into a protocol and what it answers, in order of appearance in a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import MisuseError
from safa.protocol.records import Ids, Refusal

__all__ = ["Dispatch", "Events", "Receipt"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatch:
    """Whom a protocol sets to work when a round opens."""

    sync: Ids
    """Sent the latest global model: they abandon what they are doing and start from it."""
    resume: Ids
    """Not sent anything: they continue their attempt, or start one from the model that they hold."""
    deprecated: Ids
    """Those of `sync` that are forced (Eq. 3)."""
    upload: bool = True
    """Whether a finished client sends its model to the server."""
    dropped: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Drawn for the round, but left out of it beforehand (FedCS)."""


@dataclass(frozen=True, eq=False)
class Events:
    """What the server noticed, in order of time: an update came in from a client, or a client was found lost."""

    client: Ids
    base: Ids
    """The version that the update was trained from; without meaning for a loss."""
    at_s: NDArray[np.float64]
    lost: NDArray[np.bool_]

    def __post_init__(self) -> None:
        sizes = {array.shape for array in (self.client, self.base, self.at_s, self.lost)}
        if len(sizes) != 1 or self.client.ndim != 1:
            raise MisuseError(f"the arrays of a batch of events must be of one length, not of shapes {sorted(sizes)}")

    @classmethod
    def arrivals(cls, clients: ArrayLike, bases: ArrayLike, *, at_s: ArrayLike) -> Self:
        """Updates that came in, in this order; a single time serves for all."""
        client = np.atleast_1d(np.asarray(clients, dtype=np.int64))
        base = np.broadcast_to(np.asarray(bases, dtype=np.int64), client.shape)
        time = np.broadcast_to(np.asarray(at_s, dtype=np.float64), client.shape)
        return cls(client, base, time, np.zeros(client.shape, dtype=np.bool_))

    @classmethod
    def losses(cls, clients: ArrayLike, *, at_s: ArrayLike) -> Self:
        """Clients that were found lost, in this order."""
        arrivals = cls.arrivals(clients, -1, at_s=at_s)
        return cls(arrivals.client, arrivals.base, arrivals.at_s, np.ones_like(arrivals.lost))

    @classmethod
    def concatenate(cls, batches: Sequence[Events]) -> Self:
        """Several batches as one, in the order given."""
        empty = cls.arrivals(np.empty(0, dtype=np.int64), 0, at_s=0.0)
        names = ("client", "base", "at_s", "lost")
        return cls(*(np.concatenate([getattr(batch, name) for batch in (empty, *batches)]) for name in names))

    def __len__(self) -> int:
        return len(self.client)

    def __getitem__(self, part: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Events:
        return Events(self.client[part], self.base[part], self.at_s[part], self.lost[part])


@dataclass(frozen=True, eq=False)
class Receipt:
    """What a protocol answers to events."""

    refusal: NDArray[np.int8]
    """One `Refusal` for every event that was taken notice of. Events behind those belong to the next round."""
    sync: Ids
    """Clients to send the latest global model to at once (protocols that answer arrivals)."""
    sync_s: NDArray[np.float64]
    """When: the time of the event by which each of these was answered."""

    @property
    def consumed(self) -> int:
        """How many of the events were taken notice of."""
        return len(self.refusal)

    @property
    def accepted(self) -> NDArray[np.bool_]:
        """Which of those were not refused."""
        return np.asarray(self.refusal == Refusal.NONE.value)
