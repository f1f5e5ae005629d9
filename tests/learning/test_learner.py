"""The learner against a literal one that trains every update at once and sums every entry in every round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.experiment import Experiment, simulate
from safa.learning import Evaluator, Learner, Optimiser, SerialTrainer
from safa.records import Ids, RoundRecord, Rule, Verdict
from safa.settings import Settings
from safa.simulation import make_fleet, run_rounds
from safa.tasks import task_of
from tests.learning.problems import make, ragged_shards

PROBLEM = make("svm")
CPU = torch.device("cpu")
PROTOCOLS = ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff"]


def settings_for(protocol: str, **given: Any) -> Settings:
    world = {"clients": 10, "rounds": 12, "fraction": 0.3, "lag_tolerance": 2, "epochs": 2, "batch_size": 8}
    return Settings.of(task_of(PROBLEM, "test"), protocol=protocol, round_limit_s=900.0, **world | given)


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
