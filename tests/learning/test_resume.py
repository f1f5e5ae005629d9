"""A run that was stopped, anywhere and in any way, is taken up to the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from safa import load_run, simulate
from safa.cli import main
from safa.errors import SafaError
from safa.experiment import Experiment, play, take_up
from safa.runs import RunWriter
from safa.settings import Settings
from tests.learning.kill_and_resume import RESULTS


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_and_resume.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "20"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "20 kills\n", done.stderr


@pytest.mark.parametrize("protocol", ["safa", "fedavg", "local", "fedasync", "fedbuff"])
@pytest.mark.parametrize("stop", [1, 7, 12])
def test_every_protocol_is_taken_up_where_it_was(protocol: str, stop: int, tmp_path: Path) -> None:
    experiment = Experiment(Settings.of("boston", protocol=protocol, rounds=14, checkpoint_every=3))
    simulate("boston", protocol=protocol, rounds=14, checkpoint_every=3, out=tmp_path / "whole")
    rounds = play(experiment, RunWriter.begin(tmp_path / "cut", experiment.settings))
    for _ in range(stop):
        next(rounds)
    del rounds
    experiment, writer = take_up(tmp_path / "cut")
    assert experiment.finished == stop // 3 * 3
    for _ in play(experiment, writer):
        pass
    for name in RESULTS:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_run_that_came_to_its_end_is_not_taken_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate("boston", rounds=2, out=tmp_path / "run")
    assert main(["run", "--resume", str(tmp_path / "run")]) == 2
    assert "came to its end; there is nothing to take up" in capsys.readouterr().err


def test_resume_takes_everything_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "boston", "--resume", str(tmp_path)]) == 2
    assert "give no task and no settings with it" in capsys.readouterr().err


def test_a_run_in_memory_is_the_same_object_as_one_on_disk(tmp_path: Path) -> None:
    held = simulate("boston", rounds=5, seed=2)
    simulate("boston", rounds=5, seed=2, out=tmp_path / "run")
    read = load_run(tmp_path / "run")
    assert [record.to_json() for record in held.records()] == [record.to_json() for record in read.records()]
    assert held.summary == read.summary
    assert all((held.model()[name] == tensor).all() for name, tensor in read.model().items())
    with pytest.raises(SafaError, match="held in memory"):
        RunWriter.resume(held, 0)


def test_a_run_without_training_has_no_model() -> None:
    with pytest.raises(SafaError, match="no model was trained"):
        simulate("boston", rounds=2, train=False).model()
