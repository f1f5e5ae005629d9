"""The paper clock, held against the tables that the paper prints."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from safa.analysis import measure
from safa.errors import SafaError
from safa.paper import printed
from safa.paper.times import printed_times
from safa.runs.settings import Settings
from safa.simulation import run_rounds

CRASH_RATES = (0.1, 0.3, 0.5, 0.7)
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 1.0)


def metrics(task: str, protocol: str, crash_rate: float, fraction: float, seed: int = 0) -> dict[str, float]:
    setting = Settings.of(task, preset="paper", protocol=protocol, crash_rate=crash_rate, fraction=fraction, seed=seed)
    records = list(run_rounds(setting))
    return measure(records) | printed_times(records)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["boston", "mnist", "kdd99"])
def test_t_dist_of_fedavg_is_as_printed_to_the_last_digit(task: str) -> None:
    """It does not depend on chance, nor on the crash rate."""
    for fraction in FRACTIONS:
        measured = metrics(task, "fedavg", 0.1, fraction)["t_dist_s_as_printed"]
        for crash_rate in CRASH_RATES:
            assert round(measured, 2) == printed()[task, "fedavg", "t_dist_s", crash_rate, fraction]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "tolerance", "seeds"), [("boston", 0.05, 20), ("mnist", 0.02, 1), ("kdd99", 0.02, 1)])
def test_sync_ratio_and_futility_of_safa_are_as_printed(task: str, tolerance: float, seeds: int) -> None:
    """Neither depends on the fraction, so one fraction stands for all. With five clients it takes many seeds."""
    for crash_rate in CRASH_RATES:
        runs = [metrics(task, "safa", crash_rate, 0.1, seed) for seed in range(seeds)]
        for name, fraction in itertools.product(("sync_ratio", "futility"), FRACTIONS):
            expected = printed()[task, "safa", name, crash_rate, fraction]
            measured = statistics.mean(run[name] for run in runs)
            assert measured == pytest.approx(expected, abs=tolerance), (crash_rate, fraction, name)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["mnist", "kdd99"])
@pytest.mark.parametrize("crash_rate", CRASH_RATES)
def test_short_rounds_of_safa_are_as_long_as_printed(task: str, crash_rate: float) -> None:
    measured = statistics.mean(
        metrics(task, "safa", crash_rate, 0.1, seed)["round_length_s_as_printed"] for seed in range(5)
    )
    assert measured == pytest.approx(printed()[task, "safa", "round_length_s", crash_rate, 0.1], rel=0.1)


@pytest.mark.parametrize(("tau", "stationary"), [(6, 0.340), (5, 0.361), (1, 1.0)])
def test_sync_ratio_settles_at_its_stationary_value(tau: int, stationary: float) -> None:
    """A client is synchronised when it committed or has missed tau rounds in a row: SR = (1-cr)/(1-cr^tau)."""
    crash_rate = 0.7
    setting = Settings.of(
        "mnist", preset="paper", clients=2000, rounds=120, lag_tolerance=tau, crash_rate=crash_rate, fraction=0.1
    )
    late = [len(record.sent) / 2000 for record in run_rounds(setting) if record.round > 20]
    formula = (1 - crash_rate) / (1 - crash_rate**tau)
    assert formula == pytest.approx(stationary, abs=0.001)
    assert statistics.mean(late) == pytest.approx(formula, abs=0.003)


def test_fedcs_waits_for_whom_it_selected_crashed_or_not() -> None:
    """Its round length does not fall as more clients crash; the tables' does not either."""
    lengths = [metrics("kdd99", "fedcs", crash_rate, 0.1)["round_length_s"] for crash_rate in (0.0, 0.7)]
    assert lengths[0] == lengths[1]


def test_fedavg_waits_until_the_limit_for_whoever_crashed() -> None:
    records = list(run_rounds(Settings.of("mnist", preset="paper", protocol="fedavg", rounds=20, crash_rate=0.05)))
    for record in records:
        waited = record.length_s - record.distribution_s
        assert (waited == pytest.approx(5600.0)) == (len(record.crashed) > 0)
    assert {len(record.crashed) > 0 for record in records} == {True, False}


