"""A literal learner, which trains every update at once and sums every entry in every round; and rounds by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.protocol import Events, Protocol
from safa.protocol.records import Ids, Refusal, RoundRecord, Rule, Verdict
from safa.server import Server
from safa.server.learner import Learner
from safa.training import LocalTraining, Optimiser, SerialTrainer
from tests.training.problems import make, ragged_shards

PROBLEM = make("svm")
CPU = torch.device("cpu")
SIZES = np.array([3.0, 40.0, 16.0, 5.0])
START = torch.linspace(-1, 1, 8, dtype=torch.float64)


def trainer() -> SerialTrainer:
    return SerialTrainer(PROBLEM, ragged_shards(8), batch_size=8, optimiser=Optimiser(lr=0.05), device=CPU)


class Literal:
    """The rules as they are written: every update is trained when it comes in, from the model of its base version."""

    def __init__(self, sizes: NDArray[np.float64]) -> None:
        self.trainer = trainer()
        self.share = torch.from_numpy(sizes / sizes.sum())
        self.models = {0: torch.zeros(self.trainer.layout.size, dtype=torch.float64)}
        self.entries = self.models[0].repeat(len(sizes), 1)
        self.waiting: list[tuple[int, int, float, Tensor]] = []
        self.latest = 0
        self.trained = 0

    def train(self, client: int, start: Tensor) -> Tensor:
        self.trained += 1
        return self.trainer.train(np.array([client]), start.unsqueeze(0), epochs=2)[0]

    def apply(self, record: RoundRecord) -> Tensor:
        if record.rule in (Rule.AVERAGE, Rule.DELTA):
            self.merge(record)
        elif record.rule is Rule.OWN:
            for client in record.client[record.verdict != Verdict.REFUSED]:
                self.entries[client] = self.train(int(client), self.entries[client])
            if record.version > self.latest:
                self.models[record.version] = self.share @ self.entries
        else:
            updates = {
                int(k): self.train(int(k), self.models[int(b)])
                for k, b, verdict in zip(record.client, record.base, record.verdict, strict=True)
                if verdict != Verdict.REFUSED
            }
            for client in record.deprecated:  # Eq. 6
                self.entries[client] = self.models[record.version - 1]
            for client in record.picked:
                self.entries[client] = updates[int(client)]
            self.models[record.version] = self.share @ self.entries  # Eq. 7
            for client in record.undrafted:  # Eq. 8
                self.entries[client] = updates[int(client)]
        self.latest = record.version
        return self.models[self.latest]

    def merge(self, record: RoundRecord) -> None:
        for version in range(self.latest + 1, record.version + 1):
            self.models[version] = self.models[version - 1].clone()
        columns = (record.client, record.base, record.weight, record.into)
        version = self.latest
        fresh = [(int(k), int(b), float(w), int(v)) for k, b, w, v in zip(*columns, strict=True) if v > 0]
        for client, base, weight, into in fresh:
            while into > version + 1:  # all updates of the next version are in
                version += 1
                self.make(version, record.rule)
            self.waiting.append((into, base, weight, self.train(client, self.models[base])))
        while version < record.version:
            version += 1
            self.make(version, record.rule)

    def make(self, version: int, rule: Rule) -> None:
        model = self.models[version - 1].clone()
        parts = [(base, weight, update) for into, base, weight, update in self.waiting if into == version]
        if rule is Rule.AVERAGE:
            model *= 1 - sum(weight for _, weight, _ in parts)
        for base, weight, update in parts:
            model += weight * (update if rule is Rule.AVERAGE else update - self.models[base])
        self.models[version] = model
        self.waiting = [item for item in self.waiting if item[0] != version]


def resumed(old: Learner, new: Learner) -> Learner:
    """`new`, which has learnt nothing, with all that `old` has come to."""
    new.restore(old.state(), {name: (table.numbers, table.get(table.numbers)) for name, table in old.tables().items()})
    return new


class Fake:
    """A trainer whose updates are a simple function of the client and the model that it starts from."""

    layout = trainer().layout

    def train(self, clients: Ids, start: Tensor, *, epochs: int | None = None, **given: Any) -> Tensor:
        return 0.7 * start + torch.sin(torch.from_numpy(clients + 1.0)).unsqueeze(1) * START


def fake() -> LocalTraining:
    return LocalTraining(Fake(), epochs=2)


class Arrivals:
    """The updates in order of arrival: for a literal learner, which trains each of them as it comes in."""

    layout = Fake.layout

    def __init__(self) -> None:
        self.rows: deque[Tensor] = deque()

    def train(self, clients: Ids, start: Tensor, *, epochs: int | None = None, **given: Any) -> Tensor:
        return torch.stack([self.rows.popleft() for _ in clients])


class LiteralFleet(Literal):
    """The literal learner with the protocol's own word on who is there, and new entries as they enrol."""

    def __init__(self, protocol: Protocol, trainer: Fake | Arrivals) -> None:
        super().__init__(protocol.sizes)
        self.protocol = protocol
        self.trainer = trainer  # type: ignore[assignment]
        self.models = {0: START}
        self.entries = START.repeat(protocol.clients, 1)

    def apply(self, record: RoundRecord) -> Tensor:
        before, active = self.models[self.latest], self.protocol.active
        sizes = np.where(active, self.protocol.sizes, 0.0)
        self.share = torch.from_numpy(sizes / sizes.sum() if active.any() else sizes)
        new = len(active) - len(self.entries)
        self.entries = torch.cat([self.entries, before.repeat(new, 1)])
        after = super().apply(record)
        if not active.any():
            self.models[self.latest] = after = before
        return after


