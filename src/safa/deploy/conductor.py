"""The server of a deployment, without the network: real devices in place of a simulated fleet.

It drives the same protocol, learner and run folder as a simulation. Time and everything that devices say are arguments;
what it wants to tell them is taken from its outbox. So it can be tested without a network, and fed again what a
deployment has seen.

    observe    which nodes are online                 hear    what came back for something that was posted
    tick       let time pass: open, feed, close       posts   what is to be sent, to whom

Answers are fed to the protocol one at a time: in the order of their posts where they were found together, otherwise as
they come. What comes when a round has enough waits for the next one. Everything that a round came to is on the disk
before the next one opens; a server that is killed goes on from there, and asks its clients again.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from safa.analysis import Metrics
from safa.deploy.attendance import Attendance
from safa.deploy.checkpoint import protocol_state, restore_protocol
from safa.deploy.letters import Answer, Failure, Introduction, Invitation, Missing, Order, Post, Update
from safa.deploy.options import FILE as OPTIONS_FILE
from safa.deploy.options import Options
from safa.deploy.roster import Roster
from safa.deploy.screening import Reason, Refused, Screening
from safa.deploy.travel import Tensors, Travel
from safa.deploy.watch import NODES, PARDONS
from safa.deploy.wire import Kind, Parcel, bytes_of
from safa.errors import SafaError
from safa.experiment import Learning, load_problem
from safa.fleet import stream
from safa.learning import Layout, Received
from safa.protocol import Events, registry
from safa.protocol.continuous import Continuous
from safa.records import Refusal, RoundRecord, Rule
from safa.runs import ROSTER, Run, RunWriter, load_run, write_atomically

__all__ = ["Conductor"]

_DEPLOYMENT = "deployment.json"
_RECONNECT_S = 60.0  # how long to wait for known clients after a restart
_FRUITLESS_S = 5.0  # how long to wait after a round in which nobody could be reached
_ASK_AGAIN_S = 10.0  # how long to wait before a node that was unreachable is tried again

_log = logging.getLogger("safa.deploy")


@dataclass(frozen=True)
class _UnderWay:
    """What a client was asked and has not answered."""

    attempt: int
    asked_at: float
    with_model: bool


class Conductor:
    """A protocol, a learner and a run folder, driven by what devices say."""

    def __init__(self, folder: Path, *, now: float) -> None:
        """Begin the run in a folder that holds its settings and options, or go on with it. `now` is in seconds."""
        run = load_run(folder)
        self.folder, self.settings = folder, run.settings
        self.options = Options.read(folder / OPTIONS_FILE)
        if self.settings.warm_start:
            raise SafaError("warm_start is a habit of the paper's experiments; devices start from one model")
        problem = load_problem(self.settings.task)
        layout = Layout(problem.start_model(self.settings.seed))
        self._travel = Travel(layout, cast(Kind, self.options.wire))
        self._received = Received(layout)
        self._learning = Learning(self.settings, problem, np.empty(0), trainer=self._received)
        self._learner = self._learning.learner
        self.protocol = registry.build(self.settings.protocol, np.empty(0), self.settings.values())
        if self.protocol.answers_arrivals and not isinstance(self.protocol, Continuous):
            raise SafaError(f"{self.protocol.name} answers arrivals in a way that cannot be deployed")
        roster = Roster(max_size=self.options.max_size, max_clients=self.options.max_clients)
        names = self._registered if (folder / NODES).exists() else None
        self.attendance = Attendance(roster, leave_after_s=self.options.leave_after_s, names=names)
        self.screening = Screening(self.options.screen(self._travel.model_bytes))
        self._metrics = Metrics()
        self._config = self.settings.to_toml()
        self._id, self._began = _deployment(folder, now)
        self.posts: deque[Post] = deque()
        self._inbox: deque[tuple[Post, Update | Refused]] = deque()
        self._attempts = 0
        self._current: dict[int, _UnderWay] = {}  # by client
        self._took: dict[int, float] = {}  # by client, how long its last answer took
        self._to_ask: dict[int, float] = {}  # by client, from when on it can be sent its order
        self._sync: set[int] = set()  # who is to be sent the model with its next order
        self._bytes_down = self._bytes_up = self._work_done = self._work_lost = 0.0
        self._open_from = now
        self._wait_for_all_until = -math.inf
        self._latest: tuple[int, Parcel, str] | None = None
        self._roster_text = ""
        self.finished = False
        self._writer = self._take_up(run, now)

    def _take_up(self, run: Run, now: float) -> RunWriter:
        """Go on from the last checkpoint, if there is one."""
        found = run.load_checkpoint()
        if run.summary is not None:
            raise SafaError(f"the run in {self.folder} came to its end; there is nothing to take up")
        done, notes, state = found.rounds, found.notes, found.state
        for problem in found.problems:
            _log.warning("%s", problem)
        if done:
            kept = json.loads(notes["conductor"])
            restore_protocol(self.protocol, state, notes["protocol"])
            self._learner.restore(state)
            self._received.restore(state)
            self.screening.restore(kept["screening"])
            active = np.flatnonzero(self.protocol.active).tolist()
            self.attendance.restore(kept["roster"], known=self.protocol.clients, active=active)
            self._attempts = kept["attempts"]
            self._took = {int(client): seconds for client, seconds in kept["took"]}
            earlier = list(islice(run.records(), done))
            if len(earlier) < done:
                raise SafaError(f"{self.folder} holds {len(earlier)} rounds, but a checkpoint made after round {done}")
            for record in earlier:
                self._metrics.add(record)
            self._wait_for_all_until = now + _RECONNECT_S
            _log.info("going on behind round %d of %d", done, self.settings.rounds)
        self._pardon()
        writer = RunWriter.resume(run, done)
        if done >= self.settings.rounds:
            self._finish(writer)
        return writer

    def _pardon(self) -> None:
        """Let those take part again whom the operator has pardoned."""
        file = self.folder / PARDONS
        for name in json.loads(file.read_text(encoding="utf-8")) if file.exists() else []:
            number = self.attendance.roster.number_of(name)
            if number is not None:
                self.screening.pardon(number)
                _log.info("%s is pardoned", name)
        file.unlink(missing_ok=True)

    def _registered(self) -> dict[int, str]:
        found = json.loads((self.folder / NODES).read_text(encoding="utf-8"))
        return {int(node): str(name) for node, name in found.items()}

    # -- what happens ------------------------------------------------------------------------------------------------

    def observe(self, nodes: Iterable[int], *, now: float) -> None:
        """Take note of the nodes that are online."""
        for node in self.attendance.observe(nodes, now=now):
            self.posts.append(Post(node=node, letter=Invitation(deployment=self._id, config=self._config)))

    def hear(self, post: Post, answer: Answer, *, now: float) -> None:
        """Take note of what came back for a post."""
        if isinstance(post.letter, Invitation):
            self._hear_introduction(post.node, cast("Introduction | Failure | Refused", answer), now)
            return
        client = cast(int, post.client)
        under_way = self._under_way(client, post.letter)
        if isinstance(answer, Update | Refused):
            self._inbox.append((post, answer))
            if under_way:
                self._took[client] = now - under_way.asked_at
        elif under_way and isinstance(answer, Missing) and not under_way.with_model:
            del self._current[client]
            self._sync.add(client)
            self._to_ask[client] = now
        elif under_way:
            why = answer if isinstance(answer, Failure) else Failure(why="it misses the model that it was sent")
            self._fail(client, why, now)

    def _under_way(self, client: int, order: Order) -> _UnderWay | None:
        """What the client is at work on, if it is this order."""
        found = self._current.get(client)
        return found if found and found.attempt == order.attempt else None

    def tick(self, *, now: float) -> None:
        """Let time pass."""
        while not self.finished:
            if self.protocol.is_open:
                self._feed(now)
                if not self.protocol.done and self._time(now) < self.protocol.deadline:
                    self._send_orders(now)
                    return
                self._close(now)
            if self.finished or not self._may_open(now):
                return
            self._open(now)

    def stop(self) -> None:
        """Leave the folder as it is, to be taken up later."""
        if not self.finished:
            self._writer.close()

    def _time(self, now: float) -> float:
        """Seconds since the deployment began, never going back."""
        return max(now - self._began, self.protocol.now, 0.0)

    # -- who is there ------------------------------------------------------------------------------------------------

    def _hear_introduction(self, node: int, said: Introduction | Failure | Refused, now: float) -> None:
        number = self.attendance.introduced(node, said, now=now)
        if number is None:
            return
        if number in self.screening.set_aside:
            _log.warning("refused: %s, set aside: nobody has pardoned it", self._name(number))
            self.attendance.leave(number)
            return
        # Whatever it was asked before went to another process, which is gone; it goes on with what it holds.
        if self._current.pop(number, None) is not None or number in self._to_ask:
            self._to_ask[number] = now

    def _fail(self, client: int, failure: Failure, now: float) -> None:
        """A client will not answer."""
        del self._current[client]
        _log.warning("lost: %s, code %d: %s", self._name(client), failure.code, failure.why)
        if failure.code == _UNAVAILABLE:
            self._to_ask[client] = now + _ASK_AGAIN_S
        self._lose(client, now)

    def _lose(self, client: int, now: float) -> None:
        """The open round waits for a client no longer."""
        if self.protocol.is_open and not self.protocol.done and self.protocol.expects(client):
            self.protocol.receive(Events.losses([client], at_s=self._time(now)))

    def _name(self, client: int) -> str:
        return self.attendance.roster[client].name

    # -- a round -----------------------------------------------------------------------------------------------------

    def _may_open(self, now: float) -> bool:
        """Whether there is anybody to open a round for."""
        if now < self._open_from:
            return False
        online, present = self.attendance.present_online, len(self.attendance.roster.present)
        if self.protocol.round == 0:
            return online >= self.options.start_with
        return online == present > 0 or (online > 0 and now >= self._wait_for_all_until)

    def _open(self, now: float) -> None:
        self.attendance.tell(self.protocol)
        protocol, clients = self.protocol, self.protocol.clients
        expected_s = np.array([self._took.get(client, 0.0) for client in range(clients)])
        lottery = stream(self.settings.seed, "lottery", protocol.round + 1).random(clients)
        dispatch = protocol.open_round(now=self._time(now), lottery=lottery, expected_s=expected_s)
        self._sync = self._sync.intersection(dispatch.resume.tolist()).union(dispatch.sync.tolist())
        self._to_ask = dict.fromkeys(dispatch.sync.tolist(), now)
        for client in dispatch.sync.tolist():
            self._current.pop(client, None)  # what it is doing is abandoned
        for client in dispatch.resume.tolist():
            if client not in self._current:
                self._to_ask[client] = now
        for client in dispatch.deprecated.tolist():
            _log.warning("deprecated: %s starts over from version %d", self._name(client), protocol.version)
        self._bytes_down = self._bytes_up = self._work_done = self._work_lost = 0.0
        for client in list(self._to_ask):
            if not self.attendance.is_online(client):
                self._lose(client, now)

    def _send_orders(self, now: float) -> None:
        """Post an order to everyone who is to be asked, and is there."""
        for client, when in list(self._to_ask.items()):
            if when <= now and self.protocol.expects(client) and self.attendance.is_online(client):
                del self._to_ask[client]
                self._post_order(client, now)

    def _post_order(self, client: int, now: float) -> None:
        version = int(self.protocol.versions[client])
        parcel, digest = self._packed(client, version)
        with_model = client in self._sync
        self._attempts += 1
        order = Order(
            deployment=self._id,
            attempt=self._attempts,
            version=version,
            digest=digest,
            own=self.protocol.rule is Rule.OWN,
            wire=self._travel.kind,
            config=self._config,
            model=parcel if with_model else None,
        )
        self._sync.discard(client)
        self._current[client] = _UnderWay(self._attempts, now, with_model)
        self._bytes_down += bytes_of(parcel) if with_model else 0
        _log.info("%s: %s, version %d", "sent" if with_model else "goes on", self._name(client), version)
        self.posts.append(Post(node=cast(int, self.attendance.roster[client].node), letter=order, client=client))

    def _close(self, now: float) -> None:
        arrived = self.protocol.close_round(now=self._time(now))
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
        self._checkpoint(record)
        _log.info(
            "round %d closed by %s: %d picked, %d undrafted, %d refused, %d clients",
            record.round, record.ended_by, len(record.picked), len(record.undrafted), len(record.refused),
            record.clients,
        )  # fmt: skip
        if record.round >= self.settings.rounds:
            self._finish(self._writer)
        elif not len(record.client):
            self._open_from = now + _FRUITLESS_S

    def _checkpoint(self, record: RoundRecord) -> None:
        """Everything that the round came to, on the disk."""
        tensors, values = protocol_state(self.protocol)
        kept: dict[str, Any] = {
            "roster": self.attendance.snapshot(),
            "screening": self.screening.snapshot(),
            "attempts": self._attempts,
            "took": list(self._took.items()),
        }
        state = self._learner.state() | self._received.state() | tensors
        self._writer.checkpoint(record.round, state, {"protocol": values, "conductor": json.dumps(kept)})
        members = kept["roster"]["members"]
        text = json.dumps([{k: member[k] for k in ("name", "size", "details")} for member in members], indent=1)
        if text != self._roster_text:
            write_atomically(self.folder / ROSTER, text.encode())
            self._roster_text = text

    def _finish(self, writer: RunWriter) -> None:
        counts = {str(reason): count for reason, count in self.screening.counts.items()}
        writer.close(self._metrics.values() | {"refusals": counts}, self._learning.model())
        self.finished = True
        _log.info("all %d rounds are done", self.settings.rounds)

    # -- updates -----------------------------------------------------------------------------------------------------

    def _feed(self, now: float) -> None:
        """Give the open round what has come in, one at a time, as long as it wants more."""
        while self._inbox and not self.protocol.done and self._time(now) < self.protocol.deadline:
            post, answer = self._inbox.popleft()
            order, client = cast(Order, post.letter), cast(int, post.client)
            work = -(-self.attendance.roster[client].size // self.settings.batch_size) * self.settings.epochs
            self._work_done += work
            self._bytes_up += answer.size_bytes if isinstance(answer, Update) else 0
            taken = self._take(client, order, answer, now)
            self._work_lost += 0 if taken else work

    def _take(self, client: int, order: Order, answer: Update | Refused, now: float) -> bool:
        """Screen an answer, and let the protocol decide on it; whether it was taken."""
        under_way = self._under_way(client, order)
        if not under_way and isinstance(answer, Update):
            return self._abandoned(client, order.version, now)
        is_aside = client in self.screening.set_aside
        row = self._screened(client, order, answer)
        if isinstance(row, torch.Tensor):
            del self._current[client]
            return self._offer(client, order.version, now, row)
        _log.warning("refused: %s, %s: %s", self._name(client), row.reason, row.why)
        if under_way:
            del self._current[client]
            self._lose(client, now)
        if client in self.screening.set_aside and not is_aside:
            _log.warning("set aside: %s, refused %d times in a row", self._name(client), self.options.refusals_allowed)
            self.attendance.leave(client)
        return False

    def _screened(self, client: int, order: Order, answer: Update | Refused) -> torch.Tensor | Refused:
        """The update as a row, if it is taken."""
        if isinstance(answer, Refused):
            return self.screening.refuse(client, answer)
        found = self.screening.admit(
            client,
            size_bytes=answer.size_bytes,
            version=answer.version,
            latest=int(self.protocol.versions[client]),
            held=range(order.version + 1),
            asked=answer.attempt == order.attempt,
        )
        if found:
            return found
        if answer.version != order.version:
            why = f"it is based on version {answer.version}; the client was asked to train {order.version}"
            return self.screening.refuse(client, Refused(Reason.STALE_VERSION, why))
        base = self._travel.arrived(self._learner.start_of(client, order.version))
        update = self._travel.update(answer.parcel, base)
        found = self.screening.judge(client, update, base)
        return found or self._travel.row(cast(Tensors, update))

    def _abandoned(self, client: int, base: int, now: float) -> bool:
        """An update came in for an order that no longer stands. It cannot be taken; the protocol says why."""
        if base == self.protocol.versions[client]:  # the same order was given again, and its answer is still to come
            _log.warning("refused: %s, %s: the order was given again since", self._name(client), Reason.NOT_ASKED)
            return False
        return self._offer(client, base, now, None)

    def _offer(self, client: int, base: int, now: float, row: torch.Tensor | None) -> bool:
        """Let the protocol decide on an update; whether it took it."""
        receipt = self.protocol.receive(Events.arrivals([client], [base], at_s=self._time(now)))
        refusal = Refusal(int(receipt.refusal[0]))
        if refusal is not Refusal.NONE or row is None:
            _log.warning("refused: %s, %s", self._name(client), refusal.name.lower().replace("_", " "))
            return False
        self._received.keep(client, base, row)
        if isinstance(self.protocol, Continuous):
            weight, into = self.protocol.last_merge
            self._learner.anticipate(client, base, weight, into, version=self.protocol.version)
            for answered in receipt.sync.tolist():
                self._sync.add(answered)
                self._to_ask[answered] = now
        return True

    def _packed(self, client: int, version: int) -> tuple[Parcel, str]:
        """The model that a client starts from, as it travels, and its digest as it arrives."""
        if self._latest is None or self._latest[0] != version or self.protocol.rule is Rule.OWN:
            self._latest = version, *self._travel.packed(self._learner.start_of(client, version))
        return self._latest[1:]


_UNAVAILABLE = 5  # Flower's code for a node that is not there


def _deployment(folder: Path, now: float) -> tuple[str, float]:
    """What this deployment is called by its devices, and when it began."""
    file = folder / _DEPLOYMENT
    if not file.exists():
        write_atomically(file, json.dumps({"id": secrets.token_hex(8), "began_s": now}).encode())
    found = json.loads(file.read_text(encoding="utf-8"))
    return str(found["id"]), float(found["began_s"])
