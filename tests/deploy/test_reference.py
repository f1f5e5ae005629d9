"""How far an honest first update goes: no honest one of a built-in task is refused, and none that is far too large."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from safa.deploy.exchange.options import Options
from safa.deploy.exchange.reference import Reference, reference, steps_of
from safa.deploy.exchange.screening import RejectReason, Screening
from safa.fleet import make_fleet
from safa.runs.settings import Settings
from safa.tasks import load_problem
from safa.training import BatchedTrainer, Layout
from safa.training.setup import make_optimiser, make_shards
from tests.deploy.harness import Harness, apart, fed_again


def test_more_steps_go_further_and_fewer_do_not_count_for_less() -> None:
    assert Reference(2.0, 10).for_steps(30) == 6.0
    assert Reference(2.0, 10).for_steps(3) == 2.0


def test_steps_are_mini_batches_in_all_epochs() -> None:
    assert steps_of(41, Settings.of("boston", batch_size=20, epochs=3)) == 9


@pytest.mark.parametrize(
    ("task", "clients", "epochs"),
    [
        ("boston", 5, (1, 3, 10, 60)),
        pytest.param("digits", 20, (1, 2), marks=pytest.mark.slow),
        pytest.param("kdd99", 500, (1, 5, 20), marks=pytest.mark.slow),
        pytest.param("mnist", 100, (1,), marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("real_files")
def test_first_updates_are_judged_rightly_before_anybody_has_voted(
    task: str, clients: int, epochs: tuple[int, ...]
) -> None:
    """From w(0), with the defaults: an honest update is taken, and a thousand times its change is refused."""
    problem = load_problem(task)
    for count in epochs:
        settings = Settings.of(task, clients=clients, epochs=count)
        module = problem.start_model(settings.seed)
        layout = Layout(module)
        start = layout.row(dict(module.named_parameters()) | dict(module.named_buffers()))
        shards = make_shards(settings, problem, np.asarray(make_fleet(settings).sizes, dtype=np.float64))
        chosen = np.arange(2 if task == "mnist" else 5)
        trainer = BatchedTrainer(
            problem,
            shards,
            batch_size=settings.batch_size,
            optimiser=make_optimiser(settings),
            device=torch.device("cpu"),
        )
        updates = trainer.train(chosen, start.expand(len(chosen), -1), epochs=count)
        known = reference(settings, problem)
        for client, update in zip(chosen.tolist(), updates, strict=True):
            gate = Screening(Options().screen(10**9))
            usual = known.for_steps(steps_of(len(shards[client]), settings))
            base = {"row": start.numpy()}
            large = gate.judge(client, {"row": (start + 1000 * (update - start)).numpy()}, base, usual=usual)
            assert large is not None, (count, client)
            assert large.reason is RejectReason.NORM
            assert gate.judge(client, {"row": update.numpy()}, base, usual=usual) is None, (count, client)


def test_a_small_fleet_is_protected_from_the_first_vote_on(tmp_path: Path) -> None:
    """Two clients never make a median of three; what the server has trained itself holds all the time."""
    harness = Harness(tmp_path, {"clients": 2, "rounds": 5, "fraction": 1.0})
    run = harness.run()
    assert not harness.coordinator.screening.has_median
    assert run.summary is not None
    assert run.summary["refusals"] == {}
    assert apart(fed_again(run), run.model()) <= 1e-6
