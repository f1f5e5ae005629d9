"""Targets: when a run has reached one and held it, and runs that end then."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import safa
from safa.analysis import Reached, Target, reached
from safa.cli.program import main
from safa.errors import SafaError
from safa.experiments.simulate import Experiment, resume_run, run_to_end
from safa.experiments.sweep import run_one
from safa.protocol.records import RoundRecord
from safa.report import run_page, sweep_page
from safa.report.words import duration
from safa.runs import RunWriter, Settings
from tests.experiments.kill_and_resume import RESULTS
from tests.report.test_pages import specs_of, sweep, text_of
from tests.test_metrics import record

LOWER = {"perplexity": "lower"}


def scored(scores: list[float | None], name: str = "auc") -> list[RoundRecord]:
    """Rounds of 10 s and 5 bytes with these scores; None: not evaluated."""
    return [
        record(number, [0], [], bytes_down=2.0, bytes_up=3.0)
        if score is None
        else record(number, [0], [], bytes_down=2.0, bytes_up=3.0, loss=1.0, metrics={name: score})
        for number, score in enumerate(scores, 1)
    ]


@pytest.mark.parametrize(
    ("text", "scores", "round_reached"),
    [
        ("auc=0.5", [0.1, 0.5, 0.9], 2),
        ("auc=0.5,held=2", [0.6, 0.4, 0.5, 0.5], 3),
        ("auc=0.5,held=2", [0.6, None, 0.5, 0.1], 1),
        ("auc=0.5,held=3", [0.6, 0.6, 0.4, 0.6, 0.6], None),
        ("auc=0.5,held=2", [0.6, math.nan, 0.6, 0.6], 3),
        ("auc=0.5", [math.nan, None, 0.4], None),
        ("auc = 0.5, held = 1", [0.5], 1),
    ],
)
def test_a_target_is_reached_in_the_first_round_from_which_on_it_is_held(
    text: str, scores: list[float | None], round_reached: int | None
) -> None:
    found = reached(scored(scores), Target.parse(text, {"auc": "higher"}))
    at = (None, None, None) if round_reached is None else (10.0 * round_reached, round_reached, 5.0 * round_reached)
    assert tuple(found.values()) == at


def test_a_target_where_lower_is_better() -> None:
    records = scored([9.0, 4.0, 5.0, 3.0], "perplexity")
    assert reached(records, Target.parse("perplexity=4.5", LOWER))["rounds_to_target"] == 2
    assert reached(records, Target.parse("perplexity=4.5,held=2", LOWER))["rounds_to_target"] is None
    assert reached(records, Target.parse("loss=1", LOWER))["rounds_to_target"] == 1
    assert reached(records, Target.parse("loss=0.9", LOWER))["rounds_to_target"] is None


def test_what_was_held_stays_reached() -> None:
    follower = Reached(Target.parse("auc=0.5,held=2", {"auc": "higher"}))
    for one in scored([0.6, 0.6, 0.1]):
        follower.add(one)
    assert follower.held
    assert follower.values()["rounds_to_target"] == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("f1=0.5", "there is no metric 'f1' to reach.*there is loss, accuracy"),
        ("accuracy", "a target must be METRIC=VALUE or METRIC=VALUE,held=ROUNDS, not 'accuracy'"),
        ("accuracy=high", "a target must be METRIC=VALUE"),
        ("accuracy=nan", "a target must be METRIC=VALUE"),
        ("accuracy=0.5,held=0", "a target must be METRIC=VALUE"),
        ("accuracy=0.5,kept=2", "a target must be METRIC=VALUE"),
    ],
)
def test_a_target_that_cannot_be_is_one_sentence(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SafaError, match=complaint):
        Settings.of("boston", until=text)
    assert main(["run", "boston", "--until", text, "--out", str(tmp_path / "run")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_target_needs_training() -> None:
    with pytest.raises(SafaError, match="until has no effect where nothing is trained"):
        Settings.of("boston", until="accuracy=0.5", train=False)


# -- runs that end at their target -------------------------------------------------------------------------------------

GIVEN: dict[str, Any] = {"protocol": "fedavg", "fraction": 1.0, "rounds": 30, "crash_rate": 0.0, "threads": 1}


@pytest.fixture(scope="module")
def whole() -> list[RoundRecord]:
    """A run without a target."""
    return list(safa.simulate("boston", **GIVEN).records())


def between(whole: list[RoundRecord], number: int, name: str = "accuracy") -> float:
    """A value that is first reached in that round."""
    scores = [one.metrics[name] if name == "accuracy" else one.loss or 0.0 for one in whole]
    before, after = scores[number - 2 : number]
    assert before != after
    return (before + after) / 2


def test_a_run_ends_in_the_round_in_which_its_target_was_held(whole: list[RoundRecord]) -> None:
    assert all(a.metrics["accuracy"] < b.metrics["accuracy"] for a, b in pairwise(whole[:12])), "it rises"
    run = safa.simulate("boston", **GIVEN, until=f"accuracy={between(whole, 7)},held=3")
    records = list(run.records())
    assert [one.to_json() for one in records] == [one.to_json() for one in whole[:9]]
    assert run.summary is not None
    assert (run.summary["rounds_to_target"], run.summary["time_to_target_s"]) == (7, whole[6].closed_s)
    assert run.summary["bytes_to_target"] == sum(one.bytes_down + one.bytes_up for one in whole[:7])
    assert run.summary["virtual_time_s"] == whole[8].closed_s


def test_a_target_for_the_loss_and_evaluations_now_and_then(whole: list[RoundRecord]) -> None:
    run = safa.simulate("boston", **GIVEN, until=f"loss={between(whole, 7, 'loss')},held=2", eval_every=4)
    assert run.summary is not None
    assert run.summary["rounds_to_target"] == 8
    assert len(list(run.records())) == 12


def test_a_target_that_is_not_reached_changes_nothing_but_says_so(whole: list[RoundRecord]) -> None:
    run = safa.simulate("boston", **GIVEN, until="accuracy=2")
    assert [one.to_json() for one in run.records()] == [one.to_json() for one in whole]
    assert run.summary is not None
    assert run.summary["time_to_target_s"] is None
    assert "Time to target time_to_target_s not reached accuracy 2, not within" in text_of(run_page(run))


def test_a_run_of_a_sweep_ends_at_its_target_too(whole: list[RoundRecord]) -> None:
    row = run_one(Settings.of("boston", **GIVEN, until=f"accuracy={between(whole, 5)}"))
    assert (row["rounds_to_target"], row["virtual_time_s"]) == (5, whole[4].closed_s)


def test_the_best_of_a_sweep_with_a_target_is_there_first(whole: list[RoundRecord], tmp_path: Path) -> None:
    given = {name: [value] for name, value in GIVEN.items() if name != "fraction"}
    given |= {"train": [True], "fraction": [0.2, 1.0], "until": [f"accuracy={between(whole, 5)}"]}
    rows = sweep(tmp_path, ["boston"], **given)
    times = {row["fraction"]: row["time_to_target_s"] for row in rows}
    best = min((time, fraction) for fraction, time in times.items() if time is not None)[1]
    said = text_of(sweep_page(rows))
    assert f"First to accuracy {between(whole, 5):g} C {best:g} " in said
    assert "Time to the target" in said
    many = [
        row | {"seed": seed, "time_to_target_s": time}
        for row, of in zip(rows, ((1.0, 100.0), (30.0, 30.0)), strict=True)
        for seed, time in enumerate(of)
    ]
    ahead = "C 0.2 ahead, but cannot be told from the next It takes time_to_target_s 10 s"
    assert ahead in text_of(sweep_page(many)), "as safa best has it"
    assert "when the target was reached, and then held" in sweep_page(rows)
    assert f"{rows[-1]['bytes_to_target'] / 1e6:.4g} MB" in said
    assert "none No setting reached" in text_of(sweep_page([row | {"time_to_target_s": None} for row in rows]))


def test_a_setting_that_did_not_always_reach_the_target_has_no_mean_time_on_the_page(tmp_path: Path) -> None:
    rows = sweep(tmp_path, ["boston"], fraction=[0.2, 0.6, 1.0], seed=[0, 1])
    times = {(0.2, 0): 10.0, (0.6, 0): 400.0, (0.6, 1): 100.0, (1.0, 0): 300.0, (1.0, 1): 150.0}
    rows = [
        row | {"until": "accuracy=0.5", "time_to_target_s": times.get((row["fraction"], row["seed"]))} for row in rows
    ]
    said, points = text_of(sweep_page(rows)), by_fraction(sweep_page(rows))
    assert [(point["x"], point["mean"]) for point in points] == [(0.6, 250.0), (1.0, 225.0)]
    assert "Only settings are shown with which every run reached it." in said
    first = "First to accuracy 0.5 C 0.6 ahead, but cannot be told from the next It takes time_to_target_s 3.33 min"
    assert first in said, "the times differ by world, and the ratios count"
    fedavg = [row | {"protocol": "fedavg", "time_to_target_s": 7.0} for row in rows]
    page = sweep_page([row | {"time_to_target_s": None} for row in rows] + fedavg)
    assert {point["series"] for point in by_fraction(page)} == {"FedAvg"}
    assert '"domain": ["SAFA", "FedAvg"]' in json.dumps(specs_of(page)), "each looks the same in every chart"
    nowhere = [row | {"time_to_target_s": 5.0 if row["seed"] else None} for row in rows]
    assert "Time to the target by" not in text_of(sweep_page(nowhere))


def by_fraction(page: str) -> list[dict[str, Any]]:
    """The points of the first chart along what was varied: that of times to the target."""
    return next(rows for spec in specs_of(page) for rows in spec["datasets"].values() if "x" in rows[0])


def test_page_and_summary_say_when_the_target_was_reached(
    whole: list[RoundRecord], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = f"--protocol fedavg --fraction 1 --rounds 30 --crash-rate 0 --until accuracy={between(whole, 6)}"
    assert main(f"run boston {given} --out {tmp_path / 'run'}".split()) == 0
    words = f"in round 6, after {whole[5].closed_s:,.0f} s."
    assert words in capsys.readouterr().out
    said = text_of(run_page(safa.load_run(tmp_path / "run")))
    assert "Finished after 6 rounds." in said
    assert f"Time to target time_to_target_s {duration(whole[5].closed_s)} accuracy " in said
    assert ", reached in round 6" in said
    assert "at most 30 rounds" in said


@pytest.mark.parametrize("stop", [1, 5, 7, 8])
def test_a_run_with_a_target_is_resumed_to_the_same_bytes_and_replayed(
    whole: list[RoundRecord], stop: int, tmp_path: Path
) -> None:
    """The target is held in round 8, after which a checkpoint is written; stopped there, nothing is left to do."""
    given = GIVEN | {"until": f"accuracy={between(whole, 7)},held=2", "checkpoint_every": 4}
    safa.simulate("boston", **given, out=tmp_path / "whole")
    experiment = Experiment(Settings.of("boston", **given))
    rounds = run_to_end(experiment, RunWriter.begin(tmp_path / "cut", experiment.settings))
    for _ in range(stop):
        next(rounds)
    del rounds
    experiment, writer = resume_run(tmp_path / "cut")
    assert experiment.server.finished == stop // 4 * 4
    assert experiment.is_over == (stop == 8)
    left = [one.round for one in run_to_end(experiment, writer)]
    assert left == list(range(stop // 4 * 4 + 1, 9))
    for name in RESULTS:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    run = safa.load_run(tmp_path / "cut")
    assert all((safa.replay(run)[name] == tensor).all() for name, tensor in run.model().items())
