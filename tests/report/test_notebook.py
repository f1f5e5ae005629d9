"""Runs and sweeps in a notebook: what they show of themselves, and the charts that they return."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from safa import Run, load_run, simulate, sweep
from safa.analysis import Metrics
from safa.errors import SafaError
from safa.experiments import Sweep
from safa.report.plots import curves_chart
from safa.report.words import duration
from safa.runs import Settings, write_config
from tests.report.making import learnt, simulated
from tests.report.test_figures import found

HOSTILE = "<script>alert(1)</script>&\"'"
VALUES: dict[str, Any] = {"protocol": ["safa", "fedavg"], "fraction": [0.4, 1.0], "rounds": 3, "until": "loss=0.1"}


class Elements(HTMLParser):
    """The elements, attributes and words of a piece of HTML, whose elements must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes |= attrs
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"


def card(run: Any) -> Elements:
    text = run._repr_html_()
    assert len(text) < 10_000
    shown = Elements(text)
    assert set(shown.names) <= {"div", "strong", "span", "table", "thead", "tbody", "tr", "th", "td", "svg", "polyline"}
    assert set(shown.attributes) <= {"style", "role", "aria-label", "width", "height"}, "nothing is fetched or run"
    return shown


def spec(chart: Any) -> dict[str, Any]:
    """What Altair makes of a chart, after its own checks."""
    made: dict[str, Any] = chart.to_dict()
    return made


def values(chart: Any) -> list[dict[str, Any]]:
    """All rows of a chart."""
    return [row for rows in spec(chart)["datasets"].values() for row in rows]


def texts(chart: Any) -> list[str]:
    """The words in a chart."""
    return [mark["text"] for mark in found(spec(chart), "mark") if isinstance(mark, dict) and "text" in mark]


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return sweep("boston", seed=range(2), **VALUES)


def aiming(until: str) -> Run:
    """A run with a target."""
    run = learnt(simulated())
    return summed_up(replace(run, settings=replace(run.settings, until=until)))


def summed_up(run: Run) -> Run:
    """The run with the summary that its records come to."""
    metrics = Metrics(run.settings.metrics, run.settings.target)
    for record in run.records():
        metrics.add(record)
    return replace(run, summary=metrics.values())


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_says_how_good_how_long_what_was_wasted_and_who_was_left_out() -> None:
    run = aiming("accuracy=0.9")
    shown = card(run)
    assert "SAFA on digits" in shown.words
    assert "20 clients, at most 12 rounds, C" in shown.words
    for title in ("Accuracy of the last model", "Time of all rounds", "Work thrown away", "Clients left out"):
        assert title in shown.words
    assert "The target accuracy=0.9 was reached in round 5" in shown.words
    assert shown.attributes["aria-label"] == "from 0.5 to 0.958"
    assert len(repr(run)) < 100


def test_a_run_without_a_model_shows_no_curve() -> None:
    shown = card(simulated())
    assert "svg" not in shown.names
    assert "ccuracy" not in shown.words


def test_a_run_that_is_not_finished_says_so_and_one_that_has_not_begun_too(tmp_path: Path) -> None:
    assert "Not finished: 12 rounds of 12." in card(replace(simulated(), summary=None)).words
    write_config(tmp_path, Settings.of("boston"))
    assert "Not finished: 0 rounds of 100. In " in card(load_run(tmp_path)).words


@pytest.mark.slow
def test_a_run_in_a_folder_shows_the_same_as_in_memory_and_as_if_it_were_unfinished(tmp_path: Path) -> None:
    held = simulate("boston", rounds=4)
    written = simulate("boston", rounds=4, out=tmp_path / "run")
    assert card(written).words == card(held).words.replace("seed 0.", f"seed 0. In {tmp_path / 'run'}.")
    unfinished = card(replace(held, summary=None)).words
    assert unfinished.replace(" Not finished: 4 rounds of 4.", "") == card(held).words


def test_hostile_names_are_text() -> None:
    run = learnt(simulated())
    settings = replace(run.settings, task=HOSTILE, metrics={HOSTILE: "higher"})
    records = [replace(record, metrics={HOSTILE: 0.5}) for record in run.held_records]
    shown = card(summed_up(replace(run, settings=settings, held_records=records)))
    assert f"SAFA on {HOSTILE}" in shown.words
    assert f"{HOSTILE} of the last model" in shown.words


def test_a_run_is_plotted_over_time_or_rounds_with_its_target() -> None:
    run = aiming("accuracy=0.9")
    over_time, over_rounds, fifth = run.plot(), run.plot(over="round"), list(run.records())[4]
    scores = [row["score"] for row in values(over_time) if "score" in row]
    assert scores[:12] == [1 - 0.5 / number for number in range(1, 13)]
    assert texts(over_time) == [f"target 0.9, reached after {duration(fifth.closed_s)}, in round 5"]
    assert texts(over_rounds) == texts(over_time)
    assert sorted(found(spec(over_rounds), "datum")) == [0.9, 0.9, 0.9, 5, 5]
    assert texts(run.plot("loss")) == [], "the target is not the loss's"


def test_a_target_that_is_not_reached_is_drawn_as_such() -> None:
    assert texts(aiming("accuracy=0.99").plot()) == ["target 0.99, not reached"]


