"""A run that was stopped, anywhere and in any way, is resumed to the same bytes."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import safa
from safa import load_run, simulate
from safa.cli.program import main
from safa.errors import SafaError
from safa.experiments.simulate import Experiment, resume_run, run_to_end
from safa.runs import RunWriter
from safa.runs.settings import Settings
from safa.tasks import Problem, task_of
from tests.experiments.kill_and_resume import RESULTS
from tests.training.problems import make


@pytest.mark.slow
def test_twenty_kills(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_and_resume.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "20"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "20 kills\n", done.stderr


@pytest.mark.parametrize(
    "protocol", ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff", "timelyfl", "fedcompass", "fedsecant"]
)
@pytest.mark.parametrize("stop", [1, 7, 12])
def test_every_protocol_is_resumed_where_it_was(protocol: str, stop: int, tmp_path: Path) -> None:
    experiment = Experiment(Settings.of("boston", protocol=protocol, rounds=14, checkpoint_every=3))
    simulate("boston", protocol=protocol, rounds=14, checkpoint_every=3, out=tmp_path / "whole")
    rounds = run_to_end(experiment, RunWriter.begin(tmp_path / "cut", experiment.settings))
    for _ in range(stop):
        next(rounds)
    del rounds
    experiment, writer = resume_run(tmp_path / "cut")
    assert experiment.server.finished == stop // 3 * 3
    for _ in run_to_end(experiment, writer):
        pass
    for name in RESULTS:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("protocol", ["safa", "local", "fedasync"])
@pytest.mark.parametrize(
    "given",
    [{"shuffle": True, "schedule": "warmup:3+cosine"}, {"local_steps": 7, "schedule": "step:4:0.5", "shuffle": True}],
    ids=["epochs", "steps"],
)
def test_shuffling_and_schedules_are_resumed_to_the_same_bytes(
    protocol: str, given: dict[str, Any], tmp_path: Path
) -> None:
    settings = Settings.of("boston", protocol=protocol, rounds=9, checkpoint_every=2, **given)
    experiment = Experiment(settings)
    for _ in run_to_end(experiment, RunWriter.begin(tmp_path / "whole", experiment.settings)):
        pass
    experiment = Experiment(settings)
    rounds = run_to_end(experiment, RunWriter.begin(tmp_path / "cut", experiment.settings))
    for _ in range(7):
        next(rounds)
    del rounds
    experiment, writer = resume_run(tmp_path / "cut")
    assert experiment.server.finished == 6
    for _ in run_to_end(experiment, writer):
        pass
    for name in RESULTS:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_finished_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate("boston", rounds=2, out=tmp_path / "run")
    assert main(["run", "--resume", str(tmp_path / "run")]) == 2
    assert "is finished; there is nothing to resume" in capsys.readouterr().err


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


# -- from Python, with a problem of one's own --------------------------------------------------------------------------

PROBLEM = make("svm")
GIVEN: dict[str, Any] = {"clients": 6, "rounds": 9, "epochs": 2, "batch_size": 8, "round_limit_s": 900.0,
                         "checkpoint_every": 3}  # fmt: skip


def stopped(folder: Path, after: int, problem: Problem = PROBLEM) -> None:
    """A run of a problem of one's own that was killed after so many rounds."""
    experiment = Experiment(Settings.of(task_of(problem, "your own"), **GIVEN), problem)
    rounds = run_to_end(experiment, RunWriter.begin(folder, experiment.settings))
    for _ in range(after):
        next(rounds)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("after", [1, 3, 8])
def test_a_run_of_a_problem_is_resumed_from_python_to_the_same_bytes(after: int, tmp_path: Path) -> None:
    simulate(PROBLEM, **GIVEN, out=tmp_path / "whole")
    stopped(tmp_path / "cut", after)
    run = safa.resume(tmp_path / "cut", PROBLEM)
    assert run.summary == load_run(tmp_path / "whole").summary
    for name in RESULTS:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    again = safa.replay(load_run(tmp_path / "cut"), PROBLEM)
    assert all((again[name] == tensor).all() for name, tensor in run.model().items())
    with pytest.raises(SafaError, match="is finished; there is nothing to resume"):
        safa.resume(tmp_path / "cut", PROBLEM)


def test_a_built_in_task_is_resumed_from_python_by_its_name(tmp_path: Path) -> None:
    simulate("boston", rounds=8, checkpoint_every=3, out=tmp_path / "whole")
    settings = Settings.of("boston", rounds=8, checkpoint_every=3)
    rounds = run_to_end(Experiment(settings), RunWriter.begin(tmp_path / "cut", settings))
    for _ in range(5):
        next(rounds)
    del rounds
    safa.resume(tmp_path / "cut")
    assert (tmp_path / "cut" / "rounds.jsonl").read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()


