"""A metric over time, as steps, against the same on a fine grid of times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from safa import simulate
from safa.analysis import Curve, Metrics, mean_curve

RISING = Curve([1.0, 3.0, 4.0, 7.0], [0.2, 0.5, 0.4, 0.6])


def test_a_value_holds_until_the_next_one() -> None:
    assert [RISING.at(time) for time in (0.9, 1.0, 2.9, 3.5, 9.0)] == [None, 0.2, 0.2, 0.5, 0.6]
    assert Curve().at(5.0) is None


def test_the_mean_is_that_of_a_fine_grid() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        times = np.round(np.sort(draw.random(6)) * 12, 2)
        curve = Curve(times.tolist(), draw.random(6).tolist())
        grid = [curve.at(time) or 0.0 for time in np.arange(0.005, 10, 0.01)]
        assert curve.mean(10.0) == pytest.approx(float(np.mean(grid)), abs=1e-9)


def test_what_is_not_known_counts_as_the_worst() -> None:
    assert Curve().mean(5.0) == 0.0
    assert Curve([2.0], [math.nan]).mean(5.0) == 0.0
    assert Curve([1.0, 2.0], [4.0, 1.0], higher=False).mean(4.0) == pytest.approx((4 + 4 + 1 + 1) / 4)
    assert Curve([], [], higher=False).mean(5.0) == math.inf


@pytest.mark.parametrize(
    ("value", "given", "expected"),
    [
        (0.2, {}, 1.0),
        (0.45, {}, 3.0),
        (0.45, {"held_s": 1.0}, 3.0),
        (0.45, {"held_s": 1.1}, 7.0),
        (0.45, {"held_s": 1.1, "until_s": 8.0}, None),
        (0.45, {"held_s": 1.0, "until_s": 8.0}, 3.0),
        (0.4, {"held_s": 5.0, "until_s": 8.0}, 3.0),
        (0.6, {"until_s": 6.9}, None),
        (0.7, {}, None),
    ],
)
def test_a_target_must_be_held_before_the_end(value: float, given: dict[str, Any], expected: float | None) -> None:
    assert RISING.time_to(value, **given) == expected


def test_less_may_be_better_and_nan_never_is() -> None:
    assert Curve([1.0, 2.0, 3.0], [3.0, math.nan, 1.0], higher=False).time_to(2.0) == 3.0
    assert Curve([1.0, 2.0], [math.nan, 0.5]).time_to(0.4) == 2.0


def test_it_is_written_where_it_changes_and_read_again() -> None:
    curve = Curve([1.25, 2.0, 3.0, 1234567.8], [0.5, 0.50000001, 1 / 3, math.nan])
    assert str(curve) == "1.25:0.5 3:0.333333 1.23457e+06:nan"
    again = Curve.parse(str(curve))
    assert again.times_s == [1.25, 3.0, 1234570.0]
    assert str(again) == str(curve)
    assert Curve.parse(None) == Curve.parse("") == Curve([], [])


def test_the_curve_of_a_run_is_that_of_its_records() -> None:
    run = simulate("boston", rounds=8, eval_every=3)
    metrics = Metrics(run.settings.metrics)
    for record in run.records():
        metrics.add(record)
    evaluated = [record for record in run.records() if record.loss is not None]
    assert metrics.curve.times_s == [record.closed_s for record in evaluated]
    assert metrics.curve.values == [record.metrics["accuracy"] for record in evaluated]
    assert metrics.curve.higher


def test_a_mean_curve_begins_when_all_have_a_value_and_keeps_the_last_ones() -> None:
    other = Curve([2.0, 5.0], [0.4, math.nan])
    assert mean_curve([RISING, other], 4.5) == [
        (2.0, pytest.approx(0.3), 0.2, 0.4),
        (3.0, pytest.approx(0.45), 0.4, 0.5),
        (4.0, 0.4, 0.4, 0.4),
        (4.5, 0.4, 0.4, 0.4),
    ]
    assert mean_curve([RISING, other], 9.0)[-1][0] == 4.0, "nothing is drawn where a value is not finite"
    assert mean_curve([RISING, Curve()], 9.0) == []
    assert [time for time, *_ in mean_curve([RISING], 9.0, points=2)] == [1.0, 9.0]
