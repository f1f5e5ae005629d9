"""The causal clock: against the slow oracle, and by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safa.analysis import measure
from safa.errors import SafaError
from safa.fleet import Faults, Fleet, make_fleet
from safa.protocol import available, build
from safa.protocol.records import EndedBy, RoundRecord, Rule, Verdict
from safa.protocol.registry import parameters
from safa.runs.settings import Settings
from safa.server import Server
from safa.simulation import drive, run_rounds
from tests.protocol.helpers import SparingFedAsync, SparingFedAvg, SparingSafa
from tests.simulation import oracle
from tests.simulation.servers import SERVERS

SPARING: dict[str, Any] = {"safa": SparingSafa, "fedavg": SparingFedAvg, "fedasync": SparingFedAsync}

worlds = st.fixed_dictionaries(
    {
        "protocol": st.sampled_from(sorted(SERVERS)),
        "seed": st.integers(0, 1000),
        "clients": st.integers(1, 9),
        "rounds": st.integers(1, 8),
        "fraction": st.sampled_from([0.1, 0.3, 0.5, 1.0]),
        "crash_rate": st.sampled_from([0.0, 0.3, 0.8, 1.0]),
        "lag_tolerance": st.integers(1, 4),
        "buffer_size": st.integers(1, 4),
        "work_cap": st.sampled_from(["auto", 0.0, 0.5, 1.5]),
        "normalise_work": st.booleans(),
        "interval_share": st.sampled_from([0.2, 0.5, 1.0]),
        "server_lr": st.sampled_from([1.0, 0.3]),
        "step_ratio": st.sampled_from([0.1, 0.5, 1.0]),
        "late_factor": st.sampled_from([1.0, 1.2, 3.0]),
        "round_limit_s": st.sampled_from([150.0, 400.0, 5600.0]),
        "detection_delay_s": st.sampled_from([0.0, 60.0, math.inf]),
        "fault_model": st.sampled_from(["attempt", "round"]),
        "keep_progress": st.booleans(),
        "server_mbps": st.sampled_from([1.0, 10_000.0]),
        "model_size_mb": st.sampled_from([0.0, 10.0]),
    }
)


@settings(max_examples=150, deadline=None)
@given(worlds, st.booleans())
def test_the_fast_simulation_equals_the_slow_one(world: dict[str, Any], sparing: bool) -> None:
    setting = replace(Settings.of("mnist"), **world)  # some have no effect with some protocols
    check_against_oracle(setting, make_fleet(setting), sparing)


returning_worlds = st.fixed_dictionaries(
    {
        "crash_rate": st.sampled_from([0.0, 0.3, 0.8]),
        "fault_model": st.just("attempt"),
        "return_delay_s": st.sampled_from([1.0, 60.0, 1000.0]),
        "speed_mean": st.sampled_from([0.02, 1.0]),
        "online_hours": st.sampled_from([0.0, 4.0, 20.0]),
    }
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(worlds, returning_worlds, st.booleans())
def test_the_fast_simulation_of_returns_equals_the_slow_one(
    world: dict[str, Any], returning: dict[str, Any], sparing: bool
) -> None:
    setting = replace(Settings.of("mnist"), **world | returning)
    check_against_oracle(setting, make_fleet(setting), sparing)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(worlds, returning_worlds, st.integers(0, 1000), st.booleans())
def test_returns_and_times_online_equal_the_slow_simulation(
    world: dict[str, Any], returning: dict[str, Any], drawn: int, repeats: bool
) -> None:
    """Times online that touch each other, or the ends of a period, and clients that are never online."""
    setting = replace(Settings.of("mnist"), **world | returning | {"clients": 9})
    edges = [np.unique(rng.integers(0, 21, rng.integers(0, 9)) * 100.0) for rng in [np.random.default_rng(drawn)] * 9]
    rows = [(k, start, end) for k, times in enumerate(edges) for start, end in itertools.pairwise(times)]
    faults = Faults(
        9,
        seed=setting.seed,
        crash_rate=setting.crash_rate,
        trace=np.array([row for place, row in enumerate(rows) if place % 3], dtype=np.float64).reshape(-1, 3),
        period_s=np.full(9, 2000.0) if repeats else None,
        return_delay_s=setting.return_delay_s,
    )
    check_against_oracle(setting, replace(make_fleet(setting), faults=faults), sparing=False)


def check_against_oracle(setting: Settings, fleet: Fleet, sparing: bool) -> None:
    """The fast simulation must yield what the slow one does, to the last bit."""
    sparing = sparing and setting.protocol in SPARING
    protocol = build(setting.protocol, fleet.sizes, setting.values() | {"normalise_work": False})
    if protocol.rule is not Rule.DELTA or not protocol.asks_for_parts:
        setting = replace(setting, normalise_work=False)
    slow = oracle.simulate(setting, fleet, sparing=sparing)
    fast = list(run_sparingly(setting, fleet) if sparing else run_rounds(setting, fleet))
    assert len(slow) == len(fast)
    for expected, record in zip(slow, fast, strict=True):
        assert (record.opened_s, record.closed_s) == (expected.opened_s, expected.closed_s)
        assert record.sent.tolist() == expected.sent
        assert record.deprecated.tolist() == expected.deprecated
        assert told(record) == expected.arrivals
        assert record.work.tolist() == expected.shares
        if protocol.answers_arrivals:
            assert record.weight.tolist() == expected.weights
        assert record.crashed.tolist() == expected.crashed


def run_sparingly(setting: Settings, fleet: Fleet) -> Iterator[RoundRecord]:
    """The rounds of a protocol that asks slow clients for a part of their work."""
    kind = SPARING[setting.protocol]
    taken = {name: value for name, value in setting.values().items() if name in parameters(kind.__mro__[2])}
    protocol = kind(fleet.sizes, **taken)
    protocol.work_cap = 0.0 if setting.work_cap == "auto" else float(setting.work_cap)
    server = Server(protocol, seed=setting.seed, rounds=setting.rounds)
    return drive(server, fleet, setting)


def told(record: RoundRecord) -> list[tuple[int, int, str]]:
    return [
        (int(client), int(base), Verdict(verdict).name.lower())
        for client, base, verdict in zip(record.client, record.base, record.verdict, strict=True)
    ]


def hand_made(tmp_path: Path, speeds: list[float], **given: Any) -> Settings:
    """A fleet of clients with 1 batch each, no links to speak of, at these speeds."""
    (tmp_path / "speeds").write_text("\n".join(map(str, speeds)))
    (tmp_path / "sizes").write_text("\n".join("5" for _ in speeds))
    world: dict[str, Any] = {
        "clients": len(speeds),
        "epochs": 1,
        "batch_size": 5,
        "model_size_mb": 0.0,
        "crash_rate": 0.0,
        "speeds": str(tmp_path / "speeds"),
        "sizes": str(tmp_path / "sizes"),
    }
    return Settings.of("boston", **world | given)


def test_a_straggler_straddles_rounds(tmp_path: Path) -> None:
    """Clients that need 1 s, 2 s and 7 s, and one update closes a round."""
    setting = hand_made(tmp_path, [1.0, 0.5, 1 / 7], fraction=0.3, rounds=8, lag_tolerance=9)
    records = list(run_rounds(setting))
    assert [r.closed_s for r in records] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.0]
    assert [told(r) for r in records] == [
        [(0, 0, "picked")],
        [(0, 1, "undrafted"), (1, 0, "picked")],  # 0 was picked last time and has to stand back
        [(0, 2, "picked")],
        [(0, 3, "undrafted"), (1, 2, "picked")],  # 1 had been at it since round 3
        [(0, 4, "picked")],
        [(0, 5, "undrafted"), (1, 4, "picked")],
        [(0, 6, "picked")],
        [(2, 0, "picked")],  # the slowest came at the same moment, and counts in the next round
    ]


def test_an_abandoned_attempt_is_futile(tmp_path: Path) -> None:
    """With tau = 1, a client that needs 10 s while rounds last 1.5 s has to start over again and again."""
    setting = hand_made(tmp_path, [1.0, 1 / 1.5, 0.1], fraction=0.3, rounds=4, lag_tolerance=1)
    records = list(run_rounds(setting))
    assert [r.closed_s for r in records] == [1.0, 2.5, 3.5, 5.0]
    assert [r.deprecated.tolist() for r in records] == [[], [1, 2], [2], [1, 2]]
    assert records[1].work_lost == pytest.approx(1 / 1.5 + 0.1)  # what 1 and 2 had done in 1 s
    assert records[2].work_lost == pytest.approx(0.15)
    assert measure(records)["starved"] == pytest.approx(1 / 3)


def test_half_the_work_takes_half_the_time(tmp_path: Path) -> None:
    """A client that needs 4 s, another 1 s: in the second round, the slow one is asked for half."""
    setting = hand_made(tmp_path, [1.0, 0.25], fraction=1.0, rounds=2, protocol="fedavg")
    whole, half = run_sparingly(setting, make_fleet(setting))
    assert (whole.closed_s, whole.work_done, whole.work.tolist()) == (4.0, 2.0, [1.0, 1.0])
    assert (half.length_s, half.work_done, half.work.tolist()) == (2.0, 1.5, [1.0, 0.5])


def test_a_lost_client_is_noticed_after_the_delay(tmp_path: Path) -> None:
    setting = hand_made(tmp_path, [1.0], fraction=1.0, rounds=1, crash_rate=1.0, detection_delay_s=7.0)
    (record,) = run_rounds(setting)
    assert record.ended_by is EndedBy.NOBODY_LEFT
    assert 7.0 <= record.closed_s < 8.0
    assert record.crashed.tolist() == [0]


def test_progress_is_kept_across_crashes(tmp_path: Path) -> None:
    """A client that always crashes never finishes, but with progress kept it comes ever closer."""
    world = {"fraction": 1.0, "rounds": 12, "crash_rate": 1.0, "detection_delay_s": 0.0, "lag_tolerance": 99}
    kept = [r.length_s for r in run_rounds(hand_made(tmp_path, [1.0], **world))]
    lost = [r.length_s for r in run_rounds(hand_made(tmp_path, [1.0], keep_progress=False, **world))]
    assert sum(kept) < 1.0 < sum(lost)
    assert measure(run_rounds(hand_made(tmp_path, [1.0], keep_progress=False, **world)))["futility"] == 1.0


def test_a_round_that_would_never_end_says_so(tmp_path: Path) -> None:
    setting = hand_made(
        tmp_path, [1.0], fraction=1.0, crash_rate=1.0, detection_delay_s=math.inf, round_limit_s=math.inf
    )
    with pytest.raises(SafaError, match="would never end"):
        list(run_rounds(setting))


def test_clients_work_only_while_they_are_online(tmp_path: Path) -> None:
    """Client 0 is online throughout; client 1 (3 s of work) goes offline after 2 s and is back at 10 s."""
    trace = tmp_path / "trace.csv"
    trace.write_text("client,online_from_s,online_until_s\n0,0,1000\n1,0,2\n1,10,1000\n")
    setting = hand_made(
        tmp_path, [0.1, 1 / 3], fraction=1.0, rounds=2, trace=str(trace), detection_delay_s=0.0, lag_tolerance=9
    )
    first, second = run_rounds(setting)
    assert first.crashed.tolist() == [1]
    assert first.closed_s == 10.0
    assert second.client.tolist() == [1, 0]
    assert second.arrival_s.tolist() == pytest.approx([11.0, 20.0])  # 1 s of its work was left


def test_a_client_that_is_never_online_is_lost_at_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("client,online_from_s,online_until_s\n0,1000,1001\n")  # not in the time of this run
    setting = hand_made(tmp_path, [1.0], fraction=1.0, rounds=1, trace=str(trace), detection_delay_s=5.0)
    (record,) = run_rounds(setting)
    assert record.closed_s == 5.0
    assert record.work_done == 0.0


def test_a_client_that_is_away_begins_when_it_is_back(tmp_path: Path) -> None:
    """Client 1 (3 s of work) is offline from 2 s to 10 s; nobody has to open a round for it to go on."""
    world: dict[str, Any] = {"trace": [(0, 0, 1000), (1, 0, 2), (1, 10, 1000)], "return_delay_s": 5.0}
    setting = hand_made(tmp_path, [0.05, 1 / 3], fraction=1.0, rounds=1, lag_tolerance=9, **world)
    (record,) = run_rounds(setting)
    assert record.arrival_s.tolist() == [11.0, 20.0]  # 1 s of its work was left
    assert record.crashed.tolist() == []
    (record,) = run_rounds(replace(setting, keep_progress=False))
    assert record.arrival_s.tolist() == [13.0, 20.0]
    assert record.work_lost == pytest.approx(2 / 3)
    assert record.work_done == pytest.approx(2 + 2 / 3)


def test_an_update_comes_after_its_client_was_found_lost(tmp_path: Path) -> None:
    """The server hears of the loss at 2 s + 3 s and does not wait any longer; the update is for a later round."""
    world: dict[str, Any] = {"trace": [(0, 0, 1000), (1, 0, 2), (1, 10, 1000)], "return_delay_s": 5.0}
    setting = hand_made(tmp_path, [1.0, 1 / 3], fraction=1.0, rounds=2, lag_tolerance=9, detection_delay_s=3.0, **world)
    first, second = run_rounds(setting)
    assert (first.closed_s, first.client.tolist(), first.crashed.tolist()) == (5.0, [0], [1])
    assert second.client.tolist() == [0, 1]
    assert second.arrival_s.tolist() == [6.0, 11.0]
    assert second.base.tolist() == [1, 0]


def test_a_client_that_is_sent_a_model_while_it_is_away_begins_when_it_is_back(tmp_path: Path) -> None:
    """Client 1 is away from 2 s on, and FedAvg gives it a new model at 5 s: it drops what it had."""
    world: dict[str, Any] = {"trace": [(0, 0, 1000), (1, 0, 2), (1, 10, 1000)], "return_delay_s": 5.0}
    setting = hand_made(
        tmp_path,
        [1.0, 1 / 3],
        protocol="fedavg",
        fraction=1.0,
        rounds=2,
        detection_delay_s=8.0,
        round_limit_s=5.0,
        **world,
    )
    first, second = run_rounds(setting)
    assert (first.closed_s, first.client.tolist()) == (5.0, [0])
    assert second.sent.tolist() == [0, 1]
    assert second.closed_s == 10.0  # T_lim: it has begun only now
    assert second.crashed.tolist() == []
    _, second = run_rounds(replace(setting, round_limit_s=9.0))
    assert second.arrival_s.tolist() == [10.0, 13.0]
    assert second.base.tolist() == [1, 1]


def arrivals(**given: Any) -> list[tuple[float, int]]:
    """When whose update came in, over the rounds of a run in which sending takes no time."""
    setting = Settings.of("mnist", clients=40, crash_rate=0.5, return_delay_s=200.0, server_mbps=math.inf, **given)
    return [
        (float(at_s), int(client))
        for record in run_rounds(setting)
        for at_s, client in zip(record.arrival_s, record.client, strict=True)
    ]


@pytest.mark.parametrize("protocol", ["fedbuff", "fedasync"])
def test_the_fraction_changes_nothing_in_a_world_without_rounds(protocol: str) -> None:
    """C says how many arrivals are in a record; with return delays it does not say when clients are back."""
    few, many = (
        arrivals(protocol=protocol, fraction=0.1, rounds=60),
        arrivals(protocol=protocol, fraction=0.6, rounds=10),
    )
    assert len(few) == len(many) == 240
    assert few == many


class Logged(Faults):
    """Keeps at which share of its work every stretch that was cut short was, and how long its client was away then."""

    def __init__(self, clients: int, **given: Any) -> None:
        super().__init__(clients, **given)
        self.log: dict[tuple[int, int], list[float]] = {}

    def stretch(self, clients: Any, begin_s: Any, left_s: Any, number: Any) -> Any:
        cut_s, back_s = super().stretch(clients, begin_s, left_s, number)
        for place in np.flatnonzero(cut_s < np.inf):
            share, delay_s = (cut_s - begin_s)[place] / left_s[place], back_s[place] - cut_s[place]
            self.log[int(clients[place]), int(number[place])] = [float(share), float(delay_s)]
        return cut_s, back_s


def test_every_protocol_meets_the_same_crashes_and_delays() -> None:
    logs = []
    for protocol, fraction in (("safa", 0.1), ("safa", 0.9), ("fedavg", 0.5), ("fedbuff", 0.3)):
        setting = Settings.of("mnist", protocol=protocol, fraction=fraction, rounds=30, return_delay_s=100.0)
        faults = Logged(setting.clients, seed=setting.seed, crash_rate=0.3, return_delay_s=100.0)
        list(run_rounds(setting, replace(make_fleet(setting), faults=faults)))
        logs.append(faults.log)
    for log in logs[1:]:
        both = sorted(log.keys() & logs[0].keys())
        assert len(both) > 100
        assert np.allclose([log[stretch] for stretch in both], [logs[0][stretch] for stretch in both])


def test_keeping_progress_matters_to_every_protocol_where_clients_return() -> None:
    assert not Settings.of("mnist", protocol="fedavg", keep_progress=False, return_delay_s=9.0).keep_progress


def test_the_server_sends_no_faster_than_its_link(tmp_path: Path) -> None:
    """10 MB to each of 4 clients over 8 Mbit/s is 40 s; rounds shorter than that queue up behind it."""
    setting = hand_made(
        tmp_path, [1.0] * 4, fraction=0.25, rounds=2, model_size_mb=10.0, server_mbps=8.0, down_mbps=8e9, up_mbps=8e9
    )
    first, second = run_rounds(setting)
    assert first.distribution_s == 40.0
    assert first.closed_s == pytest.approx(41.0)
    assert second.bytes_down == 10e6 * len(second.sent)


@pytest.mark.parametrize("protocol", available())
def test_same_settings_same_bytes(protocol: str) -> None:
    setting = Settings.of("mnist", protocol=protocol, rounds=8)
    once, again = (b"\n".join(r.to_json().encode() for r in run_rounds(setting)) for _ in range(2))
    assert once == again


def test_every_protocol_meets_the_same_world() -> None:
    fleets = [make_fleet(Settings.of("mnist", seed=3, protocol=name)) for name in ("safa", "fedavg", "fedbuff")]
    for fleet in fleets[1:]:
        assert np.array_equal(fleet.speeds, fleets[0].speeds)
        assert np.array_equal(fleet.sizes, fleets[0].sizes)
        for number in range(1, 4):
            for one, other in zip(fleet.faults.draw(number), fleets[0].faults.draw(number), strict=True):
                assert np.array_equal(one, other)


def test_an_estimate_that_is_off_costs_fedcs_clients() -> None:
    """FedCS sends the model to fewer clients the worse it guesses."""
    ratios = [
        measure(run_rounds(Settings.of("kdd99", protocol="fedcs", rounds=10, estimate_error=error)))["sync_ratio"]
        for error in (0.0, 2.0)
    ]
    assert ratios[1] < ratios[0] - 0.01
