"""The same settings, `threads` among them, give the same bytes, whatever the number of threads outside of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from safa import load_run, simulate
from safa.experiments.sweep import run_one
from safa.runs.settings import Settings
from safa.training import torch_threads
from tests.experiments.kill_and_resume import RESULTS

RUN = ("run", "digits", "--rounds", "2", "--epochs", "1", "--trainer", "batched", "--checkpoint-every", "1", "--quiet")
STOPPED = """
import sys
from pathlib import Path
from safa.experiments.simulate import Experiment, run_to_end
from safa.runs import RunWriter
from safa.runs.settings import Settings
experiment = Experiment(Settings.of("digits", rounds=2, epochs=1, trainer="batched", checkpoint_every=1))
rounds = run_to_end(experiment, RunWriter.begin(Path(sys.argv[1]), experiment.settings))
next(rounds)
next(rounds)  # the first checkpoint is written before the second round
"""


def run(outside: int, *command: str) -> None:
    """Run Python in a process in which torch would take so many threads."""
    environment = os.environ | {"OMP_NUM_THREADS": str(outside), "MKL_NUM_THREADS": str(outside)}
    subprocess.run([sys.executable, *command], env=environment, check=True)


def results(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RESULTS}


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_outside_does_not_matter(threads: int, tmp_path: Path) -> None:
    for outside in (1, 2):
        run(outside, "-m", "safa", *RUN, "--threads", str(threads), "--out", str(tmp_path / str(outside)))
    assert results(tmp_path / "1") == results(tmp_path / "2")


@pytest.mark.slow
def test_a_run_says_how_many_threads_it_took_and_is_resumed_with_them(tmp_path: Path) -> None:
    run(2, "-m", "safa", *RUN, "--out", str(tmp_path / "whole"))
    assert load_run(tmp_path / "whole").settings.threads == 2
    run(2, "-c", STOPPED, str(tmp_path / "cut"))
    run(1, "-m", "safa", "run", "--resume", str(tmp_path / "cut"), "--quiet")
    assert results(tmp_path / "cut") == results(tmp_path / "whole")


def test_a_run_from_python_names_its_threads_and_leaves_torch_as_it_was(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    assert simulate("boston", rounds=1, out=tmp_path / "default").settings.threads == before
    assert "threads = 3\n" in simulate("boston", rounds=1, threads=3, out=tmp_path / "three").settings.to_toml()
    assert load_run(tmp_path / "default").settings.threads == before
    assert load_run(tmp_path / "three").settings.threads == 3
    assert torch.get_num_threads() == before


def test_rounds_that_train_nothing_name_no_threads() -> None:
    assert simulate("boston", rounds=1, train=False).settings.threads == 0


@pytest.mark.parametrize(("given", "used"), [({}, 1), ({"threads": 3}, 3), ({"train": False}, 0)], ids=str)
def test_a_run_of_a_sweep_takes_one_thread_unless_another_number_is_given(given: dict[str, Any], used: int) -> None:
    with torch_threads(2):
        assert run_one(Settings.of("boston", rounds=1, **given))["threads"] == used
        assert torch.get_num_threads() == 2


def test_settings_of_an_older_run_have_no_threads() -> None:
    settings = Settings.of("boston")
    older = "\n".join(line for line in settings.to_toml().splitlines() if not line.startswith("threads"))
    assert "threads" not in older
    assert Settings(**tomllib.loads(older)) == settings
