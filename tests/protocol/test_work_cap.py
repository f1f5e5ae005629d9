"""The work cap of every protocol, and TimelyFL, which cuts the work to fit its rounds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from safa import Settings, run_rounds
from safa.errors import MisuseError, SafaError
from safa.protocol import Dispatch, FedCS, Protocol, TimelyFL, available, build
from safa.protocol.records import EndedBy, Rule
from tests.protocol.helpers import arrive, lose


def capped(name: str = "fedbuff", clients: int = 4, **settings: Any) -> Protocol:
    return build(name, np.ones(clients), {"fraction": 1.0, "rounds": 1, "buffer_size": 4} | settings)


def begin(protocol: Protocol, expected_s: list[float], fixed_s: list[float] | None = None, now: float = 0) -> Dispatch:
    draws = np.linspace(0, 1, protocol.clients)
    return protocol.open_round(now=now, draws=draws, expected_s=expected_s, fixed_s=fixed_s)


def test_nobody_takes_longer_than_the_cap_times_the_median() -> None:
    """The median of 2, 4, 6 and 100 s is 5 s."""
    protocol = capped(work_cap=3)
    begin(protocol, [2, 4, 6, 100])
    assert protocol.work.tolist() == [1, 1, 1, 0.15]


def test_only_the_work_shrinks_and_not_the_time_of_the_links() -> None:
    """Of 100 s, 10 pass with no work at all: 15 s leave 5 s for 90 s of work."""
    protocol = capped(work_cap=3)
    begin(protocol, [2, 4, 6, 100], [1, 1, 1, 10])
    assert protocol.work.tolist() == [1, 1, 1, pytest.approx(5 / 90)]


def test_a_client_is_asked_for_something_in_any_case() -> None:
    protocol = capped(work_cap=0.5)
    begin(protocol, [2, 4, 6, 100], [2, 4, 6, 99])
    assert protocol.work.tolist() == [1, 1, 1, 0.01]


def test_a_client_that_nobody_knows_is_asked_for_everything() -> None:
    """It is not in the median either. The cap holds from the next round on for who is asked then."""
    protocol = capped(work_cap=1)
    begin(protocol, [0, 0, 0, 0])
    assert protocol.work.tolist() == [1, 1, 1, 1]
    arrive(protocol, [0, 3], 1.0)
    lose(protocol, [0, 1, 2, 3], 2.0)
    protocol.close_round(now=2.0)
    begin(protocol, [0, 2, 4, 12], now=2.0)
    arrive(protocol, [3, 1], 3.0)
    assert protocol.work.tolist() == [1, 1, 1, pytest.approx(1 / 3)]


def test_clients_that_have_retired_are_not_in_the_median() -> None:
    protocol = capped(work_cap=1)
    protocol.retire([0, 1])
    begin(protocol, [1, 1, 10, 30])
    assert protocol.work[2:].tolist() == [1, pytest.approx(20 / 30)]


def test_weights_are_divided_by_the_share_of_the_work() -> None:
    protocol = capped(work_cap=1, normalise_work=True)
    begin(protocol, [1, 1, 1, 4])
    arrive(protocol, [0, 3, 1, 2], 4.0)
    assert protocol.close_round(now=4.0).weight.tolist() == [0.25, 1.0, 0.25, 0.25]


@pytest.mark.parametrize("name", [name for name, kind in available().items() if kind.rule is not Rule.DELTA])
def test_weights_of_models_cannot_be_normalised(name: str) -> None:
    with pytest.raises(SafaError, match=f"protocols that add up changes .*, not for {name}"):
        capped(name, work_cap=2, normalise_work=True)


def test_normalising_nothing_is_refused() -> None:
    with pytest.raises(SafaError, match="no effect with fedbuff where work_cap is 0"):
        capped(normalise_work=True)
    with pytest.raises(SafaError, match="no effect with fedsecant where work_cap is 0"):
        capped("fedsecant", normalise_work=True, work_cap=0)
    assert capped("fedcompass", normalise_work=True).normalise_work


@pytest.mark.parametrize("name", available())
def test_every_protocol_takes_a_cap(name: str) -> None:
    own = 3.0 if name == "fedsecant" else 0.0
    assert capped(name).work_cap == capped(name, work_cap="auto").work_cap == own
    assert capped(name, work_cap=0).work_cap == 0
    protocol = capped(name, work_cap=1.5)
    assert protocol.asks_for_parts
    dispatch = begin(protocol, [1, 1, 1, 100])
    least = 0.01 if name == "timelyfl" else 0.015  # timelyfl cuts it more by itself
    assert protocol.work[dispatch.sync].min() == pytest.approx(least)


def test_fedcs_takes_whom_the_cap_lets_finish_in_time() -> None:
    for cap, left_out in ((0, [3]), (2, [])):
        protocol = capped("fedcs", work_cap=cap, round_limit_s=20)
        assert isinstance(protocol, FedCS)
        assert begin(protocol, [10, 10, 10, 100]).dropped.tolist() == left_out


def test_estimates_are_one_for_each_client() -> None:
    with pytest.raises(MisuseError, match="fixed_s need one number for each of 4 clients"):
        begin(capped(), [1, 1, 1, 1], [1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"work_cap": -1}, "work_cap must be at least 0"),
        ({"work_cap": "three"}, "work_cap must be auto or a number"),
        ({"work_cap": 3, "clock": "paper"}, "work_cap has no effect with clock = paper"),
        ({"estimate_error": 0.5}, "estimate_error has no effect with protocol = safa"),
        ({"fraction": 0.5, "protocol": "fedsecant"}, "fraction has no effect with protocol = fedsecant"),
    ],
)
def test_settings_without_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SafaError, match=message):
        Settings.of("boston", **given)


def test_a_cap_shortens_fedavgs_rounds() -> None:
    lengths = []
    for cap in (0, 2):
        setting = Settings.of("mnist", protocol="fedavg", rounds=3, fraction=1.0, crash_rate=0.0, work_cap=cap)
        lengths.append(max(record.length_s for record in run_rounds(setting)))
    assert lengths[1] < lengths[0] / 4


def test_estimates_that_are_off_change_the_work() -> None:
    shares = []
    for error in (0.0, 1.0):
        setting = Settings.of("mnist", protocol="fedbuff", rounds=2, work_cap=1, estimate_error=error)
        shares.append(np.concatenate([record.work for record in run_rounds(setting)]).tolist())
    assert shares[0] != shares[1]


# -- TimelyFL --------------------------------------------------------------------------------------------------------


def test_the_interval_is_the_time_of_the_kth_fastest() -> None:
    """Of 2, 4, 6 and 10 s (2 s for the links), half is two clients: 4 s, in which the others do 1/2 and 1/4."""
    timely = TimelyFL(np.ones(4), fraction=1.0, interval_share=0.5, late_factor=1.5)
    begin(timely, [2, 4, 6, 10], [2, 2, 2, 2])
    assert timely.interval_s == 4
    assert timely.work.tolist() == [1, 1, 0.5, 0.25]
    assert timely.deadline == 6
    arrive(timely, [0, 1, 2, 3], 4.0)
    record = timely.close_round(now=4.0)
    assert record.weight.tolist() == [0.25] * 4
    assert record.work.tolist() == [1, 1, 0.5, 0.25]


def test_a_round_of_timelyfl_does_not_wait_for_whoever_is_late() -> None:
    timely = TimelyFL(np.ones(2), fraction=1.0, interval_share=1.0, late_factor=1.5)
    begin(timely, [2, 4])
    arrive(timely, [0], 2.0)
    record = timely.close_round(now=6.0)
    assert record.ended_by is EndedBy.DEADLINE
    assert record.picked.tolist() == [0]


def test_timelyfl_cuts_nothing_while_it_knows_nobody() -> None:
    timely = TimelyFL(np.ones(2), fraction=1.0, interval_share=1.0)
    begin(timely, [0, 4])
    assert timely.interval_s == timely.deadline == math.inf
    assert timely.work.tolist() == [1, 1]
    empty = TimelyFL(np.empty(0), fraction=1.0)
    begin(empty, [])
    assert empty.interval_s == math.inf


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"interval_share": 0.0}, "interval_share must be above 0"), ({"late_factor": 0.9}, "late_factor must be at le")],
)
def test_timelyfl_refuses_settings_by_name(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(SafaError, match=message):
        TimelyFL([1], fraction=1.0, **wrong)
