"""FedSecant: the protocol's part. What its aggregator remembers is tested there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from safa import Settings, run_rounds
from safa.errors import SafaError
from safa.protocol import FedSecant
from safa.protocol.records import EndedBy, Verdict
from safa.protocol.registry import parameters
from tests.protocol.helpers import arrive, lose, open_round


@pytest.mark.parametrize(("clients", "buffer"), [(0, 2), (1, 2), (4, 2), (5, 3), (9, 3), (10, 4), (100, 10), (101, 11)])
def test_a_version_is_made_of_the_square_root_of_the_clients(clients: int, buffer: int) -> None:
    protocol = FedSecant(np.ones(clients))
    open_round(protocol, 0.0)
    assert protocol.quota == protocol.buffer_size == buffer


def test_nothing_has_to_be_set() -> None:
    assert {name: given.default for name, given in parameters(FedSecant).items()} == {
        "exponent": 0.25,
        "overdue": 2.0,
        "round_limit_s": math.inf,
    }
    assert FedSecant([1]).aggregator == "secant"


@pytest.mark.parametrize("exponent", [-0.1, math.inf, math.nan])
def test_an_exponent_that_is_no_discount_is_refused(exponent: float) -> None:
    with pytest.raises(SafaError, match="exponent must be a number, at least 0, not"):
        FedSecant([1], exponent=exponent)


@pytest.mark.parametrize("overdue", [0.9, math.nan])
def test_a_client_is_not_away_while_its_work_takes_its_time(overdue: float) -> None:
    with pytest.raises(SafaError, match="overdue must be a number, at least 1, not"):
        FedSecant([1], overdue=overdue)


def test_a_version_is_made_of_the_square_root_of_the_clients_at_work() -> None:
    """Of 16 clients, whose work takes 1 s, four commit again and again; after 2 s nobody waits for the others."""
    protocol, quotas = FedSecant(np.ones(16)), []
    for number in range(5):
        protocol.open_round(now=float(number), draws=np.zeros(16), expected_s=np.ones(16))
        quotas.append(protocol.quota)
        arrive(protocol, [0, 1, 2, 3][: protocol.quota], number + 0.5)
        protocol.close_round(now=float(number + 1))
    assert quotas == [4, 4, 4, 2, 2]


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
