"""Sweeps: what they keep, how they are resumed, and what they answer."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safa import load_run, simulate
from safa.analysis import TARGET_METRICS, Target, reached
from safa.cli.program import main
from safa.errors import SafaError
from safa.experiments.results import best, load_sweep
from safa.experiments.sweep import combinations, run_sweep, sweep
from safa.runs.lock import hold
from safa.runs.settings import Settings
from safa.runs.sweep_folder import KEEPS, Keep, SweepFolder
from safa.runs.table import csv_line, parsed_row
from safa.tasks import Problem
from safa.tasks.problem import Metric
from tests.programs import started

VALUES: dict[str, Any] = {"protocol": ["safa", "fedavg"], "seed": [0, 1], "rounds": [4], "until": ["loss=0.1"]}
RUNS = combinations(["boston"], VALUES)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(folder: Path, keep: Any = "records", **options: Any) -> dict[str, bytes]:
    assert len(list(run_sweep(RUNS, folder, keep=keep, **options))) == len(RUNS)
    return tree(folder)


def problem() -> Problem:
    x = torch.linspace(-1, 1, 90).reshape(30, 3)
    return Problem(
        model=lambda: torch.nn.Linear(3, 1),
        loss=lambda output, target: ((output[:, 0] - target) ** 2).mean(),
        metrics={"error": Metric(lambda output, target: (output[:, 0] - target).abs().mean(), higher_is_better=False)},
        train=(x[:20], x[:20, 0]),
        test=(x[20:], x[20:, 0]),
    )


MADE: list[Problem] = []


def make_sharded() -> Problem:
    """The same, with shards: its fleet cannot be made without it."""
    MADE.append(replace(problem(), shards=[np.arange(10), np.arange(10, 20)]))
    return MADE[-1]


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_runs_of_a_sweep_are_ordinary_runs(tmp_path: Path) -> None:
    files = made(tmp_path / "sweep", keep="models")
    simulate("boston", protocol="fedavg", seed=1, rounds=4, until="loss=0.1", threads=1, out=tmp_path / "run")
    theirs = tree(tmp_path / "sweep" / "runs" / "0004")
    mine = tree(tmp_path / "run")
    assert mine.keys() == {"config.toml", "rounds.jsonl", "summary.json", "model.safetensors"}
    assert {name: text for name, text in theirs.items() if name != "config.toml"} == {
        name: text for name, text in mine.items() if name != "config.toml"
    }
    assert load_run(tmp_path / "sweep" / "runs" / "0004").settings.seed == 1
    assert files.keys() >= {"sweep.json", "results.csv"}


@pytest.mark.parametrize(("keep", "more"), [("nothing", set()), ("records", {"config.toml", "rounds.jsonl"})])
def test_what_is_kept_does_not_change_the_table(keep: str, more: set[str], tmp_path: Path) -> None:
    files = made(tmp_path / "some", keep)
    assert files["results.csv"] == made(tmp_path / "all", "models")["results.csv"]
    kept = {f"runs/{n:04d}/{name}" for n in range(1, 5) for name in (*more, *(["summary.json"] if more else []))}
    assert files.keys() == {"sweep.json", "results.csv", "lock", *kept}


def test_a_target_ends_a_run_and_has_columns(tmp_path: Path) -> None:
    whole = combinations(["digits"], {"seed": [0], "rounds": [9]})
    ended = combinations(["digits"], {"seed": [0], "rounds": [9], "until": ["accuracy=0.5"]})
    (row,), (all_rounds,) = run_sweep(ended, tmp_path / "ended"), run_sweep(whole, tmp_path / "whole")
    assert row["rounds_to_target"] == len(list(load_run(tmp_path / "ended" / "runs" / "0001").records())) < 9
    assert not all_rounds.keys() & TARGET_METRICS.keys()
    records = load_run(tmp_path / "whole" / "runs" / "0001").records()
    assert reached(records, Target("accuracy", 0.5)) == {name: row[name] for name in TARGET_METRICS}


def test_long_settings_are_short_in_a_table() -> None:
    assert csv_line([(1.0, 2.0), None, "a,b", math.inf, True]) == b'2 values,,"a,b",inf,True\n'
    assert parsed_row("abcde", ["2 values", "", "0.5", "inf", "True"]) == {
        "a": "2 values", "b": None, "c": 0.5, "d": math.inf, "e": True,
    }  # fmt: skip


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPS)
def test_a_finished_sweep_is_not_run_again(keep: Any, tmp_path: Path) -> None:
    before = made(tmp_path, keep)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "lock"}
    assert made(tmp_path, keep) == before
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != "lock"} == times


@pytest.mark.parametrize("keep", ["records", "nothing"])
def test_a_table_that_was_cut_off_anywhere_is_completed(keep: Any, tmp_path: Path) -> None:
    before = made(tmp_path, keep)
    table = before["results.csv"]
    head = table.index(b"\n") + 1
    for size in (head, head + 1, head + 700, table.index(b"\n", head), table.index(b"\n", head) + 1, len(table) - 1):
        (tmp_path / "results.csv").write_bytes(table[:size])
        assert made(tmp_path, keep) == before
    (tmp_path / "results.csv").unlink()
    assert made(tmp_path, keep) == before


def test_runs_that_are_missing_or_half_written_are_run_again_and_no_others(tmp_path: Path) -> None:
    before = made(tmp_path)
    runs = tmp_path / "runs"
    shutil.rmtree(runs / "0002")
    (runs / "0004").rename(runs / "0004.part-123")
    (runs / "0004.part-123" / "summary.json").unlink()
    shutil.copytree(runs / "0004.part-123", runs / "0004.part-9.old")
    (runs / "0003.part-77").mkdir()
    (runs / "0003.part-77" / "config.toml.part").touch()
    others = {path: path.stat().st_mtime_ns for n in (1, 3) for path in (runs / f"{n:04d}").iterdir()}
    assert made(tmp_path) == before
    assert {path: path.stat().st_mtime_ns for path in others} == others


def test_another_sweep_in_the_folder_is_refused_and_replaced_with_force(tmp_path: Path) -> None:
    before = made(tmp_path)
    other = combinations(["boston"], VALUES | {"rounds": [3]})
    others: list[tuple[list[Settings], Keep]] = [(other, "records"), (RUNS[:3], "records"), (RUNS, "nothing")]
    for runs, keep in others:
        with pytest.raises(SafaError, match="holds another sweep; choose another folder, or replace it with --force"):
            next(run_sweep(runs, tmp_path, keep=keep))
    assert tree(tmp_path) == before
    assert len(list(run_sweep(other, tmp_path, force=True))) == 4
    assert {row["rounds"] for row in load_sweep(tmp_path).rows} == {3}


def test_what_somebody_else_put_there_is_refused(tmp_path: Path) -> None:
    made(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "0002")
    (tmp_path / "runs" / "0002").mkdir()
    (tmp_path / "runs" / "0002" / "thesis.tex").write_text("precious")
    before = tree(tmp_path)
    with pytest.raises(SafaError, match="0002 holds no run of this sweep; remove or rename it first"):
        next(run_sweep(RUNS, tmp_path))
    assert tree(tmp_path) == before
    with pytest.raises(SafaError, match="keep must be one of records, models, curves, nothing, not 'all'"):
        next(run_sweep(RUNS, tmp_path, keep="all"))  # type: ignore[arg-type]


def test_only_one_sweep_works_on_a_folder(tmp_path: Path) -> None:
    made(tmp_path)
    with hold(tmp_path), pytest.raises(SafaError, match="another sweep works on"):
        next(run_sweep(RUNS, tmp_path))


def test_a_damaged_sweep_is_one_sentence(tmp_path: Path) -> None:
    made(tmp_path, "nothing")
    table, plan = tmp_path / "results.csv", tmp_path / "sweep.json"
    whole, planned = table.read_text(), plan.read_text()
    for text, said in (
        (whole.replace("protocol", "rule", 1), "other columns"),
        (whole.replace("\nboston,", "\n", 1), r"line 2: needs \d+ fields, as many as there are columns, not \d+"),
        (whole + whole.partition("\n")[0] + "\n", r"line \d+: \w+ must be a number or nothing, not '\w+'"),
    ):
        table.write_text(text)
        with pytest.raises(SafaError, match=said):
            next(run_sweep(RUNS, tmp_path, keep="nothing"))
    table.write_bytes(b"\xff\n")
    with pytest.raises(SafaError, match="it is not text"):
        load_sweep(tmp_path)
    table.write_text(whole)
    for text, said in (
        ("[]", "of a format that this version cannot read"),
        (planned.replace('"seed"', '"seeds"'), "it does not hold the plan of a sweep"),
        (planned.replace('"nothing"', '"all"'), "it does not hold the plan of a sweep"),
        (planned[:-9], "it is not JSON"),
    ):
        plan.write_text(text)
        with pytest.raises(SafaError, match=said):
            load_sweep(tmp_path)
    plan.unlink()
    with pytest.raises(SafaError, match=r"holds no sweep: there is no sweep\.json in it"):
        load_sweep(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["records", "nothing"])
def test_twenty_kills(keep: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("kill_sweep.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "20", keep], capture_output=True, text=True, check=False
    )
    assert done.stdout == "20 kills\n", done.stderr


@pytest.mark.slow
def test_a_sweep_with_workers_that_is_killed_and_started_again_ends_with_the_same_bytes(tmp_path: Path) -> None:
    command = "sweep digits --protocol safa,fedbuff --seed 0-2 --rounds 12 --until accuracy=0.7 --quiet --workers"
    assert main([*command.split(), "1", "--out", str(tmp_path / "whole")]) == 0
    program = [sys.executable, "-m", "safa", *command.split(), "2", "--out", str(tmp_path / "killed")]
    with started(program) as process:
        while process.poll() is None and len(list((tmp_path / "killed" / "runs").glob("????"))) < 2:
            time.sleep(0.001)  # leaves the processor to the workers
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)  # its workers live on for a moment
        process.wait()
    assert main(program[3:]) == 0
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


# -- from Python -------------------------------------------------------------------------------------------------------


def test_a_sweep_from_python_lasts_as_long_as_its_object() -> None:
    found = sweep("boston", protocol=["safa", "fedavg"], seed=range(2), rounds=3)
    folder = found.folder
    assert [(row["protocol"], row["seed"]) for row in found.rows] == [
        ("safa", 0), ("safa", 1), ("fedavg", 0), ("fedavg", 1),
    ]  # fmt: skip
    assert [len(list(run.records())) for run in found.runs()] == [3, 3, 3, 3]
    assert [setting.name for setting in found.settings()] == ["safa", "fedavg"]
    assert list(found.to_pandas()["rounds"]) == [3, 3, 3, 3]
    assert found.best().task == "boston"
    assert folder.is_dir()
    del found
    assert not folder.exists()


def test_a_sweep_of_an_own_problem(tmp_path: Path) -> None:
    found = sweep(problem(), protocol=["safa", "fedavg"], rounds=3, clients=4, out=tmp_path)
    answer = found.best()
    assert (answer.metric, answer.seeds, answer.is_certain) == ("error", 1, False)
    errors = {row["protocol"]: row["last_error"] for row in found.rows}
    assert answer.first.values == {"protocol": min(errors, key=lambda name: errors[name])}
    assert found.best("error=100").first.reached == 1
    with pytest.raises(SafaError, match="runs with workers=1"):
        sweep(problem(), rounds=3, workers=2)


def test_a_function_that_makes_a_problem_is_called_once() -> None:
    MADE.clear()
    found = sweep(make_sharded, rounds=2, lr=0.1, seed=range(2))
    assert [row["task"] for row in found.rows] == [f"{__name__}:make_sharded"] * 2
    assert len(MADE) == 1


def test_without_records_only_the_own_target_can_be_asked_for(tmp_path: Path) -> None:
    made(tmp_path / "until", "nothing")
    made(tmp_path / "records")
    assert best(tmp_path / "until").to_json() == best(tmp_path / "records", "loss=0.1").to_json()
    with pytest.raises(SafaError, match=r"were not kept, so that only its own target, loss=0\.1, can be asked for"):
        best(tmp_path / "until", "loss=0.2")
    with pytest.raises(SafaError, match="were not kept; only its rows were"):
        load_sweep(tmp_path / "until").runs()
    plain = sweep("boston", rounds=2, keep="nothing")
    with pytest.raises(SafaError, match="were not kept, so that no target can be asked for"):
        plain.best("accuracy=0.1")


def test_runs_with_different_targets_are_compared_by_one_that_is_named() -> None:
    found = sweep("boston", until=["loss=100", "loss=1e-9"], rounds=2)
    with pytest.raises(SafaError, match="had several targets; name one, such as loss=100"):
        found.best()
    assert [standing.setting.reached for standing in found.best("loss=100").standings] == [1, 1]


def test_a_sweep_that_is_not_finished_has_no_answer(tmp_path: Path) -> None:
    rows: Iterator[Any] = run_sweep(RUNS, tmp_path)
    for _ in range(3):
        next(rows)
    with pytest.raises(SafaError, match=r"3 of the 4 runs in .* are finished; the command of the sweep resumes it"):
        load_sweep(tmp_path)
    del rows
    assert len(list(run_sweep(RUNS, tmp_path))) == 4
    assert load_sweep(tmp_path).place == SweepFolder.of(tmp_path, RUNS, "records")


def test_every_task_has_its_own_answer(tmp_path: Path) -> None:
    found = sweep(["boston", "digits"], protocol=["safa", "fedavg"], rounds=2, out=tmp_path)
    assert found.tasks == ["boston", "digits"]
    assert found.best(task="digits").first.values["task"] == "digits"
    with pytest.raises(SafaError, match="the sweep has several tasks; name one of boston, digits"):
        found.best()
    with pytest.raises(SafaError, match="the sweep has no task 'mnist'; it has boston, digits"):
        found.best(task="mnist")


# -- the commands ------------------------------------------------------------------------------------------------------


def test_a_sweep_prints_a_line_a_setting_and_prints_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        f"sweep digits --fraction 0.3,0.5 --seed 0-1,4 --rounds 6 --until accuracy=0.3 --workers 1 --out {tmp_path}"
    )
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    head, first, second, *notes = out.splitlines()
    assert head.split("  ")[0] == "fraction"
    assert "accuracy" in head
    assert "time to target, s" in head
    assert first.startswith("0.3 ")
    assert first.rstrip().endswith(" 1")
    assert "±" in second
    assert " to " in second
    assert notes[0] == "Means over 3 seeds with 95% intervals."
    assert main(command.split()) == 0
    again = capsys.readouterr()
    assert again.out == out
    assert f"6 runs in {tmp_path}/results.csv" in again.err.replace("\n", "")
    assert [row["seed"] for row in load_sweep(tmp_path).rows] == [0, 0, 1, 1, 4, 4]


@pytest.mark.parametrize(("target", "compared"), [("0.3", True), ("0.45", False), ("0.9", False)])
def test_times_are_compared_where_two_settings_have_them(
    target: str, compared: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both settings reach 0.3 with both seeds, one of them 0.45, none 0.9."""
    words = f"sweep boston --protocol safa,fedavg --rounds 20 --until accuracy={target} --seed 0,1 --workers 1 --out"
    assert main([*words.split(), str(tmp_path / "sweep")]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.rstrip().endswith("time, relative" if compared else "MB to target")
    assert all(len(line) <= len(head) for line in lines[:2])


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ("0-3,2", "seed lists 2 twice"),
        ("5-3", "a range of seeds must be FIRST-LAST"),
        ("0-99999999", "with 100,000 seeds at most"),
        ("0-", "seed must be a number, or a range FIRST-LAST such as 0-9, not '0-'"),
        ("a-b", "seed must be a number, or a range FIRST-LAST such as 0-9, not 'a-b'"),
    ],
)
def test_seeds_that_make_no_sense_are_one_sentence(seeds: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "boston", "--seed", seeds]) == 2
    assert said in capsys.readouterr().err
