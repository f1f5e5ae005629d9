"""The pages of runs and sweeps: what they say, for whatever a folder holds."""

from __future__ import annotations

import base64
import csv
import html
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa.analysis import Metrics, measure
from safa.analysis.client_map import client_map
from safa.errors import SafaError
from safa.experiments.simulate import simulate
from safa.experiments.sweep import combinations, run_sweep
from safa.fleet import make_fleet
from safa.report import read_table, run_page, sweep_page, write_report
from safa.report.clients import MAP_CLIENTS, MAP_ROUNDS
from safa.report.words import duration, number, percent, some_of, time_unit, value_of
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


def map_of(page: str) -> dict[str, Any]:
    """What the map of clients and rounds is drawn from."""
    return next(chart for chart in specs_of(page) if "cells" in chart)


def headline_of(page: str) -> list[str]:
    """The cards that a page opens with."""
    cards = re.findall(r'class="headline">(.*?)</dl>', page, re.DOTALL)[0]
    return [text_of(card).strip() for card in cards.removesuffix("</div>").split("</div>")]


def sweep(tmp_path: Path, tasks: list[str], **given: list[Any]) -> list[dict[str, Any]]:
    values: dict[str, list[Any]] = {"train": [False], "rounds": [5]}
    runs = combinations(tasks, values | given)
    table = tmp_path / "results.csv"
    assert len(list(run_sweep(runs, tmp_path, keep="nothing", force=True))) == len(runs)
    return read_table(table)


def test_a_run_says_what_it_is() -> None:
    page = run_page(simulated(rounds=6))
    said = text_of(page)
    assert "SAFA on digits 20 clients, 6 rounds, C = 0.3, crash rate 0.3, tau = 5, causal clock, seed 0. " in said
    said_of_secant = text_of(run_page(simulated(rounds=6, protocol="fedsecant")))
    assert "FedSecant on digits 20 clients, 6 rounds, crash rate 0.3, causal clock, seed 0. " in said_of_secant
    assert "A round takes 420 s at most. For one update a client makes 2 passes over its data, about 90 samples" in said
    assert "Finished after 6 rounds. No model was trained" in said
    assert "Length of a round round_length_s" in said
    assert "Mean length of a round (Eq. 17)" in said
    assert len(specs_of(page)) == 6  # no loss, no accuracy; the map, and the length of the rounds twice


def test_a_deployment_is_described_by_its_devices_and_not_by_a_world(tmp_path: Path) -> None:
    simulate("boston", clients=3, rounds=2, out=tmp_path / "run")
    roster = [{"name": f"device {name}", "size": 20.0, "details": {}} for name in "abc"]
    (tmp_path / "run" / "roster.json").write_text(json.dumps(roster))
    summary = tmp_path / "run" / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"refusals": {"not finite": 4}}))
    said = text_of(run_page(load_run(tmp_path / "run")))
    assert "SAFA on boston 3 devices, 2 rounds, C = 0.3, tau = 5, seed 0. " in said
    assert "A round takes 830 s at most." in said
    assert "about 20 samples" in said
    assert "0 device a 20 1 device b 20 2 device c 20" in said
    assert "Refusals: not finite refusals 4 updates refused before the protocol saw them" in said
    assert "Accuracy over time" in said
    assert "virtual time" not in said.partition("Settings")[0].replace("virtual_time", "")


def test_a_run_that_trained_shows_loss_and_accuracy() -> None:
    page = run_page(learnt(simulated(rounds=6)))
    said = text_of(page)
    assert "Accuracy over virtual time" in said
    assert "Loss over rounds" in said
    assert len(specs_of(page)) == 10


def test_a_run_opens_with_four_numbers() -> None:
    run = learnt(simulated(rounds=6))
    values = measure(run.held_records, run.settings.metrics)
    whole = duration(values["virtual_time_s"])
    good, long, wasted, left_out = headline_of(run_page(run))
    assert good == "Accuracy last_accuracy 0.917 of the last model on the test set; the highest was 0.917"
    assert long.startswith(f"Time virtual_time_s {whole} {duration(values['round_length_s'])} a round; no target")
    assert wasted.startswith(f"Work thrown away futility {percent(values['futility'])} of what the clients computed")
    assert left_out.startswith(f"Clients left out starved {round(20 * values['starved'])} of 20 ")


def test_a_target_is_marked_where_it_was_reached() -> None:
    run = learnt(simulated(rounds=6))
    reached = replace(run, settings=replace(run.settings, until="accuracy=0.75"))  # that of the second round
    at_s = run.held_records[1].closed_s
    page = run_page(reached)
    said = f"Time to target time_to_target_s {duration(at_s)} accuracy 0.75, reached in round 2"
    assert headline_of(page)[1] == said
    chart = json.dumps(specs_of(page)[0])
    assert f'"text": "target 0.75, reached after {duration(at_s)}"' in chart
    assert '"datum": 0.75' in chart
    never = run_page(replace(run, settings=replace(run.settings, until="accuracy=0.99")))
    assert headline_of(never)[1].startswith("Time to target time_to_target_s not reached accuracy 0.99, not within ")
    assert "The dashed line is the target, 0.99, not reached." in text_of(never)
    assert "reached after" not in json.dumps(specs_of(never)[0])


