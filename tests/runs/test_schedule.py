"""Schedules of the learning rate: their formulas, what is refused, and functions of one's own."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import safa
from safa import load_run, simulate
from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.runs.schedule import Schedule
from safa.runs.settings import Settings
from safa.tasks.references import load_reference, reference_of
from tests.training.problems import make

ROUNDS = np.arange(1, 11)


def halved(number: int) -> float:
    """A schedule of one's own."""
    return 0.5**number


def broken(number: int) -> float:
    raise RuntimeError("no such round")


class Scale:
    """Something with a name inside it."""

    @staticmethod
    def doubled(number: int) -> float:
        return 2.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant", [1.0] * 10),
        ("cosine", [(1 + math.cos(math.pi * (r - 1) / 10)) / 2 for r in range(1, 11)]),
        ("step:3:0.5", [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]),
        ("step:3:0", [1.0] * 3 + [0.0] * 7),
        ("warmup:4", [0.25, 0.5, 0.75] + [1.0] * 7),
        ("warmup:2+step:5:0.1", [0.5, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.1]),
    ],
)
def test_a_schedule_is_its_formula(text: str, expected: list[float]) -> None:
    schedule = Schedule.parse(text)
    np.testing.assert_allclose(schedule.factor(ROUNDS, 10), expected, rtol=1e-15)
    assert schedule.is_constant == (text == "constant")


def test_rounds_may_come_in_any_order_and_stay_at_the_last_one() -> None:
    found = Schedule.parse("cosine").factor(np.array([3, 1, 3, 10, 11]), 10)
    assert found[0] == found[2]
    assert found[1] == 1.0
    assert found[3] == found[4] > 0


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("step:10", "EVERY is a whole number of at least 1 and FACTOR a number from 0 to 1, as in step:10:0.5"),
        ("step:0:0.5", "EVERY is"), ("step:2.5:0.5", "EVERY is"), ("step:5:-1", "EVERY is"), ("step:5:1.1", "EVERY is"),
        ("step:5:nan", "EVERY is"), ("step:5:inf", "EVERY is"), ("step", "EVERY is"),
        ("warmup", "ROUNDS is a whole number of at least 1, as in warmup:5"), ("warmup:0", "ROUNDS"),
        ("warmup:-3", "ROUNDS"), ("warmup:x", "ROUNDS"),
        ("linear", ""), ("", ""), ("cosine+", ""), ("cosine:5", ""), ("a:b:c", ""), ("my-module:f", ""),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_refused_when_settings_are_made(text: str, hint: str) -> None:
    with pytest.raises(SafaError, match="a schedule must be constant, cosine, step:EVERY:FACTOR, warmup") as error:
        Settings.of("boston", schedule=text)
    assert f"not {text!r}" in str(error.value)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


# -- functions of one's own ------------------------------------------------------------------------------------------


def test_a_function_is_stored_by_its_name() -> None:
    settings = Settings.of("boston", schedule=halved)
    assert settings.schedule == "tests.runs.test_schedule:halved"
    assert load_reference(settings.schedule) is halved
    assert reference_of(Scale.doubled) == "tests.runs.test_schedule:Scale.doubled"


def test_a_function_without_a_name_that_can_be_imported_is_refused() -> None:
    def local(number: int) -> float:
        return 1.0

    for schedule in (local, lambda number: 1.0):
        with pytest.raises(SafaError, match="a lambda or a local function has no name that can be imported"):
            Settings.of("boston", schedule=schedule)


def test_a_function_of_a_script_has_the_name_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("from safa.tasks.references import reference_of\ndef f(r): return 1.0\nprint(reference_of(f))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "mine:f\n"
    script.rename(tmp_path / "not-a-name.py")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "not-a-name.py")], capture_output=True, text=True, check=False
    )
    assert "f cannot be imported by another process; define it in a module of its own" in done.stderr


COMMON: dict[str, Any] = {"clients": 4, "rounds": 4, "batch_size": 8, "lr": 0.1, "round_limit_s": 900.0}


def test_a_run_heeds_its_function() -> None:
    own, same, other = (
        simulate(make("svm"), schedule=schedule, **COMMON).model()
        for schedule in (halved, "tests.runs.test_schedule:halved", "constant")
    )
    assert all((own[name] == same[name]).all() for name in own)
    assert any((own[name] != other[name]).any() for name in own)


@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        ("tests.runs.test_schedule:broken", "the schedule .*:broken failed in round 1: RuntimeError: no such round"),
        ("tests.runs.test_schedule:nothing", "the module tests.runs.test_schedule has no attribute 'nothing'"),
        ("tests.runs.nowhere:f", "there is no module tests.runs.nowhere"),
        ("tests.runs.test_schedule:ROUNDS", "must be a function of the round, not a ndarray"),
        ("math:cos", "the schedule math:cos must return a number of at least 0, not -0.4"),
    ],
)
def test_a_function_that_is_no_schedule_is_refused_before_the_first_round(
    schedule: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(SafaError, match=why):
        simulate(make("svm"), schedule=schedule, out=tmp_path / "run", **COMMON)
    assert not (tmp_path / "run").exists()


def test_a_run_with_a_function_is_continued_if_it_is_given_again(tmp_path: Path) -> None:
    problem = make("svm")
    whole = simulate(problem, schedule=halved, checkpoint_every=2, out=tmp_path / "run", **COMMON)
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been stopped
    name = "tests.runs.test_schedule:halved"
    with pytest.raises(SafaError, match=f"the schedule of this run, {name}, is not built in; if you trust it"):
        safa.resume(tmp_path / "run", problem)
    with pytest.raises(SafaError, match=f"the schedule of this run is '{name}', not 'cosine'"):
        safa.resume(tmp_path / "run", problem, schedule="cosine")
    again = safa.resume(tmp_path / "run", problem, schedule=halved)
    replayed = replay(load_run(tmp_path / "run"), problem, schedule=name)
    for key, tensor in whole.model().items():
        assert (again.model()[key] == tensor).all()
        assert (replayed[key] == tensor).all()
