"""How costs grow is measured and fitted, and a slowdown is seen."""

from __future__ import annotations

import csv
import json
from itertools import count
from pathlib import Path

import pytest
from benchmarks.bench import BASELINE, MEASURES, Line, compared

from safa.bench.growth import WHAT, Job, Point, exponent, fits, measure, plan, write
from safa.bench.workloads import measure_rounds, measure_steps
from safa.cli import main
from safa.errors import SafaError

SIZES = (10, 100, 1000)


def grown(power: float, *, by: tuple[float, ...] = (1.0,), what: str = "model", series: str = "mean") -> list[Point]:
    return [Point(what, series, size, tuple(2e-6 * size**power * factor for factor in by), 50.0) for size in SIZES]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_is_found(power: float) -> None:
    assert exponent(SIZES, [3e-4 * size**power for size in SIZES]) == pytest.approx(power, abs=1e-12)


def test_an_exponent_needs_two_sizes() -> None:
    with pytest.raises(SafaError, match="at least two sizes"):
        exponent([10, 10], [1.0, 2.0])
    assert fits(grown(1.0)[:1]) == []


def test_the_band_is_that_of_the_repetitions() -> None:
    points = grown(1.0, by=(1.0, 1.0, 1.0))
    slower = Point("model", "mean", 1000, (2e-3, 4e-3, 1e-3), 50.0)
    (fit,) = fits([*points[:2], slower])
    assert fit.exponent == pytest.approx(1.0)
    assert fit.least < 1.0 < fit.most


def test_series_are_fitted_apart() -> None:
    found = fits([*grown(1.0), *grown(2.0, series="cache")])
    assert [(fit.series, round(fit.exponent, 6)) for fit in found] == [("mean", 1.0), ("cache", 2.0)]


def test_what_is_measured_is_planned_once_and_by_name() -> None:
    assert {job.what for job in plan(quick=True)} == set(WHAT)
    assert plan(["clients", "clients"], quick=True) == plan(["clients"], quick=True)
    assert max(job.size for job in plan(["clients"])) == 1_000_000
    assert max(job.size for job in plan(["model"])) == 100_000_000
    with pytest.raises(SafaError, match=r"cannot measure 'modle'.*model"):
        plan(["modle"])


def test_rounds_are_measured_in_a_process_of_their_own() -> None:
    job = Job("clients", "safa", 50, {"kind": "rounds", "clients": 50, "rounds": 2})
    point = measure(job)
    assert point.median > 0
    assert point.peak_mib > 1
    assert point.times_copy is None


def test_what_cannot_be_measured_is_said_in_a_sentence() -> None:
    with pytest.raises(SafaError, match=r"clients of safa could not be measured for 0: .*clients"):
        measure(Job("clients", "safa", 0, {"kind": "rounds", "clients": 0, "rounds": 2}))


@pytest.mark.parametrize("aggregator", ["mean", "buffer", "cache", "mifa"])
def test_steps_are_measured_beside_a_copy(aggregator: str) -> None:
    found = measure_steps(aggregator, 100, 3, steps=2)
    assert found["seconds"] > 0
    assert found["copy_seconds"] > 0
    assert measure_rounds(20, 2)["seconds"] > 0


def test_a_table_and_plots_are_written(tmp_path: Path) -> None:
    files = write([*grown(1.0), *grown(1.5, what="clients", series="safa")], tmp_path)
    assert [path.name for path in files] == ["growth.csv", "model.svg", "clients.svg"]
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    assert [int(row["size"]) for row in rows] == [*SIZES, *SIZES]
    assert float(rows[2]["seconds"]) == pytest.approx(2e-3)
    assert "<svg" in files[1].read_text()


def test_the_command_refuses_nonsense_in_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "--what", "weather", "--out", str(tmp_path / "new")]) == 2
    assert "cannot measure 'weather'; there are clients, model, updates" in capsys.readouterr().err
    assert main(["bench", "--repeats", "0", "--out", str(tmp_path / "new")]) == 2
    assert "repeats must be at least 1, not 0" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_the_command_prints_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", "--what", "clients", "--repeats", "1", "--json", "--quiet"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [point["size"] for point in found["points"]] == [1_000, 10_000, 100_000]
    assert len(found["fits"]) == 1


def test_a_slowdown_is_seen() -> None:
    assert not Line("as before", 1.2, 1.0).is_worse
    assert Line("slower", 1.4, 1.0).is_worse
    assert not Line("not known yet", 1.4, None).is_worse
    assert str(Line("slower", 1.4, 1.0)).endswith("SLOWER")
    assert "new" in str(Line("not known yet", 1.4, None))


def test_what_seems_slower_is_measured_again() -> None:
    noisy, calls = iter([2.0, 1.1]), count()
    measures = {"noisy": lambda: next(noisy), "fast": lambda: next(calls) + 0.5, "slow": lambda: 3.0}
    lines = {line.name: line for line in compared(measures, {"noisy": 1.0, "fast": 1.0, "slow": 1.0})}
    assert lines["noisy"].now == 1.1
    assert lines["fast"].now == 0.5
    assert next(calls) == 1
    assert [name for name, line in lines.items() if line.is_worse] == ["slow"]


def test_the_baseline_is_that_of_what_is_measured() -> None:
    assert json.loads(BASELINE.read_text()).keys() == MEASURES.keys()
