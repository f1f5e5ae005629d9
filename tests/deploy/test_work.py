"""A deployment whose protocol asks slow clients for a part of their work: the one of the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from safa import replay
from safa.runs import Run
from tests.deploy.harness import Harness, apart
from tests.sparing import install_sparing


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The protocol of the docs, as if its package was installed."""
    install_sparing(tmp_path / "packages", monkeypatch)


def shares(run: Run) -> list[dict[int, float]]:
    """By round, what every client was asked for."""
    return [dict(zip(record.client.tolist(), record.work.tolist(), strict=True)) for record in run.records()]


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


def test_parts_of_the_work_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"protocol": "sparing", "fraction": 1.0})
    harness.run(until=harness.in_round(3))
    harness.step()
    harness.kill_server()
    run = harness.run()
    assert shares(run)[2:] == [{0: 1.0, 1: 1.0, 2: 0.5, 3: 0.5}] * 4
    assert apart(replay(run), run.model()) <= 1e-6


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
        coordinator._requests._took[client] = 500.0 if share < 1 else 0.0
    for peer in harness.peers:
        peer.delay_s = 3.0
    run = harness.run()
    assert [request.work for request in harness.peers[0].requests] == [1.0, 1.0, 1.0, 0.5]
    assert [request.work for request in harness.peers[3].requests] == [1.0, 0.5, 0.5, 1.0]
    assert shares(run)[2][0] == 0.5
    assert shares(run)[2][3] == 1.0
    assert apart(replay(run), run.model()) <= 1e-6
