"""FedAvg, FedCS, fully local, FedAsync and FedBuff, each by its own paper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from safa.errors import MisuseError, SafaError
from safa.protocol import Events, FedAsync, FedAvg, FedBuff, FedCS, Local, Protocol, Safa
from safa.protocol.records import EndedBy, Refusal, Rule, Verdict
from tests.protocol.helpers import arrive, lose, open_round


def test_fedavg_selects_by_lot_and_averages_over_the_participants() -> None:
    fedavg = FedAvg([10, 20, 30, 40], fraction=0.5)
    dispatch = open_round(fedavg, 0.0, draws=[0.9, 0.1, 0.8, 0.2])
    assert dispatch.sync.tolist() == [1, 3]
    assert dispatch.resume.tolist() == []
    arrive(fedavg, [3, 1], 1.0)
    record = fedavg.close_round(now=1.0)
    assert record.picked.tolist() == [3, 1]
    assert record.weight.tolist() == [40 / 60, 20 / 60]
    assert record.rule is Rule.AVERAGE
    assert record.ended_by is EndedBy.NOBODY_LEFT


def test_fedavg_over_the_population_damps_by_the_share_that_took_part() -> None:
    fedavg = FedAvg([10, 20, 30, 40], fraction=0.5, averaging="population")
    open_round(fedavg, 0.0)
    arrive(fedavg, [0], 1.0)
    lose(fedavg, [1], 2.0)
    assert fedavg.close_round(now=2.0).weight.tolist() == [0.1]


def test_fedavg_refuses_stragglers() -> None:
    fedavg = FedAvg([1, 1], fraction=0.5, round_limit_s=10.0)
    open_round(fedavg, 0.0, draws=[0.0, 1.0])
    empty = fedavg.close_round(now=10.0)
    assert empty.client.tolist() == []
    assert empty.version == 1
    open_round(fedavg, 10.0, draws=[1.0, 0.0])
    assert arrive(fedavg, [0], 11.0) == [Refusal.NOT_EXPECTED]
    arrive(fedavg, [1], 12.0)
    record = fedavg.close_round(now=12.0)
    assert record.refused.tolist() == [0]
    assert record.verdict.tolist() == [Verdict.REFUSED, Verdict.PICKED]
    assert record.weight.tolist() == [0.0, 1.0]


def test_fedavg_has_no_bypass() -> None:
    fedavg = FedAvg([1, 1], fraction=1.0)
    open_round(fedavg, 0.0)
    assert arrive(fedavg, [0], 1.0, late=True) == [Refusal.LATE]


def test_fedavg_names_its_averages() -> None:
    with pytest.raises(SafaError, match="participants, population, not 'median'"):
        FedAvg([1], fraction=1.0, averaging="median")


def test_fedcs_drops_those_that_cannot_make_it() -> None:
    fedcs = FedCS([1, 1, 1], fraction=1.0, round_limit_s=10.0)
    dispatch = fedcs.open_round(now=0.0, draws=[0, 0, 0], expected_s=[10.0, 10.1, 3.0])
    assert dispatch.dropped.tolist() == [1]
    assert dispatch.sync.tolist() == [0, 2]
    arrive(fedcs, [0, 2], 4.0)
    assert len(fedcs.close_round(now=4.0).picked) == 2


def test_fedcs_closes_at_once_when_it_expects_nobody() -> None:
    fedcs = FedCS([1], fraction=1.0, round_limit_s=1.0)
    fedcs.open_round(now=0.0, draws=[0], expected_s=[2.0])
    assert fedcs.done
    record = fedcs.close_round(now=0.0)
    assert record.trained == 0
    assert record.version_variance == 0.0


def test_local_exchanges_nothing_until_the_last_round() -> None:
    local = Local([10, 30], fraction=0.5, rounds=3)
    draws = ([0.0, 1.0], [1.0, 0.0], [0.0, 1.0])
    dispatches, records = [], []
    for number, drawn in enumerate(draws):
        dispatches.append(open_round(local, float(number), draws=drawn))
        arrive(local, [number % 2], number + 0.5)
        records.append(local.close_round(now=number + 0.5))
    assert [d.sync.tolist() for d in dispatches] == [[0], [1], []]  # w(0) once each
    assert [d.resume.tolist() for d in dispatches] == [[], [], [0]]  # then everyone goes on alone
    assert [d.upload for d in dispatches] == [False, False, True]
    assert [r.uploads for r in records] == [0, 0, 2]
    assert [r.version for r in records] == [0, 0, 1]
    assert [r.undrafted.tolist() for r in records] == [[0], [1], []]
    assert records[2].picked.tolist() == [0]
    assert records[2].weight.tolist() == [0.25]
    assert records[2].rule is Rule.OWN


def test_local_lets_a_straggler_finish() -> None:
    local = Local([1, 1], fraction=0.5, rounds=9, round_limit_s=10.0)
    open_round(local, 0.0, draws=[0.0, 1.0])
    local.close_round(now=10.0)
    dispatch = open_round(local, 10.0, draws=[1.0, 0.0])
    assert dispatch.sync.tolist() == [1]
    assert dispatch.resume.tolist() == [0]
    assert arrive(local, [0], 11.0) == [Refusal.NONE]


def test_local_needs_a_last_round() -> None:
    with pytest.raises(SafaError, match="rounds must be"):
        Local([1], fraction=1.0, rounds=0)


def test_fedasync_mixes_every_arrival_and_answers_it() -> None:
    fedasync = FedAsync([1, 1, 1], fraction=0.7, mixing=0.5, staleness="polynomial", staleness_exponent=1.0)
    assert open_round(fedasync, 0.0).sync.tolist() == [0, 1, 2]
    receipt = fedasync.receive(Events.arrivals([2, 2, 0], [0, 1, 0], at_s=[1.0, 2.0, 3.0]))
    assert receipt.refusal.tolist() == [0, 0, 0]
    assert receipt.sync.tolist() == [2, 2, 0]
    assert fedasync.versions.tolist() == [3, 0, 2]
    record = fedasync.close_round(now=3.0)
    assert record.weight.tolist() == [0.5, 0.5, 0.5 / 3]  # lags 0, 0 and 2
    assert record.into.tolist() == [1, 2, 3]
    assert record.version == 3
    assert record.sent.tolist() == [0, 1, 2, 2, 2, 0]
    dispatch = open_round(fedasync, 3.0)
    assert dispatch.sync.tolist() == []  # everyone is at work already
    assert dispatch.resume.tolist() == [0, 1, 2]


def test_a_record_of_fedasync_ends_when_everyone_is_lost() -> None:
    fedasync = FedAsync([1, 1], fraction=1.0)
    open_round(fedasync, 0.0)
    events = Events.concatenate(
        [Events.arrivals(0, 0, at_s=1.0), Events.losses([1, 0, 1], at_s=2.0), Events.arrivals(1, 0, at_s=3.0)]
    )
    receipt = fedasync.receive(events)
    assert receipt.refusal.tolist() == [0, 0, 0]
    record = fedasync.close_round(now=2.0)
    assert record.ended_by is EndedBy.NOBODY_LEFT
    assert record.crashed.tolist() == [0, 1]


def test_a_client_that_was_given_up_and_still_delivers_is_awaited_again() -> None:
    fedasync = FedAsync([1, 1, 1], fraction=1.0)
    open_round(fedasync, 0.0)
    lose(fedasync, [0], 1.0)
    assert fedasync.waiting_for == 2
    assert arrive(fedasync, [0], 2.0) == [Refusal.NONE]
    assert fedasync.waiting_for == 3


@pytest.mark.parametrize(
    ("staleness", "expected"), [("constant", [1, 1, 1]), ("polynomial", [1, 0.5, 0.2]), ("hinge", [1, 1, 1 / 21])]
)
def test_staleness_discounts_as_in_the_paper(staleness: str, expected: list[float]) -> None:
    fedasync = FedAsync([1], fraction=1.0, staleness=staleness, staleness_exponent=1.0, hinge_lag=2.0)
    assert fedasync.staleness(np.array([0, 1, 4])) == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings", [{"mixing": 0.0}, {"staleness": "linear"}, {"staleness_exponent": -1.0}, {"hinge_lag": float("nan")}]
)
def test_fedasync_turns_down_wrong_settings(settings: dict[str, float]) -> None:
    with pytest.raises(SafaError, match="must"):
        FedAsync([1], fraction=1.0, **settings)  # type: ignore[arg-type]


def test_fedbuff_makes_a_version_of_every_k_updates() -> None:
    fedbuff = FedBuff([1, 1, 1], fraction=1.0, buffer_size=2, server_lr=3.0)
    open_round(fedbuff, 0.0)
    fedbuff.receive(Events.arrivals([0, 1, 2], [0, 0, 0], at_s=[1.0, 2.0, 3.0]))
    record = fedbuff.close_round(now=3.0)
    assert record.into.tolist() == [1, 1, 2]  # the third waits for a fourth
    assert record.version == 1
    assert record.weight == pytest.approx([1.5, 1.5, 1.5 / np.sqrt(2)])  # the third lags by one version
    assert fedbuff.versions.tolist() == [0, 1, 1]
    assert record.rule is Rule.DELTA
    open_round(fedbuff, 3.0)
    fedbuff.receive(Events.arrivals([0, 1, 2], [0, 1, 1], at_s=[4.0, 5.0, 6.0]))
    assert fedbuff.close_round(now=6.0).into.tolist() == [2, 3, 3]
    assert fedbuff.version == 3


@pytest.mark.parametrize("settings", [{"buffer_size": 0}, {"server_lr": 0.0}])
def test_fedbuff_turns_down_wrong_settings(settings: dict[str, float]) -> None:
    with pytest.raises(SafaError, match="must be"):
        FedBuff([1], fraction=1.0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [(FedBuff([1, 1, 1], fraction=1.0, buffer_size=2), [1, 1, 2]), (FedAsync([1, 1, 1], fraction=1.0), [1, 2, 3])],
    ids=["fedbuff", "fedasync"],
)
def test_what_becomes_of_an_update_is_known_as_soon_as_it_came(protocol: Protocol, expected: list[int]) -> None:
    open_round(protocol, 0)
    assert protocol.record_so_far().client.tolist() == []
    merges = []
    for client in range(3):
        arrive(protocol, [client], client + 1.0)
        so_far = protocol.record_so_far()
        assert len(so_far.client) == client + 1
        assert so_far.version == protocol.version
        merges.append((float(so_far.weight[-1]), int(so_far.into[-1])))
    before = protocol.record_so_far()
    record = protocol.close_round(now=4.0)
    assert merges == list(zip(record.weight.tolist(), record.into.tolist(), strict=True))
    assert [into for _, into in merges] == expected
    assert replace(before, closed_s=4.0).to_json() == record.to_json()


@pytest.mark.parametrize(
    "protocol", [FedAvg([1], fraction=1.0), Local([1], fraction=1.0, rounds=2)], ids=["fedavg", "local"]
)
def test_where_versions_are_made_at_the_close_there_is_no_record_before(protocol: Protocol) -> None:
    open_round(protocol, 0.0)
    with pytest.raises(MisuseError, match="makes no version before a round is closed"):
        protocol.record_so_far()


def test_without_an_open_round_there_is_no_record_so_far() -> None:
    with pytest.raises(MisuseError, match="no round is open"):
        FedAsync([1], fraction=1.0).record_so_far()


@pytest.mark.parametrize(
    ("protocol", "aggregator"),
    [
        (Safa([1], fraction=1.0), "cache"),
        (FedAvg([1], fraction=1.0), "mean"),
        (FedCS([1], fraction=1.0, averaging="population"), "population"),
        (Local([1], fraction=1.0, rounds=1), "own"),
        (FedAsync([1], fraction=1.0), "mixing"),
        (FedBuff([1], fraction=1.0), "buffer"),
    ],
    ids=lambda given: given if isinstance(given, str) else given.name,
)
def test_every_protocol_names_its_aggregator(protocol: Protocol, aggregator: str) -> None:
    assert protocol.aggregator == aggregator
