"""What is done for many clients at once gives what the plain way gives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from safa.fleet import make_fleet
from safa.protocol import Dispatch, Safa
from safa.runs.settings import Settings
from safa.server.server import Server
from safa.simulation import returns, run_rounds
from safa.simulation.devices import Devices, _in_order
from safa.streams import stream

COUNT = 20_000
DRAWN = stream(0, "test of sorting").exponential(1000.0, COUNT)


@pytest.mark.parametrize(
    "times",
    [
        DRAWN,
        np.round(DRAWN),  # most of them are level with others
        np.append(DRAWN[1:], 1e15),  # one far behind leaves all others in one bucket
        np.full(COUNT, 3.0),
        np.append(DRAWN[1:] * 1e-320, 0.0),
        DRAWN[:50],
        DRAWN[:0],
    ],
)
def test_times_are_sorted_as_by_a_stable_sort(times: np.ndarray) -> None:
    assert np.array_equal(_in_order(times), np.argsort(times, kind="stable"))


@pytest.mark.parametrize("most", [1, 700, 5000, COUNT])
def test_the_first_events_come_in_order_of_time_and_client(most: int) -> None:
    fleet = make_fleet(Settings.of("mnist", clients=COUNT, crash_rate=0.3, train=False))
    devices = Devices(fleet, detection_delay_s=60.0, keep_progress=True)
    everybody, nobody = np.arange(COUNT), np.arange(0)
    dispatch = Dispatch(sync=everybody, resume=nobody, deprecated=nobody)
    devices.open_round(dispatch, np.zeros(COUNT, dtype=np.int32), np.ones(COUNT), now=0.0, begin_s=1.0)
    in_order = devices.pending(np.inf, most=COUNT)
    first = devices.pending(np.inf, most=most)
    assert len(in_order) == COUNT
    assert np.all(np.diff(in_order.at_s) >= 0)
    assert len(first) == min(most + 1, COUNT)
    assert np.array_equal(first.client, in_order.client[: len(first)])
    assert np.array_equal(first.at_s, in_order.at_s[: len(first)])


class Lottery(Safa):
    """Keeps what it was given to draw clients by."""

    def _invite(self, draws: np.ndarray, expected_s: np.ndarray) -> Dispatch:
        self.given = draws
        return super()._invite(draws, expected_s)


def test_random_numbers_are_drawn_for_a_protocol_that_may_use_them() -> None:
    protocol = Lottery([1.0, 1.0, 1.0], fraction=0.5)
    server = Server(protocol, seed=1, rounds=1)
    drawn = server.draws()
    server.open_round(now=0.0, expected_s=[1.0, 1.0, 1.0])
    assert np.array_equal(protocol.given, drawn)
    assert not Safa([1.0], fraction=0.5).uses_draws


@pytest.mark.parametrize("protocol", ["safa", "fedavg", "fedbuff"])
def test_events_of_clients_that_return_are_the_same_in_batches_of_any_size(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Settings.of(
        "mnist", protocol=protocol, clients=500, rounds=4, crash_rate=0.5, return_delay_s=100.0, server_mbps=math.inf
    )
    told = [record.to_json() for record in run_rounds(setting)]
    monkeypatch.setattr(returns, "_AT_A_TIME", 3)
    assert [record.to_json() for record in run_rounds(setting)] == told
