"""The map of clients and rounds, by hand and against simulated rounds of every protocol."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from safa.analysis.client_map import ClientMap, State, client_map, lag, turnaround_s
from safa.protocol.records import Rule, Verdict
from tests.report.making import ids, record, simulated

IDLE, TRAINING, PICKED, UNDRAFTED, CRASHED, REFUSED, ABSENT = State


def states(cells: ClientMap) -> list[list[State]]:
    return [[State(value) for value in row] for row in cells.state]


def test_safa_by_hand() -> None:
    """A client that crashed resumes from its base; one that was undrafted is sent the next version."""
    cells = client_map(
        [
            record(1, [(0, 0, Verdict.PICKED, 4.0), (1, 0, Verdict.UNDRAFTED, 6.0)], sent=ids(0, 1, 2), crashed=ids(2)),
            record(2, [(2, 0, Verdict.PICKED, 14.0)], sent=ids(0, 1)),
            record(3, sent=ids(0, 2), deprecated=ids(0)),
        ]
    )
    assert states(cells) == [[PICKED, UNDRAFTED, CRASHED], [TRAINING, TRAINING, PICKED], [TRAINING] * 3]
    assert cells.base.tolist() == [[0, 0, 0], [1, 1, 0], [2, 1, 2]]
    assert cells.deprecated.tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    np.testing.assert_array_equal(cells.arrival_s[:2], [[4.0, 6.0, np.nan], [np.nan, np.nan, 14.0]])
    assert cells.lag.tolist() == [[0, 0, -1], [-1, -1, 1], [-1] * 3]
    assert cells.rounds.tolist() == [1, 2, 3]
    assert cells.opened_s.tolist() == [0.0, 10.0, 20.0]
    assert cells.clients.tolist() == [0, 1, 2]
    assert cells.state.dtype == np.int8


def test_fedavg_leaves_the_unselected_idle_and_a_late_client_works_on() -> None:
    average: dict[str, Any] = {"rule": Rule.AVERAGE, "trained": 1}
    cells = client_map(
        [
            record(1, sent=ids(0), **average),  # it does not make the time limit ...
            record(2, [(1, 1, Verdict.PICKED, 13.0)], sent=ids(1), **average),
            record(
                3, [(0, 0, Verdict.REFUSED, 22.0)], sent=ids(2), crashed=ids(2), **average
            ),  # ... and comes too late
            record(4, sent=ids(1), **average),  # the crash is not continued
        ]
    )
    assert states(cells) == [
        [TRAINING, IDLE, IDLE],
        [TRAINING, PICKED, IDLE],
        [REFUSED, IDLE, CRASHED],
        [IDLE, TRAINING, IDLE],
    ]
    assert cells.base.tolist() == [[0, -1, -1], [0, 1, -1], [0, -1, 2], [-1, 3, -1]]


def test_the_last_update_that_was_taken_stands() -> None:
    twice = [(0, 0, Verdict.PICKED, 2.0), (0, 1, Verdict.PICKED, 5.0), (0, 1, Verdict.REFUSED, 6.0)]
    cells = client_map([record(1, twice, sent=ids(0, 1, 2, 0), crashed=ids(0))])
    assert (cells.state[0, 0], cells.base[0, 0], cells.arrival_s[0, 0]) == (PICKED, 1, 5.0)


def test_clients_come_and_go() -> None:
    cells = client_map(
        [
            record(1, sent=ids(0, 1, 2)),
            record(2, joined=ids(3), left=ids(1), joined_size=np.ones(1), sent=ids(3)),
            record(3, clients=4, trained=4, joined=ids(1), joined_size=np.ones(1)),
        ]
    )
    assert states(cells) == [[TRAINING] * 3 + [ABSENT], [TRAINING, ABSENT, TRAINING, TRAINING], [TRAINING] * 4]
    assert cells.base.tolist() == [[0, 0, 0, -1], [0, -1, 0, 1], [0, -1, 0, 1]]


def test_a_client_that_nobody_knows_is_left_out() -> None:
    cells = client_map([record(1, [(99, 0, Verdict.REFUSED, 1.0), (-1, 0, Verdict.REFUSED, 2.0)], sent=ids(0, 1, 2))])
    assert states(cells) == [[TRAINING] * 3]


def test_no_records_make_an_empty_map() -> None:
    assert client_map([]).state.shape == (0, 0)


@pytest.mark.parametrize(
    ("protocol", "clock"),
    [(name, clock) for name in ("safa", "fedavg", "fedcs", "local") for clock in ("causal", "paper")]
    + [("fedasync", "causal"), ("fedbuff", "causal")],
)
def test_the_map_agrees_with_the_records(protocol: str, clock: str) -> None:
    own: dict[str, Any] = {"lag_tolerance": 2} if protocol == "safa" else {}
    records = simulated(protocol=protocol, clock=clock, rounds=30, crash_rate=0.4, **own).held_records
    cells = client_map(records)
    for row, each in enumerate(records):
        assert set(np.flatnonzero(cells.state[row] == State.PICKED)) == set(each.picked)
        assert set(np.flatnonzero(cells.state[row] == State.UNDRAFTED)) == set(each.undrafted) - set(each.picked)
        assert set(np.flatnonzero(cells.deprecated[row])) == set(each.deprecated)
        assert set(np.flatnonzero(cells.state[row] == State.CRASHED)) == set(each.crashed) - set(each.client)
        at_work = np.count_nonzero(cells.state[row] != State.IDLE)
        assert at_work >= each.trained if protocol != "local" else at_work <= each.trained
    arrived = np.isin(cells.state, [State.PICKED, State.UNDRAFTED, State.REFUSED])
    np.testing.assert_array_equal(arrived, ~np.isnan(cells.arrival_s))
    np.testing.assert_array_equal(arrived, cells.lag >= 0)
    assert np.all((cells.base >= 0) == (cells.state != State.IDLE))


def test_chosen_clients_come_in_the_order_wanted() -> None:
    records = simulated(rounds=8).held_records
    whole, some = client_map(records), client_map(records, [7, 2, 11])
    np.testing.assert_array_equal(some.state, whole.state[:, [7, 2, 11]])
    np.testing.assert_array_equal(some.arrival_s, whole.arrival_s[:, [7, 2, 11]])
    assert some.rows([0, 3]).rounds.tolist() == [1, 4]


def test_the_lag_of_an_update() -> None:
    each = record(5, [(0, 4, Verdict.PICKED, 41.0), (1, 2, Verdict.UNDRAFTED, 42.0)])
    assert lag(each).tolist() == [0, 2]


@pytest.mark.parametrize("protocol", ["safa", "fedavg", "local", "fedasync", "fedbuff"])
def test_turnarounds_order_the_clients_as_their_speeds_do(protocol: str) -> None:
    """Without crashes, what the records show goes by the speed of the clients, which depends on the seed alone."""
    run = simulated(protocol=protocol, crash_rate=0.0, rounds=60, size_distribution="equal", server_mbps=1e9)
    took_s = turnaround_s(run.held_records)
    truth_s = turnaround_s(simulated(protocol="fedavg", crash_rate=0.0, rounds=60, fraction=1.0, round_limit_s=1e9,
                                     size_distribution="equal", server_mbps=1e9).held_records)  # fmt: skip
    seen = ~np.isnan(took_s)
    assert np.count_nonzero(seen) > 10
    ranks = np.argsort(np.argsort(took_s[seen])), np.argsort(np.argsort(truth_s[seen]))
    assert np.corrcoef(*ranks)[0, 1] > 0.9
