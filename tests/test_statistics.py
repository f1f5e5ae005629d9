"""Intervals and tests over seeds, against printed tables and literal versions."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from safa.analysis.statistics import (
    Interval,
    mean_interval,
    paired_difference,
    paired_ratio,
    sign_test,
    t_probability,
    t_quantile,
)


@pytest.mark.parametrize(
    ("degrees", "printed_95", "printed_99"),
    [(1, 12.706, 63.657), (2, 4.303, 9.925), (3, 3.182, 5.841), (4, 2.776, 4.604), (5, 2.571, 4.032), (9, 2.262, 3.250),
     (10, 2.228, 3.169), (19, 2.093, 2.861), (29, 2.045, 2.756), (60, 2.000, 2.660), (120, 1.980, 2.617)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(degrees: int, printed_95: float, printed_99: float) -> None:
    """Fisher and Yates, Statistical Tables, Table III, as in all textbooks: three decimals."""
    assert t_quantile(degrees) == pytest.approx(printed_95, abs=5.1e-4)
    assert t_quantile(degrees, 0.99) == pytest.approx(printed_99, abs=5.1e-4)


def test_two_degrees_have_a_closed_form_and_many_are_normal() -> None:
    for t in (0.1, 1.0, 7.5):
        assert t_probability(t, 2) == pytest.approx(t / math.sqrt(2 + t * t), rel=1e-14)
    assert t_quantile(100_001) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), rel=1e-4)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 12])
def test_the_probability_is_the_area_under_the_density(degrees: int) -> None:
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    steps = 20_000
    middles = ((place + 0.5) * 2.5 / steps for place in range(steps))
    area = 2 * sum(scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2) for x in middles) * 2.5 / steps
    assert t_probability(2.5, degrees) == pytest.approx(area, rel=1e-7)


def test_the_interval_of_a_mean() -> None:
    """The extra hours of sleep of ten patients (Student 1908, both drugs): t = 4.06, interval 0.70 to 2.46."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_difference(second, first)
    assert (found.mean, found.low, found.high) == pytest.approx((1.58, 0.70, 2.46), abs=0.005)
    assert found.excludes(0.0)
    assert not mean_interval(first).excludes(0.0)


def test_one_value_has_no_interval_and_excludes_nothing() -> None:
    assert mean_interval([3.0]) == Interval(3.0)
    assert paired_ratio([4.0], [4.0]) == Interval(1.0)
    assert not Interval(3.0).excludes(0.0)
    assert mean_interval([1.0, math.inf]) == Interval(math.inf)
    assert math.isnan(mean_interval([-math.inf, math.inf]).mean)


def test_values_that_are_all_the_same_exclude_all_others() -> None:
    assert mean_interval([2.0, 2.0, 2.0]) == Interval(2.0, 2.0, 2.0)
    assert paired_ratio([2.0, 4.0], [2.0, 4.0]).excludes(1.0) is False
    assert paired_ratio([2.0, 4.0], [1.0, 2.0]).excludes(1.0)


def test_a_ratio_does_not_depend_on_how_fast_the_worlds_are_and_turns_around() -> None:
    times, others, speeds = [10.0, 12.0, 9.0], [14.0, 15.0, 14.0], [1.0, 30.0, 0.1]
    found = paired_ratio(others, times)
    scaled = paired_ratio(*([time * speed for time, speed in zip(one, speeds, strict=True)] for one in (others, times)))
    assert (scaled.mean, scaled.low, scaled.high) == pytest.approx((found.mean, found.low, found.high))
    turned = paired_ratio(times, others)
    assert turned.low is not None
    assert (1 / turned.mean, 1 / turned.low) == pytest.approx((found.mean, found.high))


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    draw = random.Random(3)
    samples = [mean_interval([draw.gauss(0, 1) for _ in range(5)]) for _ in range(4000)]
    assert 0.94 < sum(not sample.excludes(0.0) for sample in samples) / len(samples) < 0.96


@pytest.mark.parametrize("count", [0, 1, 5, 6, 9])
def test_the_sign_test_counts_all_outcomes(count: int) -> None:
    for wins in range(count + 1):
        outcomes = [sum(outcome) for outcome in itertools.product((0, 1), repeat=count)]
        as_uneven = sum(abs(2 * outcome - count) >= abs(2 * wins - count) for outcome in outcomes)
        assert sign_test(wins, count - wins) == pytest.approx(as_uneven / 2**count)
    assert sign_test(6, 0) < 0.05 < sign_test(5, 0)
