"""The reproduction of the paper: what is run, kept, compared and claimed."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import safa
from safa.cli.program import main
from safa.paper.claims import Finding, claims
from safa.paper.collect import HOLD, Results, collect, reached
from safa.paper.corrected import Corrected
from safa.paper.differences import sort_out
from safa.paper.grid import ACCOUNTINGS, CRASH_RATES, FRACTIONS, LAGS, PARTS, TASKS, Job, job, lag_job, plan
from safa.paper.printed import printed
from safa.paper.reproduction import Reproduction
from safa.paper.tables import PRINTED_TABLES, TABLE_METRICS, Comparison, compare

SMALL = {"crash_rate": 0.3, "fraction": 0.3, "train": False}


def small(seed: int, task: str = "boston") -> Job:
    return job("as printed", task, "safa", seed=seed, **SMALL)  # type: ignore[arg-type]


# -- what is run -------------------------------------------------------------------------------------------------------


def test_the_printed_tables_have_all_960_cells() -> None:
    cells = {
        (table.task, protocol, metric, crash_rate, fraction)
        for table in PRINTED_TABLES
        for metric in table.metrics
        for protocol in table.protocols
        for crash_rate in CRASH_RATES
        for fraction in FRACTIONS
    }
    assert cells == printed().keys()
    assert sorted(table.number for table in PRINTED_TABLES) == list(range(4, 16))


def test_a_plan_has_every_run_once() -> None:
    jobs = plan(["boston"], PARTS, seeds=2, worlds=3)
    assert len({each.key for each in jobs}) == len(jobs)
    cells = len(CRASH_RATES) * len(FRACTIONS)
    timing, accuracy, lags = 3 * cells * 3, 2 * 4 * cells * 2, 2 * len(LAGS) * 2 * 3 * 2
    shared = 2 * 2 * 3 * 2  # tau = 5 stands in the tables, too
    assert len(jobs) == timing + accuracy + lags - shared


def test_where_a_run_is_computed_does_not_change_what_it_is() -> None:
    here, there = (job("corrected", "mnist", "safa", crash_rate=0.3, fraction=0.3, seed=0, train=True, device=device)
                   for device in ("cpu", "cuda"))  # fmt: skip
    assert here.key == there.key
    assert here.key != small(0, "mnist").key


def test_the_two_accountings() -> None:
    as_printed, corrected = (
        job(accounting, "kdd99", "fedavg", crash_rate=0.3, fraction=0.3, seed=0, train=True)
        for accounting in ACCOUNTINGS
    )
    assert (as_printed.settings.clock, as_printed.settings.averaging) == ("paper", "population")
    assert as_printed.settings.server_optimiser == "safa.paper.habits:AsPrinted"
    assert as_printed.target is None
    assert (corrected.settings.clock, corrected.settings.averaging) == ("causal", "participants")
    assert corrected.settings.server_optimiser == "none"
    assert corrected.target == 0.99
    assert (corrected.rounds, corrected.settings.rounds) == (100, 400)


def test_the_paper_counts_tau_one_lower_than_its_equation() -> None:
    taus = [lag_job(accounting, "boston", 5, crash_rate=0.3, fraction=0.5, seed=0).settings.lag_tolerance
            for accounting in ACCOUNTINGS]  # fmt: skip
    assert taus == [6, 5]


def test_nobody_but_the_command_line_knows_of_the_paper() -> None:
    """A preset names what it needs; no other package does."""
    source = Path(safa.__file__).parent
    files = [path for path in source.rglob("*.py") if path.relative_to(source).parts[0] not in ("paper", "cli")]
    knowing = [path.name for path in files if re.search(r"safa\.paper|as_printed", path.read_text(encoding="utf-8"))]
    assert files
    assert knowing == []


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_results_are_kept_and_not_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    jobs = [small(seed) for seed in range(3)]
    first = collect(jobs, Results(path))
    assert next(first).key == jobs[0].key
    first.close()  # type: ignore[attr-defined]
    assert len(Results(path)) == 1
    assert [done.key for done in collect(jobs, Results(path))] == [each.key for each in jobs[1:]]
    assert list(collect(jobs, Results(path))) == []


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    list(collect([small(0), small(1)], Results(path)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    results = Results(path)
    assert len(results) == 1
    assert path.read_bytes() == whole[:-20]  # who only reads changes nothing
    list(collect([small(0), small(1)], results))
    assert len(Results(path)) == 2
    assert path.read_bytes().startswith(whole[: whole.index(b"\n") + 1])


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda row: "[" * 100_000, "it is not JSON"),
        (lambda row: "7", "it is not a result with a key"),
        (lambda row: json.dumps(row | {"summary": {}}), "summary must hold all metrics"),
        (lambda row: json.dumps(row | {"summary": row["summary"] | {"futility": "much"}}), "unlike futility"),
        (lambda row: json.dumps(row | {"target_s": []}), "target_s and target_round must be numbers"),
        (lambda row: json.dumps(row | {"loss": [1.0]}), "must be lists, all of them or none"),
        (lambda row: json.dumps(row | {"loss": [1], "accuracy": [1], "closed_s": [1, 2]}), "lists of one length"),
    ],
)
def test_garbage_in_the_results_is_one_sentence(
    damage: Callable[[dict[str, Any]], str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    list(collect([small(0)], Results(path)))
    good = path.read_text()
    path.write_text(good + damage(json.loads(good)) + "\n")
    before = path.read_bytes()
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"results.jsonl, line 2: {complaint}" in said or ("line 2: " in said and complaint in said)
    assert said.count("\n") == 1
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["results.jsonl"]


def test_garbage_in_the_sessions_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list(collect([small(0)], Results(tmp_path / "results.jsonl")))
    (tmp_path / "sessions.jsonl").write_bytes(b'{"command": 3}\n')
    assert main(["report", str(tmp_path)]) == 2
    assert "sessions.jsonl, line 1: it is not the note of a session" in capsys.readouterr().err


KILLED = """
import os, signal, sys
from pathlib import Path
from safa.experiments.engines import LocalEngine
from safa.paper.collect import Results, collect
from safa.paper.grid import job

