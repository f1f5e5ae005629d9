"""The coordinator of a deployment: drives a server with what real devices reply. It knows no network.

Time and the replies of devices are arguments; the messages to be sent are taken from its outbox. So it can be tested
without a network, and fed again what a deployment has received. What becomes of a round is for the server to say, which
is the one that a simulation drives (`safa.server`).

    on_nodes   which nodes are online                 on_reply   what came back for a message
    tick       let time pass: open, feed, close       outbox     which messages are to be sent, to whom

Replies are fed to the server one at a time: in the order of their requests where they were found together, otherwise as
they come. What comes when a round has enough waits for the next one. The results of a round are on the disk before the
next one opens; a server that is killed resumes from there, and asks its clients again.

**A round without any accepted update is cancelled.** Nothing is written of it; the server goes back to its state before
the round, and the round is opened again after a pause. Requests in flight stay valid, and their updates count.

**Time** is any clock that never goes back, `time.monotonic` in a real server. Inside, it is in seconds since the
deployment began. Those continue across restarts from the last checkpoint; while no server runs, no time passes.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from safa.deploy.exchange.codec import CodecName, EncodedModel, encoded_bytes
from safa.deploy.exchange.files import NODES
from safa.deploy.exchange.intake import Intake
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
from safa.deploy.exchange.model_codec import ModelCodec
from safa.deploy.exchange.operator_requests import OperatorRequests
from safa.deploy.exchange.options import FILE as OPTIONS_FILE
from safa.deploy.exchange.options import Options
from safa.deploy.exchange.reference import steps_of
from safa.deploy.exchange.requests import Requests
from safa.deploy.exchange.roster import Roster
from safa.deploy.exchange.screening import Rejected, RejectReason, Screening, shown
from safa.errors import SafaError
from safa.protocol import Dispatch, Events, registry
from safa.protocol.records import Refusal, RoundRecord
from safa.runs import ROSTER, Checkpoint, Run, RunWriter, load_run, write_atomically
from safa.runs.folder import STATUS_FORMAT
from safa.server import Server
from safa.server.resume import find_checkpoint
from safa.server.setup import Learning
from safa.tasks import load_problem

__all__ = ["Coordinator"]

_DEPLOYMENT = "deployment.json"
_NOTES = "coordinator"  # what a checkpoint holds of a coordinator
_RECONNECT_S = 60.0  # how long to wait for known clients after a restart
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0  # before a cancelled round is opened again
_ASK_AGAIN_S = 10.0  # how long to wait before a node that was unreachable is tried again

_log = logging.getLogger("safa.deploy")


@dataclass
class _Measured:
    """What only the coordinator knows of a round."""

    bytes_down: float = 0.0
    bytes_up: float = 0.0
    work_done: float = 0.0
    work_lost: float = 0.0


@dataclass
class _Opening:
    """A round that was opened; it may have to be opened again."""

    accepted: int = 0
    """Updates."""
    lost: set[int] = field(default_factory=set)
    """Clients that the round no longer waits for."""
    dropped: set[int] = field(default_factory=set)
    """Clients that it did not ask, because they would be too slow."""


@dataclass
class _Openings:
    """How often a round was opened so far, and to what end."""

    count: int = 0
    failed: set[int] = field(default_factory=set)
    """Clients that were lost or dropped: they are drawn last."""
    pause_s: float = _FIRST_PAUSE_S


class Coordinator:
    """Clients, requests and screening around a server, driven by the replies of devices."""

    def __init__(self, folder: Path, *, now: float) -> None:
        """Begin the run in a folder that holds its settings and options, or resume it. `now` is in seconds.

        Where the folder cannot be used, that is an error, and nothing in it has been changed.
        """
        run = load_run(folder)
        self.folder, self.settings, self.options = folder, run.settings, Options.read(folder / OPTIONS_FILE)
        self._config = self.settings.to_toml()
        self._clock_began, self._began_s, self._now = now, 0.0, 0.0
        self._make_server()
        self.membership = Membership(
            Roster(max_size=self.options.max_size, max_clients=self.options.max_clients),
            leave_after_s=self.options.leave_after_s,
            size_multiple=self.options.size_multiple,
            names=self._registered if (folder / NODES).exists() else None,
        )
        self.outbox: deque[Outgoing] = deque()
        self._replies: deque[tuple[Outgoing, Update | Rejected]] = deque()
        self._requests = Requests()
        self._measured, self._opening, self._openings = _Measured(), _Opening(), _Openings()
        self._open_from, self._wait_for_all_until = 0.0, -math.inf
        self._latest: tuple[int, EncodedModel, str] | None = None
        self._names: tuple[tuple[int, int], dict[int, str]] | None = None
        self._roster_text = ""
        self.finished = False
        self._id, self._writer = self._resume(run)
        self._operator = OperatorRequests(folder, expel=self._expel, unblock=self._unblock, checkpoint=self._checkpoint)
        self._operator.apply()
        if self._is_over:
            self._finish()

    def _make_server(self) -> None:
        """The server, without any clients yet, and what stands between it and the devices."""
        settings, problem = self.settings, load_problem(self.settings.task)
        self.protocol = registry.build(settings.protocol, np.empty(0), settings.values(), settings.protocol_options)
        self._learning = Learning(settings, problem, self.protocol)
        self.server = Server(
            self.protocol,
            seed=settings.seed,
            rounds=settings.rounds,
            learner=self._learning.learner,
            inbox=self._learning.inbox,
            directions=settings.metrics,
            target=settings.target,
            notes=self._notes,
        )
        self._codec = ModelCodec(self._learning.layout, cast(CodecName, self.options.codec))
        self.screening = Screening(self.options.screen(self._codec.model_bytes))
        self._intake = Intake(self.server, self._codec, self.screening, settings, problem)

    # -- resume ------------------------------------------------------------------------------------------------------

    def _resume(self, run: Run) -> tuple[str, RunWriter]:
        """Resume from the newest checkpoint that can be used, if there are any. Before all is read, nothing is changed.

        Returns the id of the deployment, and the writer of its folder.
        """
        known = _deployment(self.folder)
        checkpoint = find_checkpoint(run, needed=True)
        for fault in checkpoint.problems:
            _log.warning("%s", fault)
        if checkpoint.state:
            try:
                self._restore(run, checkpoint)
            except SafaError:
                raise
            except Exception as error:  # whatever may be wrong with a file that somebody has changed
                what = f"{type(error).__name__}: {error}"
                raise SafaError(f"the checkpoint in {self.folder / 'checkpoint'} cannot be used ({what})") from None
        self.server.writer = writer = RunWriter.resume(run, checkpoint.rounds)
        if known is None:
            known = secrets.token_hex(8)
            write_atomically(self.folder / _DEPLOYMENT, json.dumps({"id": known}).encode())
        return known, writer

    def _restore(self, run: Run, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint."""
        kept = json.loads(checkpoint.notes[_NOTES])
        finished = run.finished_rounds()
        self.server.resume(run, checkpoint)
        self.screening.restore(kept["screening"])
        self._began_s = self._now = max(0.0, float(kept["time_s"]), self.protocol.now)
        self.membership.restore(kept["roster"], now=self._now)
        if len(self.membership.roster) < self.protocol.clients:
            raise SafaError(f"the checkpoint in {self.folder / 'checkpoint'} knows clients that its roster does not")
        self._requests.restore(kept["requests"])
        self._open_from, self._wait_for_all_until = self._now, self._now + _RECONNECT_S
        if checkpoint.rounds < finished:
            level = logging.WARNING if checkpoint.problems else logging.INFO
            _log.log(level, "%s: the checkpoint was made after round %d", _again(checkpoint.rounds, finished),
                     checkpoint.rounds)  # fmt: skip
        _log.info("resuming after round %d of %d", checkpoint.rounds, self.settings.rounds)

    def _notes(self) -> dict[str, str]:
        """What a checkpoint holds besides the server's own state."""
        kept = {
            "roster": self.membership.snapshot(),
            "screening": self.screening.snapshot(),
            "requests": self._requests.snapshot(),
            "time_s": self._now,
        }
        return {_NOTES: json.dumps(kept)}

    def _checkpoint(self) -> None:
        """Write the state after the last round to the disk. No round is open."""
        self.server.checkpoint()
        self._write_roster()

    def _write_roster(self) -> None:
        """Say in a file who the clients are, if that has changed."""
        members = self.membership.snapshot()["members"]
        text = json.dumps([{k: member[k] for k in ("name", "size", "details")} for member in members], indent=1)
        if text != self._roster_text:
            write_atomically(self.folder / ROSTER, text.encode())
            self._roster_text = text

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

    # -- the operator's requests -------------------------------------------------------------------------------------

    def _expel(self, name: str) -> None:
        """Expel a client: it leaves, and its entry has no weight from the next round on."""
        number = self.membership.roster.expel(name)
        if number is not None:
            self._requests.forget(number)
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

    # -- events ------------------------------------------------------------------------------------------------------

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
        in_flight = self._requests.in_flight(client, outgoing.message)
        if isinstance(reply, Update | Rejected):
            self._replies.append((outgoing, reply))
            if in_flight:
                trained_s = reply.seconds if isinstance(reply, Update) else None
                self._requests.measure(client, in_flight, trained_s=trained_s, now=now)
        elif in_flight and isinstance(reply, ModelMissing) and not in_flight.with_model:
            self._requests.ask(client, at=now, with_model=True)
        elif in_flight:
            why = reply if isinstance(reply, Failure) else Failure(why="it does not hold the model that it was sent")
            self._fail(client, why, now)

    def tick(self, *, now: float) -> None:
        """Let time pass."""
        now = self._time(now)
        while not self.finished:
            if self.protocol.is_open:
                self._feed(now)
                if not self.protocol.done and now < self.protocol.deadline:
                    self._send_requests(now)
                    return
                if self._opening.accepted:
                    self._close(now)
                else:
                    self._cancel_round(now)
            if self.finished:
                return
            self._operator.apply()
            if not self._may_open(now):
                return
            self._open(now)

    def status(self) -> dict[str, Any]:
        """The round under way and the clients, as plain values, for people who watch; times are those of the run."""
        protocol, is_open = self.protocol, self.protocol.is_open
        return {
            "format": STATUS_FORMAT,
            "now_s": self._now,
            "round": protocol.round if is_open else protocol.round + 1,
            "is_open": is_open,
            "opened_s": protocol.opened_s if is_open else None,
            "deadline_s": protocol.deadline if is_open and math.isfinite(protocol.deadline) else None,
            "quota": protocol.quota,
            "accepted": self._opening.accepted if is_open else 0,
            "openings": self._openings.count,
            "refusals": {str(reason): count for reason, count in self.screening.counts.items()},
            "clients": self._status_of_clients(),
        }

    def _status_of_clients(self) -> list[dict[str, Any]]:
        """Every client by number: who it is, whether it is there, what it does, and how far it is behind."""
        refused, blocked = self.screening.counts_by_client, set(self.screening.blocked)
        at_work, versions = set(self._requests.clients_at_work), self.protocol.versions
        roster = self.membership.roster
        members = [(number, roster[number]) for number in range(len(roster))]
        return [
            {
                "name": member.name,
                "online": self.membership.is_online(number),
                "last_seen_s": member.last_seen_s,
                "at_work": number in at_work,
                "lag": max(0, self.protocol.version - int(versions[number])) if number < len(versions) else 0,
                "refused": refused.get(number, 0),
                "present": member.present,
                "blocked": number in blocked,
                "expelled": member.expelled,
            }
            for number, member in members
        ]

    def stop(self) -> None:
        """Leave the folder as it is, to be resumed later."""
        if not self.finished:
            self._writer.close()

    def _time(self, now: float) -> float:
        """Seconds since the deployment began, never going back, by the clock of whoever calls."""
        self._now = max(self._now, self._began_s + now - self._clock_began)
        return self._now

    # -- clients -----------------------------------------------------------------------------------------------------

    def _on_join_reply(self, node: int, reply: JoinReply | Failure | Rejected, now: float) -> None:
        number = self.membership.on_join_reply(node, reply, now=now)
        if number is None:
            return
        if number in self.screening.blocked:
            _log.warning("rejected: %s, blocked", self._name(number))
            self.membership.leave(number)
            return
        # Its request in flight went to a process that is gone; it is asked again, and resumes from its state.
        if self._requests.done(number) or self._requests.is_due(number):
            self._requests.ask(number, at=now)

    def _fail(self, client: int, failure: Failure, now: float) -> None:
        """A client will not reply."""
        self._requests.done(client)
        _log.warning("lost: %s, code %d: %s", self._name(client), failure.code, failure.why)
        if failure.unreachable:
            self._requests.ask(client, at=now + _ASK_AGAIN_S)
        self._lose(client, now)

    def _lose(self, client: int, now: float) -> None:
        """The open round no longer waits for a client."""
        if self.protocol.is_open and not self.protocol.done and self.protocol.expects(client):
            self._opening.lost.add(client)
            self.server.receive(Events.losses([client], at_s=now))

    def _name(self, client: int) -> str:
        return self.membership.roster[client].name

    # -- a round -----------------------------------------------------------------------------------------------------

    def _may_open(self, now: float) -> bool:
        """Whether there is anybody to open a round for."""
        if now < self._open_from:
            return False
        online, present = self.membership.present_online, len(self.membership.roster.present)
        if self.protocol.round == 0 and not self._openings.count:
            return online >= self.options.start_with
        return online == present > 0 or (online > 0 and now >= self._wait_for_all_until)

    def _open(self, now: float) -> None:
        """Open the next round, or a cancelled one again."""
        if self.protocol.round == 0:
            self._checkpoint()  # from now on, rounds without a checkpoint mean that one was lost
        self.server.mark()
        self.membership.update_protocol(self.protocol)
        expected_s = [self._expected_s(client, now) for client in range(self.protocol.clients)]
        other_s = [self._requests.other_s(client) for client in range(self.protocol.clients)]
        dispatch = self.server.open_round(now=now, expected_s=expected_s, fixed_s=other_s, draws=self._draws())
        self._log_deprecated(dispatch)
        self._requests.abandon_other_work([*dispatch.sync.tolist(), *dispatch.resume.tolist()], self.protocol.work)
        sync = {client for client in dispatch.sync.tolist() if not self._is_at_work(client)}
        self._requests.open_round(sync, dispatch.resume.tolist(), now=now)
        self._openings.count += 1
        self._opening = _Opening(dropped=set(dispatch.dropped.tolist()))
        for client in self._requests.due(now=now):
            if not self.membership.is_online(client):
                self._lose(client, now)

    def _log_deprecated(self, dispatch: Dispatch) -> None:
        for client in dispatch.deprecated.tolist() if not self._openings.count else []:
            _log.warning("deprecated: %s starts over from version %d", self._name(client), self.protocol.version)

    def _is_at_work(self, client: int) -> bool:
        """Whether a client is at work on the latest version and need not be asked: the round was opened before."""
        return self._requests.works_on(client, self.protocol.version) and self.membership.is_online(client)

    def _expected_s(self, client: int, now: float) -> float:
        """How long a client will take; less its time so far, if it is at work on the latest version.

        Where less than all of the work may be asked for, the share follows from the time for all of it.
        """
        if self.protocol.asks_for_parts:
            return self._requests.expected_s(client, since=None, now=now)
        since = self.protocol.version if self.membership.is_online(client) else -1
        return self._requests.expected_s(client, since=since, now=now)

    def _draws(self) -> NDArray[np.float64]:
        """A random number for every client, the same whenever the round is opened.

        Clients that failed in earlier openings of the round are drawn last: otherwise a protocol that draws one client
        would draw the same offline client again and again.
        """
        draws = self.server.draws()
        last = np.isin(np.arange(len(draws)), sorted(self._openings.failed.difference(self._requests.clients_at_work)))
        return (draws + last) / 2 if last.any() else draws

    def _cancel_round(self, now: float) -> None:
        """Cancel the open round, which has no update, and open it again after a pause."""
        number, opening, openings = self.protocol.round, self._opening, self._openings
        at_work = sum(self.protocol.expects(client) for client in self._requests.clients_at_work)
        self.server.cancel_round()
        for client in opening.dropped & openings.failed:
            self._requests.forget_time(client)  # nobody is faster, or they are offline: next time it is asked
        openings.failed |= opening.lost | opening.dropped
        self._requests.close_round()
        self._open_from = now + openings.pause_s
        counts = {"lost": len(opening.lost), "still working": at_work, "expected to be too slow": len(opening.dropped)}
        described = ", ".join(f"{count} client{'s' * (count > 1)} {what}" for what, count in counts.items() if count)
        _log.warning(
            "round %d: no update (%s); retrying in %g s", number, described or "no client was asked", openings.pause_s
        )
        openings.pause_s = min(2 * openings.pause_s, _LONGEST_PAUSE_S)

    def _close(self, now: float) -> None:
        arrived = self.server.close_round(now=now)
        self._requests.close_round()
        self._openings, self._latest = _Openings(), None
        record = self.server.commit(replace(arrived, uploads=len(arrived.client), **vars(self._measured)))
        self._measured = _Measured()
        if record.round >= self.settings.rounds:
            self._checkpoint()
        self._write_roster()
        _log_round(record)
        if self._is_over:
            self._finish()

    @property
    def _is_over(self) -> bool:
        """Whether all rounds are finished, or the target of the run has been held."""
        return self.protocol.round >= self.settings.rounds or self.server.metrics.target_held

    def _finish(self) -> None:
        counts = {str(reason): count for reason, count in self.screening.counts.items()}
        self._writer.close(self.server.metrics.values() | {"refusals": counts}, self._learning.model())
        self.finished = True
        _log.info("run finished after %d rounds", self.protocol.round)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _send_requests(self, now: float) -> None:
        """Send a request to every client that is to be asked and is online."""
        for client in self._requests.due(now=now):
            if self.protocol.expects(client) and self.membership.is_online(client):
                self._send_request(client, now)

    def _send_request(self, client: int, now: float) -> None:
        version, work = int(self.protocol.versions[client]), float(self.protocol.work[client])
        encoded, digest = self._encoded(client, version)
        sent = self._requests.send(client, version, work, now=now)
        request = TrainRequest(
            deployment=self._id,
            attempt=sent.attempt,
            version=version,
            digest=digest,
            own=self._learning.aggregator.trains_own_models,
            codec=self._codec.name,
            config=self._config,
            client=client,
            round=self._learning.learner.round_of(client, version),
            work=work,
            model=encoded if sent.with_model else None,
        )
        self._measured.bytes_down += encoded_bytes(encoded) if sent.with_model else 0
        _log.info("%s: %s, version %d", "sent" if sent.with_model else "resumes", self._name(client), version)
        node = cast(int, self.membership.roster[client].node)
        self.outbox.append(Outgoing(node=node, message=request, client=client))

    def _encoded(self, client: int, version: int) -> tuple[EncodedModel, str]:
        """The base model of a client, encoded, and its digest as the client decodes it."""
        if self._latest is None or self._latest[0] != version or self._learning.aggregator.trains_own_models:
            self._latest = version, *self._codec.encode(self.server.start_model(client, version))
        return self._latest[1:]

    # -- updates -----------------------------------------------------------------------------------------------------

    def _feed(self, now: float) -> None:
        """Feed received updates to the open round, one at a time, as long as it wants more."""
        while self._replies and not self.protocol.done and now < self.protocol.deadline:
            outgoing, reply = self._replies.popleft()
            request, client = cast(TrainRequest, outgoing.message), cast(int, outgoing.client)
            work = request.work * steps_of(self.membership.roster[client].size, self.settings)
            self._measured.work_done += work
            self._measured.bytes_up += reply.size_bytes if isinstance(reply, Update) else 0
            self._measured.work_lost += 0 if self._accept(client, request, reply, now) else work

    def _accept(self, client: int, request: TrainRequest, reply: Update | Rejected, now: float) -> bool:
        """Screen a reply, and let the server decide on it; returns whether it was accepted."""
        in_flight = self._requests.in_flight(client, request)
        if self.membership.roster[client].expelled:
            why = Rejected(RejectReason.EXPELLED, "the operator has expelled this client")
            self._log_rejected(client, self.screening.reject(client, why))
            return False
        if not in_flight and isinstance(reply, Update):
            return self._abandoned(client, request.version, now)
        if request.version > self.protocol.versions[client]:  # no fault of its own: it is not counted
            self._requests.done(client)
            _log.warning("refused: %s, not expected: its round was opened again without it", self._name(client))
            return False
        was_blocked = client in self.screening.blocked
        row = self._intake.update(client, request, reply)
        if isinstance(row, Tensor):
            self._requests.done(client)
            return self._offer(client, request.version, now, row)
        self._log_rejected(client, row)
        if in_flight:
            self._requests.done(client)
            self._lose(client, now)
        if client in self.screening.blocked and not was_blocked:
            _log.warning("blocked: %s, rejected %d times in a row", self._name(client), self.options.rejections_allowed)
            self.membership.leave(client)
        return False

    def _log_rejected(self, client: int, rejected: Rejected) -> None:
        _log.warning("rejected: %s, %s: %s", self._name(client), rejected.reason, rejected.why)

    def _abandoned(self, client: int, base: int, now: float) -> bool:
        """An update for a request that is no longer valid. It is not accepted; the protocol says why."""
        if base == self.protocol.versions[client]:  # the request was sent again, and that reply is still to come
            _log.warning("rejected: %s, %s: the request was sent again", self._name(client), RejectReason.NOT_ASKED)
            return False
        return self._offer(client, base, now, None)

    def _offer(self, client: int, base: int, now: float, row: Tensor | None) -> bool:
        """Let the server decide on an update; returns whether it was accepted."""
        rows = None if row is None else row.unsqueeze(0)
        receipt = self.server.receive(Events.arrivals([client], [base], at_s=now), rows=rows)
        refusal = Refusal(int(receipt.refusal[0]))
        if refusal is not Refusal.NONE or row is None:
            _log.warning("refused: %s, %s", self._name(client), refusal.name.lower().replace("_", " "))
            return False
        self._opening.accepted += 1
        for answered in receipt.sync.tolist():
            self._requests.ask(answered, at=now, with_model=True)
        return True


def _log_round(record: RoundRecord) -> None:
    _log.info(
        "round %d closed by %s: %d picked, %d undrafted, %d refused, %d clients",
        record.round, record.ended_by, len(record.picked), len(record.undrafted), len(record.refused), record.clients,
    )  # fmt: skip


def _again(done: int, finished: int) -> str:
    rounds = f"round {finished} is" if finished == done + 1 else f"rounds {done + 1} to {finished} are"
    return f"{rounds} run again"


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
