"""The learner against a literal one that trains every update at once and sums every entry in every round."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.errors import MisuseError, SafaError
from safa.experiments.simulate import Experiment, simulate
from safa.fleet import make_fleet
from safa.protocol import Events, FedAvg, Protocol, Safa
from safa.protocol.records import Ids, Refusal, RoundRecord, Rule, Verdict
from safa.runs.settings import Settings
from safa.server.inbox import Received
from safa.server.learner import Learner
from safa.simulation import run_rounds
from safa.tasks import task_of
from safa.training import Evaluator, Optimiser, SerialTrainer
from tests.protocol.helpers import PROTOCOLS as MACHINES
from tests.training.problems import make, ragged_shards

PROBLEM = make("svm")
CPU = torch.device("cpu")
PROTOCOLS = ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff"]


def settings_for(protocol: str, **given: Any) -> Settings:
    world = {"clients": 10, "rounds": 12, "fraction": 0.3, "lag_tolerance": 2, "epochs": 2, "batch_size": 8}
    plain = Settings.of(task_of(PROBLEM, "test"), protocol=protocol, round_limit_s=900.0)
    return replace(plain, **world | given)  # some have no effect with some protocols


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


def learner(settings: Settings, sizes: NDArray[np.float64], **given: Any) -> Learner:
    start = torch.zeros(8, dtype=torch.float64)
    rule = next(iter(run_rounds(settings))).rule
    return Learner(trainer(), Evaluator(PROBLEM, device=CPU), start, sizes, rule=rule, epochs=2, **given)


@pytest.mark.parametrize("clock", ["causal", "paper"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_learner_equals_the_literal_one(protocol: str, clock: str) -> None:
    if clock == "paper" and protocol in ("fedasync", "fedbuff"):
        return
    settings = settings_for(protocol, clock=clock, buffer_size=2)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    lazy, literal = learner(settings, sizes), Literal(sizes)
    for record in run_rounds(settings):
        applied = lazy.apply(record)
        expected = literal.apply(record)
        torch.testing.assert_close(lazy.model, expected, rtol=1e-9, atol=1e-9)
        assert (applied.loss is not None) == ((record.version > 0 and protocol != "local") or record.round == 12)
    assert lazy.model.abs().max() > 0.01


class Counting:
    """A trainer that says how many updates it was asked for at a time."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.layout, self.most = inner, inner.layout, 0

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        self.most = max(self.most, len(clients))
        rows: Tensor = self._inner.train(clients, start, epochs=epochs)
        return rows


