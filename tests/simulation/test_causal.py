"""The causal clock: against the slow oracle, and by hand."""

from __future__ import annotations

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
from safa.fleet import Fleet, make_fleet
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


@settings(max_examples=300, deadline=None)
@given(worlds, st.booleans())
def test_the_fast_simulation_equals_the_slow_one(world: dict[str, Any], sparing: bool) -> None:
    setting = replace(Settings.of("mnist"), **world)  # some have no effect with some protocols
    check_against_oracle(setting, make_fleet(setting), sparing)


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
