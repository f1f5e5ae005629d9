"""The learner against a literal one that trains every update at once and sums every entry in every round."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation import Aggregator, registry
from safa.experiments.simulate import Experiment, simulate
from safa.fleet import make_fleet
from safa.paper.habits import AsPrinted
from safa.protocol import Events, FedAvg, Protocol, Safa, build
from safa.protocol.records import Ids
from safa.runs.settings import Settings
from safa.server.inbox import Inbox
from safa.server.learner import Learner, UpdateSource
from safa.simulation import run_rounds
from safa.tasks import task_of
from safa.training import Evaluator, LocalTraining, Optimiser, Score, SerialTrainer, Trainer
from tests.protocol import helpers
from tests.server.literal import (
    CPU,
    PROBLEM,
    SIZES,
    START,
    Arrivals,
    Fake,
    Literal,
    LiteralFleet,
    change_fleet,
    fake,
    resumed,
    run_round,
    trainer,
)
from tests.training.problems import ragged_shards

MACHINES = {name: make for name, make in helpers.PROTOCOLS.items() if name != "fedsecant"}  # `literal` has no secant
WHOLE = [name for name in MACHINES if not name.startswith(("fedcompass", "fedbuff with"))]
"""Protocols that ask for all of the work, if all clients are expected to take as long."""
PROTOCOLS = ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff"]


def settings_for(protocol: str, **given: Any) -> Settings:
    world = {"clients": 10, "rounds": 12, "fraction": 0.3, "lag_tolerance": 2, "epochs": 2, "batch_size": 8}
    plain = Settings.of(task_of(PROBLEM, "test"), protocol=protocol, round_limit_s=900.0)
    return replace(plain, **world | given)  # some have no effect with some protocols


def sizes_of(settings: Settings) -> NDArray[np.float64]:
    return np.asarray(make_fleet(settings).sizes, dtype=np.float64)


def aggregator_of(settings: Settings) -> Aggregator:
    """The aggregator that the protocol of the settings names."""
    protocol = build(settings.protocol, sizes_of(settings), settings.values())
    return registry.build(protocol.aggregator, settings.values())


def learner(
    settings: Settings, *, using: Trainer | None = None, aggregator: Aggregator | None = None, memory_mb: float = 4096.0
) -> Learner:
    return Learner(
        LocalTraining(using or trainer(), epochs=2),
        aggregator or aggregator_of(settings),
        torch.zeros(8, dtype=torch.float64),
        sizes_of(settings),
        evaluate=Evaluator(PROBLEM, device=CPU).evaluate,
        memory_mb=memory_mb,
    )


@pytest.mark.parametrize("clock", ["causal", "paper"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_learner_equals_the_literal_one(protocol: str, clock: str) -> None:
    if clock == "paper" and protocol in ("fedasync", "fedbuff"):
        return
    settings = settings_for(protocol, clock=clock, buffer_size=2)
    lazy, literal = learner(settings), Literal(sizes_of(settings))
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

    def train(self, clients: Ids, start: Tensor, *, epochs: int | None = None, **given: Any) -> Tensor:
        self.most = max(self.most, len(clients))
        rows: Tensor = self._inner.train(clients, start, epochs=epochs, **given)
        return rows


@pytest.mark.parametrize("bad", [{}, {1: math.nan, 4: math.inf}], ids=["sound", "diverged"])
@pytest.mark.parametrize("at_a_time", [1, 3])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_small_memory_changes_nothing_but_the_last_bits(protocol: str, at_a_time: int, bad: dict[int, float]) -> None:
    settings = settings_for(protocol, fraction=0.7, crash_rate=0.1, buffer_size=5)
    check_small_memory(settings, at_a_time, bad, aggregator_of)


@pytest.mark.parametrize("at_a_time", [1, 3])
@pytest.mark.parametrize("protocol", ["safa", "fedavg", "local"])
def test_a_small_memory_changes_nothing_under_the_habits_of_the_paper(protocol: str, at_a_time: int) -> None:
    settings = settings_for(protocol, fraction=0.7, crash_rate=0.1)
    check_small_memory(settings, at_a_time, {}, lambda settings: AsPrinted(aggregator_of(settings)))


def check_small_memory(
    settings: Settings, at_a_time: int, bad: dict[int, float], aggregator: Callable[[Settings], Aggregator]
) -> None:
    all_at_once, few = Counting(Poisoned(bad)), Counting(Poisoned(bad))
    large = learner(settings, using=all_at_once, aggregator=aggregator(settings), memory_mb=100.0)
    memory_mb = at_a_time * 6 * 8 * 8 / 2**20
    small = learner(settings, using=few, aggregator=aggregator(settings), memory_mb=memory_mb)
    for record in run_rounds(settings):
        one, two = large.apply(record), small.apply(record)
        assert one.diverged == two.diverged
        torch.testing.assert_close(small.model, large.model, rtol=1e-12, atol=1e-12)
    assert few.most <= at_a_time < all_at_once.most
    assert small.asked_for == large.asked_for
    assert large.model.abs().max() > 0.01


def test_dead_updates_are_not_trained_and_nothing_else_changes() -> None:
    """Under the paper clock most updates are undrafted, and many of those are overwritten before they count."""
    settings = settings_for("safa", clock="paper", fraction=0.5, crash_rate=0.1)
    lazy, literal = learner(settings), Literal(sizes_of(settings))
    for record in run_rounds(settings):
        lazy.apply(record)
        literal.apply(record)
    torch.testing.assert_close(lazy.model, literal.models[literal.latest], rtol=1e-9, atol=1e-9)
    assert lazy.asked_for < 0.8 * literal.trained


class Poisoned:
    """A trainer in which the updates of some clients come out as NaN or infinite."""

    def __init__(self, bad: dict[int, float]) -> None:
        self._honest = trainer()
        self.layout = self._honest.layout
        self._bad = bad

    def train(self, clients: Ids, start: Tensor, *, epochs: int | None = None, **given: Any) -> Tensor:
        updates = self._honest.train(clients, start, epochs=epochs, **given)
        for place, client in enumerate(clients):
            if int(client) in self._bad:
                updates[place, 2] = self._bad[int(client)]
        return updates


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_update_that_diverged_does_not_reach_the_global_model(protocol: str) -> None:
    settings = settings_for(protocol, crash_rate=0.0, fraction=0.5)
    records = list(run_rounds(settings))
    poisoned = Poisoned({int(records[0].client[0]): float("nan"), int(records[0].client[1]): float("inf")})
    victim = learner(settings, using=poisoned)
    applied = [victim.apply(record) for record in records]
    assert sum(record.diverged for record in applied) >= 2
    assert torch.isfinite(victim.model).all()


def test_the_others_stand_in_for_a_participant_that_diverged() -> None:
    settings = settings_for("fedavg", crash_rate=0.0, rounds=1)
    (record,) = run_rounds(settings)
    sizes = sizes_of(settings)
    bad, *good = record.picked.tolist()
    victim = learner(settings, using=Poisoned({bad: float("nan")}))
    victim.apply(record)
    updates = trainer().train(np.array(good), torch.zeros(len(good), 8, dtype=torch.float64), epochs=2)
    weights = torch.from_numpy(sizes[good] / sizes[good].sum())
    torch.testing.assert_close(victim.model, weights @ updates)


def test_diverging_clients_are_counted_in_the_summary() -> None:
    run = simulate(PROBLEM, clients=10, rounds=4, lr=1e200, epochs=3, round_limit_s=900.0)
    assert run.summary is not None
    assert run.summary["diverged"] > 0
    assert all(torch.isfinite(tensor).all() for tensor in run.model().values())


def test_under_the_habits_of_the_paper_the_loss_never_rises() -> None:
    settings = settings_for("fedavg", lr=2.0)
    wild = SerialTrainer(PROBLEM, ragged_shards(8), batch_size=8, optimiser=Optimiser(lr=0.6), device=CPU)
    losses: list[list[float]] = []
    for aggregator in (aggregator_of(settings), AsPrinted(aggregator_of(settings))):
        it = learner(settings, using=wild, aggregator=aggregator)
        losses.append([float(it.apply(record).loss or 0.0) for record in run_rounds(settings)])
    without, with_them = losses
    assert with_them == sorted(with_them, reverse=True)
    assert without != sorted(without, reverse=True)


def test_under_the_habits_of_the_paper_entries_begin_trained() -> None:
    settings = settings_for("safa")
    cold, warm = learner(settings), learner(settings, aggregator=AsPrinted(aggregator_of(settings)))
    record = next(iter(run_rounds(settings)))
    cold.apply(record)
    warm.apply(record)
    assert not torch.allclose(cold.model, warm.model)


@pytest.mark.parametrize("habits", [False, True], ids=["plain", "habits"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_learner_continues_from_its_state_to_the_same_bits(protocol: str, habits: bool) -> None:
    settings = settings_for(protocol)

    def new() -> Learner:
        aggregator = aggregator_of(settings)
        return learner(settings, aggregator=AsPrinted(aggregator) if habits else aggregator)

    through, stopped = new(), new()
    for record in run_rounds(settings):
        expected = through.apply(record)
        assert stopped.apply(record).to_json() == expected.to_json()
        stopped = resumed(stopped, new())
    assert torch.equal(through.model, stopped.model)
    assert through.asked_for == stopped.asked_for


def test_models_that_nobody_needs_are_dropped() -> None:
    settings = settings_for("safa", rounds=40)
    it = learner(settings)
    for record in run_rounds(settings):
        it.apply(record)
        assert len(it.tables()["models"].numbers) <= 2 + settings.lag_tolerance + settings.clients


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


def test_a_model_that_was_made_between_two_evaluations_is_evaluated_at_the_next_one() -> None:
    """FedBuff makes no model in most rounds; one that was not evaluated when it was made must not be passed over."""
    settings = settings_for("fedbuff", eval_every=4, buffer_size=5)
    records = list(Experiment(settings, PROBLEM).rounds())
    made = [
        record.round for record, before in zip(records[1:], records, strict=False) if record.version > before.version
    ]
    assert any(number % 4 for number in made)
    due = [number for number in (4, 8, 12) if any(number - 4 < new <= number for new in made)]
    assert [record.round for record in records if record.loss is not None] == due != []


# -- clients come and go ---------------------------------------------------------------------------------------------


def follower(protocol: Protocol, source: UpdateSource, sizes: NDArray[np.float64] = SIZES) -> Learner:
    """A learner that knows of the four clients at the start and no others."""
    aggregator = registry.build(protocol.aggregator, {})
    return Learner(source, aggregator, START, sizes, evaluate=Evaluator(PROBLEM, device=CPU).evaluate)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", WHOLE)
def test_the_learner_follows_the_fleet(name: str, seed: int) -> None:
    """Eq. 6-8 over those that are enrolled, with a real protocol; a second learner is stopped after every round."""
    rng = np.random.default_rng(seed)
    protocol = MACHINES[name](SIZES)
    through, stopped = follower(protocol, fake()), follower(protocol, fake())
    literal = LiteralFleet(protocol, Fake())
    for _ in range(25):
        change_fleet(protocol, rng)
        record = run_round(protocol, rng, lambda client, base: None)
        through.apply(record)
        stopped = resumed(stopped, follower(protocol, fake()))
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
    inbox, arrivals = new_inbox(), Arrivals()
    server, literal = follower(protocol, inbox), LiteralFleet(protocol, arrivals)

    def accept(client: int, base: int) -> None:
        row = torch.from_numpy(rng.normal(size=8))
        inbox.put(client, base, row)
        arrivals.rows.append(row)

    for _ in range(25):
        change_fleet(protocol, rng)
        record = run_round(protocol, rng, accept)
        server.apply(record)
        torch.testing.assert_close(server.model, literal.apply(record), rtol=1e-9, atol=1e-9)
        state = server.state()
        assert len(inbox) == len(state["queue.client"]) + len(state["undrafted.client"])
        inbox = new_inbox()
        server = resumed(server, follower(protocol, inbox))


def new_inbox() -> Inbox:
    """With room for two updates in memory; the others are held in files."""
    return Inbox(START, memory_mb=2 * 8 * 8 / 2**20)


def test_the_version_that_a_client_holds_is_kept_for_its_return() -> None:
    """SAFA: a client commits, leaves and comes back within the lag tolerance; it goes on from the version it had."""
    protocol = Safa(SIZES, fraction=0.5, lag_tolerance=5, round_limit_s=9)
    rng = np.random.default_rng(0)
    it = follower(protocol, fake())
    for step in range(12):
        if step in (3, 5, 8, 11):
            change = protocol.retire if step in (3, 8) else protocol.readmit
            change([0, 1])
        it.apply(run_round(protocol, rng, lambda client, base: None))
        assert it.state()["held"].tolist() == protocol.versions.tolist()
        assert set(protocol.versions.tolist()) <= set(it.tables()["models"].numbers.tolist())


@pytest.mark.parametrize("kind", [Safa, FedAvg])
def test_a_federation_may_begin_with_nobody(kind: Callable[..., Protocol]) -> None:
    protocol = kind([], fraction=1.0)
    rng = np.random.default_rng(0)
    it = follower(protocol, fake(), np.empty(0))
    it.apply(run_round(protocol, rng, lambda client, base: None))
    assert torch.equal(it.model, START)
    protocol.enrol([1.0, 3.0])
    protocol.open_round(now=1.0, draws=[0.1, 0.2], expected_s=[1.0, 1.0])
    protocol.receive(Events.arrivals([0, 1], 1, at_s=2.0))
    it.apply(protocol.close_round(now=2.0))
    updates = Fake().train(np.arange(2), START.repeat(2, 1), epochs=2)
    torch.testing.assert_close(it.model, 0.25 * updates[0] + 0.75 * updates[1])


def test_a_model_that_an_aggregator_has_evaluated_is_not_evaluated_again() -> None:
    settings = settings_for("safa")
    it = learner(settings, aggregator=AsPrinted(aggregator_of(settings)))
    asked, evaluate = list[Tensor](), it._evaluate

    def counted(row: Tensor) -> Score:
        asked.append(row)
        return evaluate(row)

    it._evaluate = counted
    records = list(run_rounds(settings))
    for record in records:
        it.apply(record)
    assert len(asked) == len(records)
