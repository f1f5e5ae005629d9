"""Replaying the records of a run gives its model again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.experiments.simulate import Experiment, simulate
from safa.fleet import make_fleet
from safa.protocol import Events, Protocol, Safa
from safa.protocol.records import RoundRecord
from safa.runs import Run, load_run
from safa.runs.settings import Settings
from safa.server import Server
from safa.server.setup import Learning
from safa.tasks import task_of
from safa.training.setup import make_shards, trainer_of
from tests.training.problems import SAMPLES, make

PROBLEM = make("svm")


def run_of(**given: Any) -> Run:
    world = {"clients": 10, "rounds": 12, "fraction": 0.3, "epochs": 2, "batch_size": 8}
    own = {"safa": {"lag_tolerance": 2}, "fedbuff": {"buffer_size": 2}}.get(given.get("protocol", "safa"), {})
    return simulate(PROBLEM, **{"round_limit_s": 900.0} | world | own | given)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "protocol", ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff", "timelyfl", "fedcompass", "fedsecant"]
)
def test_a_replay_gives_the_same_model_to_the_bit(protocol: str) -> None:
    run = run_of(protocol=protocol, partition="dirichlet:0.5", seed=3)
    assert same(replay(run, PROBLEM), run.model())


@pytest.mark.parametrize(
    "given",
    [
        {"clock": "paper", "fraction": 0.5},
        {"trainer": "serial", "rounds": 2},
        {"server_optimiser": "safa.paper.habits:AsPrinted", "eval_every": 3},
        {"optimiser": "adam", "memory_mb": 1e-4},
    ],
    ids=str,
)
def test_a_replay_goes_by_the_settings_of_the_run(given: dict[str, Any]) -> None:
    run = run_of(**given)
    assert same(replay(run, PROBLEM), run.model())


@pytest.mark.slow
def test_a_folder_is_replayed_and_its_task_is_found(tmp_path: Path) -> None:
    simulate("digits", clients=8, rounds=3, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert same(replay(run), run.model())


def test_a_run_that_was_stopped_is_replayed_as_far_as_it_came() -> None:
    whole = run_of()
    half = Run(settings=whole.settings, summary=None, held_records=list(whole.records())[:6])
    experiment = Experiment(whole.settings, PROBLEM)
    for _ in zip(range(6), experiment.rounds(), strict=False):
        pass
    assert same(replay(half, PROBLEM), experiment.model() or {})
    assert not same(replay(half, PROBLEM), whole.model())


def test_a_run_that_trained_nothing_cannot_be_replayed() -> None:
    with pytest.raises(SafaError, match="only simulated its rounds"):
        replay(run_of(train=False), PROBLEM)
    with pytest.raises(SafaError, match="it trained nothing"):
        replay(Run(settings=run_of(rounds=1).settings, summary=None), PROBLEM)


def test_there_must_be_data_for_every_client() -> None:
    with pytest.raises(SafaError, match="10 clients took part in the run, but there is data for 3 only"):
        replay(run_of(), PROBLEM, shards=[np.arange(20)] * 3)


class Deployment:
    """A server that knows received updates alone, and clients that train by themselves as they are told."""

    def __init__(self, settings: Settings, shards: list[NDArray[np.int64]]) -> None:
        self.protocol: Protocol = Safa([], fraction=0.5, lag_tolerance=2)
        self.shards = shards
        self.trainer = trainer_of(settings, PROBLEM, shards, torch.device("cpu"))
        self.learning = Learning(settings, PROBLEM, self.protocol)
        self.server = Server(self.protocol, seed=0, rounds=settings.rounds, learner=self.learning.learner)

    def enrol(self, client: int) -> None:
        assert self.protocol.enrol([len(self.shards[client])]).tolist() == [client]

    def round(self, order: list[int]) -> RoundRecord:
        now = max(self.protocol.now, 0.0)
        self.server.open_round(now=now, expected_s=np.ones(self.protocol.clients))
        for client in order:
            base = int(self.protocol.versions[client])
            start = self.server.start_model(client, base)
            if self.server.receive(Events.arrivals([client], base, at_s=now + 1)).accepted.tolist() == [True]:
                update = self.trainer.train(np.array([client]), start.unsqueeze(0), epochs=2)
                self.learning.inbox.put(client, base, update[0])
        return self.server.commit(self.server.close_round(now=now + 1))


def test_a_deployment_is_replayed_with_the_data_of_its_clients() -> None:
    """Clients enrol in an order of their own, leave and return; the replay trains what the server received."""
    settings = Settings.of(task_of(PROBLEM, "test"), clients=4, epochs=2, batch_size=8, rounds=9, lr=0.01)
    shards = np.split(np.arange(SAMPLES), [30, 100, 120])[::-1]
    server = Deployment(settings, shards)
    rng = np.random.default_rng(1)
    records = []
    for number in range(9):
        if number in (0, 2, 3, 6):
            server.enrol(server.protocol.clients)
        if number == 4:
            server.protocol.retire([0])
        if number == 7:
            server.protocol.readmit([0])
        records.append(server.round(rng.permutation(np.flatnonzero(server.protocol.active)).tolist()))
    run = Run(settings=settings, summary=None, held_records=records)
    expected = server.learning.model()
    for name, tensor in replay(run, PROBLEM, shards).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(replay(run, PROBLEM, shards[::-1])["weight"], expected["weight"])


def test_shards_can_be_given_for_a_simulated_run_too() -> None:
    run = run_of()
    sizes = np.asarray(make_fleet(run.settings).sizes, dtype=np.float64)
    assert same(replay(run, PROBLEM, make_shards(run.settings, PROBLEM, sizes)), run.model())
