"""The server of a deployment, without the network: real devices in place of a simulated fleet.

It drives the same protocol, learner and run folder as a simulation. Time and everything that devices say are arguments;
what it wants to tell them is taken from its outbox. So it can be tested without a network, and fed again what a
deployment has seen.

    observe    which nodes are online                 hear    what came back for something that was posted
    tick       let time pass: open, feed, close       posts   what is to be sent, to whom

Answers are fed to the protocol one at a time: in the order of their posts where they were found together, otherwise as
they come. What comes when a round has enough waits for the next one. Everything that a round came to is on the disk
before the next one opens; a server that is killed goes on from there, and asks its clients again.

**A round into which no update was taken is not a round.** Nothing is written of it; the protocol goes back to where it
was, and the round is opened again after a while. What clients are at work on stays wanted, and counts when it comes.

**Time** is any clock that never goes back, `time.monotonic` in a real server. Inside, it is in seconds since the
deployment began. Those go on across restarts from the last checkpoint; while no server runs, no time passes.
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
from safa.deploy.exchange.codec import Kind, Parcel, bytes_of
from safa.deploy.exchange.membership import Attendance
from safa.deploy.exchange.messages import Answer, Failure, Introduction, Invitation, Missing, Order, Post, Update
from safa.deploy.exchange.model_codec import Tensors, Travel
from safa.deploy.exchange.options import EXPEL, Options
from safa.deploy.exchange.options import FILE as OPTIONS_FILE
from safa.deploy.exchange.reference import Reference, reference, steps_of
from safa.deploy.exchange.roster import Roster
from safa.deploy.exchange.screening import Reason, Refused, Screening, shown
from safa.deploy.launcher.watch import NODES, PARDONS, finished_rounds
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

__all__ = ["Conductor"]

_DEPLOYMENT, _ROUNDS = "deployment.json", "rounds.jsonl"
_TAKEN = "expel.taken.json"  # what was asked for in EXPEL, until a checkpoint holds it
_RECONNECT_S = 60.0  # how long to wait for known clients after a restart
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 60.0  # before a round into which no update was taken is opened again
_ASK_AGAIN_S = 10.0  # how long to wait before a node that was unreachable is tried again

_log = logging.getLogger("safa.deploy")


@dataclass(frozen=True)
class _UnderWay:
    """What a client was asked and has not answered."""

    attempt: int
    version: int
    """The version of the model that it starts from."""
    asked_at: float
    with_model: bool


class Conductor:
    """A protocol, a learner and a run folder, driven by what devices say."""

    def __init__(self, folder: Path, *, now: float) -> None:
        """Begin the run in a folder that holds its settings and options, or go on with it. `now` is in seconds.

        Where the folder cannot be used, that is an error, and nothing in it has been changed.
        """
        run = load_run(folder)
        self.folder, self.settings = folder, run.settings
        self.options = Options.read(folder / OPTIONS_FILE)
        problem = self._problem = load_problem(self.settings.task)
        layout = Layout(problem.start_model(self.settings.seed))
        self._travel = Travel(layout, cast(Kind, self.options.wire))
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
        self.attendance = Attendance(
            roster,
            leave_after_s=self.options.leave_after_s,
            size_multiple=self.options.size_multiple,
            names=names,
        )
        self.screening = Screening(self.options.screen(self._travel.model_bytes))
        self._metrics = Metrics()
        self._config = self.settings.to_toml()
        self._clock_began, self._began_s, self._now = now, 0.0, 0.0
        self.posts: deque[Post] = deque()
        self._inbox: deque[tuple[Post, Update | Refused]] = deque()
        self._attempts = 0
        self._current: dict[int, _UnderWay] = {}  # by client
        self._took: dict[int, float] = {}  # by client, how long its last answer took
        self._to_ask: dict[int, float] = {}  # by client, from when on it can be sent its order
        self._sync: set[int] = set()  # who is to be sent the model with its next order
        self._bytes_down = self._bytes_up = self._work_done = self._work_lost = 0.0
        self._before: dict[str, Any] = {}  # the protocol before the round was opened
        self._taken = 0  # updates of the open round that were taken
        self._lost: set[int] = set()  # whom the open round waits for no longer
        self._dropped: set[int] = set()  # whom the open round did not ask, because they would be too slow
        self._passed_over: set[int] = set()  # by whom earlier openings of this round came to nothing: drawn last
        self._openings = 0  # of this round, so far
        self._pause_s = _FIRST_PAUSE_S
        self._open_from = 0.0
        self._wait_for_all_until = -math.inf
        self._latest: tuple[int, Parcel, str] | None = None
        self._reference: Reference | None = None
        self._names: tuple[tuple[int, int], dict[int, str]] | None = None
        self._roster_text = ""
        self.finished = False
        self._id, self._writer = self._take_up(run)
        self._obey()
        if self.protocol.round >= self.settings.rounds:
            self._finish(self._writer)

    def _take_up(self, run: Run) -> tuple[str, RunWriter]:
        """Go on from the newest checkpoint that can be used, if there are any. Before all is read, nothing is changed.

        What comes back is what devices call this deployment by, and the writer of its folder.
        """
        if run.summary is not None:
            raise SafaError(f"the run in {self.folder} came to its end; there is nothing to take up")
        known = _deployment(self.folder)
        checkpoint = self._usable(run)
        if checkpoint.state:
            try:
                self._restore(run, checkpoint)
            except SafaError:
                raise
            except Exception as wrong:  # whatever may be wrong with a file that somebody has changed
                what = f"{type(wrong).__name__}: {wrong}"
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
        if not checkpoint.state and ((self.folder / _ROUNDS).exists() and (self.folder / _ROUNDS).stat().st_size):
            why = "".join(f"{problem}; " for problem in checkpoint.problems)
            raise SafaError(
                f"{why}{self.folder} holds {finished} rounds and no checkpoint that can be used: restore its folder "
                "checkpoint from a backup, or begin anew in another folder, or here with --force"
            )
        for problem in checkpoint.problems:
            _log.warning("%s", problem)
        if checkpoint.rounds < finished:
            again = f"rounds {checkpoint.rounds + 1} to {finished} are"
            if finished == checkpoint.rounds + 1:
                again = f"round {finished} is"
            level = logging.WARNING if checkpoint.problems else logging.INFO
            _log.log(level, "%s run again: the checkpoint was made after round %d", again, checkpoint.rounds)
        return checkpoint

    def _restore(self, run: Run, checkpoint: Checkpoint) -> None:
        """Go back to a checkpoint."""
        state, done, kept = checkpoint.state, checkpoint.rounds, json.loads(checkpoint.notes["conductor"])
        restore_protocol(self.protocol, state, checkpoint.notes["protocol"])
        if self.protocol.round != done:
            raise SafaError(f"the checkpoint was made after round {done}, but is of round {self.protocol.round}")
        check_learnt(state, clients=self.protocol.clients, size=self._received.layout.size)
        self._learner.restore(state)
        self._received.restore(state)
        self.screening.restore(kept["screening"])
        self._began_s = self._now = max(0.0, float(kept["time_s"]), self.protocol.now)
        self.attendance.restore(kept["roster"], now=self._now)
        if len(self.attendance.roster) < self.protocol.clients:
            raise SafaError(f"the checkpoint in {self.folder / 'checkpoint'} knows clients that its roster does not")
        self._attempts = int(kept["attempts"])
        self._took = {int(client): float(seconds) for client, seconds in kept["took"]}
        for number, record in enumerate(islice(run.records(), done), start=1):
            if record.round != number:
                raise SafaError(f"{self.folder / _ROUNDS} holds round {record.round} in the place of round {number}")
            self._metrics.add(record)
        self._open_from, self._wait_for_all_until = self._now, self._now + _RECONNECT_S
        _log.info("going on behind round %d of %d", done, self.settings.rounds)

    def _registered(self) -> dict[int, str]:
        """The names of all registered keys by node id. The file is read again when it was written anew."""
        file = self.folder / NODES
        try:
            written = file.stat()
            mark = written.st_mtime_ns, written.st_ino
            if self._names is None or self._names[0] != mark:
                found = json.loads(file.read_text(encoding="utf-8"))
                self._names = mark, {int(node): str(name) for node, name in found.items()}
        except (OSError, ValueError, AttributeError) as problem:
            raise SafaError(f"{file} does not say whose node is which ({problem}); a restart writes it anew") from None
        return self._names[1]

    # -- what the operator says --------------------------------------------------------------------------------------

    def _obey(self) -> None:
        """Expel whom the operator has named, and let those take part again whom he has pardoned.

        Both are asked for in files. They go away once a checkpoint holds what was asked for, so that it is never lost.
        """
        expel, taken, pardons = (self.folder / name for name in (EXPEL, _TAKEN, PARDONS))
        if taken.exists():  # a server was killed right here
            self._act(taken, self._expel)
        if expel.exists():
            expel.replace(taken)  # another may be written from now on
            self._act(taken, self._expel)
        if pardons.exists():
            self._act(pardons, self._pardon)

    def _act(self, file: Path, act: Callable[[str], None]) -> None:
        """Do something about every client that is named in a file."""
        try:
            names = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            names = None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            for name in names:
                act(name)
        else:
            _log.warning("%s is not a list of names, and is passed over", file.name)
        self._checkpoint()
        file.unlink()

    def _expel(self, name: str) -> None:
        """A client is taken out for good: it leaves, and its entry counts for nothing from the next round on."""
        number = self.attendance.roster.expel(name)
        if number is not None:
            self._current.pop(number, None)
            self._to_ask.pop(number, None)
            self._sync.discard(number)
            self.screening.forget(number)
            _log.warning("expelled: %s", name)
        elif name not in self.attendance.roster.expelled:
            _log.warning("there is no client %s to expel", shown(name))

    def _pardon(self, name: str) -> None:
        """Let a client take part again that was set aside or expelled."""
        number = self.attendance.roster.number_of(name)
        if self.attendance.roster.pardon(name):
            _log.info("%s is pardoned: it may enrol as a new client", name)
        elif number is not None:
            self.screening.pardon(number)
            _log.info("%s is pardoned", name)

    # -- what happens ------------------------------------------------------------------------------------------------

    def observe(self, nodes: Iterable[int], *, now: float) -> None:
        """Take note of the nodes that are online."""
        now = self._time(now)
        for node in self.attendance.observe(nodes, now=now):
            self.posts.append(Post(node=node, letter=Invitation(deployment=self._id, config=self._config)))

    def hear(self, post: Post, answer: Answer, *, now: float) -> None:
        """Take note of what came back for a post."""
        now = self._time(now)
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
        now = self._time(now)
        while not self.finished:
            if self.protocol.is_open:
                self._feed(now)
                if not self.protocol.done and now < self.protocol.deadline:
                    self._send_orders(now)
                    return
                if self._taken:
                    self._close(now)
                else:
                    self._take_back(now)
            if self.finished:
                return
            self._obey()
            if not self._may_open(now):
                return
            self._open(now)

    def stop(self) -> None:
        """Leave the folder as it is, to be taken up later."""
        if not self.finished:
            self._writer.close()

    def _time(self, now: float) -> float:
        """Seconds since the deployment began, never going back, by the clock of whoever calls."""
        self._now = max(self._now, self._began_s + now - self._clock_began)
        return self._now

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
            self._lost.add(client)
            self.protocol.receive(Events.losses([client], at_s=now))

    def _name(self, client: int) -> str:
        return self.attendance.roster[client].name

    # -- a round -----------------------------------------------------------------------------------------------------

    def _may_open(self, now: float) -> bool:
        """Whether there is anybody to open a round for."""
        if now < self._open_from:
            return False
        online, present = self.attendance.present_online, len(self.attendance.roster.present)
        if self.protocol.round == 0 and not self._openings:
            return online >= self.options.start_with
        return online == present > 0 or (online > 0 and now >= self._wait_for_all_until)

    def _open(self, now: float) -> None:
        """Open the next round; or the same one again, if nothing came of it."""
        if self.protocol.round == 0:
            self._checkpoint()  # from now on, rounds without a checkpoint mean that one was lost
        self._before = self.protocol.snapshot()
        self.attendance.tell(self.protocol)
        protocol = self.protocol
        expected_s = [self._expected_s(client, now) for client in range(protocol.clients)]
        dispatch = protocol.open_round(now=now, lottery=self._lots(), expected_s=expected_s)
        sync = {client for client in dispatch.sync.tolist() if not self._is_at_work(client, protocol.version)}
        self._sync = self._sync.intersection(dispatch.resume.tolist()) | sync
        self._to_ask = dict.fromkeys(sorted(sync), now)
        for client in sync:
            self._current.pop(client, None)  # what it is doing is abandoned
        for client in dispatch.resume.tolist():
            if client not in self._current:
                self._to_ask[client] = now
        for client in dispatch.deprecated.tolist() if not self._openings else []:
            _log.warning("deprecated: %s starts over from version %d", self._name(client), protocol.version)
        self._openings += 1
        self._taken, self._lost, self._dropped = 0, set(), set(dispatch.dropped.tolist())
        for client in list(self._to_ask):
            if not self.attendance.is_online(client):
                self._lose(client, now)

    def _is_at_work(self, client: int, version: int) -> bool:
        """Whether a client is at work on that very version and need not be asked: the round was opened before."""
        under_way = self._current.get(client)
        return under_way is not None and under_way.version == version and self.attendance.is_online(client)

    def _expected_s(self, client: int, now: float) -> float:
        """How long a client will take, going by its last answer; less what it has been at work already."""
        spent_s = now - self._current[client].asked_at if self._is_at_work(client, self.protocol.version) else 0.0
        return max(0.0, self._took.get(client, 0.0) - spent_s)

    def _lots(self) -> NDArray[np.float64]:
        """A random number for every client, the same whenever the round is opened.

        By whom earlier openings came to nothing is drawn last: else one client that is away would stop all the others
        where it is drawn alone, since it would be drawn again and again.
        """
        lots = stream(self.settings.seed, "lottery", self.protocol.round + 1).random(self.protocol.clients)
        last = np.isin(np.arange(len(lots)), sorted(self._passed_over - self._current.keys()))
        return (lots + last) / 2 if last.any() else lots

    def _take_back(self, now: float) -> None:
        """The open round came to nothing: it is as if it had not been opened, and will be opened again."""
        number = self.protocol.round
        at_work = sum(self.protocol.expects(client) for client in self._current)
        self.protocol.restore(self._before)
        for client in self._dropped & self._passed_over:
            self._took.pop(client, None)  # nobody is faster, or they are away: next time it is asked all the same
        self._passed_over |= self._lost | self._dropped
        self._to_ask = {}
        self._open_from = now + self._pause_s
        lost, slow = len(self._lost), len(self._dropped)
        counts = {"lost": lost, "not answering yet": at_work, "expected to be too slow": slow}
        told = ", ".join(f"{count} client{'s' * (count > 1)} {what}" for what, count in counts.items() if count)
        _log.warning(
            "round %d: no update came in (%s); opened again in %g s", number, told or "nobody was asked", self._pause_s
        )
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

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
        self._current[client] = _UnderWay(self._attempts, version, now, with_model)
        self._bytes_down += bytes_of(parcel) if with_model else 0
        _log.info("%s: %s, version %d", "sent" if with_model else "goes on", self._name(client), version)
        self.posts.append(Post(node=cast(int, self.attendance.roster[client].node), letter=order, client=client))

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
        """Everything that the rounds so far came to, on the disk. No round is open."""
        tensors, values = protocol_state(self.protocol)
        kept: dict[str, Any] = {
            "roster": self.attendance.snapshot(),
            "screening": self.screening.snapshot(),
            "attempts": self._attempts,
            "took": list(self._took.items()),
            "time_s": self._now,
        }
        state = self._learner.state() | self._received.state() | tensors
        self._writer.checkpoint(self.protocol.round, state, {"protocol": values, "conductor": json.dumps(kept)})
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
        while self._inbox and not self.protocol.done and now < self.protocol.deadline:
            post, answer = self._inbox.popleft()
            order, client = cast(Order, post.letter), cast(int, post.client)
            work = steps_of(self.attendance.roster[client].size, self.settings)
            self._work_done += work
            self._bytes_up += answer.size_bytes if isinstance(answer, Update) else 0
            taken = self._take(client, order, answer, now)
            self._work_lost += 0 if taken else work

    def _take(self, client: int, order: Order, answer: Update | Refused, now: float) -> bool:
        """Screen an answer, and let the protocol decide on it; whether it was taken."""
        under_way = self._under_way(client, order)
        if self.attendance.roster[client].expelled:
            refused = self.screening.refuse(client, Refused(Reason.EXPELLED, "the operator has expelled this client"))
            _log.warning("refused: %s, %s: %s", self._name(client), refused.reason, refused.why)
            return False
        if not under_way and isinstance(answer, Update):
            return self._abandoned(client, order.version, now)
        if order.version > self.protocol.versions[client]:  # no fault of its own: it is not counted
            self._current.pop(client, None)
            _log.warning("refused: %s, not expected: its round was opened again without it", self._name(client))
            return False
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
        found = self.screening.judge(client, update, base, usual=self._usual_norm(client))
        return found or self._travel.row(cast(Tensors, update))

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
        """An update came in for an order that no longer stands. It cannot be taken; the protocol says why."""
        if base == self.protocol.versions[client]:  # the same order was given again, and its answer is still to come
            _log.warning("refused: %s, %s: the order was given again since", self._name(client), Reason.NOT_ASKED)
            return False
        return self._offer(client, base, now, None)

    def _offer(self, client: int, base: int, now: float, row: torch.Tensor | None) -> bool:
        """Let the protocol decide on an update; whether it took it."""
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

    def _packed(self, client: int, version: int) -> tuple[Parcel, str]:
        """The model that a client starts from, as it travels, and its digest as it arrives."""
        if self._latest is None or self._latest[0] != version or self.protocol.rule is Rule.OWN:
            self._latest = version, *self._travel.packed(self._learner.start_of(client, version))
        return self._latest[1:]


_UNAVAILABLE = 5  # Flower's code for a node that is not there


def _deployment(folder: Path) -> str | None:
    """What this deployment is called by its devices; None where it has no name yet."""
    file = folder / _DEPLOYMENT
    if not file.exists():
        return None
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, TypeError, KeyError):
        raise SafaError(f"{file} cannot be read; restore it, or remove it, and devices start their work anew") from None
