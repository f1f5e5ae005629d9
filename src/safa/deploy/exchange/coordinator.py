"""The server of a deployment, without the network: real devices in place of a simulated fleet.

It drives the same protocol, learner and run folder as a simulation. Time and the replies of devices are arguments; the
messages to be sent are taken from its outbox. So it can be tested without a network, and fed again what a deployment
has received.

    on_nodes   which nodes are online                 on_reply   what came back for a message
    tick       let time pass: open, feed, close       outbox     which messages are to be sent, to whom

Replies are fed to the protocol one at a time: in the order of their requests where they were found together, otherwise
as they come. What comes when a round has enough waits for the next one. The results of a round are on the disk before
the next one opens; a server that is killed resumes from there, and asks its clients again.

**A round without any accepted update is cancelled.** Nothing is written of it; the protocol is restored to its state
before the round, and the round is opened again after a pause. Requests in flight stay valid, and their updates count.

**Time** is any clock that never goes back, `time.monotonic` in a real server. Inside, it is in seconds since the
deployment began. Those continue across restarts from the last checkpoint; while no server runs, no time passes.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from safa.analysis import Metrics
from safa.deploy.exchange.codec import CodecName, EncodedModel, encoded_bytes
from safa.deploy.exchange.files import EXPEL, NODES, ROUNDS, UNBLOCK, finished_rounds
from safa.deploy.exchange.membership import Membership
from safa.deploy.exchange.messages import (
    Failure,
    JoinReply,
    JoinRequest,
    ModelMissing,
    Outgoing,
    Reply,
    TrainRequest,
    Update,
)
from safa.deploy.exchange.model_codec import ModelCodec, Tensors
from safa.deploy.exchange.options import FILE as OPTIONS_FILE
from safa.deploy.exchange.options import Options
from safa.deploy.exchange.reference import Reference, reference, steps_of
from safa.deploy.exchange.roster import Roster
from safa.deploy.exchange.screening import Rejected, RejectReason, Screening, shown
from safa.errors import SafaError
from safa.experiments.simulate import Learning
from safa.protocol import Events, registry
from safa.protocol.continuous import Continuous
from safa.protocol.records import Refusal, Rule
from safa.runs import ROSTER, Checkpoint, Run, RunWriter, load_run, write_atomically
from safa.server.inbox import Received
from safa.server.protocol_state import check_learnt, protocol_state, restore_protocol
from safa.streams import stream
from safa.tasks import load_problem
from safa.training import Layout

__all__ = ["Coordinator"]

_DEPLOYMENT = "deployment.json"
_APPLYING = "expel.applying.json"  # the content of EXPEL, until a checkpoint holds it
_RECONNECT_S = 60.0  # how long to wait for known clients after a restart
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0  # before a cancelled round is opened again
_ASK_AGAIN_S = 10.0  # how long to wait before a node that was unreachable is tried again

_log = logging.getLogger("safa.deploy")


@dataclass(frozen=True)
class _InFlight:
    """A request that a client has not replied to."""

    attempt: int
    version: int
    """The version of the model that it starts from."""
    asked_at: float
    with_model: bool


class Coordinator:
    """A protocol, a learner and a run folder, driven by the replies of devices."""

    def __init__(self, folder: Path, *, now: float) -> None:
        """Begin the run in a folder that holds its settings and options, or resume it. `now` is in seconds.

        Where the folder cannot be used, that is an error, and nothing in it has been changed.
        """
        run = load_run(folder)
        self.folder, self.settings = folder, run.settings
        self.options = Options.read(folder / OPTIONS_FILE)
        if self.settings.warm_start:
            raise SafaError("warm_start cannot be deployed: devices start from one model")
        problem = self._problem = load_problem(self.settings.task)
        layout = Layout(problem.start_model(self.settings.seed))
        self._codec = ModelCodec(layout, cast(CodecName, self.options.codec))
        self._received = Received(layout)
        self._learning = Learning(self.settings, problem, np.empty(0), trainer=self._received)
        self._learner = self._learning.learner
        self.protocol = registry.build(
            self.settings.protocol, np.empty(0), self.settings.values(), self.settings.protocol_options
        )
        if self.protocol.answers_arrivals and not isinstance(self.protocol, Continuous):
            raise SafaError(f"{self.protocol.name} answers arrivals in a way that cannot be deployed")
        roster = Roster(max_size=self.options.max_size, max_clients=self.options.max_clients)
        names = self._registered if (folder / NODES).exists() else None
        self.membership = Membership(
            roster,
            leave_after_s=self.options.leave_after_s,
            size_multiple=self.options.size_multiple,
            names=names,
        )
        self.screening = Screening(self.options.screen(self._codec.model_bytes))
        self._metrics = Metrics()
        self._config = self.settings.to_toml()
        self._clock_began, self._began_s, self._now = now, 0.0, 0.0
        self.outbox: deque[Outgoing] = deque()
        self._inbox: deque[tuple[Outgoing, Update | Rejected]] = deque()
        self._attempts = 0
        self._in_flight: dict[int, _InFlight] = {}  # by client
        self._took: dict[int, float] = {}  # by client, how long its last reply took
        self._to_ask: dict[int, float] = {}  # by client, from when on it can be sent its request
        self._sync: set[int] = set()  # who is to be sent the model with its next request
        self._bytes_down = self._bytes_up = self._work_done = self._work_lost = 0.0
        self._before: dict[str, Any] = {}  # the protocol before the round was opened
        self._taken = 0  # accepted updates of the open round
        self._lost: set[int] = set()  # clients that the open round no longer waits for
        self._dropped: set[int] = set()  # clients that the open round did not ask, because they would be too slow
        self._passed_over: set[int] = set()  # clients that failed in earlier openings of this round: drawn last
        self._openings = 0  # of this round, so far
        self._pause_s = _FIRST_PAUSE_S
        self._open_from = 0.0
        self._wait_for_all_until = -math.inf
        self._latest: tuple[int, EncodedModel, str] | None = None
        self._reference: Reference | None = None
        self._names: tuple[tuple[int, int], dict[int, str]] | None = None
        self._roster_text = ""
        self.finished = False
        self._id, self._writer = self._resume(run)
        self._apply_operator_requests()
        if self.protocol.round >= self.settings.rounds:
            self._finish(self._writer)

    def _resume(self, run: Run) -> tuple[str, RunWriter]:
        """Resume from the newest checkpoint that can be used, if there are any. Before all is read, nothing is changed.

        Returns the id of the deployment, and the writer of its folder.
        """
        if run.summary is not None:
            raise SafaError(f"the run in {self.folder} is finished; there is nothing to resume")
        known = _deployment(self.folder)
        checkpoint = self._usable(run)
        if checkpoint.state:
            try:
                self._restore(run, checkpoint)
            except SafaError:
                raise
            except Exception as error:  # whatever may be wrong with a file that somebody has changed
                what = f"{type(error).__name__}: {error}"
                raise SafaError(f"the checkpoint in {self.folder / 'checkpoint'} cannot be used ({what})") from None
        writer = RunWriter.resume(run, checkpoint.rounds)
        if known is None:
            known = secrets.token_hex(8)
            write_atomically(self.folder / _DEPLOYMENT, json.dumps({"id": known}).encode())
        return known, writer

    def _usable(self, run: Run) -> Checkpoint:
        """The newest checkpoint that can be used; that there are rounds and none of it is an error."""
        finished = finished_rounds(self.folder)
        checkpoint = run.load_checkpoint()
        if checkpoint.rounds > finished:
            older = run.load_checkpoint(finished)
            if not older.state:
                made = f"a checkpoint made after round {checkpoint.rounds}"
                raise SafaError(f"{self.folder} holds {finished} rounds, but {made}: restore both from one backup")
            checkpoint = older
        if not checkpoint.state and ((self.folder / ROUNDS).exists() and (self.folder / ROUNDS).stat().st_size):
            why = "".join(f"{fault}; " for fault in checkpoint.problems)
            raise SafaError(
                f"{why}{self.folder} holds {finished} rounds and no checkpoint that can be used: restore its folder "
                "checkpoint from a backup, or begin in another folder, or here with --force"
            )
        for fault in checkpoint.problems:
            _log.warning("%s", fault)
        if checkpoint.rounds < finished:
            again = f"rounds {checkpoint.rounds + 1} to {finished} are"
            if finished == checkpoint.rounds + 1:
                again = f"round {finished} is"
            level = logging.WARNING if checkpoint.problems else logging.INFO
            _log.log(level, "%s run again: the checkpoint was made after round %d", again, checkpoint.rounds)
        return checkpoint

    def _restore(self, run: Run, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint."""
        state, done, kept = checkpoint.state, checkpoint.rounds, json.loads(checkpoint.notes["coordinator"])
        restore_protocol(self.protocol, state, checkpoint.notes["protocol"])
        if self.protocol.round != done:
            raise SafaError(f"the checkpoint was made after round {done}, but is of round {self.protocol.round}")
        check_learnt(state, clients=self.protocol.clients, size=self._received.layout.size)
        self._learner.restore(state)
        self._received.restore(state)
        self.screening.restore(kept["screening"])
        self._began_s = self._now = max(0.0, float(kept["time_s"]), self.protocol.now)
        self.membership.restore(kept["roster"], now=self._now)
        if len(self.membership.roster) < self.protocol.clients:
            raise SafaError(f"the checkpoint in {self.folder / 'checkpoint'} knows clients that its roster does not")
        self._attempts = int(kept["attempts"])
        self._took = {int(client): float(seconds) for client, seconds in kept["took"]}
        for number, record in enumerate(islice(run.records(), done), start=1):
            if record.round != number:
                raise SafaError(f"{self.folder / ROUNDS} holds round {record.round} in the place of round {number}")
            self._metrics.add(record)
        self._open_from, self._wait_for_all_until = self._now, self._now + _RECONNECT_S
        _log.info("resuming after round %d of %d", done, self.settings.rounds)

    def _registered(self) -> dict[int, str]:
        """The names of all registered keys by node id. The file is read again when it was written anew."""
        file = self.folder / NODES
        try:
            written = file.stat()
            mark = written.st_mtime_ns, written.st_ino
            if self._names is None or self._names[0] != mark:
                found = json.loads(file.read_text(encoding="utf-8"))
                self._names = mark, {int(node): str(name) for node, name in found.items()}
        except (OSError, ValueError, AttributeError) as error:
            raise SafaError(f"{file} cannot be read ({error}); a restart writes it again") from None
        return self._names[1]

    # -- the operator's requests --------------------------------------------------------------------------------------

    def _apply_operator_requests(self) -> None:
        """Expel and unblock the clients that the operator has named in files.

        A file is removed once a checkpoint holds what it asks for, so that nothing is lost.
        """
        expel, taken, unblocks = (self.folder / name for name in (EXPEL, _APPLYING, UNBLOCK))
        if taken.exists():  # a server was killed at this point
            self._apply(taken, self._expel)
        if expel.exists():
            expel.replace(taken)  # another may be written from now on
            self._apply(taken, self._expel)
        if unblocks.exists():
            self._apply(unblocks, self._unblock)

    def _apply(self, file: Path, act: Callable[[str], None]) -> None:
        """Call `act` with every name in a file."""
        try:
            names = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            names = None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            for name in names:
                act(name)
        else:
            _log.warning("%s is not a list of names; ignored", file.name)
        self._checkpoint()
        file.unlink()

    def _expel(self, name: str) -> None:
        """Expel a client: it leaves, and its entry has no weight from the next round on."""
        number = self.membership.roster.expel(name)
        if number is not None:
            self._in_flight.pop(number, None)
            self._to_ask.pop(number, None)
            self._sync.discard(number)
            self.screening.forget(number)
            _log.warning("expelled: %s", name)
        elif name not in self.membership.roster.expelled:
            _log.warning("there is no client %s to expel", shown(name))

    def _unblock(self, name: str) -> None:
        """Let a client that was blocked or expelled take part again."""
        number = self.membership.roster.number_of(name)
        if self.membership.roster.unblock(name):
            _log.info("%s is unblocked: it may enrol as a new client", name)
        elif number is not None:
            self.screening.unblock(number)
            _log.info("%s is unblocked", name)

    # -- events -----------------------------------------------------------------------------------------------------

    def on_nodes(self, nodes: Iterable[int], *, now: float) -> None:
        """Process the list of nodes that are online."""
        now = self._time(now)
        for node in self.membership.on_nodes(nodes, now=now):
            self.outbox.append(Outgoing(node=node, message=JoinRequest(deployment=self._id, config=self._config)))

    def on_reply(self, outgoing: Outgoing, reply: Reply, *, now: float) -> None:
        """Process the reply to a message."""
        now = self._time(now)
        if isinstance(outgoing.message, JoinRequest):
            self._on_join_reply(outgoing.node, cast("JoinReply | Failure | Rejected", reply), now)
            return
        client = cast(int, outgoing.client)
        in_flight = self._in_flight_of(client, outgoing.message)
        if isinstance(reply, Update | Rejected):
            self._inbox.append((outgoing, reply))
            if in_flight:
                self._took[client] = now - in_flight.asked_at
        elif in_flight and isinstance(reply, ModelMissing) and not in_flight.with_model:
            del self._in_flight[client]
            self._sync.add(client)
            self._to_ask[client] = now
        elif in_flight:
            why = reply if isinstance(reply, Failure) else Failure(why="it does not hold the model that it was sent")
            self._fail(client, why, now)

    def _in_flight_of(self, client: int, request: TrainRequest) -> _InFlight | None:
        """The request that the client works on, if it is this one."""
        found = self._in_flight.get(client)
        return found if found and found.attempt == request.attempt else None

    def tick(self, *, now: float) -> None:
        """Let time pass."""
        now = self._time(now)
        while not self.finished:
            if self.protocol.is_open:
                self._feed(now)
                if not self.protocol.done and now < self.protocol.deadline:
                    self._send_requests(now)
                    return
                if self._taken:
                    self._close(now)
                else:
                    self._cancel_round(now)
            if self.finished:
                return
            self._apply_operator_requests()
            if not self._may_open(now):
                return
            self._open(now)

    def stop(self) -> None:
        """Leave the folder as it is, to be resumed later."""
        if not self.finished:
            self._writer.close()

    def _time(self, now: float) -> float:
        """Seconds since the deployment began, never going back, by the clock of whoever calls."""
        self._now = max(self._now, self._began_s + now - self._clock_began)
        return self._now

    # -- clients ----------------------------------------------------------------------------------------------------

    def _on_join_reply(self, node: int, reply: JoinReply | Failure | Rejected, now: float) -> None:
        number = self.membership.on_join_reply(node, reply, now=now)
        if number is None:
            return
        if number in self.screening.blocked:
            _log.warning("rejected: %s, blocked", self._name(number))
            self.membership.leave(number)
            return
        # Its request in flight went to a process that is gone; it is asked again, and resumes from its state.
        if self._in_flight.pop(number, None) is not None or number in self._to_ask:
            self._to_ask[number] = now

    def _fail(self, client: int, failure: Failure, now: float) -> None:
        """A client will not reply."""
        del self._in_flight[client]
        _log.warning("lost: %s, code %d: %s", self._name(client), failure.code, failure.why)
        if failure.unreachable:
            self._to_ask[client] = now + _ASK_AGAIN_S
        self._lose(client, now)

    def _lose(self, client: int, now: float) -> None:
        """The open round no longer waits for a client."""
        if self.protocol.is_open and not self.protocol.done and self.protocol.expects(client):
            self._lost.add(client)
            self.protocol.receive(Events.losses([client], at_s=now))

    def _name(self, client: int) -> str:
        return self.membership.roster[client].name

    # -- a round -----------------------------------------------------------------------------------------------------

    def _may_open(self, now: float) -> bool:
        """Whether there is anybody to open a round for."""
        if now < self._open_from:
            return False
        online, present = self.membership.present_online, len(self.membership.roster.present)
        if self.protocol.round == 0 and not self._openings:
            return online >= self.options.start_with
        return online == present > 0 or (online > 0 and now >= self._wait_for_all_until)

    def _open(self, now: float) -> None:
        """Open the next round, or a cancelled one again."""
        if self.protocol.round == 0:
            self._checkpoint()  # from now on, rounds without a checkpoint mean that one was lost
        self._before = self.protocol.snapshot()
        self.membership.update_protocol(self.protocol)
        protocol = self.protocol
        expected_s = [self._expected_s(client, now) for client in range(protocol.clients)]
        dispatch = protocol.open_round(now=now, lottery=self._draws(), expected_s=expected_s)
        sync = {client for client in dispatch.sync.tolist() if not self._is_at_work(client, protocol.version)}
        self._sync = self._sync.intersection(dispatch.resume.tolist()) | sync
        self._to_ask = dict.fromkeys(sorted(sync), now)
        for client in sync:
            self._in_flight.pop(client, None)  # what it is doing is abandoned
        for client in dispatch.resume.tolist():
            if client not in self._in_flight:
                self._to_ask[client] = now
        for client in dispatch.deprecated.tolist() if not self._openings else []:
            _log.warning("deprecated: %s starts over from version %d", self._name(client), protocol.version)
        self._openings += 1
        self._taken, self._lost, self._dropped = 0, set(), set(dispatch.dropped.tolist())
        for client in list(self._to_ask):
            if not self.membership.is_online(client):
                self._lose(client, now)

    def _is_at_work(self, client: int, version: int) -> bool:
        """Whether a client is at work on that very version and need not be asked: the round was opened before."""
        in_flight = self._in_flight.get(client)
        return in_flight is not None and in_flight.version == version and self.membership.is_online(client)

    def _expected_s(self, client: int, now: float) -> float:
        """How long a client will take, going by its last reply; less what it has been at work already."""
        spent_s = now - self._in_flight[client].asked_at if self._is_at_work(client, self.protocol.version) else 0.0
        return max(0.0, self._took.get(client, 0.0) - spent_s)

    def _draws(self) -> NDArray[np.float64]:
        """A random number for every client, the same whenever the round is opened.

        Clients that failed in earlier openings of the round are drawn last: otherwise a protocol that draws one client
        would draw the same offline client again and again.
        """
        draws = stream(self.settings.seed, "lottery", self.protocol.round + 1).random(self.protocol.clients)
        last = np.isin(np.arange(len(draws)), sorted(self._passed_over - self._in_flight.keys()))
        return (draws + last) / 2 if last.any() else draws

    def _cancel_round(self, now: float) -> None:
        """Cancel the open round, which has no update: restore the protocol, and open it again after a pause."""
        number = self.protocol.round
        at_work = sum(self.protocol.expects(client) for client in self._in_flight)
        self.protocol.restore(self._before)
        for client in self._dropped & self._passed_over:
            self._took.pop(client, None)  # nobody is faster, or they are offline: next time it is asked
        self._passed_over |= self._lost | self._dropped
        self._to_ask = {}
        self._open_from = now + self._pause_s
        lost, slow = len(self._lost), len(self._dropped)
        counts = {"lost": lost, "still working": at_work, "expected to be too slow": slow}
        described = ", ".join(f"{count} client{'s' * (count > 1)} {what}" for what, count in counts.items() if count)
        _log.warning(
            "round %d: no update (%s); retrying in %g s", number, described or "no client was asked", self._pause_s
        )
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _send_requests(self, now: float) -> None:
        """Send a request to every client that is to be asked and is online."""
        for client, when in list(self._to_ask.items()):
            if when <= now and self.protocol.expects(client) and self.membership.is_online(client):
                del self._to_ask[client]
                self._send_request(client, now)

    def _send_request(self, client: int, now: float) -> None:
        version = int(self.protocol.versions[client])
        encoded, digest = self._encoded(client, version)
        with_model = client in self._sync
        self._attempts += 1
        request = TrainRequest(
            deployment=self._id,
            attempt=self._attempts,
            version=version,
            digest=digest,
            own=self.protocol.rule is Rule.OWN,
            codec=self._codec.name,
            config=self._config,
            model=encoded if with_model else None,
        )
        self._sync.discard(client)
        self._in_flight[client] = _InFlight(self._attempts, version, now, with_model)
        self._bytes_down += encoded_bytes(encoded) if with_model else 0
        _log.info("%s: %s, version %d", "sent" if with_model else "resumes", self._name(client), version)
        self.outbox.append(
            Outgoing(node=cast(int, self.membership.roster[client].node), message=request, client=client)
        )

    def _close(self, now: float) -> None:
        arrived = self.protocol.close_round(now=now)
        record = self._learner.apply(
            replace(
                arrived,
                uploads=len(arrived.client),
                bytes_down=self._bytes_down,
                bytes_up=self._bytes_up,
                work_done=self._work_done,
                work_lost=self._work_lost,
            )
        )
        self._metrics.add(record)
        self._writer.add(record)
        self._to_ask, self._latest = {}, None
        self._bytes_down = self._bytes_up = self._work_done = self._work_lost = 0.0
        self._passed_over, self._openings, self._pause_s = set(), 0, _FIRST_PAUSE_S
        self._checkpoint()
        _log.info(
            "round %d closed by %s: %d picked, %d undrafted, %d refused, %d clients",
            record.round, record.ended_by, len(record.picked), len(record.undrafted), len(record.refused),
            record.clients,
        )  # fmt: skip
        if record.round >= self.settings.rounds:
            self._finish(self._writer)

    def _checkpoint(self) -> None:
        """Write the state after the last round to the disk. No round is open."""
        tensors, values = protocol_state(self.protocol)
        kept: dict[str, Any] = {
            "roster": self.membership.snapshot(),
            "screening": self.screening.snapshot(),
            "attempts": self._attempts,
            "took": list(self._took.items()),
            "time_s": self._now,
        }
        state = self._learner.state() | self._received.state() | tensors
        self._writer.checkpoint(self.protocol.round, state, {"protocol": values, "coordinator": json.dumps(kept)})
        members = kept["roster"]["members"]
        text = json.dumps([{k: member[k] for k in ("name", "size", "details")} for member in members], indent=1)
        if text != self._roster_text:
            write_atomically(self.folder / ROSTER, text.encode())
            self._roster_text = text

    def _finish(self, writer: RunWriter) -> None:
        counts = {str(reason): count for reason, count in self.screening.counts.items()}
        writer.close(self._metrics.values() | {"refusals": counts}, self._learning.model())
        self.finished = True
        _log.info("run finished after %d rounds", self.settings.rounds)

    # -- updates -----------------------------------------------------------------------------------------------------

    def _feed(self, now: float) -> None:
        """Feed received updates to the open round, one at a time, as long as it wants more."""
        while self._inbox and not self.protocol.done and now < self.protocol.deadline:
            outgoing, reply = self._inbox.popleft()
            request, client = cast(TrainRequest, outgoing.message), cast(int, outgoing.client)
            work = steps_of(self.membership.roster[client].size, self.settings)
            self._work_done += work
            self._bytes_up += reply.size_bytes if isinstance(reply, Update) else 0
            taken = self._take(client, request, reply, now)
            self._work_lost += 0 if taken else work

    def _take(self, client: int, request: TrainRequest, reply: Update | Rejected, now: float) -> bool:
        """Screen a reply, and let the protocol decide on it; returns whether it was accepted."""
        in_flight = self._in_flight_of(client, request)
        if self.membership.roster[client].expelled:
            rejected = self.screening.reject(
                client, Rejected(RejectReason.EXPELLED, "the operator has expelled this client")
            )
            _log.warning("rejected: %s, %s: %s", self._name(client), rejected.reason, rejected.why)
            return False
        if not in_flight and isinstance(reply, Update):
            return self._abandoned(client, request.version, now)
        if request.version > self.protocol.versions[client]:  # no fault of its own: it is not counted
            self._in_flight.pop(client, None)
            _log.warning("refused: %s, not expected: its round was opened again without it", self._name(client))
            return False
        was_blocked = client in self.screening.blocked
        row = self._screened(client, request, reply)
        if isinstance(row, torch.Tensor):
            del self._in_flight[client]
            return self._offer(client, request.version, now, row)
        _log.warning("rejected: %s, %s: %s", self._name(client), row.reason, row.why)
        if in_flight:
            del self._in_flight[client]
            self._lose(client, now)
        if client in self.screening.blocked and not was_blocked:
            _log.warning("blocked: %s, rejected %d times in a row", self._name(client), self.options.rejections_allowed)
            self.membership.leave(client)
        return False

    def _screened(self, client: int, request: TrainRequest, reply: Update | Rejected) -> torch.Tensor | Rejected:
        """The update as a row, if the screening accepts it."""
        if isinstance(reply, Rejected):
            return self.screening.reject(client, reply)
        found = self.screening.admit(
            client,
            size_bytes=reply.size_bytes,
            version=reply.version,
            latest=int(self.protocol.versions[client]),
            held=range(request.version + 1),
            asked=reply.attempt == request.attempt,
        )
        if found:
            return found
        if reply.version != request.version:
            why = f"it is based on version {reply.version}; the client was asked to train {request.version}"
            return self.screening.reject(client, Rejected(RejectReason.STALE_VERSION, why))
        base = self._codec.round_trip(self._learner.start_of(client, request.version))
        update = self._codec.decode_update(reply.encoded, base)
        found = self.screening.judge(client, update, base, usual=self._usual_norm(client))
        return found or self._codec.row(cast(Tensors, update))

    def _usual_norm(self, client: int) -> float | None:
        """How far an update of this client usually moves the model, where screening cannot know it yet."""
        if self.screening.has_median or math.isinf(self.options.norm_multiple):
            return None
        if self._reference is None:
            self._reference = reference(self.settings, self._problem)
            _log.info("an update of the server's own has a norm of %.6g", self._reference.norm)
        usual = self._reference.for_steps(steps_of(float(self.protocol.sizes[client]), self.settings))
        return usual if 0 < usual < math.inf else None

    def _abandoned(self, client: int, base: int, now: float) -> bool:
        """An update for a request that is no longer valid. It is not accepted; the protocol says why."""
        if base == self.protocol.versions[client]:  # the request was sent again, and that reply is still to come
            _log.warning("rejected: %s, %s: the request was sent again", self._name(client), RejectReason.NOT_ASKED)
            return False
        return self._offer(client, base, now, None)

    def _offer(self, client: int, base: int, now: float, row: torch.Tensor | None) -> bool:
        """Let the protocol decide on an update; returns whether it was accepted."""
        receipt = self.protocol.receive(Events.arrivals([client], [base], at_s=now))
        refusal = Refusal(int(receipt.refusal[0]))
        if refusal is not Refusal.NONE or row is None:
            _log.warning("refused: %s, %s", self._name(client), refusal.name.lower().replace("_", " "))
            return False
        self._taken += 1
        self._received.keep(client, base, row)
        if isinstance(self.protocol, Continuous):
            weight, into = self.protocol.last_merge
            self._learner.anticipate(client, base, weight, into, version=self.protocol.version)
            for answered in receipt.sync.tolist():
                self._sync.add(answered)
                self._to_ask[answered] = now
        return True

    def _encoded(self, client: int, version: int) -> tuple[EncodedModel, str]:
        """The base model of a client, encoded, and its digest as the client decodes it."""
        if self._latest is None or self._latest[0] != version or self.protocol.rule is Rule.OWN:
            self._latest = version, *self._codec.encode(self._learner.start_of(client, version))
        return self._latest[1:]


def _deployment(folder: Path) -> str | None:
    """The id of the deployment; None where it has none yet."""
    file = folder / _DEPLOYMENT
    if not file.exists():
        return None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, TypeError, KeyError):
        raise SafaError(
            f"{file} cannot be read; restore it, or remove it, and devices restart their training"
        ) from None
