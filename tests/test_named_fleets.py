"""Fleets by name have the spread that they are said to have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from safa.errors import SafaError
from safa.fleet import Fleet, make_fleet
from safa.fleet.named import speeds_of
from safa.runs.settings import Settings

MANY = 100_000


def made(fleet: str, **given: Any) -> Fleet:
    options: dict[str, Any] = {"fleet": fleet, "clients": MANY} | given
    return make_fleet(Settings.of("mnist", **options))


def test_phones_have_the_quantiles_of_the_benchmark() -> None:
    speeds = made("phones", speed_mean=3.0).speeds
    below = [np.mean(speeds < 3.0 * score / 4638) for score in (511, 4638, 30229)]
    assert below == pytest.approx([0.05, 0.5, 0.95], abs=0.005)


def test_phones_have_the_bandwidths_of_the_public_figures_either_way() -> None:
    fleet = made("phones", model_size_mb=1.0)
    mbps = 8.0 / fleet.down_s
    assert np.array_equal(fleet.down_s, fleet.up_s)
    assert np.median(mbps) == pytest.approx(6.1, rel=0.01)
    assert np.mean(mbps < 3) == pytest.approx(0.26, abs=0.005)
    assert abs(np.corrcoef(np.log(mbps), np.log(fleet.speeds))[0, 1]) < 0.02


def test_one_client_in_five_of_two_speed_is_ten_times_slower() -> None:
    speeds = made("two-speed", speed_mean=3.0).speeds
    assert np.unique(speeds).tolist() == pytest.approx([0.3, 3.0])
    assert np.mean(speeds < 1) == pytest.approx(0.2, abs=0.005)


def test_the_lognormal_fleet_has_its_mean_and_a_sigma_of_one() -> None:
    speeds = made("lognormal", speed_mean=3.0).speeds
    assert speeds.mean() == pytest.approx(3.0, rel=0.02)
    assert np.log(speeds).std() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("fleet", ["phones", "two-speed", "lognormal"])
def test_a_client_keeps_its_speed_and_link_in_a_larger_fleet(fleet: str) -> None:
    few, many, other = (made(fleet, clients=count, seed=seed) for count, seed in ((10, 1), (1000, 1), (1000, 2)))
    assert np.array_equal(few.speeds, many.speeds[:10])
    assert np.array_equal(few.down_s, many.down_s[:10])
    assert not np.array_equal(other.speeds, many.speeds)


def test_links_of_the_other_fleets_are_as_the_options_say() -> None:
    fleet = made("two-speed", down_mbps=8.0, up_mbps=4.0, model_size_mb=1.0)
    assert (fleet.down_s[0], fleet.up_s[0]) == (1.0, 2.0)
    own = make_fleet(Settings.of("boston", fleet="phones", links=[(8, 4)] * 5, model_size_mb=1.0))
    assert (own.down_s[0], own.up_s[0]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"speed_distribution": "normal"}, "speed_distribution has no effect with fleet = phones; .* fleet = paper"),
        ({"speed_floor": 0.9}, "speed_floor has no effect with fleet = phones; it is for fleet = paper"),
        ({"speed_spread": 0.9}, "speed_spread has no effect with fleet = phones; it is for fleet = paper"),
        ({"down_mbps": 3}, "down_mbps has no effect with fleet = phones; .* fleet = paper or two-speed or lognormal"),
        ({"up_mbps": 3}, "up_mbps has no effect with fleet = phones"),
        ({"speeds": "x"}, "fleet has no effect where speeds come from a file; leave out one of the two"),
        ({"speeds": [1.0]}, "fleet has no effect where speeds are given; leave out one of the two"),
        ({"fleet": "tablets"}, "fleet must be one of paper, phones, two-speed, lognormal, not 'tablets'"),
    ],
    ids=str,
)
def test_what_has_no_effect_with_a_fleet_is_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SafaError, match=complaint):
        Settings.of("boston", **{"fleet": "phones"} | given)


def test_the_fleet_of_the_paper_has_no_speeds_of_its_own() -> None:
    with pytest.raises(SafaError, match="no fleet 'paper' with speeds of its own"):
        speeds_of("paper", 3, seed=0, mean=1.0)
