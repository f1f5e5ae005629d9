"""What the docs show is run, so that it stays true."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import safa
from safa import load_run
from safa.aggregation.registry import available, optimisers
from safa.analysis import METRICS, TARGET_METRICS
from safa.cli import program
from safa.experiments.arena_plan import Plan
from safa.fleet import make_fleet
from safa.protocol import FedAvg, Protocol
from safa.protocol import available as available_protocols
from safa.protocol.records import Verdict
from safa.runs import Settings
from safa.runs.options import SettingsOptions
from safa.server import Server
from safa.simulation import drive
from safa.tasks import measures
from safa.tasks.partitions import available as available_partitions
from safa.testing import check_protocol
from safa.trackers import available as available_trackers
from safa.vocabulary import FLEETS
from tests import leaf

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{page.name}" for page in sorted(ROOT.glob("docs/*.md")))]


def blocks(page: str) -> list[str]:
    """The Python examples of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_examples_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    ten_lines, own = blocks("README.md")
    exec(ten_lines, {})
    shown = re.findall(r"```\n(safa: accuracy.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    minutes = re.compile(r"(\w+): accuracy 0.85 after (\d+) minutes")
    printed, said = dict(minutes.findall(capsys.readouterr().out)), dict(minutes.findall(shown))
    assert printed.keys() == said.keys() == {"safa", "fedavg", "fedbuff"}
    for protocol, value in said.items():  # other processors round differently
        assert float(printed[protocol]) == pytest.approx(float(value), rel=0.2)
    exec(own, {})
    assert float(capsys.readouterr().out) > 0.8


def commands(page: str) -> list[list[str]]:
    """The commands `safa ...` that a page shows in blocks of their own, without what is said behind them."""
    parts = re.split(r"^```(\w*)$", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    shown = "".join(parts[2::4]).splitlines()  # text, language, block, "", text, language, block, "", ...
    return [
        shlex.split(re.split(r" [#|>&]", line.removeprefix("$ "))[0])[1:]
        for line in shown
        if re.match(r"(\$ )?safa [a-z]", line)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_of_the_docs_is_understood(page: str) -> None:
    for command in commands(page):
        program._parser(command[0]).parse_args(command)


@pytest.mark.slow
def test_the_commands_of_the_readme_run_as_printed(tmp_path: Path) -> None:
    """One after the other, with the program on the path.

    Those that take half an hour, or run until they are stopped, are asked for help.
    """
    shell = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    told = {}
    shown = commands("README.md")
    assert {"sweep", "best", "run", "report"} <= {words[0] for words in shown}
    for words in shown:
        asked = ["--help"] if words[0] in ("reproduce", "deploy", "serve") else []
        done = subprocess.run(["safa", *words, *asked], cwd=tmp_path, env=shell, capture_output=True, text=True)
        assert done.returncode == 0, (words, done.stderr)
        told[words[0]] = done.stdout
    said = (ROOT / "README.md").read_text(encoding="utf-8")
    first, second = (line.partition(":")[0] for line in told["best"].splitlines()[:2])
    assert first.replace("fedbuff", "fedsecant") in said  # these two change places on other processors,
    assert second in said  # where the seeds cannot tell them apart either
    assert (tmp_path / "runs" / "first" / "report.html").exists()


def test_the_problems_of_the_docs_are_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    leaf.write_images(tmp_path / "leaf/data/femnist/data")
    leaf.write_texts(tmp_path / "leaf/data/shakespeare/data")
    for block in blocks("docs/data.md"):
        exec(block, names)
    printed = capsys.readouterr().out.splitlines()
    assert "['0.weight', '0.bias', '2.weight', '2.bias']" in printed[0]
    assert printed[1:] == ["3 natural [120, 60, 20]", "[120, 60, 20]", "two-speed rare:1:0.1", "[3, 1]", "50 50"]


def test_every_partition_has_a_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w:\[\]]+)` \| ", page, re.MULTILINE)) == {*available_partitions()}


def test_the_run_of_the_docs_is_resumed_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem, resuming = blocks("docs/data.md")[0], blocks("docs/learning.md")[1]
    names: dict[str, Any] = {}
    exec(problem, names)
    exec(resuming.replace("out=", "checkpoint_every=2, out=").split("run = ")[0], names)
    (tmp_path / "runs" / "mine" / "summary.json").unlink()  # as if it had been stopped
    exec("import safa\nrun = " + resuming.split("run = ")[1], names)
    assert all((names["model"][name] == tensor).all() for name, tensor in names["run"].model().items())


def test_the_trainer_of_the_docs_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("docs/learning.md")[0], {})
    assert capsys.readouterr().out.strip() in ("batched", "threads", "processes", "serial")


def test_the_local_work_of_the_docs_learns(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("docs/local-work.md")[0], {"__name__": "local_work"})
    reached = [float(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(reached) == 4
    assert min(reached) > 0.5


def test_the_metrics_of_the_docs_are_measured_and_the_target_is_reached(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    own, afterwards = blocks("docs/metrics.md")
    exec(own, names)
    assert "['auc', 'brier', 'recall', 'recall_0', 'recall_1']" in capsys.readouterr().out
    summary, records = names["run"].summary, list(names["run"].records())
    assert len(records) == summary["rounds_to_target"] + 2 < 40
    assert summary["best_auc"] >= 0.95
    assert summary["best_brier"] == min(record.metrics["brier"] for record in records)
    exec(afterwards, names)
    assert capsys.readouterr().out.strip().isdigit()


def test_every_metric_has_a_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    named = {name for row in re.findall(r"^\| (.+?) \| ", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named >= {*METRICS, *TARGET_METRICS, *measures.__all__}


def test_the_protocol_of_the_docs_keeps_the_contract() -> None:
    names: dict[str, Any] = {}
    protocol_example, _, test_example = blocks("docs/own-protocol.md")
    exec(protocol_example, names)
    first_come: type[Protocol] = names["FirstCome"]
    check_protocol(lambda sizes: first_come(sizes, fraction=0.3, round_limit_s=9.0), scripts=10)
    exec(test_example, names)
    assert np.isfinite(first_come([1.0], fraction=1.0).quota)


def test_the_protocol_of_the_docs_that_asks_for_parts_has_shorter_rounds() -> None:
    names: dict[str, Any] = {}
    exec(blocks("docs/own-protocol.md")[1], names)
    sparing: type[FedAvg] = names["Sparing"]
    check_protocol(lambda sizes: sparing(sizes, fraction=0.5, round_limit_s=9.0), scripts=10)
    settings = Settings.of("boston", protocol="fedavg", fraction=0.5, rounds=5, crash_rate=0.0)
    fleet = make_fleet(settings)
    all_of_it, parts = (
        list(drive(Server(kind(fleet.sizes, fraction=0.5), seed=0, rounds=5), fleet, settings))
        for kind in (FedAvg, sparing)
    )
    assert {share for record in parts for share in record.work.tolist()} == {0.5, 1.0}
    assert all(one.length_s < other.length_s for one, other in zip(parts, all_of_it, strict=True))


def test_the_aggregator_of_the_docs_keeps_the_contract() -> None:
    names: dict[str, Any] = {}
    aggregator_example, test_example = blocks("docs/aggregation.md")
    exec(aggregator_example, names)
    exec(test_example, names)
    names["test_clipped_mean"]()


def test_the_fleets_of_the_docs_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    by_name, returning, from_python, from_fedscale = blocks("docs/fleets.md")
    exec(by_name, {})
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(FLEETS)
    exec(returning, {})
    small, large = capsys.readouterr().out.splitlines()
    assert small.removeprefix("C = 0.1: ") == large.removeprefix("C = 0.3: ")
    exec(from_python, {})
    assert capsys.readouterr().out == "(2.0, 1.0, 0.2) (20.0, 5.0)\n"
    names: dict[str, Any] = {}
    exec(from_fedscale, names)
    assert names["run"].settings.speeds == tuple(names["slower"])


def test_the_examples_of_the_python_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    first, callbacks, frames, script = blocks("docs/python.md")
    exec(first, {})
    assert (tmp_path / "runs" / "first" / "report.html").exists()
    names: dict[str, Any] = {}
    exec(callbacks, names)
    accuracies = [record.metrics["accuracy"] for record in names["run"].records()]
    assert min(accuracies[-2:]) >= 0.7 > accuracies[-3]
    exec(frames, {})
    exec(script, {"__name__": "__main__"})
    assert load_run("runs/mine").summary is not None
    assert re.search(r"\b\d+ rounds\n", capsys.readouterr().out)


def test_the_table_of_settings_is_up_to_date() -> None:
    names: dict[str, Any] = {"__name__": "docs", "__file__": str(ROOT / "docs" / "settings_table.py")}
    exec((ROOT / "docs" / "settings_table.py").read_text(encoding="utf-8"), names)
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)) >= set(get_type_hints(SettingsOptions))
    assert page == names["with_table"](page), "run python docs/settings_table.py"


def test_every_public_name_is_on_the_python_page() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    missing = [name for name in safa.__all__ if not re.search(rf"`(?:safa\.)?{name}\b|\bsafa\.{name}\b", page)]
    assert not missing


def test_every_field_of_a_record_is_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \| ", page, re.MULTILINE)
    found = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(found) == sorted(item.name for item in fields(safa.RoundRecord))
    exec(blocks("docs/records.md")[0], {})
    assert "round 5: " in capsys.readouterr().out


def test_the_glossary_has_the_words_of_the_protocols() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = [word for row in re.findall(r"^\| \*\*(.+?)\*\* \| ", page, re.MULTILINE) for word in row.split(", ")]
    assert {verdict.name.lower() for verdict in Verdict} <= set(words)
    more = "deprecated futility lag staleness version base quota starved cache bypass EUR SR VV T_dist T_lim tau C"
    assert set(more.split()) <= set(words)


def test_every_aggregator_and_optimiser_has_a_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "aggregation.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)) >= {*available(), *optimisers()}


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_what_the_docs_link_to_is_there(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = {link.partition("#")[0] for link in re.findall(r"\]\(([^):]+)\)", text)}
    missing = [target for target in targets if target and not ((ROOT / page).parent / target).exists()]
    assert not missing, missing


def test_a_page_of_ones_own_is_made_of_blocks() -> None:
    names: dict[str, Any] = {}
    exec(blocks("docs/pages.md")[0], names)
    assert names["page"].index("My view") < names["page"].index("Who did what, round by round")


def test_the_picture_is_drawn_from_the_run_it_names() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    exec((ROOT / "docs" / "client_map.py").read_text(encoding="utf-8"), names)
    drawn = names["draw"](list(names["run_rounds"](names["SETTINGS"])))
    assert (ROOT / "docs" / "client-map.svg").read_text(encoding="utf-8").strip() == drawn.strip()


def test_every_protocol_and_aggregator_is_on_the_map(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)) == set(available_protocols())
    assert set(re.findall(r"`(\w+)`", page)) >= set(available())
    (example,) = blocks("docs/protocols.md")
    exec(example, {})
    lags = [int(lag) for lag in re.findall(r"lagged (\d+) versions", capsys.readouterr().out)]
    assert lags[1] < lags[0] / 2


def test_the_map_of_protocols_is_drawn_by_its_script() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    exec((ROOT / "docs" / "protocol_map.py").read_text(encoding="utf-8"), names)
    assert names["PROTOCOLS"].keys() == available_protocols().keys()
    assert (ROOT / "docs" / "protocol-map.svg").read_text(encoding="utf-8").strip() == names["draw"]().strip()


@pytest.mark.slow
def test_the_sweep_of_the_docs_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    paging, sweeping, reading = blocks("docs/sweeps.md")
    exec(paging, {})
    assert "First to accuracy 0.1" in (tmp_path / "page.html").read_text(encoding="utf-8")
    exec(sweeping.replace("until=", 'out="d", until='), {})
    said = capsys.readouterr().out
    assert "is first to accuracy=0.5,held=2: after" in said
    exec(reading, {})
    assert capsys.readouterr().out.endswith("6 runs\n")


def test_the_plan_of_the_docs_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/arena.md").read_text(encoding="utf-8")
    (plan,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "plan.toml").write_text(plan, encoding="utf-8")
    example, fitted = blocks("docs/arena.md")
    exec(fitted, {})
    assert f"```\n{capsys.readouterr().out}```" in page
    exec(example, {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["safa", "fedbuff", "fedavg"]
    script = {"__name__": "table", "__file__": str(ROOT / "docs/arena_table.py")}
    exec((ROOT / "docs/arena_table.py").read_text(encoding="utf-8"), script)
    results = (tmp_path / "results" / "arena.md").read_text(encoding="utf-8")
    written = script["with_results"](page, results)  # type: ignore[operator]
    assert results in written
    assert script["with_results"](written, results) == written  # type: ignore[operator]
    titles = re.findall("^### (.*)", script["without_worlds"](results), re.MULTILINE)  # type: ignore[operator]
    assert titles == ["The outcome", "Against the baselines", "World by world", "Tuning"]


def test_the_page_on_the_arena_shows_every_protocol_in_every_world_of_the_plan() -> None:
    page = (ROOT / "docs/arena.md").read_text(encoding="utf-8")
    plan = Plan.read(ROOT / "src/safa/experiments/arena.toml")
    assert f"checksum `{plan.digest[:16]}`" in page
    for name in plan.worlds:
        table = page.partition(f"### World {name}\n")[2].partition("###")[0]
        assert {line.split()[1] for line in table.splitlines() if line.startswith("| ")} >= set(plan.entries)


@pytest.mark.parametrize("file", ["confirmation", "linear", "ablation", "ablation-cnn"])
def test_the_page_on_the_arena_has_the_results_of_the_other_plans(file: str) -> None:
    page = (ROOT / "docs/arena.md").read_text(encoding="utf-8")
    plan = Plan.read(ROOT / f"src/safa/experiments/{file}.toml")
    shown = page.partition(f"<!-- {file} -->\n")[2].partition(f"<!-- end of {file} -->\n")[0]
    assert f"checksum `{plan.digest[:16]}`" in shown
    tuning = shown.partition("### Tuning\n")[2]
    assert {line.split()[1] for line in tuning.splitlines() if line.startswith("| ")} >= set(plan.entries)
    assert all(f"| {name} |" in tuning for name in plan.worlds)


def test_the_picture_of_the_arena_has_every_world_of_its_tables() -> None:
    script = {"__name__": "plot", "__file__": str(ROOT / "docs/arena_plot.py")}
    exec((ROOT / "docs/arena_plot.py").read_text(encoding="utf-8"), script)
    drawn, shown = script["draw"](), (ROOT / "docs/arena/times.svg").read_text(encoding="utf-8")  # type: ignore[operator]
    rows = script["rows"]()  # type: ignore[operator]
    assert Counter(row["result"] for row in rows) == {"arena": 19, "confirmation": 17}
    for words in {row["world"] for row in rows} | {"arena", "confirmation", "at most", "not known"}:
        assert f">{words}<" in drawn
        assert f">{words}<" in shown


def test_the_tables_of_the_page_on_performance_are_those_of_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    script = {"__name__": "tables", "__file__": str(ROOT / "docs/performance_tables.py")}
    exec((ROOT / "docs/performance_tables.py").read_text(encoding="utf-8"), script)
    assert script["with_tables"](page) == page  # type: ignore[operator]
    (example,) = blocks("docs/performance.md")
    exec(example, {})
    assert len(capsys.readouterr().out.split()) == 3


def test_the_runs_of_the_docs_are_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tracked, own = blocks("docs/trackers.md")
    exec(tracked, {})
    names = {path.parent.name for path in (tmp_path / "runs" / "tensorboard").rglob("events.out.tfevents.*")}
    assert names == {"first", "second", "0001", "0002"}
    assert (tmp_path / "runs" / "mlruns").is_dir()
    exec(own, {})
    (table,) = (tmp_path / "runs").glob("*.csv")
    assert [line.split(",")[0] for line in table.read_text().splitlines()] == ["1", "2", "3", "4", "5"]
    assert re.fullmatch(rf"{table}: 0\.\d\d\n", capsys.readouterr().out)
    page = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE)) == {*available_trackers()}
