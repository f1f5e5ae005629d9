"""`lr = auto`: the range test finds a learning rate that learns, by the training data alone."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import safa
from safa.fleet import make_fleet
from safa.runs import Settings
from safa.tasks import Problem, load_problem, task_of
from safa.training.range_test import RangeTest, find_learning_rate
from safa.training.setup import make_shards


def outcome(problem: Problem, settings: Settings) -> RangeTest:
    settings = replace(settings, threads=1)
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    return find_learning_rate(settings, problem, make_shards(settings, problem, sizes))


def regression(scale: float = 1.0) -> Problem:
    """Least squares with a curvature of `scale` squared, of its bias 1: what is far above the inverse diverges."""
    generator = torch.Generator().manual_seed(0)
    inputs = scale * torch.randn(400, 3, generator=generator)
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5]) + 1
    return Problem(
        model=lambda: nn.Linear(3, 1),
        loss=lambda output, target: (output[:, 0] - target).square().mean(),
        train=(inputs[:300], targets[:300]),
        test=(inputs[300:], targets[300:]),
    )


@pytest.mark.parametrize(("scale", "least", "most"), [(1.0, 0.03, 0.5), (10.0, 3e-4, 5e-3), (0.1, 0.1, 1.1)])
def test_the_learning_rate_follows_the_curvature(scale: float, least: float, most: float) -> None:
    problem = regression(scale)
    found = outcome(problem, Settings.of(task_of(problem, "test"), clients=6))
    assert least <= found.lr <= most
    assert found.after < 0.2 * found.before


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_does_not_choose_what_diverges_for_clients_that_are_averaged(seed: int) -> None:
    """On boston, averaged clients diverge with 0.3 of SGD and more."""
    problem = load_problem("boston")
    found = outcome(problem, Settings.of("boston", seed=seed))
    assert 0.03 <= found.lr <= 0.2
    run = safa.simulate("boston", seed=seed, lr=found.lr, rounds=20, threads=1)
    assert run.summary is not None
    assert run.summary["diverged"] == 0
    assert run.summary["last_loss"] < float(problem.test[1].square().mean())  # that of w(0), all zeros


def test_it_uses_the_optimiser_of_the_run() -> None:
    found = outcome(load_problem("boston"), Settings.of("boston", optimiser="adam"))
    assert 0.01 <= found.lr <= 0.2
    assert found.after < 0.1 * found.before


def test_the_same_seed_finds_the_same_and_the_test_set_is_not_looked_at() -> None:
    problem = regression()
    settings = Settings.of(task_of(problem, "test"), clients=6)
    blind = replace(problem, test=(problem.test[0], torch.full_like(problem.test[1], torch.nan)))
    assert outcome(problem, settings) == outcome(problem, settings) == outcome(blind, settings)


def test_where_nothing_makes_the_loss_fall_it_says_so() -> None:
    problem = replace(regression(), loss=lambda output, target: 0 * output.sum() + 1.0)
    found = outcome(problem, Settings.of(task_of(problem, "test"), clients=6))
    assert found.words.endswith("in which none from 1e-05 to 10 made the training loss fall")


def test_an_own_problem_learns_without_a_word_about_the_learning_rate(tmp_path: Path) -> None:
    run = safa.simulate(regression(10.0), clients=6, rounds=5, out=tmp_path / "run")
    assert isinstance(run.settings.lr, float)
    assert safa.load_run(tmp_path / "run").settings.lr == run.settings.lr
    losses = [record.loss for record in run.records() if record.loss is not None]
    assert losses[-1] < 0.1 * losses[0]
    named = safa.simulate(regression(10.0), clients=6, rounds=5, lr=run.settings.lr)
    assert [record.loss for record in named.records()] == [record.loss for record in run.records()]


def test_nothing_is_looked_for_where_nothing_is_trained() -> None:
    assert safa.simulate(regression(), clients=6, rounds=2, train=False).settings.lr == "auto"


def test_the_command_says_what_was_found(tmp_path: Path) -> None:
    words = ["run", "boston", "--lr", "auto", "--rounds", "2", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-m", "safa", *words], capture_output=True, text=True, check=True)
    said = "safa: learning rate 0.1, found by a range test in which the training loss fell from 0.234 to 0.02"
    assert done.stderr.startswith(said)
    assert "lr = 0.1\n" in (tmp_path / "run" / "config.toml").read_text()


def test_a_number_or_auto_it_must_be() -> None:
    given: Any = "fast"
    with pytest.raises(safa.SafaError, match="lr must be auto or a number, not 'fast'"):
        Settings.of("boston", lr=given)