@pytest.mark.parametrize(
    ("run", "given", "said"),
    [
        (learnt(simulated()), {"metric": "acuracy"}, r"no metric 'acuracy' \(did you mean accuracy\?\); there is acc"),
        (learnt(simulated()), {"over": "rounds"}, "over must be time or round, not 'rounds'"),
        (simulated(), {}, "no round of this run has a finite accuracy"),
    ],
)  # fmt: skip
def test_what_cannot_be_plotted_is_said(run: Run, given: dict[str, Any], said: str) -> None:
    with pytest.raises(SafaError, match=said):
        run.plot(**given)


def test_the_clients_of_a_run_are_plotted_also_where_they_are_many() -> None:
    small, large = simulated(), simulated(clients=300, rounds=150)
    assert len(_text(small, "map_clients").split(",")) == 20
    assert len(_text(large, "map_clients").split(",")) == 200
    assert len(_text(large, "map_rounds").split(",")) == 75
    with pytest.raises(SafaError, match="no round of this run is finished"):
        replace(small, held_records=[]).plot_clients()


def _text(run: Run, name: str) -> str:
    given = {one["name"]: one.get("value") for one in spec(run.plot_clients())["params"]}
    return str(given[f"{name}_text"])


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_shows_which_setting_is_first_and_whether_the_seeds_allow_saying_so(swept: Sweep) -> None:
    shown = card(swept)
    assert "8 runs: 4 settings x 2 seeds" in shown.words
    for sentence in swept.best().sentences():
        assert sentence in shown.words
    assert shown.names.count("tr") == 5
    assert repr(swept) == "<Sweep on boston, 8 runs: 4 settings x 2 seeds>"


def test_a_large_sweep_shows_its_first_settings_and_one_without_a_model_says_why_there_is_no_best() -> None:
    large = card(sweep("boston", lag_tolerance=list(range(1, 15)), rounds=2, seed=[0]))
    assert large.names.count("tr") == 13
    assert "... and 2 more" in large.words
    assert "no model was evaluated" in card(sweep("boston", seed=range(2), rounds=2, train=False)).words


def test_a_sweep_is_plotted_over_time_as_the_mean_of_its_seeds(swept: Sweep) -> None:
    curves = swept.curves()
    assert list(curves) == ["safa, fraction 0.4", "safa, fraction 1.0", "fedavg, fraction 0.4", "fedavg, fraction 1.0"]
    first = curves["safa, fraction 0.4"]
    rows = [row for row in values(swept.plot()) if row.get("setting") == "safa, fraction 0.4"]
    start = max(curve.times_s[0] for curve in first)
    assert rows[0]["mean"] == pytest.approx(sum(curve.at(start) or 0.0 for curve in first) / 2)
    assert rows[-1]["lowest"] == min(curve.values[-1] for curve in first)
    assert texts(swept.plot("loss")) == ["target 0.1"]


def test_the_curves_of_a_sweep_are_those_of_its_records_also_where_only_curves_are_kept(swept: Sweep) -> None:
    losses = swept.curves("loss")
    for run in swept.runs():
        curve = losses[f"{run.settings.protocol}, fraction {run.settings.fraction}"][run.settings.seed]
        assert curve.values == [record.loss for record in run.records()]
    kept = sweep("boston", keep="curves", protocol=["safa", "fedavg"], rounds=3, seed=range(2))
    there = sweep("boston", protocol=["safa", "fedavg"], rounds=3, seed=range(2))
    assert [str(curve) for seeds in kept.curves().values() for curve in seeds] == [
        str(curve) for seeds in there.curves().values() for curve in seeds
    ]
    assert values(kept.plot())
    with pytest.raises(SafaError, match="kept no loss over time"):
        kept.plot("loss")


def test_a_sweep_is_plotted_against_a_setting(swept: Sweep) -> None:
    rows = [row for row in values(swept.plot("futility", over="fraction")) if row.get("series") == "safa"]
    settings = [setting for setting in swept.settings() if setting.values["protocol"] == "safa"]
    means = [setting.mean("futility") for setting in settings]
    assert [row["x"] for row in rows[:2]] == [0.4, 1.0]
    assert [row["mean"] for row in rows[:2]] == pytest.approx([mean.mean for mean in means if mean])
    assert {row["x"] for row in values(swept.plot("accuracy", over="protocol")) if "x" in row} == {
        "safa, fraction 0.4", "safa, fraction 1.0", "fedavg, fraction 0.4", "fedavg, fraction 1.0",
    }  # fmt: skip
    with pytest.raises(SafaError, match="no setting has a finite time_to_target_s in all seeds"):
        sweep("boston", fraction=[0.5, 1.0], seed=range(2), rounds=2, until="loss=0.0001").plot(over="fraction")


def test_what_cannot_be_plotted_of_a_sweep_is_said(swept: Sweep) -> None:
    with pytest.raises(
        SafaError, match="epochs was not varied in this sweep; over may be time, protocol, fraction, seed"
    ):
        swept.plot(over="epochs")
    with pytest.raises(SafaError, match="there is no metric 'speed'; there is accuracy, loss"):
        swept.plot("speed")
    with pytest.raises(SafaError, match="no run of this sweep has a finite accuracy"):
        curves_chart({}, "accuracy")
