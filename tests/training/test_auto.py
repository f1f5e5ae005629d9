"""`trainer = auto` measures once, remembers, says what it chose, and changes nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from safa import load_run, resume, simulate, sweep
from safa.runs.settings import Settings
from safa.tasks.problem import Problem
from safa.training import auto
from safa.training.auto import choose_trainer
from safa.training.batched import BatchedTrainer
from safa.training.batches import Ids
from safa.training.serial import SerialTrainer
from safa.training.threads import torch_threads
from safa.training.trainer import Trainer
from tests.training.equality import CASES, Case, Classifier, problem_of
from tests.training.problems import make, ragged_shards

KINDS = ("batched", "threads", "serial")
DIGITS: dict[str, Any] = {"rounds": 2, "epochs": 1, "clients": 4, "mean_size": 30.0, "threads": 1}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what is remembered."""
    monkeypatch.setenv("SAFA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return tmp_path / "cache"


def choose(problem: Problem, **given: Any) -> tuple[str, str]:
    settings = Settings.of("digits", batch_size=8, threads=1, **given)
    return choose_trainer(settings, problem, ragged_shards(8), torch.device("cpu"))


def remember(cache: Path, fastest: str, *, busy: bool = False) -> None:
    """Let the one measurement that is remembered say that this trainer was the fastest."""
    (file,) = cache.glob("trainer-*.npz")
    spent: dict[str, Any] = {kind: np.array(0.001 if kind == fastest else 0.002) for kind in KINDS}
    np.savez(file, busy=np.array(busy), **spent)


@pytest.mark.parametrize("kind", ["regression", "svm"])
def test_linear_models_need_no_measurement(kind: str, cache: Path) -> None:
    assert choose(make(kind)) == ("batched", "")
    assert not cache.exists()


def test_the_choice_is_remembered_and_said_with_its_figures(cache: Path) -> None:
    kind, words = choose(make("network"))
    assert kind in KINDS
    assert words.startswith(f"trainer {kind}, measured as the fastest for this model here: ")
    assert choose(make("network")) == (kind, words)
    remember(cache, "threads")
    assert choose(make("network")) == (
        "threads",
        "trainer threads, measured as the fastest for this model here: 1 ms a step of a client, batched 2, serial 2",
    )


@pytest.mark.parametrize(("scale", "expected"), [(1e-3, "serial"), (1.0, "batched")])
def test_one_bad_moment_leaves_a_trainer_out_only_where_measuring_takes_long(
    scale: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(trainer: Trainer, clients: Ids, _: Any, **amount: Any) -> float:
        late = isinstance(trainer, SerialTrainer)
        if "steps" in amount:  # the first measurement of all
            return scale * len(clients) * (5 if late else 1)
        return scale * (0.001 if late else 1000)

    monkeypatch.setattr(auto, "_seconds", seconds)
    assert choose(make("network"))[0] == expected


@pytest.mark.parametrize(("ahead", "expected"), [(1.1, "serial"), (1.5, "batched")])
def test_trainers_that_are_close_are_measured_for_longer(
    ahead: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0

    def seconds(trainer: Trainer, *_: Any, **amount: Any) -> float:
        nonlocal rounds
        if not isinstance(trainer, SerialTrainer):
            return 1 / ahead if isinstance(trainer, BatchedTrainer) else 2.0
        rounds += "epochs" in amount
        return 1.0 if rounds < 6 else 0.5

    monkeypatch.setattr(auto, "_seconds", seconds)
    assert choose(make("network"))[0] == expected


def test_what_was_measured_on_a_busy_machine_is_measured_again_on_an_idle_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "trainer threads, measured as the fastest for this model here: 1 ms a step of a client, batched 2, serial 2"
    choose(make("network"))
    remember(cache, "threads", busy=True)
    with monkeypatch.context() as load:
        load.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
        assert choose(make("network")) == ("threads", words)
    idle = choose(make("network"))
    assert idle[1] != words
    assert choose(make("network")) == idle


def test_another_model_batch_or_number_of_threads_is_measured_anew(cache: Path) -> None:
    choose(make("network"))
    choose(make("batch norm"))
    choose(make("network"), optimiser="adam")
    settings = Settings.of("digits", batch_size=16, threads=2)
    choose_trainer(settings, make("network"), ragged_shards(8), torch.device("cpu"))
    assert len(list(cache.glob("trainer-*.npz"))) == 4


def test_a_damaged_memory_is_made_again(cache: Path) -> None:
    choose(make("network"))
    (file,) = cache.glob("trainer-*.npz")
    file.write_bytes(b"rubbish")
    assert choose(make("network"))[0] in KINDS


def test_random_numbers_and_threads_are_left_as_they_were() -> None:
    problem = problem_of(Case(lambda: Classifier(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))), torch.float32)
    before = torch.get_rng_state()
    with torch_threads(2):
        choose(problem)
        assert torch.get_num_threads() == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_batched_is_not_measured_as_batched() -> None:
    kind, words = choose(problem_of(CASES["branch"], torch.float32))
    assert kind in ("threads", "serial")
    assert words.endswith("and torch cannot batch it")


def test_a_run_names_its_trainer_and_is_resumed_with_it(cache: Path, tmp_path: Path) -> None:
    simulate("digits", **DIGITS)
    remember(cache, "serial")
    whole = simulate("digits", out=tmp_path / "run", checkpoint_every=1, **DIGITS)
    assert load_run(tmp_path / "run").settings.trainer == whole.settings.trainer == "serial"
    explicit = simulate("digits", **DIGITS, trainer="serial")
    assert list(map(str, whole.records())) == list(map(str, explicit.records()))
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    (tmp_path / "cut" / "summary.json").unlink()
    remember(cache, "batched")
    assert resume(tmp_path / "cut").settings.trainer == "serial"


@pytest.mark.parametrize("keep", ["records", "nothing"])
def test_a_sweep_that_is_continued_keeps_its_trainer(keep: Any, cache: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {**DIGITS, "seed": range(3), "keep": keep, "out": tmp_path / "sweep"}
    sweep("digits", **{**given, "out": tmp_path / "first", "seed": [0]})
    remember(cache, "serial")
    sweep("digits", **given)
    table = tmp_path / "sweep" / "results.csv"
    whole = table.read_bytes()
    assert whole.count(b",serial,") == 3
    shutil.rmtree(tmp_path / "sweep" / "runs" / "0003", ignore_errors=True)
    table.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    remember(cache, "batched")
    sweep("digits", **given)
    assert table.read_bytes() == whole
