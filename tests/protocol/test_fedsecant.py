"""FedSecant: the protocol's part. What its aggregator remembers is tested there."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from safa import Settings, run_rounds
from safa.errors import SafaError
from safa.protocol import FedSecant
from safa.protocol.records import EndedBy, Verdict
from safa.protocol.registry import parameters
from tests.protocol.helpers import arrive, lose, open_round


@pytest.mark.parametrize(
    ("clients", "buffer"),
    [
        (0, 2), (1, 2), (4, 2), (5, 3), (9, 3), (10, 4), (90, 10), (100, 10), (101, 11), (500, 50), (1000, 100)
    ],
)  # fmt: skip
def test_a_version_is_made_of_the_square_root_of_the_clients_or_of_a_tenth(clients: int, buffer: int) -> None:
    protocol = FedSecant(np.ones(clients))
    open_round(protocol, 0.0)
    assert protocol.quota == protocol.buffer_size == buffer


def test_nothing_has_to_be_set() -> None:
    assert {name: given.default for name, given in parameters(FedSecant).items()} == {
        "exponent": 0.25,
        "adaptation": 0.25,
        "round_limit_s": math.inf,
    }
    assert FedSecant([1]).aggregator == "secant"


@pytest.mark.parametrize("exponent", [-0.1, math.inf, math.nan])
def test_an_exponent_that_is_no_discount_is_refused(exponent: float) -> None:
    with pytest.raises(SafaError, match="exponent must be a number, at least 0, not"):
        FedSecant([1], exponent=exponent)


@pytest.mark.parametrize("adaptation", [-0.1, 1.1, math.nan])
def test_an_adaptation_that_is_no_share_is_refused(adaptation: float) -> None:
    with pytest.raises(SafaError, match="adaptation must be from 0 to 1, not"):
        FedSecant([1], adaptation=adaptation)


def quotas(adaptation: float, at_work: int, rounds: int) -> list[int]:
    """K by record, where of 100 clients only so many are at work, and commit in turn."""
    protocol, found = FedSecant(np.ones(100), adaptation=adaptation), list[int]()
    turn = itertools.cycle(range(at_work))
    for number in range(rounds):
        open_round(protocol, float(number))
        found.append(protocol.quota)
        for place in range(protocol.quota):
            arrive(protocol, [next(turn)], number + (place + 1) / 100)
        protocol.close_round(now=number + 0.9)
    return found


def test_k_follows_the_number_of_clients_at_work() -> None:
    """Nine of a hundred clients commit. Lags are whole versions, so that nine are taken for ten."""
    found = quotas(0.25, 9, 40)
    assert found[:2] == [10, 10], "the first updates say nothing: all started from the first model"
    assert found == sorted(found, reverse=True)
    assert found[-1] == 4
    assert set(quotas(0.0, 9, 40)) == {10}
    assert set(quotas(0.25, 100, 100)) == {10}


def test_a_record_is_a_version_and_an_update_counts_the_less_the_staler_it_is() -> None:
    protocol = FedSecant(np.ones(4))
    for number in range(3):
        open_round(protocol, float(number))
        arrive(protocol, [0, 1] if number < 2 else [0, 3], number + 0.5)
        record = protocol.close_round(now=number + 0.5)
        assert (record.version, record.ended_by) == (number + 1, EndedBy.QUOTA)
    assert record.base.tolist() == [1, 0]  # 0 was answered before its own update was in a version
    assert record.weight.tolist() == pytest.approx([0.5 / 2**0.25, 0.5 / 3**0.25])


def test_a_buffer_that_is_not_full_stays_also_where_clients_leave() -> None:
    """With 16 clients K is 4. Three updates are in the buffer when twelve leave: the next update makes the version."""
    protocol = FedSecant(np.ones(16), round_limit_s=10.0)
    open_round(protocol, 0.0)
    arrive(protocol, [0, 1, 2], 1.0)
    assert protocol.close_round(now=10.0).version == 0
    protocol.retire(range(4, 16))
    open_round(protocol, 10.0)
    assert protocol.quota == 4
    arrive(protocol, [3], 11.0)
    assert protocol.version == 1
    lose(protocol, [0, 1, 2, 3], 12.0)
    protocol.close_round(now=12.0)
    open_round(protocol, 12.0)
    assert protocol.quota == 2


def test_nobody_is_refused_abandoned_or_starved() -> None:
    """A fleet of two speeds, of which the cap cuts the work of the slow ones."""
    setting = Settings.of("mnist", protocol="fedsecant", fleet="two-speed", rounds=100, crash_rate=0.3)
    records = list(run_rounds(setting))
    verdicts = np.concatenate([record.verdict for record in records])
    assert np.all(verdicts == Verdict.PICKED)
    assert len(np.unique(np.concatenate([record.client for record in records]))) == records[0].clients
    assert not any(len(record.deprecated) for record in records)
    assert np.concatenate([record.work for record in records]).min() < 0.5