if __name__ == "__main__":
    jobs = [job("as printed", "boston", "safa", crash_rate=0.3, fraction=0.3, train=False, seed=s) for s in range(8)]
    for done, _ in enumerate(collect(jobs, Results(Path(sys.argv[1])), engine=LocalEngine(int(sys.argv[2]))), start=1):
        if done == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "after"), [(1, 3), (2, 1), (2, 4)])
def test_killed_at_any_moment_it_continues_where_it_was(workers: int, after: int, tmp_path: Path) -> None:
    script, path = tmp_path / "killed.py", tmp_path / "results.jsonl"
    script.write_text(KILLED)
    killed = subprocess.run([sys.executable, str(script), str(path), str(workers), str(after)], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert len(Results(path)) == after
    jobs = [small(seed) for seed in range(8)]
    assert len(list(collect(jobs, Results(path)))) == 8 - after
    undisturbed = Results(tmp_path / "undisturbed.jsonl")
    list(collect(jobs, undisturbed))
    for each in jobs:
        there, whole = Results(path).get(each), undisturbed.get(each)
        assert there is not None
        assert whole is not None
        assert there["summary"] == whole["summary"]


# -- what is compared --------------------------------------------------------------------------------------------------


def of(values: Sequence[float], figure: float, metric: str = "futility") -> Comparison:
    return Comparison(("boston", "safa", metric, 0.1, 0.1), figure, values)


def test_near_the_mean_is_within_tolerance() -> None:
    assert of([0.10, 0.10], 0.12).within
    assert not of([0.10, 0.10], 0.13).within
    assert of([100.0, 100.0], 105.0, "round_length_s").near
    assert not of([100.0, 100.0], 106.0, "round_length_s").near


def test_among_the_worlds_is_within_tolerance() -> None:
    worlds = [float(value) for value in range(100, 200)]
    assert of(worlds, 190.0, "round_length_s").within
    assert not of(worlds, 190.0, "round_length_s").near
    assert not of(worlds, 199.5, "round_length_s").within
    assert of(worlds, 150.0, "round_length_s").place == pytest.approx(0.505)


def test_deviation_is_a_share_where_the_tolerance_is_one() -> None:
    assert of([110.0], 100.0, "round_length_s").deviation == pytest.approx(0.1)
    assert of([0.5], 0.4).deviation == pytest.approx(0.1)


def test_fedavgs_t_dist_is_met_to_the_digit(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    asked = job("as printed", "mnist", "fedavg", crash_rate=0.3, fraction=0.5, seed=0, train=False)
    list(collect([asked], results))
    table = next(each for each in PRINTED_TABLES if each.number == 7)
    (one,) = compare(table, results)
    assert one.cell == ("mnist", "fedavg", "t_dist_s", 0.3, 0.5)
    assert one.mean == pytest.approx(one.printed, abs=0.005)


def test_the_share_that_fedavg_asks_for_is_printed_as_c(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    list(collect([job("as printed", "boston", "fedavg", crash_rate=0.3, fraction=0.1, seed=0, train=False)], results))
    table = next(each for each in PRINTED_TABLES if each.number == 11)
    ratio = next(one for one in compare(table, results) if one.cell[2] == "sync_ratio")
    assert ratio.printed == 0.1
    assert ratio.mean == pytest.approx(0.1)


def test_exceptions_are_sorted_by_their_reason() -> None:
    fedavg = Comparison(("boston", "fedavg", "round_length_s", 0.7, 1.0), 661.67, [830.0])
    stray = Comparison(("mnist", "safa", "futility", 0.7, 1.0), 0.5, [0.1])
    classes, left = sort_out([fedavg, stray])
    assert [list(each) for each in classes.values()] == [[fedavg]]
    assert left == [stray]


def test_a_target_counts_once_it_was_held() -> None:
    held = [0.9] * HOLD
    assert reached([0.9, 0.1, *held], 0.9) == 2
    assert reached([*held[1:], 0.1, *held[1:]], 0.9) is None
    assert reached([None, *held], 0.9) == 1


def test_a_world_without_the_target_counts_as_the_latest() -> None:
    def median(*values: float | None) -> float | None:
        return Corrected("boston", "safa", "target_s", 0.1, 0.1, values).median

    assert median(3.0, 1.0, 2.0) == 2.0
    assert median(3.0, None, 2.0) == 3.0
    assert median(None, None, 2.0) is None
    assert median(1.0, 2.0) == 1.5


# -- what is claimed ---------------------------------------------------------------------------------------------------


class Made(Results):
    """Results that are made up: a summary for every job, by a rule."""

    def __init__(self, rule: Any) -> None:
        self._rule = rule
        self._cells = {}

    def get(self, asked: Job) -> dict[str, Any] | None:
        """One world."""
        return None if asked.settings.seed else self._rule(asked)


def made(asked: Job, **changed: float) -> dict[str, Any]:
    is_safa = asked.settings.protocol == "safa"
    summary = dict.fromkeys(("futility", "starved", "sync_ratio", "t_dist_s", "best_loss", "last_loss"), 0.01)
    summary |= {"round_length_s": 10.0 if is_safa else 300.0, "best_accuracy": 0.9 if is_safa else 0.8}
    summary |= {"round_length_s_as_printed": summary["round_length_s"], "last_accuracy": summary["best_accuracy"]}
    summary["sync_ratio"] = 1 / asked.settings.lag_tolerance
    return {"summary": summary | changed, "target_s": 100.0}


def test_claims_that_hold_are_confirmed() -> None:
    found = claims(Made(made))
    assert [each.finding for each in found] == [Finding.CONFIRMED] * 5


def test_claims_that_hold_as_printed_only() -> None:
    def rule(asked: Job) -> dict[str, Any]:
        if asked.settings.clock == "paper":
            return made(asked)
        return made(asked, futility=0.3, round_length_s=10.0, last_accuracy=0.8)

    assert {each.finding for each in claims(Made(rule))} == {Finding.PAPER_ONLY}


def test_claims_that_do_not_hold() -> None:
    def rule(asked: Job) -> dict[str, Any]:
        worse = 0.01 * asked.settings.lag_tolerance
        return made(asked, futility=0.3, round_length_s_as_printed=10.0, best_accuracy=0.8, best_loss=worse)

    assert {each.finding for each in claims(Made(rule))} == {Finding.NOT_CONFIRMED}


def test_nothing_is_claimed_without_results(tmp_path: Path) -> None:
    assert claims(Results(tmp_path / "results.jsonl")) == []


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small reproduction, made by the command."""
    folder = tmp_path_factory.mktemp("reproduction") / "out"
    arguments = ["--task", "boston", "--what", "timing", "--seeds", "1", "--worlds", "2", "--workers", "1", "--quiet"]
    assert main(["reproduce", *arguments, "--out", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_the_command_writes_tables_and_pages(reproduced: Path) -> None:
    with (reproduced / "tables" / "table-IV.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60
    assert {row["worlds"] for row in rows} == {"2"}
    assert rows[0]["printed"] == f"{printed()['boston', rows[0]['protocol'], 'round_length_s', 0.1, 0.1]}"
    document = (reproduced / "reproduction.md").read_text()
    for word in ("Table IV", "Table V:", "Table XI", "Known differences", "safa reproduce --task boston"):
        assert word in document
    assert "Table X:" not in document  # nothing was trained
    assert (reproduced / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_command_resumes_its_folder(reproduced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (reproduced / "results.jsonl").read_bytes()
    sessions = (reproduced / "sessions.jsonl").read_text().splitlines()
    assert [json.loads(line)["runs"] for line in sessions] == [3 * 20 * 2 + 3 * 20]
    arguments = ["--task", "boston", "--what", "timing", "--seeds", "1", "--worlds", "2", "--workers", "1"]
    assert main(["reproduce", *arguments, "--out", str(reproduced)]) == 0
    assert (reproduced / "results.jsonl").read_bytes() == before
    assert (reproduced / "sessions.jsonl").read_text().splitlines() == sessions
    assert "within tolerance" in capsys.readouterr().out


@pytest.mark.slow
def test_report_makes_the_pages_anew(reproduced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (reproduced / "report.html").read_bytes()
    (reproduced / "report.html").unlink()
    assert main(["report", str(reproduced)]) == 0
    assert (reproduced / "report.html").read_bytes() == before
    assert "report.html" in capsys.readouterr().out


@pytest.mark.slow
def test_every_cell_outside_is_explained_or_named(reproduced: Path) -> None:
    found = Reproduction.read(reproduced)
    outside = [one for one in found.cells if not one.within]
    classes, left = sort_out(outside)
    assert sum(map(len, classes.values())) + len(left) == len(outside)
    assert {one.cell[2] for one in found.cells} == TABLE_METRICS.keys() - {"best_accuracy"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--task", "cifar"], "task must be one of boston, mnist, kdd99 or all, not 'cifar'"),
        (["--what", "figures"], "what must be one of timing, accuracy, lag, bias or all, not 'figures'"),
        (["--seeds", "0"], "seeds must be at least 1, not 0"),
        (["--worlds", "0"], "worlds must be at least 1, not 0"),
        (["--workers", "0"], "workers must be at least 1, not 0"),
        (["--task", "boston", "--device", "abacus"], "there is no device 'abacus'"),
    ],
)
def test_nonsense_is_refused(
    arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", *arguments, "--out", str(tmp_path / "new")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["reproduce", "--what", "bias", "--out", str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_tasks_are_those_of_the_paper() -> None:
    assert {cell[0] for cell in printed()} == set(TASKS)


# -- what is published -------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parent.parent / "docs"


def published() -> list[dict[str, str]]:
    rows = []
    for path in (DOCS / "reproduction" / "tables").glob("table-*.csv"):
        with path.open(encoding="utf-8") as file:
            rows += list(csv.DictReader(file))
    return rows


def test_the_published_tables_are_complete() -> None:
    rows = published()
    cells = {(row["task"], row["protocol"], row["metric"], float(row["crash_rate"]), float(row["fraction"]))
             for row in rows}  # fmt: skip
    assert cells == printed().keys()
    worlds = {(row["task"], row["metric"] == "best_accuracy"): int(row["worlds"]) for row in rows}
    assert worlds["boston", True] == worlds["kdd99", True] == 5
    assert worlds["mnist", True] >= 1
    assert min(count for (_, is_accuracy), count in worlds.items() if not is_accuracy) >= 40


@pytest.mark.parametrize(
    ("metrics", "share"),
    [({"sync_ratio", "futility", "t_dist_s"}, 0.95), ({"round_length_s"}, 0.8), ({"best_accuracy"}, 0.9)],
)
def test_the_published_tables_meet_what_was_wanted(metrics: set[str], share: float) -> None:
    """Counted from the figures themselves, by the rule that the page states."""
    within = []
    for row in published():
        if row["metric"] in metrics:
            mean, low, high, figure = (float(row[name]) for name in ("mean", "low", "high", "printed"))
            metric = TABLE_METRICS[row["metric"]]
            allowed = metric.near * (figure if metric.relative else 1.0) + 0.5 * 10**-metric.digits
            among = low - 0.5 * 10**-metric.digits <= figure <= high + 0.5 * 10**-metric.digits
            within.append(abs(mean - figure) <= allowed or among)
            assert (row["within"] == "yes") == within[-1], row
    assert sum(within) / len(within) >= share


def test_every_figure_of_the_page_is_there() -> None:
    page = (DOCS / "reproduction.md").read_text(encoding="utf-8")
    linked = {line.split("](")[1].rstrip(")") for line in page.splitlines() if line.startswith("![")}
    assert {f"reproduction/figures/figure-{number}.svg" for number in range(3, 9)} <= linked
    for path in linked:
        assert (DOCS / path).is_file()