def test_who_was_left_out_is_named() -> None:
    """The slowest clients come first, and of many only four are named."""
    run = simulated("mnist", rounds=2)
    reached = {client for record in run.held_records for client in record.picked}
    slowest = [client for client in range(100) if client not in reached]
    speeds = 100 - np.arange(100)
    named = f"{', '.join(map(str, slowest[:-5:-1]))} and {len(slowest) - 4} more"
    slow = sum(client >= 50 for client in slowest)
    said = headline_of(run_page(run, speeds))[3]
    assert said.endswith(f"{len(slowest)} of 100 never reached the model: clients {named}; {slow} in the slower half")
    assert headline_of(run_page(run))[3].endswith("more")  # without speeds, who is slow cannot be told


def test_every_client_has_its_details(tmp_path: Path) -> None:
    run = simulated("boston", rounds=30, crash_rate=0.5)
    chart = map_of(run_page(run, np.array([1.0, 5.0, 3.0, 4.0, 2.0])))
    facts = {fact["name"]: fact["values"] for fact in chart["facts"]}
    assert facts["Speed"] == [f"{speed} batches/s" for speed in (5, 4, 3, 2, 1)]
    order = [1, 3, 2, 4, 0]
    metrics = Metrics()
    for each in run.held_records:
        metrics.add(each)
    assert facts["Updates merged"] == [str(metrics.merged[client]) for client in order]
    crashed = [sum(client in each.crashed for each in run.held_records) for client in order]
    assert facts["Work cut short"] == [f"{count} time{'' if count == 1 else 's'}" for count in crashed]
    sizes = make_fleet(run.settings).sizes
    assert facts["Data"] == [f"{sizes[client]:,.0f} samples" for client in order]
    assert all(len(fact["values"]) == len(fact["meanings"]) == 5 for fact in chart["facts"])


def test_the_cells_of_the_map_are_packed() -> None:
    run = simulated(rounds=8, lag_tolerance=2)
    chart = map_of(run_page(run))
    cells = client_map(run.held_records, [int(name) for name in chart["clients"]])
    raw, count = zlib.decompress(base64.b64decode(chart["cells"])), cells.state.size
    lags, arrivals = np.frombuffer(raw, "<u2", count), np.frombuffer(raw, "<u2", count, 2 * count)
    states = np.frombuffer(raw, "u1", count, 4 * count).reshape(20, 8).T
    np.testing.assert_array_equal(states & 7, cells.state)
    np.testing.assert_array_equal(states >> 3, cells.deprecated)
    np.testing.assert_array_equal(np.where(lags == 65535, -1, lags.astype(int)).reshape(20, 8).T, cells.lag)
    into_s = np.where(arrivals == 65535, np.nan, arrivals * chart["step_s"]).reshape(20, 8).T
    np.testing.assert_allclose(into_s, cells.arrival_s - cells.opened_s[:, None], atol=chart["step_s"])


@pytest.mark.parametrize("protocol", ["fedavg", "fedcs", "local", "fedasync", "fedbuff"])
def test_every_protocol_has_a_page(protocol: str) -> None:
    assert "Updates merged per client" in run_page(simulated(protocol=protocol))


def test_speeds_order_the_clients() -> None:
    run = simulated("boston", rounds=6)
    page = run_page(run, np.array([1.0, 5.0, 3.0, 4.0, 2.0]))
    assert map_of(page)["clients"] == ["1", "3", "2", "4", "0"]
    assert "the clients are ordered by speed" in text_of(page)


def test_a_run_that_is_not_finished() -> None:
    run = simulated(rounds=6)
    half = replace(run, summary=None, held_records=run.held_records[:3])
    assert "This run is not finished: 3 of 6 rounds are there" in text_of(run_page(half))
    waiting = learnt(replace(half, settings=replace(run.settings, train=True, until="accuracy=0.99")))
    assert headline_of(run_page(waiting))[1].startswith("Time to target time_to_target_s not yet accuracy 0.99")
    nothing = replace(run, summary=None, held_records=[])
    assert "There is nothing to show yet" in text_of(run_page(nothing))


@pytest.mark.slow
def test_many_clients_and_rounds_are_sampled() -> None:
    page = run_page(simulated("mnist", clients=3 * MAP_CLIENTS, rounds=3))
    said = text_of(page)
    assert "Shown are 1,000 of 3,000 clients" in said
    assert "into 100 groups of similar speed" in said
    page = run_page(simulated("boston", rounds=2 * MAP_ROUNDS + 1))
    assert "Shown is one round in 3" in text_of(page)
    assert len(map_of(page)["rounds"]) <= MAP_ROUNDS


def test_a_sweep_over_numbers_draws_curves(tmp_path: Path) -> None:
    rows = sweep(tmp_path, ["boston"], protocol=["safa", "fedavg"], crash_rate=[0.1, 0.3, 0.5], seed=[0, 1])
    page = sweep_page(rows)
    said = text_of(page)
    assert "12 runs on boston. Varied: protocol (safa, fedavg); crash rate (0.1, 0.3, 0.5); seed (0, 1)." in said
    assert "Length of a round by crash rate" in said
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
    assert "Varied: task (boston, digits); C, fraction (0.3, 0.5). Everything else comes with the task." in said
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
    assert (duration(7075), duration(96.4), duration(2e5)) == ("118 min", "96.4 s", "2.31 days")
    assert (percent(0.281), percent(0.075), percent(0.0)) == ("28%", "7.5%", "0%")
    assert (some_of(["a"]), some_of(["a", "b", "c"]), some_of(list("abcdef"), 2)) == (
        "a",
        "a, b and c",
        "a, b and 4 more",
    )
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
