"""The server: a protocol, a learner with its aggregator, metrics and a run folder, behind one object.

It is given events and time, and says whom to send what. It does not know whether its clients are real: a simulated
fleet drives it in virtual time (`safa.simulation`), a deployment in real time (`safa.deploy`). A round goes

    open_round  ->  receive, receive, ...  ->  close_round  ->  commit

Between `close_round` and `commit`, whoever drives it completes the record with what only it can know, such as the bytes
that were sent. `commit` learns from the round, evaluates, and writes; everything that a round came to is on the disk
before the next one opens, and a checkpoint as often as it is wanted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.analysis import Metrics, Target
from safa.errors import SafaError
from safa.protocol import Dispatch, Events, Protocol, Receipt
from safa.protocol.records import RoundRecord
from safa.runs import Checkpoint, Run, RunWriter
from safa.server.protocol_state import protocol_state, restore_protocol
from safa.streams import stream

if TYPE_CHECKING:
    from torch import Tensor

    from safa.server.inbox import Inbox
    from safa.server.learner import Learner

__all__ = ["Server"]

_DRAWS = "lottery"  # the stream of the random numbers by which clients are drawn; another name means other numbers


class Server:
    """One federated server. Without a learner it only decides; without a writer it keeps nothing on the disk."""

    def __init__(
        self,
        protocol: Protocol,
        *,
        seed: int,
        rounds: int,
        learner: Learner | None = None,
        inbox: Inbox | None = None,
        writer: RunWriter | None = None,
        checkpoint_every: int = 1,
        directions: Mapping[str, str] | None = None,
        target: Target | None = None,
        notes: Callable[[], Mapping[str, str]] = dict,
        repeats: bool = False,
    ) -> None:
        """`directions` says of the problem's metrics whether higher or lower is better, `target` what ends the run.

        `inbox` is where received updates go, if clients are not simulated.

        `notes` gives what else a checkpoint is to hold, as text by name.

        `repeats` says that rounds before a checkpoint are simulated again, so that none has to hold the protocol.
        """
        self.protocol, self.learner, self.inbox, self.writer = protocol, learner, inbox, writer
        self.seed, self.rounds = seed, rounds
        self.metrics = Metrics(directions, target)
        self.finished = 0
        """Rounds that were finished before this object took over; where they are repeated, nothing is made of them."""
        self._checkpoint_every, self._notes, self._repeats = checkpoint_every, notes, repeats
        self._before: dict[str, Any] = {}

    # -- a round -----------------------------------------------------------------------------------------------------

    def draws(self) -> NDArray[np.float64]:
        """A random number for every client, by which the next round may draw them."""
        return stream(self.seed, _DRAWS, self.protocol.round + 1).random(self.protocol.clients)

    def open_round(
        self,
        *,
        now: float,
        expected_s: ArrayLike,
        fixed_s: ArrayLike | None = None,
        draws: NDArray[np.float64] | None = None,
    ) -> Dispatch:
        """Open the next round, and say whom to set to work.

        `expected_s` is how long each client is thought to take, `fixed_s` the part of it that does not depend on the
        amount of work.
        """
        if draws is None:
            draws = self.draws() if self.protocol.uses_draws else np.zeros(self.protocol.clients)
        return self.protocol.open_round(now=now, draws=draws, expected_s=expected_s, fixed_s=fixed_s)

    def receive(self, events: Events, *, late: bool = False, rows: Tensor | None = None) -> Receipt:
        """Take in events, up to the one that ends the round; what was accepted counts when a version is made of it.

        `rows` are the updates themselves, where they were received; simulated ones are trained when they are needed.
        """
        receipt = self.protocol.receive(events, late=late)
        if rows is not None and self.inbox is not None:
            for place in np.flatnonzero(receipt.accepted & ~events.lost[: receipt.consumed]).tolist():
                self.inbox.put(int(events.client[place]), int(events.base[place]), rows[place])
        return receipt

    def mark(self) -> None:
        """Note the state before a round, and before clients come and go for it, in case that it is cancelled."""
        self._before = self.protocol.snapshot()

    def cancel_round(self) -> None:
        """Go back to the mark: the round that is open, of which nothing was accepted, has never been."""
        self.protocol.restore(self._before)

    def close_round(self, *, now: float) -> RoundRecord:
        """Close the round; its record is yet to be completed by whoever drives the server, and committed."""
        return self.protocol.close_round(now=now)

    def commit(self, record: RoundRecord) -> RoundRecord:
        """Learn from a closed round, measure it, and write it; it comes back with what was learnt."""
        if record.round <= self.finished:
            return record
        if self.learner is not None:
            record = self.learner.apply(record)
        self.metrics.add(record)
        if self.writer is not None:
            self.writer.add(record)
            if self.learner is not None and record.round % self._checkpoint_every == 0 and record.round < self.rounds:
                self.checkpoint()
        return record

    def start_model(self, client: int, version: int) -> Tensor:
        """The model that a client starts from; a version of the open round is made, if it is not there yet."""
        assert self.learner is not None
        if version > self.learner.versions.latest:
            self.learner.apply_so_far(self.protocol.record_so_far())
        return self.learner.start_of(client, version)

    # -- to be continued later ---------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Write everything that the rounds so far came to. No round is open."""
        assert self.writer is not None
        assert self.learner is not None
        state, kept = self.learner.state(), dict(self._notes())
        if not self._repeats:
            arrays, kept["protocol"] = protocol_state(self.protocol)
            state |= arrays
        self.writer.checkpoint(self.protocol.round, state, kept, tables=self.learner.tables())

    def resume(self, run: Run, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of a run; nothing on the disk is changed."""
        if not self._repeats:
            restore_protocol(self.protocol, checkpoint.state, checkpoint.notes["protocol"])
            if self.protocol.round != checkpoint.rounds:
                made, of = checkpoint.rounds, self.protocol.round
                raise SafaError(f"the checkpoint was made after round {made}, but is of round {of}")
        if self.learner is not None:
            self.learner.restore(checkpoint.state, checkpoint.tables)
            if not self._repeats and self.learner.clients != self.protocol.clients:
                raise SafaError(f"the checkpoint is of {self.learner.clients} and of {self.protocol.clients} clients")
        for record in itertools.islice(run.records(), checkpoint.rounds):
            self.metrics.add(record)
        self.finished = checkpoint.rounds
