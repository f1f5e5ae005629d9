"""The pages of runs and sweeps: what they say, for whatever a folder holds."""

from __future__ import annotations

import csv
import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa.errors import SafaError
from safa.experiments.simulate import simulate
from safa.experiments.sweep import combinations, run_sweep
from safa.report import read_table, run_page, sweep_page, write_report
from safa.report.run import MAP_CLIENTS, MAP_ROUNDS
from safa.report.words import number, time_unit, value_of
from safa.runs import RunWriter, load_run
from safa.runs.settings import Settings
from safa.simulation import run_rounds
from tests.report.making import learnt, simulated


def text_of(page: str) -> str:
    """What a page says, without scripts and tags, and with plain spaces."""
    body = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


def specs_of(page: str) -> list[dict[str, Any]]:
    charts = re.findall(r'class="chart".*?<script type="application/json">(.*?)</script>', page, re.DOTALL)
    return [json.loads(chart) for chart in charts]


def sweep(tmp_path: Path, tasks: list[str], **given: list[Any]) -> list[dict[str, Any]]:
    values: dict[str, list[Any]] = {"train": [False], "rounds": [5]}
    runs = combinations(tasks, values | given)
    table = tmp_path / "results.csv"
    assert len(list(run_sweep(runs, tmp_path, keep="nothing", force=True))) == len(runs)
    return read_table(table)


def test_a_run_says_what_it_is() -> None:
    page = run_page(simulated(rounds=6))
    said = text_of(page)
    assert "SAFA on digits: 20 clients, 6 rounds of 420 s at most, C = 0.3, crash rate 0.3, tau = 5" in said
    assert "The run came to its end. No model was trained" in said
    assert "mean length of a round (Eq. 17)" in said
    assert len(specs_of(page)) == 5  # no loss, no accuracy


def test_a_deployment_is_described_by_its_devices_and_not_by_a_world(tmp_path: Path) -> None:
    simulate("boston", clients=3, rounds=2, out=tmp_path / "run")
    roster = [{"name": f"device {name}", "size": 20.0, "details": {}} for name in "abc"]
    (tmp_path / "run" / "roster.json").write_text(json.dumps(roster))
    summary = tmp_path / "run" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"refusals": {"not finite": 4}}))
    said = text_of(run_page(load_run(tmp_path / "run")))
    assert "SAFA on boston: 3 devices, 2 rounds of 830 s at most, C = 0.3, tau = 5, seed 0. " in said
    assert "about 20 samples" in said
    assert "0 device a 20 1 device b 20 2 device c 20" in said
    assert "refusals: not finite 4 updates refused before the protocol saw them" in said
    assert "Accuracy over time" in said
    assert "virtual time" not in said.partition("Settings")[0].replace("virtual_time", "")


def test_a_run_that_trained_shows_loss_and_accuracy() -> None:
    page = run_page(learnt(simulated(rounds=6)))
    said = text_of(page)
    assert "Accuracy over virtual time" in said
    assert "Loss over rounds" in said
    assert len(specs_of(page)) == 9


@pytest.mark.parametrize("protocol", ["fedavg", "fedcs", "local", "fedasync", "fedbuff"])
def test_every_protocol_has_a_page(protocol: str) -> None:
    assert "Updates merged per client" in run_page(simulated(protocol=protocol))


def test_speeds_order_the_clients() -> None:
    run = simulated("boston", rounds=6)
    page = run_page(run, np.array([1.0, 5.0, 3.0, 4.0, 2.0]))
    chart = next(spec for spec in specs_of(page) if "params" in spec)
    names = next(param["value"] for param in chart["params"] if param["name"] == "map_clients_text")
    assert names == "1,3,2,4,0"
    assert "the clients are ordered by speed" in text_of(page)


def test_a_run_that_is_not_finished() -> None:
    run = simulated(rounds=6)
    half = replace(run, summary=None, held_records=run.held_records[:3])
    assert "This run is not finished: 3 of 6 rounds are there" in text_of(run_page(half))
    nothing = replace(run, summary=None, held_records=[])
    assert "There is nothing to show yet" in text_of(run_page(nothing))


@pytest.mark.slow
def test_many_clients_and_rounds_are_sampled() -> None:
    page = run_page(simulated("mnist", clients=3 * MAP_CLIENTS, rounds=3))
    said = text_of(page)
    assert "Shown are 500 of 1,500 clients" in said
    assert "into 100 groups of similar speed" in said
    page = run_page(simulated("boston", rounds=2 * MAP_ROUNDS + 1))
    assert "Shown is one round in 3" in text_of(page)
    chart = next(spec for spec in specs_of(page) if "params" in spec)
    assert chart["data"]["sequence"]["stop"] <= 5 * MAP_ROUNDS


