"""The arena: one rule for tuning, fresh seeds for judging, equal time for all, the same bytes however it is made."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch

from safa import simulate
from safa.analysis import Curve
from safa.analysis.statistics import Interval, paired_ratio
from safa.cli.program import main
from safa.errors import SafaError
from safa.experiments.arena import Arena, Judged, Run, Tuned
from safa.experiments.arena_plan import Choice, Plan, World
from safa.experiments.arena_problems import boston_every_third, kdd99_every_third
from safa.experiments.arena_results import Ratio, Results, Standing
from safa.experiments.arena_tables import write_results
from safa.experiments.engines import LocalEngine
from safa.report import write_report
from safa.runs import Settings
from safa.tasks import Problem, boston, kdd99

PLAN = """
format = "safa arena 1"
tuning_seeds = [0, 1]
judging_seeds = [10, 11]
baselines = ["buffer", "fedavg"]

[targets]
of = "buffer"
shares = [0.6, 0.9]
held = 0.01

[win]
protocol = "safa"
equal = [["near", "far"]]

[settings]
trainer = "batched"

[worlds.near]
task = "boston"
horizon_s = 500
lr = [1e-4, 3e-4]
crash_rate = 0.1

[worlds.far]
task = "boston"
horizon_s = 400
lr = [1e-4, 1e-3]
targets = [0.3]
judging_seeds = [20, 21]
trace = [[0, 0, 400], [1, 0, 400], [2, 0, 400], [3, 0, 400], [4, 0, 400]]

[protocols.safa]
knob = "lag_tolerance"
values = [5, 1]

[protocols.buffer]
protocol = "fedbuff"
knob = "buffer_size"
values = ["40%", "39%", 1]

