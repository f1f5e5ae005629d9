"""Which clients are to be asked to train, which have been, and how long they take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from safa.deploy.exchange.messages import TrainRequest

__all__ = ["InFlight", "Requests"]


@dataclass(frozen=True)
class InFlight:
    """A request that a client has not replied to."""

    attempt: int
    version: int
    """The version of the model that it starts from."""
    work: float
    """The share of the full local work that was asked for."""
    asked_at: float
    with_model: bool


class Took(NamedTuple):
    """How long a client takes for all its work, going by its last reply."""

    other_s: float
    """The time that passed otherwise: messages, and waiting for the device."""
    work_s: float
    """The time of training, by the device's own clock."""


class Requests:
    """The requests of a deployment, by client."""

    def __init__(self) -> None:
        self._attempts = 0
        self._in_flight: dict[int, InFlight] = {}
        self._due: dict[int, float] = {}  # from when on a client can be sent its request
        self._with_model: set[int] = set()  # who is to be sent the model with its next request
        self._took: dict[int, Took] = {}  # how long its last reply took

    # -- to be sent --------------------------------------------------------------------------------------------------

    def open_round(self, sync: set[int], resume: Iterable[int], *, now: float) -> None:
        """A round opens: `sync` are sent the model, those of `resume` that are not at work are asked to continue."""
        resume = list(resume)
        self._with_model = self._with_model.intersection(resume) | sync
        self._due = dict.fromkeys(sorted(sync), now)
        for client in sync:
            self._in_flight.pop(client, None)  # what it is doing is abandoned
        self._due |= {client: now for client in resume if client not in self._in_flight}

    def ask(self, client: int, *, at: float, with_model: bool = False) -> None:
        """Ask a client from some time on, in place of what it was asked before."""
        self._in_flight.pop(client, None)
        self._due[client] = at
        if with_model:
            self._with_model.add(client)

    def is_due(self, client: int) -> bool:
        """Whether a client is to be asked, now or later."""
        return client in self._due

    def due(self, *, now: float) -> list[int]:
        """The clients that are to be asked by now."""
        return [client for client, at in self._due.items() if at <= now]

    def close_round(self) -> None:
        """Nobody is to be asked any more; what is in flight stays so."""
        self._due = {}

    # -- in flight ---------------------------------------------------------------------------------------------------

    def send(self, client: int, version: int, work: float, *, now: float) -> InFlight:
        """The request of a client, which is in flight from now on."""
        self._attempts += 1
        del self._due[client]
        sent = InFlight(self._attempts, version, work, now, client in self._with_model)
        self._with_model.discard(client)
        self._in_flight[client] = sent
        return sent

    @property
    def clients_at_work(self) -> list[int]:
        """The clients that have not replied yet."""
        return list(self._in_flight)

    def in_flight(self, client: int, request: TrainRequest) -> InFlight | None:
        """The request that a client works on, if it is this one."""
        found = self._in_flight.get(client)
        return found if found and found.attempt == request.attempt else None

    def works_on(self, client: int, version: int) -> bool:
        """Whether a client is at work on that very version."""
        found = self._in_flight.get(client)
        return found is not None and found.version == version

    def abandon_other_work(self, clients: Iterable[int], work: NDArray[np.float64]) -> None:
        """Those of these clients that work on another share than `work` has for them are to be asked anew.

        That happens when a cancelled round is opened again, and asks for something else.
        """
        for client in clients:
            if client in self._in_flight and self._in_flight[client].work != work[client]:
                del self._in_flight[client]

    def done(self, client: int) -> bool:
        """A client has replied, or will not; whether it was at work."""
        return self._in_flight.pop(client, None) is not None

    def forget(self, client: int) -> None:
        """A client takes part no more."""
        self._in_flight.pop(client, None)
        self._due.pop(client, None)
        self._with_model.discard(client)

    # -- how long they take ------------------------------------------------------------------------------------------

    def measure(self, client: int, in_flight: InFlight, *, trained_s: float | None, now: float) -> None:
        """Note how long a reply took, as if all the work had been asked for.

        `trained_s` is how long the device says that it trained. That may have begun before it was asked this time, if
        it was restarted. Without its word, all the time counts as training.
        """
        elapsed_s = now - in_flight.asked_at
        trained_s = elapsed_s if trained_s is None else max(0.0, trained_s)
        self._took[client] = Took(max(0.0, elapsed_s - trained_s), trained_s / in_flight.work)

    def forget_time(self, client: int) -> None:
        """Nothing is known of how long a client takes."""
        self._took.pop(client, None)

    def expected_s(self, client: int, *, since: int | None, now: float) -> float:
        """How long a client will take for all its work, going by its last reply; 0 where there was none.

        Its time so far is subtracted if it works on version `since`. Without that, a client that has never replied
        takes as long as it has been at work by now.
        """
        spent_s = now - self._in_flight[client].asked_at if client in self._in_flight else 0.0
        if since is None:
            return sum(self._took[client]) if client in self._took else spent_s
        return max(0.0, sum(self._took.get(client, _UNKNOWN)) - (spent_s if self.works_on(client, since) else 0.0))

    def other_s(self, client: int) -> float:
        """How much of that does not depend on the amount of work."""
        return self._took.get(client, _UNKNOWN).other_s

    # -- to be continued later ---------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """What is to be kept, as plain values; what is in flight is asked again."""
        return {"attempts": self._attempts, "took": list(self._took.items())}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot."""
        self._attempts = int(snapshot["attempts"])
        self._took = {int(client): Took(*map(float, seconds)) for client, seconds in snapshot["took"]}


_UNKNOWN = Took(0.0, 0.0)