def test_a_sweep_over_numbers_draws_curves(tmp_path: Path) -> None:
    rows = sweep(tmp_path, ["boston"], protocol=["safa", "fedavg"], crash_rate=[0.1, 0.3, 0.5], seed=[0, 1])
    page = sweep_page(rows)
    said = text_of(page)
    assert "12 runs on boston. Varied: protocol (safa, fedavg); crash rate (0.1, 0.3, 0.5); seed (0, 1)." in said
    assert "Round length by crash rate" in said
    assert "Mean over 2 seeds; the band spans lowest to highest." in said
    assert "Shortest rounds SAFA, crash rate 0.1" in said
    assert page.count('<tr class="marked good">') == 1 + 2  # the setting, and its runs
    points = next(point for spec in specs_of(page) for point in spec["datasets"].values() if "x" in point[0])
    by_hand = [row["round_length_s"] for row in rows if (row["protocol"], row["crash_rate"]) == ("safa", 0.1)]
    first = next(point for point in points if (point["series"], point["x"]) == ("SAFA", 0.1))
    assert first["mean"] == pytest.approx(sum(by_hand) / 2)
    assert (first["lowest"], first["highest"]) == (min(by_hand), max(by_hand))


def test_a_sweep_over_protocols_or_seeds_alone_compares_them(tmp_path: Path) -> None:
    said = text_of(sweep_page(sweep(tmp_path, ["boston"], protocol=["safa", "fedbuff"])))
    assert "Shortest rounds" in said
    assert "one seed has no interval: add seeds" in said
    page = sweep_page(sweep(tmp_path, ["boston"], protocol=["safa", "fedbuff"], seed=[0, 1]))
    assert "Mean over 2 seeds" in text_of(page)
    assert any(spec["layer"][0]["mark"]["type"] == "rule" for spec in specs_of(page))  # from the lowest to the highest
    said = text_of(sweep_page(sweep(tmp_path, ["boston"], seed=[0, 1, 2])))
    assert "Varied: seed (0, 1, 2)" in said
    assert "There is one setting only, so there is nothing to compare." in said


def test_a_sweep_of_one_run(tmp_path: Path) -> None:
    said = text_of(sweep_page(sweep(tmp_path, ["boston"])))
    assert "1 run on boston. Nothing was varied." in said
    assert "nothing to compare" in said


def test_what_comes_with_the_task_was_not_varied(tmp_path: Path) -> None:
    said = text_of(sweep_page(sweep(tmp_path, ["boston", "digits"], fraction=[0.3, 0.5])))
    assert "Varied: task (boston, digits); C (0.3, 0.5). Everything else comes with the task." in said
    assert "Which setting is best on boston" in said
    assert "Which setting is best on digits" in said


def test_too_many_curves_are_averaged(tmp_path: Path) -> None:
    rows = sweep(tmp_path, ["boston"], protocol=["safa", "fedavg", "fedcs"], fraction=[0.2, 0.4, 0.6, 0.8],
                 crash_rate=[0.1, 0.2, 0.3])  # fmt: skip
    assert "Mean over 3 values of crash rate" in text_of(sweep_page(rows))


def test_the_best_of_runs_that_trained_is_the_most_accurate(tmp_path: Path) -> None:
    rows = sweep(tmp_path, ["boston"], protocol=["safa", "fedavg"])
    scored = [
        row | {"last_accuracy": accuracy, "last_loss": loss}
        for row, accuracy, loss in zip(rows, (0.9, 0.7), (float("nan"), 1.0), strict=True)
    ]
    page = sweep_page(scored)
    assert "Best accuracy of the last model SAFA" in text_of(page)
    assert "The next is worse by 0.2 FedAvg" in text_of(page)
    assert "NaN" not in json.dumps(specs_of(page))


def test_a_table_is_read_with_its_types(tmp_path: Path) -> None:
    table = tmp_path / "results.csv"
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(
            [["a", "b", "c", "d", "e"], [1, 0.5, "iid", True, "inf"], ["", "nan", "x,y", False, -3]]
        )
        file.write("1,2,cut")
    first, second = read_table(table)
    assert first == {"a": 1, "b": 0.5, "c": "iid", "d": True, "e": float("inf")}
    assert (second["a"], second["c"], second["d"], second["e"]) == (None, "x,y", False, -3)
    assert np.isnan(second["b"])


def spoilt(table: Path, line: int, column: str, text: str) -> None:
    """Write a text into one field of a table; line 0 is that of the names."""
    with table.open(newline="") as file:
        rows = list(csv.reader(file))
    rows[line][rows[0].index(column)] = text
    with table.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