def test_everyone_who_does_not_crash_is_picked_or_undrafted() -> None:
    for record in run_rounds(Settings.of("kdd99", preset="paper", rounds=10, fraction=0.3)):
        assert len(record.picked) == 150
        everyone = np.concatenate([record.picked, record.undrafted, record.crashed])
        assert sorted(everyone.tolist()) == list(range(500))


def test_the_version_variance_is_that_of_clients_that_did_not_crash() -> None:
    """Figure 4 shows about 0.5 at cr = 0.7, tau = 5 and C = 0.1; all clients together have 1.8."""
    runs = [metrics("boston", "safa", 0.7, 0.1, seed)["version_variance"] for seed in range(5)]
    assert statistics.mean(runs) == pytest.approx(0.5, abs=0.15)
    for record in run_rounds(Settings.of("boston", preset="paper", rounds=30, crash_rate=0.7)):
        survivors = record.base[np.isin(record.client, record.crashed, invert=True)]
        assert record.version_variance == (np.var(survivors) if len(survivors) else 0.0)


def test_a_client_slower_than_the_limit_is_never_picked(tmp_path: Path) -> None:
    (tmp_path / "speeds").write_text("1\n1\n0.001\n")
    setting = Settings.of(
        "boston", preset="paper", clients=3, rounds=5, fraction=1.0, crash_rate=0.0, speeds=str(tmp_path / "speeds")
    )
    for record in run_rounds(setting):
        assert sorted(record.picked.tolist()) == [0, 1]
        assert record.undrafted.tolist() == [2]


def test_local_is_known_to_the_paper_clock() -> None:
    records = list(run_rounds(Settings.of("boston", preset="paper", protocol="local", rounds=5)))
    assert [record.uploads for record in records[:-1]] == [0, 0, 0, 0]
    assert records[-1].version == 1


@pytest.mark.parametrize("protocol", ["fedasync", "fedbuff"])
def test_other_protocols_refuse_the_paper_clock(protocol: str) -> None:
    with pytest.raises(SafaError, match=f"run {protocol} with clock = causal"):
        list(run_rounds(Settings.of("boston", preset="paper", protocol=protocol)))


def test_the_paper_clock_knows_no_trace(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("client,online_from_s,online_until_s\n0,0,9\n")
    with pytest.raises(SafaError, match="no availability trace"):
        list(run_rounds(Settings.of("boston", preset="paper", trace=str(tmp_path / "trace"))))


def test_the_paper_clock_knows_no_work_cap() -> None:
    with pytest.raises(SafaError, match="no parts of the work"):
        list(run_rounds(replace(Settings.of("boston", preset="paper"), work_cap=2.0)))


def test_an_infinite_limit_is_no_length() -> None:
    setting = Settings.of("boston", preset="paper", protocol="fedavg", round_limit_s=math.inf, crash_rate=0.9)
    assert math.isfinite(measure(run_rounds(setting))["round_length_s"])


@pytest.mark.parametrize(
    ("crash_rate", "fraction", "as_printed"), [(0.1, 0.1, 0.21), (0.5, 0.3, 0.41), (0.7, 0.7, 0.51)]
)
def test_fedcs_is_charged_with_whom_it_left_out(
    crash_rate: float, fraction: float, as_printed: float, tmp_path: Path
) -> None:
    """Cells of Task 1 in which T_dist shows that one client of the five was always left out."""
    (tmp_path / "speeds").write_text("1\n1\n1\n1\n0.05\n")
    setting = Settings.of(
        "boston", preset="paper", protocol="fedcs", rounds=1000, fraction=fraction, crash_rate=crash_rate,
        size_distribution="equal", speeds=str(tmp_path / "speeds"),
    )  # fmt: skip
    metrics = measure(run_rounds(setting))
    assert metrics["futility"] == pytest.approx(0.2 + 0.8 * crash_rate / 2, abs=0.03)
    assert metrics["futility"] == pytest.approx(as_printed, abs=0.05)
