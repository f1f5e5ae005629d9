"""Runs that are trained as one come to what they come to alone, whatever ends one of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa.errors import MisuseError, SafaError
from safa.experiments import sweep
from safa.experiments.engines import LocalEngine
from safa.experiments.simulate import Experiment
from safa.experiments.stack import group_runs, run_side_by_side
from safa.experiments.sweep import combinations, run_sweep
from safa.runs import Settings, load_run
from safa.tasks import TASKS
from safa.tasks.problem import Problem
from safa.training.setup import TrainerOf


def swept(folder: Path, stack: int, task: str = "boston", workers: int = 1, **given: Any) -> list[dict[str, Any]]:
    lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    return list(run_sweep(combinations([task], lists), folder, stack=stack, engine=LocalEngine(workers), keep="models"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    "given",
    [
        {"protocol": ["safa", "fedavg"], "preset": "paper"},
        {"protocol": ["safa", "fedasync"], "shuffle": True},
        {"fraction": [0.2, 0.5], "local_steps": 7},
        {"aggregator": ["auto", "scaffold"], "protocol": "fedavg", "schedule": "cosine"},
        {"protocol": ["local", "safa"], "batch_size": 1000},
    ],
    ids=["protocols", "shuffled", "steps", "corrections", "own models"],
)
def test_linear_models_come_to_the_same_bytes(tmp_path: Path, given: dict[str, Any]) -> None:
    preset = given.pop("preset", None)
    lists = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    runs = combinations(["boston"], lists | {"seed": [0, 1], "rounds": [6]}, preset=preset)
    for stack in (1, 3):
        list(run_sweep(runs, tmp_path / str(stack), stack=stack, keep="models"))
    assert files(tmp_path / "1") == files(tmp_path / "3")


def test_runs_that_reach_their_target_leave_the_stack(tmp_path: Path) -> None:
    given: dict[str, Any] = {"protocol": ["safa", "fedavg"], "seed": [0, 1], "rounds": 8, "until": "loss=0.08"}
    rows = [swept(tmp_path / str(stack), stack, **given) for stack in (1, 4)]
    assert [row["rounds_to_target"] for row in rows[1]] == [None, 6, 3, 3]
    assert files(tmp_path / "1") == files(tmp_path / "4")


@pytest.mark.slow
def test_networks_and_different_rates_come_to_the_same_up_to_rounding(tmp_path: Path) -> None:
    given: dict[str, Any] = {"protocol": "safa", "lr": [0.1, 0.3], "seed": [0, 1], "rounds": 3, "momentum": 0.5}
    alone, together = (swept(tmp_path / str(stack), stack, "digits", **given) for stack in (1, 4))
    assert [row["lr"] for row in together] == [0.1, 0.1, 0.3, 0.3]
    for number, (one, other) in enumerate(zip(alone, together, strict=True), start=1):
        models = [load_run(tmp_path / stack / f"runs/{number:04d}").model() for stack in ("1", "4")]
        for name, tensor in models[0].items():
            assert np.allclose(tensor, models[1][name], atol=1e-5), name
        assert one["last_loss"] == pytest.approx(other["last_loss"], rel=1e-5)
        assert {k: v for k, v in one.items() if "loss" not in k} == {k: v for k, v in other.items() if "loss" not in k}


def test_a_stopped_sweep_is_resumed_with_any_stack(tmp_path: Path) -> None:
    given: dict[str, Any] = {"protocol": ["safa", "fedavg"], "seed": [0, 1, 2], "rounds": 3}
    swept(tmp_path / "whole", 1, **given)
    swept(tmp_path / "parts", 4, **given)
    for number in (2, 3, 6):
        for file in (tmp_path / f"parts/runs/{number:04d}").iterdir():
            file.unlink()
    swept(tmp_path / "parts", 2, **given)
    assert files(tmp_path / "whole") == files(tmp_path / "parts")


@pytest.mark.slow
def test_workers_take_stacks(tmp_path: Path) -> None:
    given: dict[str, Any] = {"protocol": ["safa", "fedavg"], "seed": [0, 1], "rounds": 2}
    swept(tmp_path / "alone", 1, **given)
    swept(tmp_path / "workers", 2, workers=2, **given)
    assert files(tmp_path / "alone") == files(tmp_path / "workers")


def test_from_python() -> None:
    alone, together = (sweep("boston", seed=range(3), rounds=2, stack=stack) for stack in (1, 3))
    assert alone.rows == together.rows
    with pytest.raises(SafaError, match="stack must be at least 1, not 0"):
        sweep("boston", seed=range(3), rounds=2, stack=0)


def test_runs_of_one_kind_are_grouped_in_order() -> None:
    def numbers(most: int, **given: list[Any]) -> list[list[int]]:
        runs = combinations(["boston"], given)
        return group_runs(runs, range(len(runs)), most)

    assert numbers(8, seed=[0, 1, 2]) == [[0, 1, 2]]
    assert numbers(2, seed=[0, 1, 2]) == [[0, 1], [2]]
    assert numbers(8, lr=[0.1, 0.2], seed=[0, 1]) == [[0, 1, 2, 3]]
    assert numbers(8, batch_size=[5, 10], seed=[0, 1]) == [[0, 1], [2, 3]]
    assert numbers(8, seed=[0, 1], local_steps=[0, 5]) == [[0], [1], [2], [3]]
    assert numbers(8, train=[False], seed=[0, 1]) == [[0], [1]]
    assert group_runs(combinations(["boston"], {"seed": [0, 1, 2, 3]}), [0, 2, 3], 2) == [[0, 2], [3]]


# -- what ends a run ---------------------------------------------------------------------------------------------------

RUNS = [Settings.of("boston", seed=seed, rounds=3) for seed in range(3)]


def rounds_of(settings: Settings, problem: Problem, trainer_of: TrainerOf, *, fails_after: int = 9) -> list[float]:
    losses = []
    for record in Experiment(settings, problem, trainer_of).rounds():
        if record.round > fails_after:
            raise SafaError(f"run {settings.seed} fails")
        losses.append(record.loss or 0.0)
    return losses


def test_an_error_of_one_run_does_not_touch_the_others() -> None:
    def job(settings: Settings, fails_after: int) -> Any:
        return lambda problem, trainer_of: rounds_of(settings, problem, trainer_of, fails_after=fails_after)

    sound = run_side_by_side(RUNS, [job(run, 9) for run in RUNS])
    found = run_side_by_side(RUNS, [job(RUNS[0], 9), job(RUNS[1], 1), job(RUNS[2], 9)])
    assert [found[0], found[2]] == [sound[0], sound[2]]
    assert isinstance(found[1], SafaError)
    assert str(found[1]) == "run 1 fails"


def test_an_error_of_the_training_ends_all_runs() -> None:
    ended = []

    def job(settings: Settings) -> Any:
        def run(problem: Problem, trainer_of: TrainerOf) -> None:
            def careless(*given: Any) -> Any:
                trainer = trainer_of(*given)
                return trainer if settings.seed else _Careless(trainer)

            try:
                rounds_of(settings, problem, careless)
            finally:
                ended.append(settings.seed)

        return run

    before = threading.active_count()
    with pytest.raises(MisuseError, match="local work is given in epochs or in steps"):
        run_side_by_side(RUNS, [job(run) for run in RUNS], TASKS["boston"].load())
    assert sorted(ended) == [0, 1, 2]
    assert threading.active_count() == before


class _Careless:
    """A trainer that is not told how much to train."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self.layout = trainer, trainer.layout

    def train(self, clients: Any, start: Any, **amount: Any) -> Any:
        return self._trainer.train(clients, start)