@pytest.mark.parametrize(
    ("line", "column", "text", "complaint"),
    [
        (0, "seed", "grain", "it has no column seed"),
        (0, "round_length_s", "", "it has no column round_length_s"),
        (0, "fraction", "seed", "has several columns 'seed'"),
        (1, "round_length_s", "long", r"results\.csv, line 2: round_length_s must be a number or nothing, not 'long'"),
        (2, "futility", "True", "line 3: futility must be a number or nothing, not True"),
        (2, "fraction", "some", "line 3: fraction must be a number, not 'some'"),
        (1, "seed", "", "line 2: seed must be a number, not None"),
        (1, "train", "perhaps", "line 2: train must be True or False, not 'perhaps'"),
        (1, "futility", "some", "line 2: futility must be a number or nothing, not 'some'"),
        (2, "task", "", "line 3: there is no task"),
        (1, "protocol", "x" * 200_000, "line 2: field larger than field limit"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(
    line: int, column: str, text: str, complaint: str, tmp_path: Path
) -> None:
    sweep(tmp_path, ["boston"], seed=[0, 1])
    spoilt(tmp_path / "results.csv", line, column, text)
    with pytest.raises(SafaError, match=complaint):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_row_of_another_length_is_refused_and_not_left_out(tmp_path: Path) -> None:
    sweep(tmp_path, ["boston"], seed=[0, 1])
    table = tmp_path / "results.csv"
    first, second, third = table.read_text().splitlines(keepends=True)
    table.write_text(first + second.rpartition(",")[0] + "\n" + third)
    with pytest.raises(SafaError, match=r"line 2: needs \d+ fields, as many as there are columns, not \d+"):
        write_report(tmp_path)
    table.write_bytes(b"\xff\xfe")
    with pytest.raises(SafaError, match="it is not text"):
        write_report(tmp_path)
    table.write_bytes(b"")
    with pytest.raises(SafaError, match="no finished run yet"):
        write_report(tmp_path)


def test_a_number_of_any_length_is_read(tmp_path: Path) -> None:
    sweep(tmp_path, ["boston"], seed=[0, 1])
    spoilt(tmp_path / "results.csv", 1, "virtual_time_s", "9" * 400)
    assert "Sweep on boston" in write_report(tmp_path).read_text()


def test_a_folder_gets_its_report(tmp_path: Path) -> None:
    settings = Settings.of("boston", train=False, rounds=3)
    writer = RunWriter.begin(tmp_path / "run", settings)
    for record in run_rounds(settings):
        writer.add(record)
    writer.close()
    path = write_report(tmp_path / "run")
    assert path == tmp_path / "run" / "report.html"
    assert "SAFA on boston" in path.read_text()
    sweep(tmp_path / "sweep", ["boston"], seed=[0, 1])
    assert "Sweep on boston" in write_report(tmp_path / "sweep").read_text()
    assert not list(tmp_path.rglob("*.part"))


def test_a_folder_that_holds_neither_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SafaError, match="holds neither a run"):
        write_report(tmp_path)
    with pytest.raises(SafaError, match="cannot read"):
        read_table(tmp_path / "results.csv")
    (tmp_path / "results.csv").write_text("task,protocol\n")
    with pytest.raises(SafaError, match="no finished run yet"):
        write_report(tmp_path)
    (tmp_path / "config.toml").write_text(Settings.of("boston").to_toml())
    with pytest.raises(SafaError, match=r"no rounds\.jsonl"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, ""), (float("nan"), ""), (float("inf"), "unlimited"), (True, "yes"), (1234, "1,234"), (0.12345, "0.123"),
     (1234.5, "1,234"), ("text", "text")],
)  # fmt: skip
def test_numbers_are_short(value: object, said: str) -> None:
    assert number(value) == said


def test_values_have_units() -> None:
    assert value_of("round_length_s", 54.87) == "54.9 s"
    assert value_of("virtual_time_s", 10140.0) == "10,140 s (2.82 h)"
    assert value_of("bytes_down", 3.0e9) == "3 GB"
    assert value_of("bytes_up", 0.0) == "0 bytes"
    assert value_of("sync_ratio", 0.3) == "0.3"
    assert time_unit(2745) == (60.0, "minutes")
    assert time_unit(20) == (1.0, "seconds")


def test_a_run_in_memory_is_written_where_it_is_told(tmp_path: Path) -> None:
    run = simulate("boston", rounds=2, train=False)
    path = write_report(run, tmp_path / "page.html")
    assert path == tmp_path / "page.html"
    simulate("boston", rounds=2, train=False, out=tmp_path / "run")
    assert write_report(load_run(tmp_path / "run")) == tmp_path / "run" / "report.html"
    assert write_report(str(tmp_path / "run")).read_bytes() == path.read_bytes()
    with pytest.raises(SafaError, match=r"held in memory has no folder; say where to write its page, path=FILE\.html"):
        write_report(run)
