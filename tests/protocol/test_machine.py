"""The mechanism that all protocols share: order, refusals, the fleet, the state as a whole."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from numpy.typing import NDArray

from safa.errors import MisuseError, SafaError
from safa.protocol import Events, FedAsync, FedAvg, Protocol, Safa
from safa.protocol.machine import Settlement
from safa.protocol.records import Ids, RecordOrder, Refusal, Rule
from safa.testing import check_protocol, check_record_so_far, check_splitting, check_work
from tests.protocol.helpers import PROTOCOLS, SparingSafa, arrive, lose, open_round


@pytest.mark.parametrize("name", PROTOCOLS)
def test_conformance(name: str) -> None:
    check_protocol(PROTOCOLS[name], scripts=15)


class Restless(FedAsync):
    """Asking it for the record so far makes a version."""

    def _settle(self, clients: Ids, late: NDArray[np.bool_]) -> Settlement:
        self.version += 1
        return super()._settle(clients, late)


class Undecided(FedAsync):
    """It weighs an update anew when the next one comes."""

    def _settle(self, clients: Ids, late: NDArray[np.bool_]) -> Settlement:
        verdict, weight, into = super()._settle(clients, late)
        return verdict, weight / max(1, len(weight)), into


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Restless, "asking for the record so far changed the state"),
        (Undecided, "what was known of an update changed later: weight"),
    ],
)
def test_a_record_so_far_that_is_not_kept_to_is_found(kind: type[FedAsync], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_record_so_far(lambda sizes: kind(sizes, fraction=0.9, round_limit_s=20), seed=1)


class Demanding(SparingSafa):
    """It asks clients for other shares while they are at work."""

    def _accept(self, clients: Ids, bases: Ids) -> Ids:
        self.work[:] = 0.5
        return super()._accept(clients, bases)


class Forgetful(FedAsync):
    """It asks for a share that depends on who else has come in at the same time."""

    def _work(self, clients: Ids) -> NDArray[np.float64]:
        return np.full(len(clients), 1 / max(1, len(clients)))


def test_a_share_of_the_work_that_is_not_kept_to_is_found() -> None:
    with pytest.raises(AssertionError, match=r"was asked for 1\.0 of its work, and for 0\.5 in mid-attempt"):
        check_work(lambda sizes: Demanding(sizes, fraction=0.9, round_limit_s=20), seed=1)
    with pytest.raises(AssertionError, match="batches gave another record than single events"):
        check_splitting(lambda sizes: Forgetful(sizes, fraction=0.9, round_limit_s=20), seed=1)


class Asking(Safa):
    """It asks for what it was told to ask for."""

    share: object = 1.0

    def _work(self, clients: Ids) -> NDArray[np.float64]:
        return np.full(len(clients), self.share)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.0000001, math.nan, math.inf, (0.5, 0.5)])
def test_a_share_of_the_work_that_is_none_is_refused(share: object) -> None:
    safa = Asking([1, 1], fraction=1.0)
    safa.share = share if isinstance(share, float) else 1.0
    if not isinstance(share, float):
        safa._work = lambda clients: np.array([0.5])  # type: ignore[method-assign]
    with pytest.raises(MisuseError, match="must ask each of 2 clients for a share of its work above 0 and at most 1"):
        open_round(safa, 0.0)


def test_a_share_of_the_work_holds_until_the_update_comes_in() -> None:
    safa = Asking([1, 1, 1], fraction=0.3, lag_tolerance=5)
    safa.share = 0.5
    open_round(safa, 0.0)
    arrive(safa, [0], 1.0)
    first = safa.close_round(now=1.0)
    safa.share = 0.25
    open_round(safa, 1.0)  # 0 begins anew, 1 and 2 continue
    assert safa.work.tolist() == [0.25, 0.5, 0.5]
    strangers = Events.arrivals([7, -1], [0, 0], at_s=1.5)
    safa.receive(strangers)
    arrive(safa, [0, 1], 2.0)
    second = safa.close_round(now=2.0)
    assert first.work.tolist() == [0.5]
    assert second.work.tolist() == [1.0, 1.0, 0.25, 0.5]  # of strangers nothing was asked
    assert safa.asks_for_parts
    assert not Safa([1], fraction=1.0).asks_for_parts


def test_who_begins_from_a_model_that_it_holds_is_asked_anew() -> None:
    local = PROTOCOLS["local in parts"](np.ones(2))
    for number, share in ((1, 1.0), (2, 0.5)):
        local.open_round(now=10.0 * number, draws=[0, 1], expected_s=[4.0, 1.0])
        assert local.work[0] == share
        arrive(local, [0], 10.0 * number + 1)
        assert local.close_round(now=local.now).work.tolist() == [share]


def test_who_comes_and_goes_again_and_again_is_named_once() -> None:
    safa = Safa([1, 2, 3], fraction=1.0)
    new = int(safa.enrol([4])[0])
    for change in (safa.retire, safa.readmit, safa.retire):
        change([0, new])
    for change in (safa.retire, safa.readmit):
        change([1])
    open_round(safa, 0.0)
    lose(safa, [1, 2], 1.0)
    record = safa.close_round(now=1.0)
    assert record.joined.tolist() == [new, 1]  # one that was new and left again is named in both
    assert record.left.tolist() == [0, new, 1]
    assert record.clients == 2
    RecordOrder(rule=Rule.CACHE, clients=3).check(record)
    for change in (safa.readmit, safa.retire, safa.readmit):
        change([0])
    open_round(safa, 2.0)
    lose(safa, [0, 1, 2], 3.0)
    record = safa.close_round(now=3.0)
    assert (record.joined.tolist(), record.joined_size.tolist(), record.left.tolist()) == ([0], [1.0], [])


def test_what_is_wrong_is_refused_by_name() -> None:
    safa = Safa([1, 1, 1, 1], fraction=1.0, lag_tolerance=1)
    safa.retire(3)
    open_round(safa, 0.0)
    arrive(safa, [0], 1.0)
    lose(safa, [1, 2], 1.0)
    safa.close_round(now=1.0)
    open_round(safa, 2.0)
    arrive(safa, [0], 3.0)
    events = Events.arrivals([9, -1, 3, 0, 1, 1, 1], [0, 0, 0, 1, 5, 0, 1], at_s=4.0)
    assert [Refusal(code).name for code in safa.receive(events).refusal] == [
        "UNKNOWN_CLIENT",
        "UNKNOWN_CLIENT",
        "RETIRED_CLIENT",
        "SECOND_COMMIT",
        "FUTURE_VERSION",
        "ABANDONED",
        "NONE",
    ]
    assert lose(safa, [1, 2], 5.0) == [Refusal.NOT_EXPECTED, Refusal.NONE]


def test_without_clients_everybody_is_a_stranger() -> None:
    safa = Safa([], fraction=1.0)
    open_round(safa, 0.0)
    assert safa.done
    assert safa.receive(Events.arrivals(0, 0, at_s=1.0), late=True).refusal.tolist() == [Refusal.UNKNOWN_CLIENT]
    assert safa.close_round(now=1.0).clients == 0


def test_a_loss_is_no_obstacle_to_an_update_that_comes_after_all() -> None:
    safa = Safa([1, 1], fraction=1.0)
    open_round(safa, 0.0)
    lose(safa, [0], 1.0)
    assert arrive(safa, [0], 2.0) == [Refusal.NONE]
    assert safa.waiting_for == 1
    arrive(safa, [1], 3.0)
    assert safa.close_round(now=3.0).crashed.tolist() == []


@pytest.mark.parametrize(
    "misuse",
    [
        lambda p: p.close_round(now=9.0),
        lambda p: p.receive(Events.arrivals(0, 0, at_s=9.0)),
        lambda p: p.open_round(now=9.0, draws=[0.0], expected_s=[0.0, 0.0]),
        lambda p: p.open_round(now=math.nan, draws=[0.0, 0.0], expected_s=[0.0, 0.0]),
        lambda p: p.open_round(now=math.inf, draws=[0.0, 0.0], expected_s=[0.0, 0.0]),
        lambda p: p.retire([2]),
        lambda p: p.readmit([-1]),
        lambda p: p.resize([2], [1.0]),
        lambda p: p.resize([0], [1.0, 2.0]),
        lambda p: p.resize([0, 0], [1.0, 2.0]),
    ],
)
def test_misuse_between_rounds_is_turned_down(misuse: object) -> None:
    protocol = FedAvg([1, 1], fraction=0.5)
    _turned_down(protocol, misuse)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda p: p.open_round(now=9.0, draws=[0.0, 0.0], expected_s=[0.0, 0.0]),
        lambda p: p.enrol([1.0]),
        lambda p: p.retire([0]),
        lambda p: p.readmit([0]),
        lambda p: p.resize([0], [2.0]),
        lambda p: p.close_round(now=9.0),  # it still waits
        lambda p: p.close_round(now=1.0),  # before it was opened
        lambda p: p.receive(Events.arrivals([0, 1], 0, at_s=[9.0, 8.0])),
        lambda p: p.receive(Events.arrivals([0], 0, at_s=1.0)),
        lambda p: p.receive(Events.arrivals([0, 1], 0, at_s=[9.0, math.nan])),
        lambda p: p.receive(Events.arrivals([0, 1], 0, at_s=[9.0, math.inf])),
    ],
)
def test_misuse_within_a_round_is_turned_down(misuse: object) -> None:
    protocol = FedAvg([1, 1], fraction=1.0)
    open_round(protocol, 5.0)
    _turned_down(protocol, misuse)


def _turned_down(protocol: Protocol, misuse: object) -> None:
    before = pickle.dumps(protocol)
    with pytest.raises(MisuseError):
        misuse(protocol)  # type: ignore[operator]
    assert pickle.dumps(protocol) == before


def test_events_need_arrays_of_one_length() -> None:
    with pytest.raises(MisuseError, match="one length"):
        Events(np.zeros(2, np.int64), np.zeros(1, np.int64), np.zeros(2), np.zeros(2, np.bool_))


@pytest.mark.parametrize("sizes", [[0.0], [-1.0], [math.nan], [[1.0, 2.0]]])
def test_sizes_must_be_positive(sizes: list[float]) -> None:
    with pytest.raises(SafaError, match="size"):
        Safa(sizes, fraction=1.0)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_round_limit_must_be_positive(limit: float) -> None:
    with pytest.raises(SafaError, match="round_limit_s"):
        Safa([1.0], fraction=1.0, round_limit_s=limit)


def test_enrolment_moves_quota_and_weights() -> None:
    safa = Safa([10, 10], fraction=0.5, lag_tolerance=9)
    open_round(safa, 0.0)
    arrive(safa, [0], 1.0)
    assert safa.close_round(now=1.0).weight.tolist() == [0.5]
    assert safa.enrol([20, 40]).tolist() == [2, 3]
    assert safa.quota == 2
    dispatch = open_round(safa, 1.0)
    assert dispatch.sync.tolist() == [0, 2, 3]  # newcomers start from the latest model
    arrive(safa, [2, 3], 2.0)
    record = safa.close_round(now=2.0)
    assert record.weight.tolist() == [0.25, 0.5]
    assert record.joined.tolist() == [2, 3]
    assert record.joined_size.tolist() == [20, 40]


def test_a_client_that_returns_finds_its_place() -> None:
    safa = Safa([1, 1, 1], fraction=0.3, lag_tolerance=2)
    open_round(safa, 0.0)
    arrive(safa, [0], 1.0)
    safa.close_round(now=1.0)
    safa.retire([2])
    assert safa.quota == 1
    for number in range(1, 4):
        dispatch = open_round(safa, float(number))
        assert 2 not in dispatch.sync
        assert 2 not in dispatch.resume
        lose(safa, [0], number + 0.4)
        arrive(safa, [1], number + 0.5)
        record = safa.close_round(now=number + 0.5)
    assert record.clients == 2
    safa.readmit([2])
    assert safa.versions[2] == 0  # as it was when it left
    assert 2 in open_round(safa, 9.0).deprecated


def test_a_new_size_is_in_the_next_record_and_changes_nothing_but_weights() -> None:
    safa = Safa([10, 10, 10], fraction=0.3, lag_tolerance=9)
    open_round(safa, 0.0)
    arrive(safa, [0], 1.0)
    safa.close_round(now=1.0)
    before = safa.snapshot()
    safa.resize([0, 1, 2], [10, 30, 10])  # of two of them it is that already
    after = safa.snapshot()
    assert {name for name in before if not np.array_equal(before[name], after[name])} == {"sizes", "_left", "_joined"}
    open_round(safa, 1.0)
    arrive(safa, [1], 2.0)
    record = safa.close_round(now=2.0)
    assert record.left.tolist() == record.joined.tolist() == [1]
    assert record.joined_size.tolist() == [30]
    assert record.clients == 3
    assert record.weight.tolist() == [0.6]


def test_a_new_size_of_who_has_just_come_or_is_away_is_reported_once() -> None:
    safa = Safa([10, 10], fraction=0.3)
    safa.retire([1])
    safa.enrol([20])
    safa.resize([2, 1], [25, 15])
    open_round(safa, 0.0)
    lose(safa, [0, 2], 1.0)
    record = safa.close_round(now=1.0)
    assert (record.joined.tolist(), record.joined_size.tolist(), record.left.tolist()) == ([2], [25], [1])
    safa.readmit([1])
    open_round(safa, 1.0)
    lose(safa, [0, 1, 2], 2.0)
    record = safa.close_round(now=2.0)
    assert (record.joined.tolist(), record.joined_size.tolist(), record.left.tolist()) == ([1], [15], [])


@pytest.mark.parametrize("size", [0.0, -1.0, math.nan, math.inf])
def test_a_new_size_must_be_positive(size: float) -> None:
    safa = Safa([1.0], fraction=1.0)
    with pytest.raises(SafaError, match="size"):
        safa.resize([0], [size])
    assert safa.sizes.tolist() == [1.0]


def test_a_returning_client_of_fedasync_starts_from_the_latest_model() -> None:
    fedasync = FedAsync([1, 1], fraction=0.5)
    open_round(fedasync, 0.0)
    arrive(fedasync, [0], 1.0)
    fedasync.close_round(now=1.0)
    fedasync.retire([1])
    open_round(fedasync, 1.0)
    arrive(fedasync, [0], 2.0)
    record = fedasync.close_round(now=2.0)
    assert record.left.tolist() == [1]
    fedasync.readmit([1])
    assert open_round(fedasync, 2.0).sync.tolist() == [1]
    assert fedasync.versions[1] == 2


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_restored_protocol_continues_as_if_nothing_had_happened(name: str) -> None:
    original, restored = PROTOCOLS[name](np.ones(4)), PROTOCOLS[name](np.ones(4))
    three_rounds(original)
    restored.restore(original.snapshot())
    assert three_rounds(restored) == three_rounds(original)


def three_rounds(protocol: Protocol) -> list[str]:
    """Rounds in which clients 0 and 1 commit and the others are lost."""
    records = []
    for _ in range(3):
        open_round(protocol, 100.0 * (protocol.round + 1))
        arrive(protocol, [0, 1], protocol.now + 1)
        lose(protocol, [2, 3, 0, 1], protocol.now)
        records.append(protocol.close_round(now=protocol.now if protocol.done else protocol.deadline).to_json())
    return records


def test_it_says_whose_update_would_be_taken() -> None:
    protocol = FedAvg([1, 1, 1, 1], fraction=0.5)
    assert not protocol.expects(0), "no round is open"
    open_round(protocol, 0, draws=[0.1, 0.2, 0.8, 0.9])
    assert [protocol.expects(client) for client in range(4)] == [True, True, False, False]
    arrive(protocol, [0], 1.0)
    lose(protocol, [1], 1.0)
    assert [protocol.expects(client) for client in range(2)] == [False, True], "a lost client may deliver after all"