[protocols.fedavg]
"""


def planned(folder: Path, text: str = PLAN) -> Path:
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def tree(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="session")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return Plan.read(planned(tmp_path_factory.mktemp("plan")))


@pytest.fixture(scope="session")
def made(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Arena:
    """An arena that is finished, with its results."""
    folder = tmp_path_factory.mktemp("arena") / "out"
    file = planned(tmp_path_factory.mktemp("given"))
    assert main(["arena", str(file), "--out", str(folder), "--workers", "1", "--quiet"]) == 0
    return Arena(plan, folder)


# -- tuning and judging ------------------------------------------------------------------------------------------------


def test_every_protocol_is_tried_with_every_learning_rate_and_value_of_its_knob(made: Arena) -> None:
    names = "protocol", "lag_tolerance", "buffer_size", "lr", "seed"
    tried = [tuple(row[name] for name in names) for row in rows(made.folder / "near" / "tuning" / "results.csv")]
    knobs = [("safa", "5", "10"), ("safa", "1", "10"), ("fedbuff", "5", "2"), ("fedbuff", "5", "1")]  # 40% of 5 is 2
    assert tried == [
        (*knob, lr, seed) for knob in [*knobs, ("fedavg", "5", "10")] for lr in ("0.0001", "0.0003") for seed in "01"
    ]


def test_targets_are_shares_of_what_one_protocol_ends_with(made: Arena) -> None:
    ends: dict[str, list[float]] = {}
    for row in rows(made.folder / "near" / "tuning" / "results.csv"):
        if row["protocol"] == "fedbuff":
            ends.setdefault(row["lr"] + row["buffer_size"], []).append(float(row["last_accuracy"]))
    best = max(fmean(of) for of in ends.values())
    near, far = made.judged()
    assert list(near.tuned.targets) == pytest.approx([share * best for share in (0.6, 0.9)], rel=1e-3)
    assert far.tuned.targets == [0.3], "as the world says"


def test_the_best_choice_is_the_first_at_the_targets(made: Arena) -> None:
    """The rule, written out once more."""
    world = made.plan.worlds["near"]
    near, scores = made.judged()[0], dict[tuple[str, ...], list[tuple[float, float]]]()
    for row in rows(made.folder / "near" / "tuning" / "results.csv"):
        key = row["protocol"], row["lr"], row["lag_tolerance"], row["buffer_size"]
        curve = Curve.parse(row["curve"])
        times = [curve.time_to(target, held_s=5.0, until_s=500.0) for target in near.tuned.targets]
        logs = [math.log(1000.0 if time is None else time) for time in times]
        scores.setdefault(key, []).append((fmean(logs), curve.mean(world.horizon_s)))
    for name, protocol in (("safa", "safa"), ("buffer", "fedbuff"), ("fedavg", "fedavg")):
        found = {
            key: (fmean(log for log, _ in of), -fmean(mean for _, mean in of))
            for key, of in scores.items()
            if key[0] == protocol
        }
        choice = near.tuned.best[name]
        lag, buffer = (choice.value, 10) if name == "safa" else (5, 10 if choice.value is None else choice.value)
        best = (protocol, str(choice.lr), str(lag), str(buffer))
        assert found[best] == min(found.values())


def test_judging_is_on_fresh_seeds_with_what_was_tuned(made: Arena) -> None:
    near, far = made.judged()
    assert [run.seed for run in near.runs["safa"]] == [10, 11]
    assert [run.seed for run in far.runs["safa"]] == [20, 21]
    assert {run.choice for run in near.runs["buffer"]} == {near.tuned.best["buffer"]}
    assert near.tuned.runs == 5 * 2 * 2
    row = near.runs["fedavg"][0].row
    given = {"crash_rate": 0.1, "lr": near.tuned.best["fedavg"].lr, "seed": 10, "trainer": "batched", "threads": 1}
    run = simulate("boston", protocol="fedavg", rounds=1000, time_limit_s=500.0, eval_clients=True, **given)  # type: ignore[arg-type]
    assert run.summary is not None
    assert run.summary["last_accuracy"] == row["last_accuracy"]
    assert run.summary["client_accuracy_worst_decile"] == row["client_accuracy_worst_decile"]


def test_all_runs_of_a_world_end_at_its_horizon(made: Arena) -> None:
    for judged in made.judged():
        end = judged.tuned.world.horizon_s
        closed = {name: [run.row["virtual_time_s"] for run in runs] for name, runs in judged.runs.items()}
        assert all(time <= end for times in closed.values() for time in times)
        assert min(closed["buffer"]) > 0.8 * end
        longer = simulate("boston", rounds=200, time_limit_s=end, crash_rate=0.1, seed=10, train=False)
        whole = simulate("boston", rounds=200, crash_rate=0.1, seed=10, train=False)
        kept = [record.to_json() for record in whole.records() if record.closed_s <= end]
        assert [record.to_json() for record in longer.records()] == kept
        assert len(kept) < 200


# -- resuming ----------------------------------------------------------------------------------------------------------


class Stopped(BaseException):
    """Stops an arena."""


def test_an_arena_that_is_stopped_anywhere_comes_to_the_same_bytes(plan: Plan, made: Arena, tmp_path: Path) -> None:
    moments = iter([1, 11, 12, 4, 3, 20])
    left = next(moments)

    def stop(_: str, found: Iterable[Any], __: int) -> Iterator[Any]:
        nonlocal left
        for row in found:
            yield row
            left -= 1
            if left == 0:
                raise Stopped

    stops = 0
    worlds = plan.chosen([])
    while True:
        try:
            Arena(plan, tmp_path / "out", watch=stop).run(worlds, ("tune", "judge"), LocalEngine())
            break
        except Stopped:
            stops, left = stops + 1, next(moments, 1000)
    assert stops >= 5
    write_results(Arena(plan, tmp_path / "out"))
    expected = tree(made.folder)
    expected.pop("report.html")
    assert tree(tmp_path / "out") == expected


KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from safa.experiments.arena import Arena
from safa.experiments.arena_plan import Plan
from safa.experiments.engines import LocalEngine

def kill(_, rows, __):
    for number, row in enumerate(rows):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield row

plan = Plan.read(Path(sys.argv[1]))
Arena(plan, Path(sys.argv[2]), watch=kill).run(plan.chosen(["far"]), ("tune", "judge"), LocalEngine())
"""


@pytest.mark.slow
def test_an_arena_that_is_killed_is_resumed_with_more_workers(made: Arena, tmp_path: Path) -> None:
    file, out = planned(tmp_path), tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(file), str(out)], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr.decode()
    assert 5 <= len(rows(out / "far" / "tuning" / "results.csv")) <= 6
    command = ["arena", str(file), "--out", str(out), "--worlds", "far", "--workers", "2", "--quiet"]
    assert main(command) == 0
    assert tree(out / "far") == tree(made.folder / "far")


BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Block())
from safa.cli.program import main
sys.exit(main(sys.argv[1:]))
"""
NOT_THERE = {
    "altair", "flwr", "hypothesis", "matplotlib", "pandas", "pooch", "ray", "requests", "rich", "safetensors", "scipy",
    "sklearn", "tqdm", "vl_convert",
}  # fmt: skip


@pytest.mark.slow
def test_numpy_and_torch_are_enough(made: Arena, tmp_path: Path) -> None:
    file, out = planned(tmp_path), tmp_path / "out"
    program = BLOCKED.replace("{names}", repr(NOT_THERE))
    command = [
        sys.executable,
        "-c",
        program,
        "arena",
        str(file),
        "--out",
        str(out),
        "--worlds",
        "far",
        "--workers",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    near = {name for name in tree(made.folder) if name.startswith("near/")}
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Written to {out / 'arena.md'}\n"
    assert "far, judged: 6 of 6 runs" in done.stderr
    assert tree(out).keys() == tree(made.folder).keys() - {"report.html"} - near
    assert tree(out / "far") == tree(made.folder / "far")
    assert "World far" in write_report(out).read_text(), "elsewhere"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('format = "safa arena 1"', "", 'its format must be "safa arena 1"'),
        ("tuning_seeds = [0, 1]", "tuning_seeds = [0, 11]", "judged on fresh seeds, but 11 is a seed for tuning, too"),
        ("tuning_seeds = [0, 1]", "tuning_seeds = [0, 0]", "tuning_seeds must be different whole numbers"),
        ("tuning_seeds = [0, 1]", "tuning_seeds = []", "must be a list with values"),
        ("horizon_s = 500", "horizon_s = 500\ntuning_seeds = [5, 11]", "but 11 is a seed for tuning, too"),
        ('baselines = ["buffer"', 'baselines = ["bufer"', r"no 'bufer' in the plan \(did you mean buffer\?\)"),
        ('equal = [["near", "far"]]', 'equal = [["near", "of"]]', "no 'of' in the plan"),
        ("held = 0.01", "hold = 0.01", "targets has no 'hold'"),
        ("shares = [0.6, 0.9]", "", "targets must have of and shares"),
        ("horizon_s = 500", "", "world near must have horizon_s"),
        ("horizon_s = 500", "horizon_s = 0", "horizon_s of world near must be above 0"),
        ("values = [5, 1]", "", "protocol safa must have both knob and values, or neither"),
        ("[worlds.near]", '[worlds."../near"]', "the name of a world is made of letters"),
        ("[targets]", "settings = 3\n[targets]", "settings of the plan must be a table"),
        ("[settings]", "[settings", "is not a plan"),
        ("[settings]", "[tuned.nea]\n[settings]", "there is no 'nea' in the plan .did you mean near"),
        ("[settings]", "[tuned.near]\nsaf = { lr = 1e-4 }\n[settings]", "there is no 'saf' in the plan"),
        ("[settings]", "[tuned.near]\nsafa = 3\n[settings]", "tuned.near.safa must be a table"),
        ("[settings]", "[tuned.near]\nsafa = { value = 5 }\n[settings]", "tuned.near.safa must have lr"),
        ("[settings]", "[tuned.near]\nsafa = { lr = 1e-4, knob = 5 }\n[settings]", "tuned.near.safa has no 'knob'"),
    ],
)
def test_a_plan_that_is_wrong_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = PLAN.replace("[settings]\n", "", 1) if new.startswith("settings") else PLAN
    assert text.count(old) >= 1
    with pytest.raises(SafaError, match=message):
        Plan.read(planned(tmp_path, text.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("crash_rate = 0.1", "crash_rat = 0.1", "world near: safa has no setting 'crash_rat'"),
        ("crash_rate = 0.1", "crash_rate = 2", "world near: crash_rate must be at least 0 and at most 1"),
        ("crash_rate = 0.1", "mixing = 0.5", "world near: mixing has no effect with protocol"),
        ("[protocols.fedavg]", '[protocols.fedavg]\n[protocols.again]\nprotocol = "fedavg"', "fedavg and again have"),
        ('"40%"', '"forty%"', "a share of the clients is written as 10%, not 'forty%'"),
        (
            "[settings]",
            "[tuned.near]\nsafa = { lr = 1e-4, value = 4 }\n[settings]",
            "near: safa cannot have been tuned to",
        ),
        (
            "[settings]",
            "[tuned.far]\nfedavg = { lr = 3e-4 }\n[settings]",
            "far: fedavg cannot have been tuned to lr 0.0003",
        ),
        ("[settings]", "[tuned.near]\nbuffer = { lr = 1e-4, value = 1 }\n[settings]", "buffer is not tuned again, so"),
    ],
)
def test_runs_that_are_wrong_are_refused_before_the_first(old: str, new: str, message: str, tmp_path: Path) -> None:
    plan = Plan.read(planned(tmp_path, PLAN.replace(old, new, 1)))
    with pytest.raises(SafaError, match=message):
        plan.check(plan.chosen([]))


def test_results_of_another_plan_are_refused(made: Arena, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(made.folder)
    other = planned(tmp_path, PLAN.replace("shares = [0.6, 0.9]", "shares = [0.6, 0.8]"))
    assert main(["arena", str(other), "--out", str(made.folder), "--workers", "1"]) == 2
    assert "holds the results of another plan; choose another folder" in capsys.readouterr().err
    assert tree(made.folder) == before
    commented = planned(tmp_path, f"# a remark\n{PLAN}")
    assert main(["arena", str(commented), "--out", str(made.folder), "--workers", "1", "--quiet"]) == 0
    assert tree(made.folder) == before


def test_a_folder_of_something_else_and_stages_out_of_order_are_refused(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SafaError, match="holds something else than an arena"):
        Arena(plan, tmp_path / "full")
    arena = Arena(plan, tmp_path / "new")
    with pytest.raises(SafaError, match="not been tuned in world near yet; begin with stage tune"):
        arena.run(plan.chosen(["near"]), ("judge",), LocalEngine())
    with pytest.raises(SafaError, match="no world has been judged"):
        write_results(arena)
    with pytest.raises(SafaError, match=r"no world 'neer' \(did you mean near\?\); there are near, far"):
        plan.chosen(["neer"])
    assert [world.name for world in plan.chosen(["f*"])] == ["far"]


def test_what_is_wrong_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(planned(tmp_path))
    assert main(["arena", str(tmp_path / "nothing.toml")]) == 2
    assert main(["arena", file, "--out", str(tmp_path / "out"), "--stage", "tun"]) == 2
    assert main(["arena", file, "--out", str(tmp_path / "out"), "--workers", "0"]) == 2
    missing, stage, workers = capsys.readouterr().err.splitlines()
    assert missing == f"safa: cannot read {tmp_path / 'nothing.toml'}: No such file or directory"
    assert stage == "safa: there is no stage 'tun' (did you mean tune?); there are tune, judge, report"
    assert workers == "safa: workers must be at least 1, not 0"


def test_worlds_can_be_made_one_by_one(plan: Plan, made: Arena, tmp_path: Path) -> None:
    arena = Arena(plan, tmp_path / "out")
    arena.run(plan.chosen(["far"]), ("tune",), LocalEngine())
    arena.run(plan.chosen(["far"]), ("judge",), LocalEngine())
    assert write_results(arena).missing == ["near"]
    assert "Not judged yet: near." in (tmp_path / "out" / "arena.md").read_text()
    assert tree(tmp_path / "out" / "far") == tree(made.folder / "far")


# -- the results -------------------------------------------------------------------------------------------------------


def standing(plan: Plan, *texts: str, other: str = "") -> tuple[Standing, Standing]:
    """Two protocols with these curves, a seed each."""
    world = World("made", "boston", {}, 100.0, [0.1, 0.2], [7], [0, 1])
    choices = {"a": Choice("a", 0.1), "b": Choice("b", 0.1)}
    tuned = Tuned(world, [0.5, 0.8], choices, 2)
    curves = {"a": texts, "b": other.split("|")}
    runs = {
        name: [Run(choices[name], seed, {}, Curve.parse(text)) for seed, text in enumerate(of)]
        for name, of in curves.items()
    }
    judged = Judged(tuned, runs)
    return Standing(judged, "a", 0.0), Standing(judged, "b", 0.0)


def test_a_ratio_is_taken_seed_by_seed_over_all_targets(plan: Plan) -> None:
    a, b = standing(plan, "10:0.5 40:0.8", "20:0.5 30:0.9", other="20:0.5 80:0.8|20:0.5 40:0.8")
    found = a.ratio(b)
    assert found is not None
    assert found.bound == ""
    expected = paired_ratio([math.sqrt(10 * 40), math.sqrt(20 * 30)], [math.sqrt(20 * 80), math.sqrt(20 * 40)])
    assert found.interval.mean == pytest.approx(expected.mean)
    assert found.interval.low == pytest.approx(expected.low)
    assert found.interval.high == pytest.approx(expected.high)
    single = a.ratio(b, [0.5])
    assert single is not None
    assert single.interval.mean == pytest.approx(math.sqrt(0.5 * 1.0))
    assert a.seconds(0.8) == pytest.approx(math.sqrt(40 * 30))


@pytest.mark.parametrize(
    ("mine", "theirs", "bound", "mean"),
    [
        ("10:0.8", "20:0.5", "<=", 10 / math.sqrt(20 * 100)),
        ("20:0.5", "10:0.8", ">=", math.sqrt(20 * 100) / 10),
        ("20:0.5", "40:0.5", "~", math.sqrt(1 / 2)),
    ],
)
def test_the_horizon_stands_for_what_was_missed(plan: Plan, mine: str, theirs: str, bound: str, mean: float) -> None:
    a, b = standing(plan, mine, mine, other=f"{theirs}|{theirs}")
    found = a.ratio(b)
    assert found is not None
    assert found.bound == bound
    assert found.interval.mean == pytest.approx(mean)
    assert (a.seconds(0.8) is None) == (bound != "<=")


def test_where_nobody_reaches_anything_there_is_no_ratio(plan: Plan) -> None:
    a, b = standing(plan, "10:0.1", "10:0.2", other="10:0.3|10:0.3")
    assert a.ratio(b) is None


def test_only_an_interval_on_one_side_says_something() -> None:
    assert Ratio(Interval(0.8, 0.7, 0.9)).verdict == "faster"
    assert Ratio(Interval(0.8, 0.7, 0.9), "<=").verdict == "faster"
    assert Ratio(Interval(0.8, 0.7, 0.9), "~").verdict == Ratio(Interval(0.8, 0.7, 1.1)).verdict == ""
    assert Ratio(Interval(1.5, 1.2, 1.9), ">=").verdict == "slower"
    assert Ratio(Interval(1.5, 1.2, 1.9), "<=").verdict == Ratio(Interval(0.5)).verdict == ""


def test_the_tables_hold_what_the_runs_came_to(made: Arena) -> None:
    judged = rows(made.folder / "judged.csv")
    assert len(judged) == 3 * 2 + 3 * 2
    assert {row["plan"] for row in judged} == {made.plan.digest}
    near = made.judged()[0]
    own = [row for row in judged if (row["world"], row["protocol"]) == ("near", "safa")]
    assert [int(row["seed"]) for row in own] == [10, 11]
    assert [float(row["metric_at_end"]) for row in own] == [run.curve.at(500.0) for run in near.runs["safa"]]
    assert [float(row["bytes"]) for row in own] == [
        run.row["bytes_down"] + run.row["bytes_up"] for run in near.runs["safa"]
    ]
    ratios = {(row["protocol"], row["baseline"], row["target"]): row for row in rows(made.folder / "ratios.csv")}
    assert float(ratios["buffer", "buffer", "all"]["times_as_long"]) == 1.0
    tuned = rows(made.folder / "tuned.csv")
    assert [(row["world"], row["protocol"]) for row in tuned] == list(
        itertools.product(["near", "far"], ["safa", "buffer", "fedavg"])
    )


def test_the_verdict_is_against_the_best_rival(made: Arena) -> None:
    results = Results(made)
    near, far = results.verdicts()
    for verdict in (near, far):
        standings = results.worlds[verdict.world]
        rivals = {name: one.rank for name, one in standings.items() if name != "safa"}
        assert verdict.rival == min(rivals, key=lambda name: rivals[name])
        assert verdict.ratio == standings["safa"].ratio(standings[verdict.rival])
        served = [one.worst_tenth.mean for name, one in standings.items() if name != "safa" and one.worst_tenth]
        own = standings["safa"].worst_tenth
        assert own is not None
        assert verdict.worst_tenth == pytest.approx(own.mean - max(served))
        assert verdict.serves == (own.mean - max(served) >= -0.02)
    ((first, second, beyond),) = results.equal_worlds()
    assert (first, second) == ("near", "far")
    assert beyond is not None


def test_protocols_that_reached_no_target_are_ranked_by_their_metric(made: Arena) -> None:
    for judged in made.judged():
        missed = replace(judged, tuned=replace(judged.tuned, targets=[2.0]))
        standings = [Standing(missed, name, 0.01) for name in missed.runs]
        assert [standing.rank[0] for standing in standings] == pytest.approx([judged.tuned.world.horizon_s] * 3)
        ranked = [standing.metric for standing in sorted(standings, key=lambda one: one.rank)]
        ends = [metric.mean if metric else -math.inf for metric in ranked]  # -inf: made no version on one of the seeds
        assert ends == sorted(ends, reverse=True)
        assert len(set(ends)) == 3


def test_page_and_markdown_show_the_same_tables(made: Arena) -> None:
    markdown, page = ((made.folder / name).read_text() for name in ("arena.md", "report.html"))
    titles = ["The outcome", "Against the baselines", "World by world", "World near", "World far", "Tuning"]
    assert re.findall(r"^### (.*)$", markdown, re.MULTILINE) == titles
    assert re.findall(r'<h2 id="[^"]*">(.*?)</h2>', page) == titles
    assert made.plan.digest[:16] in markdown
    assert made.plan.digest[:16] in page
    assert page.count('class="chart"') == 2
    assert "Task boston, crash_rate 0.1; horizon 500 s" in markdown
    assert "Task boston, trace of 5 entries; horizon 400 s" in markdown
    for part in json.loads((made.folder / "tables.json").read_text())["parts"]:
        for row in part["rows"]:
            assert "| " + " | ".join(text for text, _ in row) + " |" in markdown


def test_tables_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tables.json").write_text("{}")
    with pytest.raises(SafaError, match="of a format that this version cannot read"):
        write_report(tmp_path)


def _own_plan(name: str) -> Plan:
    return Plan.read(Path(sys.modules[Plan.__module__].__file__ or "").with_name(name))


def test_a_world_may_have_tuning_seeds_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace("horizon_s = 500", "horizon_s = 500\ntuning_seeds = [7]"))
    assert [list(world.tuning_seeds) for world in Plan.read(path).worlds.values()] == [[7], [0, 1]]


def test_what_an_earlier_tuning_chose_is_not_tuned_again(tmp_path: Path) -> None:
    known = "[tuned.far]\nsafa = { lr = 1e-3, value = 1 }\nbuffer = { lr = 1e-4, value = 2 }\n"
    out = tmp_path / "out"
    plan = planned(tmp_path, f"{PLAN}\n{known}")
    assert main(["arena", str(plan), "--out", str(out), "--workers", "1", "--worlds", "far", "--quiet"]) == 0
    assert {row["protocol"] for row in rows(out / "far" / "tuning" / "results.csv")} == {"fedavg"}
    chosen = {row["protocol"]: (row["lr"], row["value"], row["tuning_runs"]) for row in rows(out / "tuned.csv")}
    assert list(chosen) == ["safa", "buffer", "fedavg"]
    assert chosen["safa"] == ("0.001", "1", "4")
    assert chosen["buffer"] == ("0.0001", "2", "4")
    text = (out / "arena.md").read_text()
    assert "What an earlier tuning chose for 2 of the protocols is in the plan; only fedavg and worlds" in text


def test_an_arena_in_which_everything_was_tuned_before_is_only_judged(tmp_path: Path) -> None:
    known = "[tuned.far]\nsafa = { lr = 1e-3, value = 1 }\nbuffer = { lr = 1e-4, value = 2 }\nfedavg = { lr = 1e-3 }\n"
    out = tmp_path / "out"
    plan = planned(tmp_path, f"{PLAN}\n{known}")
    command = ["arena", str(plan), "--out", str(out), "--workers", "1", "--worlds", "far", "--quiet", "--stage"]
    assert [main([*command, stage]) for stage in ("judge", "report")] == [0, 0]
    assert not (out / "far" / "tuning").exists()
    assert {row["tuning_runs"] for row in rows(out / "tuned.csv")} == {"0"}


@pytest.mark.parametrize(
    ("file", "where", "worlds", "seeds"), [("ablation", "cpu", 5, 10), ("ablation-cnn", "gpu", 2, 5)]
)
def test_an_ablation_switches_off_parts_in_worlds_of_the_arena(file: str, where: str, worlds: int, seeds: int) -> None:
    plan, arena = _own_plan(f"{file}.toml"), _own_plan("arena.toml")
    assert len(plan.worlds) == worlds
    for name, world in plan.worlds.items():
        same = arena.worlds[f"{where}-{name}"]
        assert replace(world, name=same.name, seeds=same.seeds, targets=same.targets, settings=same.settings) == same
        keys = (world.settings.keys() | same.settings.keys()) - {"device", "memory_mb"}
        assert all(world.settings.get(key) == same.settings.get(key) for key in keys)
        assert len(set(world.seeds) - set(same.seeds)) == seeds
    assert {entry.settings["protocol"] for entry in plan.entries.values()} == {"fedsecant"}


def test_the_confirmation_has_the_worlds_and_rivals_of_the_arena_on_seeds_of_its_own() -> None:
    plan, arena = _own_plan("confirmation.toml"), _own_plan("arena.toml")
    assert list(plan.worlds) == [name for name in arena.worlds if name.startswith("cpu-")]
    for name, world in plan.worlds.items():
        same = arena.worlds[name]
        assert replace(world, seeds=same.seeds, targets=same.targets, rates=same.rates) == same
        assert max(world.rates) >= max(same.rates)
        assert len(set(world.seeds) - set(same.seeds)) == 20
    entries = [(replace(entry, values=()), arena.entries[name]) for name, entry in plan.entries.items()]
    assert all(entry == replace(same, values=()) for entry, same in entries)
    assert all(set(plan.entries[name].values) >= set(arena.entries[name].values) for name in plan.entries)


def test_the_plan_of_the_linear_tasks_differs_from_the_arena_in_what_is_tested_and_in_wider_grids() -> None:
    plan, arena = _own_plan("linear.toml"), _own_plan("arena.toml")
    assert (list(plan.worlds), plan.tuned) == (["boston", "kdd99"], {})
    for name, world in plan.worlds.items():
        same, own = arena.worlds[f"cpu-{name}"], Settings.of(name)
        assert world.task.endswith(f":{name}_every_third")
        assert (world.horizon_s, max(world.rates) >= max(same.rates)) == (same.horizon_s, True)
        expected = {key: same.settings.get(key, getattr(own, key)) for key in world.settings}
        assert world.settings == pytest.approx(expected)
        assert same.settings.keys() <= world.settings.keys()
    entries = [(replace(entry, values=()), arena.entries[name]) for name, entry in plan.entries.items()]
    assert all(entry == replace(same, values=()) for entry, same in entries)
    assert plan.entries.keys() == arena.entries.keys()


@pytest.mark.usefixtures("real_files")
@pytest.mark.parametrize(("make", "task"), [(boston_every_third, boston), (kdd99_every_third, kdd99)])
def test_every_third_row_of_the_file_is_tested(make: Callable[[], Problem], task: ModuleType) -> None:
    problem, whole = make(), task.load()
    rows, targets = (torch.cat(parts) for parts in zip(whole.train, whole.test, strict=True))
    (train, trained), (test, tested) = problem.train, problem.test
    assert torch.equal(test, rows[2::3])
    assert torch.equal(tested, targets[2::3])
    assert torch.equal(train[0::2], rows[0::3])
    assert torch.equal(train[1::2], rows[1::3])
    assert torch.equal(trained[0::2], targets[0::3])
    assert torch.equal(trained[1::2], targets[1::3])


@pytest.mark.usefixtures("real_files")
@pytest.mark.parametrize("file", ["arena", "confirmation", "linear", "ablation", "ablation-cnn"])
def test_the_plans_that_come_with_the_package_can_be_run(file: str) -> None:
    plan = _own_plan(f"{file}.toml")
    plan.check(world for world in plan.worlds.values() if "device" not in world.settings)


def test_the_plan_that_comes_with_the_package_can_be_read() -> None:
    plan = _own_plan("arena.toml")
    assert len([name for name in plan.worlds if name.startswith("cpu-")]) >= 12
    assert all(len(world.seeds) >= (3 if "device" in world.settings else 10) for world in plan.worlds.values())
    assert all(len(world.rates) >= (2 if "device" in world.settings else 4) for world in plan.worlds.values())
    assert {len(entry.values) for entry in plan.entries.values()} == {0, 3}, "nobody has a larger budget"
    assert plan.baselines == ["fedbuff", "fedbuff-cap", "fedavg", "safa"]