def change_fleet(protocol: Protocol, rng: np.random.Generator) -> None:
    """Between two rounds: some enrol, some retire, some come back; some do two of these, and at times all are gone."""
    for _ in range(rng.integers(0, 4)):
        what = rng.integers(0, 5)
        away = np.flatnonzero(~protocol.active)
        there = np.flatnonzero(protocol.active)
        if what == 0:
            protocol.enrol(rng.integers(1, 50, rng.integers(1, 3)))
        elif what == 4 and rng.random() < 0.3:
            protocol.retire(there)
        elif what % 2:
            protocol.retire(there[rng.random(len(there)) < 0.3])
        else:
            protocol.readmit(away[rng.random(len(away)) < 0.7])


def run_round(
    told: Protocol | Server, rng: np.random.Generator, accept: Callable[[int, int], None] = lambda client, base: None
) -> RoundRecord:
    """A round in which clients commit, or are found lost, in any order; `accept` hears of every good update.

    A protocol is told of it, or a server, which is yet to commit it.
    """
    protocol = told.protocol if isinstance(told, Server) else told
    now = max(protocol.now, 0.0)
    told.open_round(now=now, draws=rng.random(protocol.clients), expected_s=np.ones(protocol.clients))
    while not protocol.done and now < protocol.deadline:
        now += 0.2
        commit_or_fail(told, now, rng, accept)
    now = now if protocol.done else protocol.deadline
    for _ in range(rng.integers(0, 3) if protocol.active.any() else 0):
        commit_or_fail(told, now, rng, accept, late=True)
    return told.close_round(now=now)


def commit_or_fail(
    told: Protocol | Server,
    now: float,
    rng: np.random.Generator,
    accept: Callable[[int, int], None],
    *,
    late: bool = False,
) -> None:
    protocol = told.protocol if isinstance(told, Server) else told
    client = int(rng.choice(np.flatnonzero(protocol.active)))
    base = int(protocol.versions[client])
    is_lost = not late and rng.random() < 0.2
    event = Events.losses([client], at_s=now) if is_lost else Events.arrivals([client], base, at_s=now)
    if told.receive(event, late=late).refusal.tolist() == [Refusal.NONE] and not is_lost:
        accept(client, base)