@pytest.mark.parametrize("bad", [{}, {1: math.nan, 4: math.inf}], ids=["sound", "diverged"])
@pytest.mark.parametrize("at_a_time", [1, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_small_memory_changes_nothing_but_the_last_bits(protocol: str, at_a_time: int, bad: dict[int, float]) -> None:
    settings = settings_for(protocol, fraction=0.7, crash_rate=0.1, buffer_size=5)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    records = list(run_rounds(settings))
    learners = []
    for memory_mb in (100.0, at_a_time * 6 * 8 * 8 / 2**20):
        counting = Counting(Poisoned(bad))
        it = Learner(
            counting,
            Evaluator(PROBLEM, device=CPU),
            torch.zeros(8, dtype=torch.float64),
            sizes,
            rule=records[0].rule,
            epochs=2,
            warm_start=not bad,
            memory_mb=memory_mb,
        )
        learners.append((it, counting))
    (large, all_at_once), (small, few) = learners
    for record in records:
        one, two = large.apply(record), small.apply(record)
        assert one.diverged == two.diverged
        torch.testing.assert_close(small.model, large.model, rtol=1e-12, atol=1e-12)
    assert few.most <= at_a_time < all_at_once.most
    assert small.trained == large.trained
    assert large.model.abs().max() > 0.01


def test_dead_updates_are_not_trained_and_nothing_else_changes() -> None:
    """Under the paper clock most updates are undrafted, and many of those are overwritten before they count."""
    settings = settings_for("safa", clock="paper", fraction=0.5, crash_rate=0.1)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    lazy, literal = learner(settings, sizes), Literal(sizes)
    for record in run_rounds(settings):
        lazy.apply(record)
        literal.apply(record)
    torch.testing.assert_close(lazy.model, literal.models[literal.latest], rtol=1e-9, atol=1e-9)
    assert lazy.trained < 0.8 * literal.trained


class Poisoned:
    """A trainer in which the updates of some clients come out as NaN or infinite."""

    def __init__(self, bad: dict[int, float]) -> None:
        self._honest = trainer()
        self.layout = self._honest.layout
        self._bad = bad

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        updates = self._honest.train(clients, start, epochs=epochs)
        for place, client in enumerate(clients):
            if int(client) in self._bad:
                updates[place, 2] = self._bad[int(client)]
        return updates


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_update_that_diverged_does_not_reach_the_global_model(protocol: str) -> None:
    settings = settings_for(protocol, crash_rate=0.0, fraction=0.5)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    start = torch.zeros(8, dtype=torch.float64)
    records = list(run_rounds(settings))
    poisoned = Poisoned({int(records[0].client[0]): float("nan"), int(records[0].client[1]): float("inf")})
    evaluator = Evaluator(PROBLEM, device=CPU)
    victim = Learner(poisoned, evaluator, start, sizes, rule=records[0].rule, epochs=2)
    applied = [victim.apply(record) for record in records]
    assert sum(record.diverged for record in applied) >= 2
    assert torch.isfinite(victim.model).all()


def test_the_others_stand_in_for_a_participant_that_diverged() -> None:
    settings = settings_for("fedavg", crash_rate=0.0, rounds=1)
    (record,) = run_rounds(settings)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    bad, *good = record.picked.tolist()
    start = torch.zeros(8, dtype=torch.float64)
    victim = Learner(
        Poisoned({bad: float("nan")}), Evaluator(PROBLEM, device=CPU), start, sizes, rule=Rule.AVERAGE, epochs=2
    )
    victim.apply(record)
    updates = trainer().train(np.array(good), start.expand(len(good), -1), epochs=2)
    weights = torch.from_numpy(sizes[good] / sizes[good].sum())
    torch.testing.assert_close(victim.model, weights @ updates)


def test_diverging_clients_are_counted_in_the_summary() -> None:
    run = simulate(PROBLEM, clients=10, rounds=4, lr=1e200, epochs=3, round_limit_s=900.0)
    assert run.summary is not None
    assert run.summary["diverged"] > 0
    assert all(torch.isfinite(tensor).all() for tensor in run.model().values())


def test_keep_best_never_gets_worse_and_sends_out_the_best() -> None:
    settings = settings_for("fedavg", lr=2.0)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    wild = SerialTrainer(PROBLEM, ragged_shards(8), batch_size=8, optimiser=Optimiser(lr=0.6), device=CPU)
    start = torch.zeros(8, dtype=torch.float64)
    losses: dict[bool, list[float]] = {}
    for keep in (False, True):
        it = Learner(wild, Evaluator(PROBLEM, device=CPU), start, sizes, rule=Rule.AVERAGE, epochs=2, keep_best=keep)
        losses[keep] = [float(it.apply(record).loss or 0.0) for record in run_rounds(settings)]
    assert losses[True] == sorted(losses[True], reverse=True)
    assert losses[False] != sorted(losses[False], reverse=True)


def test_a_warm_start_fills_the_cache() -> None:
    settings = settings_for("safa")
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    cold, warm = learner(settings, sizes), learner(settings, sizes, warm_start=True)
    record = next(iter(run_rounds(settings)))
    cold.apply(record)
    warm.apply(record)
    assert not torch.allclose(cold.model, warm.model)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_learner_goes_on_from_its_state_to_the_same_bits(protocol: str) -> None:
    settings = settings_for(protocol)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    through, stopped = (learner(settings, sizes, keep_best=protocol == "safa") for _ in range(2))
    for record in run_rounds(settings):
        through.apply(record)
        stopped.apply(record)
        state = stopped.state()
        stopped = learner(settings, sizes, keep_best=protocol == "safa")
        stopped.restore(state)
    assert torch.equal(through.model, stopped.model)
    assert through.trained == stopped.trained


def test_models_that_nobody_needs_are_dropped() -> None:
    settings = settings_for("safa", rounds=40)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    it = learner(settings, sizes)
    for record in run_rounds(settings):
        it.apply(record)
        assert len(it.state()["models.version"]) <= 2 + settings.lag_tolerance + len(sizes)


def test_evaluation_of_every_client() -> None:
    experiment = Experiment(settings_for("fedavg", eval_clients=True), PROBLEM)
    for _ in experiment.rounds():
        pass
    summary = experiment.summary()
    assert summary["client_accuracy_worst_decile"] <= summary["client_accuracy_mean"]
    assert summary["client_accuracy_spread"] >= 0


def test_evaluation_every_other_round() -> None:
    experiment = Experiment(settings_for("fedavg", eval_every=3), PROBLEM)
    evaluated = [record.round for record in experiment.rounds() if record.loss is not None]
    assert evaluated == [3, 6, 9, 12]


# -- clients come and go ---------------------------------------------------------------------------------------------

SIZES = np.array([3.0, 40.0, 16.0, 5.0])
START = torch.linspace(-1, 1, 8, dtype=torch.float64)


class Fake:
    """A trainer whose updates are a simple function of the client and the model that it starts from."""

    layout = trainer().layout

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
        return 0.7 * start + torch.sin(torch.from_numpy(clients + 1.0)).unsqueeze(1) * START


class Arrivals:
    """The updates in order of arrival: for a literal learner, which trains each of them as it comes in."""

    layout = Fake.layout

    def __init__(self) -> None:
        self.rows: deque[Tensor] = deque()

    def train(self, clients: Ids, start: Tensor, *, epochs: int) -> Tensor:
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


def play_round(protocol: Protocol, rng: np.random.Generator, accept: Callable[[int, int], None]) -> RoundRecord:
    """A round in which clients commit, or are found lost, in any order; `accept` hears of every good update."""
    now = max(protocol.now, 0.0)
    protocol.open_round(now=now, draws=rng.random(protocol.clients), expected_s=np.ones(protocol.clients))
    while not protocol.done and now < protocol.deadline:
        now += 0.2
        commit_or_fail(protocol, now, rng, accept)
    now = now if protocol.done else protocol.deadline
    for _ in range(rng.integers(0, 3) if protocol.active.any() else 0):
        commit_or_fail(protocol, now, rng, accept, late=True)
    return protocol.close_round(now=now)


def commit_or_fail(
    protocol: Protocol, now: float, rng: np.random.Generator, accept: Callable[[int, int], None], *, late: bool = False
) -> None:
    client = int(rng.choice(np.flatnonzero(protocol.active)))
    base = int(protocol.versions[client])
    is_lost = not late and rng.random() < 0.2
    event = Events.losses([client], at_s=now) if is_lost else Events.arrivals([client], base, at_s=now)
    if protocol.receive(event, late=late).refusal.tolist() == [Refusal.NONE] and not is_lost:
        accept(client, base)


def follower(protocol: Protocol, trainer: Fake | Received) -> Learner:
    """A learner that knows of the four clients at the start and no others."""
    return Learner(trainer, Evaluator(PROBLEM, device=CPU), START, SIZES, rule=protocol.rule, epochs=2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MACHINES)
def test_the_learner_follows_the_fleet(name: str, seed: int) -> None:
    """Eq. 6-8 over those that are enrolled, with a real protocol; a second learner is stopped after every round."""
    rng = np.random.default_rng(seed)
    protocol = MACHINES[name](SIZES)
    through, stopped = follower(protocol, Fake()), follower(protocol, Fake())
    literal = LiteralFleet(protocol, Fake())
    for _ in range(25):
        change_fleet(protocol, rng)
        record = play_round(protocol, rng, lambda client, base: None)
        through.apply(record)
        state = stopped.state()
        stopped = follower(protocol, Fake())
        stopped.restore(state)
        stopped.apply(record)
        torch.testing.assert_close(through.model, literal.apply(record), rtol=1e-9, atol=1e-9)
        assert torch.equal(through.model, stopped.model)
    assert protocol.clients > len(SIZES)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MACHINES)
def test_a_learner_of_received_updates_equals_the_literal_one(name: str, seed: int) -> None:
    """Any update may be received; the server is stopped after every round, and keeps none that is dead."""
    rng = np.random.default_rng(seed)
    protocol = MACHINES[name](SIZES)
    received, arrivals = Received(Fake.layout), Arrivals()
    server, literal = follower(protocol, received), LiteralFleet(protocol, arrivals)

    def accept(client: int, base: int) -> None:
        row = torch.from_numpy(rng.normal(size=8))
        received.keep(client, base, row)
        arrivals.rows.append(row)

    for _ in range(25):
        change_fleet(protocol, rng)
        record = play_round(protocol, rng, accept)
        server.apply(record)
        torch.testing.assert_close(server.model, literal.apply(record), rtol=1e-9, atol=1e-9)
        state = server.state() | received.state()
        assert len(received) == len(state["pending.client"])
        received = Received(Fake.layout)
        received.restore(state)
        server = follower(protocol, received)
        server.restore(state)


def test_the_version_that_a_client_holds_is_kept_for_its_return() -> None:
    """SAFA: a client commits, leaves and comes back within the lag tolerance; it goes on from the version it had."""
    protocol = Safa(SIZES, fraction=0.5, lag_tolerance=5, round_limit_s=9)
    rng = np.random.default_rng(0)
    it = follower(protocol, Fake())
    for step in range(12):
        if step in (3, 5, 8, 11):
            change = protocol.retire if step in (3, 8) else protocol.readmit
            change([0, 1])
        it.apply(play_round(protocol, rng, lambda client, base: None))
        state = it.state()
        assert state["held"].tolist() == protocol.versions.tolist()
        assert set(protocol.versions.tolist()) <= set(state["models.version"].tolist())


@pytest.mark.parametrize("kind", [Safa, FedAvg])
def test_a_federation_may_begin_with_nobody(kind: Callable[..., Protocol]) -> None:
    protocol = kind([], fraction=1.0)
    rng = np.random.default_rng(0)
    it = Learner(Fake(), Evaluator(PROBLEM, device=CPU), START, np.empty(0), rule=protocol.rule, epochs=2)
    it.apply(play_round(protocol, rng, lambda client, base: None))
    assert torch.equal(it.model, START)
    protocol.enrol([1.0, 3.0])
    protocol.open_round(now=1.0, draws=[0.1, 0.2], expected_s=[1.0, 1.0])
    protocol.receive(Events.arrivals([0, 1], 1, at_s=2.0))
    it.apply(protocol.close_round(now=2.0))
    updates = Fake().train(np.arange(2), START.repeat(2, 1), epochs=2)
    torch.testing.assert_close(it.model, 0.25 * updates[0] + 0.75 * updates[1])


def test_a_received_update_is_given_away_and_what_it_overtook_is_dropped() -> None:
    received = Received(Fake.layout)
    for client, base, value in [(0, 1, 1.0), (0, 2, 2.0), (0, 2, 3.0), (0, 4, 4.0), (7, 2, 5.0)]:
        received.keep(client, base, torch.full((8,), value))
    start = torch.zeros(3, 8, dtype=torch.float64)
    rows = received.train(np.array([0, 7, 0]), start, epochs=1, bases=np.array([2, 2, 2]))
    assert rows[:, 0].tolist() == [2.0, 5.0, 3.0]
    assert len(received) == 1
    assert received.train(np.array([0]), start[:1], epochs=1)[0, 0] == 4.0
    assert len(received) == 0
    with pytest.raises(MisuseError, match="no update of client 0 from version 4 was kept"):
        received.train(np.array([0]), start[:1], epochs=1, bases=np.array([4]))


def test_a_received_update_is_copied_and_must_fit_the_model() -> None:
    received = Received(Fake.layout)
    row = torch.ones(8)
    received.keep(0, 0, row)
    row += math.nan
    assert received.train(np.array([0]), torch.zeros(1, 8), epochs=1).tolist() == [[1.0] * 8]
    with pytest.raises(SafaError, match="has 8 numbers, not shape"):
        received.keep(0, 0, torch.ones(9))
