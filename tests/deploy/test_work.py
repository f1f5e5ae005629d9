"""Deployments that ask slow clients for a part of their work: the protocol of the docs, and work caps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from safa import replay
from safa.deploy.exchange.requests import Requests, Took
from safa.runs import Run
from tests.deploy.harness import Harness, apart
from tests.sparing import install_sparing


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol of the docs, as if its package was installed."""
    install_sparing(tmp_path / "packages", monkeypatch)


def shares(run: Run) -> list[dict[int, float]]:
    """By round, what every client was asked for."""
    return [dict(zip(record.client.tolist(), record.work.tolist(), strict=True)) for record in run.records()]


@pytest.mark.usefixtures("installed")
def test_a_deployment_with_parts_of_the_work_is_replayed(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"protocol": "sparing", "fraction": 1.0, "schedule": "step:2:0.5"})
    run = harness.run()
    assert shares(run) == [dict.fromkeys(range(4), 1.0), *[{0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5}] * 5]
    slow = harness.peers[3].requests
    assert [request.work for request in slow] == [1.0, *[0.5] * 5]
    assert [request.round for request in slow] == [1, 2, 3, 4, 5, 6]
    assert apart(replay(run), run.model()) <= 1e-6
    first, second = list(run.records())[:2]
    assert second.work_done < first.work_done


@pytest.mark.usefixtures("installed")
def test_parts_of_the_work_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"protocol": "sparing", "fraction": 1.0})
    harness.run(until=harness.in_round(3))
    harness.step()
    harness.kill_server()
    run = harness.run()
    assert shares(run)[2:] == [{0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5}] * 4
    assert apart(replay(run), run.model()) <= 1e-6


@pytest.mark.usefixtures("installed")
def test_a_round_that_is_opened_again_may_ask_for_another_part(tmp_path: Path) -> None:
    """Nobody replies in time, so the round is cancelled; what is still in flight for another share is asked anew."""
    harness = Harness(tmp_path, {"protocol": "sparing", "fraction": 1.0, "rounds": 3}, delays_s={2: 9.0, 3: 10.0})
    harness.run(until=harness.in_round(2))
    for peer in harness.peers:
        peer.delay_s += 100.0  # from round 3 on
    coordinator = harness.coordinator
    harness.run(until=harness.in_round(3))
    harness.run(until=lambda: not coordinator.protocol.is_open)  # cancelled at the deadline of 60 s
    for client, share in ((0, 0.5), (3, 1.0)):
        coordinator._requests._took[client] = Took(0.0, 500.0 if share < 1 else 0.0)
    for peer in harness.peers:
        peer.delay_s = 3.0
    run = harness.run()
    assert [request.work for request in harness.peers[0].requests] == [1.0, 1.0, 1.0, 0.5]
    assert [request.work for request in harness.peers[3].requests] == [1.0, 0.5, 0.5, 1.0]
    assert shares(run)[2][0] == 0.5
    assert shares(run)[2][3] == 1.0
    assert apart(replay(run), run.model()) <= 1e-6


WORKS_S = (4.0, 4.0, 8.0, 40.0)
"""How long the devices train for all their work, by their own clocks; everything else takes them 2 s."""


def capped(folder: Path, **given: Any) -> Harness:
    """A deployment of devices that tell how long they train."""
    harness = Harness(folder, {"fraction": 1.0, "round_limit_s": 900.0} | given, delays_s=dict.fromkeys(range(4), 2.0))
    for peer, works_s in zip(harness.peers, WORKS_S, strict=True):
        peer.works_s = works_s
    return harness


def test_a_work_cap_goes_by_the_devices_own_clocks(tmp_path: Path) -> None:
    """The median of 6, 6, 10 and 42 s is 8 s. In 1.5 times that, the last has 10 s left for 40 s of training."""
    run = capped(tmp_path, protocol="fedavg", work_cap=1.5).run()
    assert shares(run) == [dict.fromkeys(range(4), 1.0), *[{0: 1.0, 1: 1.0, 2: 1.0, 3: 0.25}] * 5]
    lengths = [record.length_s for record in run.records()]
    assert lengths[0] == 42.0
    assert lengths[1:] == [12.0] * 5
    assert apart(replay(run), run.model()) <= 1e-6


def test_a_work_cap_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    """While nobody knows how long the slow device takes, it takes as long as it has been at work: 40 s, not 42."""
    harness = capped(tmp_path, protocol="fedbuff", work_cap=1.5, buffer_size=2, normalise_work=True, rounds=12)
    harness.run(until=harness.in_round(9))
    harness.step()
    assert harness.coordinator.protocol.work[3] < 1
    harness.kill_server()
    run = harness.run()
    slow = [
        (work, weight)
        for r in run.records()
        for k, work, weight in zip(r.client, r.work, r.weight, strict=True)
        if k == 3
    ]
    assert [work for work, _ in slow] == [1.0, pytest.approx(12 / 40), *[0.25] * (len(slow) - 2)]
    assert max(weight for _, weight in slow) > 0.5
    assert apart(replay(run), run.model()) <= 1e-6


@pytest.mark.parametrize("protocol", ["timelyfl", "fedcompass", "fedsecant"])
def test_protocols_that_cut_the_work_are_deployed(protocol: str, tmp_path: Path) -> None:
    """Their devices do a part of the work from the second attempt on, and a server that is killed continues."""
    harness = capped(tmp_path, protocol=protocol, rounds=24 if protocol == "fedsecant" else 12)
    for number in (3, 9):
        harness.run(until=harness.in_round(number))
        harness.step()
        harness.kill_server()
    run = harness.run()
    slow = [asked[3] for asked in shares(run) if 3 in asked]
    assert slow[0] == 1.0
    assert max(slow[1:]) < 0.7
    assert len(list(run.records())) == harness.settings.rounds
    assert apart(replay(run), run.model()) <= 1e-6


@pytest.mark.parametrize(("claimed_s", "took"), [(30.0, (10.0, 60.0)), (99.0, (0.0, 198.0)), (-5.0, (40.0, 0.0))])
def test_a_device_may_have_trained_before_it_was_asked(claimed_s: float, took: tuple[float, float]) -> None:
    """It was asked for half of its work 40 s ago. What it says is its own affair, but never makes a time negative."""
    requests = Requests()
    requests.ask(0, at=0.0)
    in_flight = requests.send(0, 1, 0.5, now=60.0)
    requests.measure(0, in_flight, trained_s=claimed_s, now=100.0)
    assert (requests.other_s(0), requests.expected_s(0, since=None, now=100.0)) == (took[0], sum(took))
    again = Requests()
    again.restore(json.loads(json.dumps(requests.snapshot())))
    assert again.expected_s(0, since=None, now=100.0) == sum(took)


def test_without_a_devices_word_all_the_time_counts_as_training() -> None:
    requests = Requests()
    requests.ask(0, at=0.0)
    requests.measure(0, requests.send(0, 1, 0.5, now=60.0), trained_s=None, now=100.0)
    assert (requests.other_s(0), requests.expected_s(0, since=None, now=100.0)) == (0.0, 80.0)
    assert requests.expected_s(1, since=None, now=100.0) == requests.other_s(1) == 0.0