def test_a_problem_that_is_missing_or_wrong_is_one_sentence_and_changes_nothing(tmp_path: Path) -> None:
    stopped(tmp_path / "cut", 5)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    inputs, targets = PROBLEM.train
    few = replace(PROBLEM, train=(inputs[:50], targets[:50]))
    wide = replace(PROBLEM, model=lambda: torch.nn.Linear(inputs.shape[1], 7, dtype=torch.float64))
    for wrong, complaint in (
        (None, r"a problem that was given in Python; name it: safa\.resume\(folder, 'package\.module:attribute'\)"),
        ("boston", "the task of this run is 'your own', not 'boston'"),
        (few, "not the problem that the run was begun with: its data are"),
        (wide, "not the problem that the run was begun with: its model has other parameters"),
    ):
        with pytest.raises(SafaError, match=complaint):
            safa.resume(tmp_path / "cut", wrong)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# -- damaged checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [[6], [3, 6]])
def test_a_damaged_checkpoint_is_reported_and_the_run_has_the_same_bytes(broken: list[int], tmp_path: Path) -> None:
    simulate(PROBLEM, **GIVEN, out=tmp_path / "whole")
    stopped(tmp_path / "cut", 7)
    for number in broken:
        damage(tmp_path / "cut" / "checkpoint" / f"state-{number:06d}.safetensors")
    with pytest.warns(UserWarning, match=r"state-00000[36]\.safetensors is damaged: ") as told:
        safa.resume(tmp_path / "cut", PROBLEM)
    ends = "; resuming after round 3" if broken == [6] else "; starting again from round 1"
    assert [str(warning.message).endswith(ends) for warning in told] == [True] * len(broken)
    for name in RESULTS:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


@pytest.mark.parametrize("left", [4, 1, 0])
def test_rounds_that_are_fewer_than_the_checkpoint_says_fall_back(left: int, tmp_path: Path) -> None:
    simulate(PROBLEM, **GIVEN, out=tmp_path / "whole")
    stopped(tmp_path / "cut", 7)
    rounds = tmp_path / "cut" / "rounds.jsonl"
    rounds.write_text("".join(rounds.read_text().splitlines(keepends=True)[:left]))
    with pytest.warns(UserWarning, match=f"skipped: there are only {left} finished rounds"):
        safa.resume(tmp_path / "cut", PROBLEM)
    assert rounds.read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()


@pytest.mark.parametrize(("name", "value"), [("lr", "0.5"), ("seed", "7"), ("rounds", "999999")])
def test_settings_that_were_changed_lose_no_rounds(name: str, value: str, tmp_path: Path) -> None:
    stopped(tmp_path / "cut", 7)
    config, rounds = tmp_path / "cut" / "config.toml", tmp_path / "cut" / "rounds.jsonl"
    config.write_text(re.sub(rf"^{name} = .*$", f"{name} = {value}", config.read_text(), flags=re.MULTILINE))
    before = rounds.read_bytes()
    with pytest.raises(SafaError, match="was made for other settings"):
        safa.resume(tmp_path / "cut", PROBLEM)
    if name == "seed":  # without a checkpoint, the rounds themselves tell
        shutil.rmtree(tmp_path / "cut" / "checkpoint")
        with pytest.raises(SafaError, match="were not made with the settings there"):
            safa.resume(tmp_path / "cut", PROBLEM)
    assert rounds.read_bytes() == before


def seven_of_eleven_rounds(folder: Path) -> Settings:
    """A whole run, and one that was killed after seven of its rounds, with a checkpoint after six."""
    simulate("boston", rounds=11, checkpoint_every=3, out=folder / "whole")
    settings = load_run(folder / "whole").settings
    rounds = run_to_end(Experiment(settings), RunWriter.begin(folder / "cut", settings))
    for _ in range(7):
        next(rounds)
    return settings


def test_a_full_disk_is_a_sentence_and_the_run_is_resumed_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seven_of_eleven_rounds(tmp_path)
    file = tmp_path / "cut" / "checkpoint" / "state-000009.safetensors"
    Path(f"{file}.part").symlink_to("/dev/full")
    assert main(["run", "--resume", str(tmp_path / "cut"), "--quiet"]) == 2
    assert capsys.readouterr().err == f"safa: cannot write {file}: No space left on device\n"
    assert main(["run", "--resume", str(tmp_path / "cut"), "--quiet"]) == 0
    for result in RESULTS:
        assert (tmp_path / "cut" / result).read_bytes() == (tmp_path / "whole" / result).read_bytes(), result


def test_rounds_that_do_not_fit_are_a_sentence_and_the_run_is_resumed_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may grow by some bytes more: a part of a line is written, and no line behind it."""
    seven_of_eleven_rounds(tmp_path)
    rounds = tmp_path / "cut" / "rounds.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (rounds.stat().st_size + 100, limits[1]))
    try:
        assert main(["run", "--resume", str(tmp_path / "cut"), "--quiet"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == f"safa: cannot write {rounds}: File too large\n"
    assert len(list(load_run(tmp_path / "cut").records())) == 7
    assert main(["run", "--resume", str(tmp_path / "cut"), "--quiet"]) == 0
    for result in RESULTS:
        assert (tmp_path / "cut" / result).read_bytes() == (tmp_path / "whole" / result).read_bytes(), result
