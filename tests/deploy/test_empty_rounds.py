"""A round without any accepted update is cancelled: it is opened again, and no work is lost."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa.deploy.exchange.messages import Failure
from safa.experiments.replay import replay
from safa.protocol.records import Verdict
from safa.runs import Run
from safa.streams import stream
from tests.deploy.harness import PROTOCOLS, Harness, apart, fed_again


def steps(harness: Harness, count: int) -> None:
    for _ in range(count):
        harness.step()


def closed(harness: Harness) -> int:
    """How many rounds are on the disk."""
    return len((harness.folder / "run" / "rounds.jsonl").read_text().splitlines())


def is_whole(run: Run, rounds: int) -> None:
    """Every round is there once, took an update, and is what the arrivals make without a fault."""
    records = list(run.records())
    assert [record.round for record in records] == list(range(1, rounds + 1))
    assert all(np.any(record.verdict != Verdict.REFUSED) for record in records)
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


def opened_again(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if "retrying in" in record.getMessage()]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_devices_that_cannot_write_their_state_use_no_rounds_up(
    tmp_path: Path, log: pytest.LogCaptureFixture, protocol: str
) -> None:
    harness = Harness(tmp_path, {"protocol": protocol, "buffer_size": 3, "rounds": 6})
    harness.run(until=harness.in_round(3))
    for peer in harness.peers:
        (tmp_path / peer.name).rename(tmp_path / f"{peer.name}.away")
        (tmp_path / peer.name).write_text("a file in the place of a folder")
    steps(harness, 60)  # what was finished before may still come in
    before = closed(harness)
    steps(harness, 200)
    assert closed(harness) == before < 6
    for peer in harness.peers:
        (tmp_path / peer.name).unlink()
        (tmp_path / f"{peer.name}.away").rename(tmp_path / peer.name)
    is_whole(harness.run(), 6)
    assert "lost: client-0, code 0: the device cannot write" in log.text
    assert "File exists" in log.text
    assert f"round {before + 1}: no update (" in opened_again(log)[-1]


def test_the_pause_doubles_to_a_minute_and_a_good_round_resets_it(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    harness = Harness(tmp_path, {"rounds": 3, "fraction": 1.0})
    for peer in harness.peers:
        peer.forge = lambda request, answer: Failure(why="no space")
    steps(harness, 300)
    told = opened_again(log)
    assert told[0] == "round 1: no update (4 clients lost); retrying in 5 s"
    assert [line.rpartition("in ")[2] for line in told[:6]] == ["5 s", "10 s", "20 s", "40 s", "60 s", "60 s"]
    for peer in harness.peers:
        peer.forge = None
    harness.run(until=harness.in_round(2))
    for peer in harness.peers:
        peer.forge = lambda request, answer: Failure(why="no space")
    before = len(told := opened_again(log))
    steps(harness, 60)
    assert opened_again(log)[before].endswith("in 5 s")
    for peer in harness.peers:
        peer.forge = None
    is_whole(harness.run(), 3)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_limit_that_passes_while_everybody_trains_costs_no_round_and_no_work(
    tmp_path: Path, log: pytest.LogCaptureFixture, protocol: str
) -> None:
    given = {"protocol": protocol, "buffer_size": 3, "rounds": 1, "round_limit_s": 30.0, "fraction": 1.0}
    harness = Harness(tmp_path, given, delays_s=dict.fromkeys(range(4), 75.0))
    is_whole(harness.run(), 1)
    assert [len(peer.requests) for peer in harness.peers] == [1, 1, 1, 1], "nobody is asked to start again"
    assert "round 1: no update (4 clients still working); retrying in 5 s" in opened_again(log)


def test_an_answer_that_comes_between_two_openings_is_taken(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    given = {"protocol": "fedavg", "rounds": 1, "round_limit_s": 30.0, "fraction": 1.0}
    harness = Harness(tmp_path, given, delays_s=dict.fromkeys(range(4), 32.0))  # the limit is at 30, the opening at 35
    run = harness.run()
    is_whole(run, 1)
    assert len(opened_again(log)) == 1
    assert len(next(run.records()).picked) == 4


def test_who_is_not_drawn_again_is_not_blamed_for_its_answer(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """A newcomer is drawn in its place when round 2 is opened again; what it was sent is newer than what it had."""
    seed = next(s for s in range(100) if _fits(s))
    given = {"protocol": "fedavg", "clients": 3, "rounds": 4, "fraction": 0.3, "round_limit_s": 20.0, "seed": seed}
    harness = Harness(tmp_path, given, {"start_with": 2, "rejections_allowed": 1})
    harness.peers[2].is_online = False
    harness.run(until=harness.in_round(2))
    (drawn,) = [peer for peer in harness.peers if peer.requests[-1:] and peer.requests[-1].version == 1]
    harness.restart(drawn)  # what it was at work on is asked for again, and takes longer now
    drawn.delay_s = 30.0
    harness.peers[2].is_online, harness.peers[2].delay_s = True, 15.0
    run = harness.run()
    assert f"refused: {drawn.name}, not expected: its round was opened again without it" in log.text
    assert harness.coordinator.screening.blocked == []
    assert apart(replay(run), run.model()) <= 1e-6


def _fits(seed: int) -> bool:
    """Whether the last of three clients has the smallest lot in round 2, and another than in round 1 the second."""
    first, second = (stream(seed, "lottery", number).random(3) for number in (1, 2))
    return bool(second.argmin() == 2 and second[:2].argmin() != first[:2].argmin())


def test_what_a_round_cost_is_counted_over_all_of_its_openings(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 1, "fraction": 1.0})
    forges: list[Any] = [lambda request, answer: Failure(why="no space"), None]
    for peer in harness.peers:
        peer.forge = forges[0]
    steps(harness, 12)
    for peer in harness.peers:
        peer.forge = None
    (record,) = harness.run().records()
    sent = sum(request.model is not None for peer in harness.peers for request in peer.requests)
    assert sent == 8
    assert record.bytes_down == 8 * 13 * 4


def test_nobody_there_uses_no_rounds_up(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 3, "round_limit_s": 30.0, "fraction": 0.5})
    harness.run(until=harness.in_round(2))
    for peer in harness.peers:
        peer.is_online = False
    steps(harness, 300)
    assert closed(harness) == 1
    for peer in harness.peers:
        harness.restart(peer)
    is_whole(harness.run(), 3)


@pytest.mark.parametrize("protocol", ["fedavg", "fedcs", "local"])
def test_a_client_that_is_drawn_alone_and_is_away_does_not_stop_the_others(tmp_path: Path, protocol: str) -> None:
    """A round that is opened again draws it last; with the same draws it would be drawn forever."""
    harness = Harness(tmp_path, {"protocol": protocol, "rounds": 12, "fraction": 0.25}, {"leave_after_s": 1e6})
    harness.run(until=harness.in_round(2))
    harness.peers[1].is_online = False
    run = harness.run()
    assert len(list(run.records())) == 12
    assert harness.now < 1000 + 12 * 80
    assert apart(replay(run), run.model()) <= 1e-6


def test_fedcs_turns_to_others_when_all_that_it_drew_are_too_slow(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    given = {"protocol": "fedcs", "rounds": 20, "fraction": 0.25, "round_limit_s": 20.0}
    harness = Harness(tmp_path, given, delays_s={0: 26.0, 1: 3.0, 2: 3.0, 3: 3.0})
    run = harness.run()
    assert len(list(run.records())) == 20
    assert "(1 client expected to be too slow)" in log.text


def test_fedcs_asks_all_the_same_when_nobody_is_fast_enough(tmp_path: Path) -> None:
    given = {"protocol": "fedcs", "rounds": 4, "fraction": 0.5, "round_limit_s": 20.0}
    harness = Harness(tmp_path, given, delays_s=dict.fromkeys(range(4), 26.0))
    assert len(list(harness.run().records())) == 4


def test_a_server_that_is_killed_between_two_openings_continues(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 8})
    harness.run(until=harness.in_round(3))
    for peer in harness.peers:
        peer.forge = lambda request, answer: Failure(why="no space")
    steps(harness, 60)
    before = closed(harness)
    for _ in range(4):
        steps(harness, 23)
        harness.kill_server()
    assert closed(harness) == before < 8
    for peer in harness.peers:
        peer.forge = None
    is_whole(harness.run(), 8)


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """A folder in which nothing can be written: a file system that is full, or where that cannot be had, a file."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        folder.rmdir()
        folder.write_text("not a folder")
        yield
        folder.unlink()
        return
    try:
        (folder / "ballast").write_bytes(bytes(2**16))
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def test_full_disks_of_all_devices_are_reported_and_survived(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path, {"rounds": 4})
    with full(tmp_path / "client-0"), full(tmp_path / "client-1"):
        for peer in harness.peers[2:]:
            peer.is_online = False
        harness.coordinator.options = harness.coordinator.options.of({"start_with": 2})
        steps(harness, 120)
        assert closed(harness) == 0
        assert "lost: client-1, code 0: the device cannot write" in log.text
        assert "No space left on device" in log.text or "File exists" in log.text
        assert "round 1: no update (2 clients lost); retrying in 10 s" in opened_again(log)
    for peer in harness.peers[2:]:
        peer.is_online = True
    is_whole(harness.run(), 4)
