"""The server of a deployment: the protocol driven by devices that answer, fail, lie, come and go."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa.deploy.exchange.codec import pack
from safa.deploy.exchange.coordinator import Conductor
from safa.deploy.exchange.messages import Answer, Failure, Introduction, Missing, Order, Update
from safa.deploy.exchange.screening import Reason
from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.protocol.records import EndedBy, Refusal, Verdict
from tests.deploy.stage import PROTOCOLS, Stage, apart, fed_again, prepare


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_runs_and_its_replay_is_its_model(tmp_path: Path, protocol: str) -> None:
    run = Stage(tmp_path, {"protocol": protocol, "buffer_size": 3, "rounds": 8}).play()
    assert run.summary is not None
    assert len(list(run.records())) == 8
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_server_that_is_killed_at_any_instant_loses_and_doubles_nothing(
    tmp_path: Path, protocol: str, seed: int
) -> None:
    """Killed in every third second or so, the run comes to its end, and is what its arrivals make without a fault."""
    stage = Stage(tmp_path, {"protocol": protocol, "buffer_size": 3, "rounds": 6}, delays_s={3: 14.0})
    lots = np.random.default_rng(seed)
    kills = 0

    def kill() -> bool:
        nonlocal kills
        if kills < 12 and lots.random() < 0.3:
            kills += 1
            stage.kill_server()
        return False

    run = stage.play(until=kill)
    assert kills >= 5
    assert [record.round for record in run.records()] == list(range(1, 7))
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_a_client_that_answered_in_a_lost_round_is_not_trained_twice(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"epochs": 3})
    stage.play(until=stage.in_round(3))
    stage.play(until=lambda: len(stage.players[0].orders) >= 3)
    written = (tmp_path / "client-0" / "state.safetensors").stat().st_mtime_ns
    stage.step()
    stage.kill_server()
    stage.play(until=lambda: len(stage.players[0].orders) >= 4)
    first, again = stage.players[0].orders[2:4]
    assert (first.version, first.digest) == (again.version, again.digest)
    assert (tmp_path / "client-0" / "state.safetensors").stat().st_mtime_ns == written
    stage.play()


def test_a_straggler_goes_on_across_rounds_and_is_deprecated_in_the_end(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    stage = Stage(tmp_path, {"clients": 5, "fraction": 0.4, "rounds": 9}, delays_s={4: 25.0})
    records = list(stage.play().records())
    straggler = stage.conductor.attendance.roster.number_of("client-4")
    deprecated = [record.round for record in records if straggler in record.deprecated]
    assert deprecated
    abandoned = [
        (record.round, int(base))
        for record in records
        for client, base, refusal in zip(record.client, record.base, record.refusal, strict=True)
        if client == straggler and refusal == Refusal.ABANDONED
    ]
    assert abandoned
    assert all(base < deprecated[-1] - 1 for _, base in abandoned)
    orders = stage.players[4].orders
    assert len(orders) <= len(deprecated) + 1  # one order an attempt, however many rounds it takes
    assert "refused: client-4, abandoned" in log.text
    assert "deprecated: client-4" in log.text


def test_a_device_that_was_lost_is_tolerable_and_goes_on_where_it_was(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"rounds": 8, "lag_tolerance": 5})
    stage.play(until=stage.in_round(2))
    lost = stage.players[0]
    number = stage.conductor.attendance.roster.number_of("client-0")
    assert number is not None
    lost.is_online = False
    stage.play(until=stage.in_round(4))
    held = int(stage.conductor.protocol.versions[number])
    assert held == 1
    stage.restart(lost)
    orders = len(lost.orders)
    run = stage.play()
    assert lost.orders[orders].version == held
    assert lost.orders[orders].model is None, "a tolerable client is sent nothing"
    commits = [(r.round, int(r.base[r.client == number][0])) for r in run.records() if number in r.client]
    assert (commits[1][0] >= 4, commits[1][1]) == (True, held)
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_a_device_that_lost_its_state_is_sent_the_version_that_it_held(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"rounds": 7, "lag_tolerance": 5})
    stage.play(until=stage.in_round(2))
    lost = stage.players[0]
    lost.is_online = False
    stage.play(until=stage.in_round(4))
    for file in (tmp_path / "client-0").iterdir():
        file.unlink()
    stage.restart(lost)
    orders = len(lost.orders)
    run = stage.play()
    bare, full = lost.orders[orders : orders + 2]
    assert (bare.model, bare.version, bare.digest) == (None, full.version, full.digest)
    assert full.model is not None
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_clients_come_and_go_and_the_fleet_follows(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path, {"clients": 5, "rounds": 12, "fraction": 0.5}, {"start_with": 3, "leave_after_s": 20.0})
    late, leaver = stage.players[4], stage.players[0]
    late.is_online = stage.players[3].is_online = False
    stage.play(until=stage.in_round(2))
    assert stage.conductor.protocol.quota == 2
    late.is_online = stage.players[3].is_online = True
    stage.play(until=stage.in_round(4))
    assert stage.conductor.protocol.quota == 3
    leaver.is_online = False
    stage.play(until=lambda: int(stage.conductor.protocol.active.sum()) == 4)
    left_in = stage.conductor.protocol.round
    stage.restart(leaver)
    run = stage.play()
    records = list(run.records())
    number = stage.conductor.attendance.roster.number_of("client-0")
    assert number in next(record for record in records if record.round == left_in).left
    assert any(number in record.joined for record in records if record.round > left_in)
    assert len(run.roster() or []) == 5
    assert "client-0 has left" in log.text
    assert "client-0 is back" in log.text
    assert apart(fed_again(run), run.model()) <= 1e-6


def forged(kind: str) -> Any:
    first: list[Update] = []

    def forge(order: Order, answer: Answer) -> Answer:
        assert isinstance(answer, Update)
        first.append(answer)
        tensors = {
            name: np.frombuffer(packed.data, np.float32).reshape(packed.shape).copy()
            for name, packed in answer.parcel.tensors.items()
        }
        name = next(iter(tensors))
        if kind == "nan":
            tensors[name].flat[0] = np.nan
        if kind == "shapes":
            tensors[name] = np.zeros((2, 2), np.float32)
        if kind == "norm":
            tensors[name] *= 1e6
        if kind == "large":
            tensors[name] = np.zeros(400_000, np.float32)
        forgery = replace(answer, parcel=pack(tensors, "float32"))
        if kind == "stale":
            forgery = replace(forgery, version=max(order.version - 1, 0))
        if kind == "future":
            forgery = replace(forgery, version=order.version + 1)
        if kind == "unknown":
            forgery = replace(forgery, version=-7)
        if kind == "replay":
            forgery = first[0]
        if kind == "kind":
            forgery = replace(forgery, parcel=pack(tensors, "float16"))
        return forgery

    return forge


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nan", Reason.NOT_FINITE),
        ("shapes", Reason.SHAPES),
        ("norm", Reason.NORM),
        ("large", Reason.TOO_LARGE),
        ("stale", Reason.STALE_VERSION),
        ("future", Reason.FUTURE_VERSION),
        ("unknown", Reason.UNKNOWN_VERSION),
        ("replay", Reason.NOT_ASKED),
        ("kind", Reason.UNREADABLE),
    ],
)
def test_a_bad_update_is_refused_by_name_and_the_others_make_the_model(
    tmp_path: Path, log: pytest.LogCaptureFixture, kind: str, reason: Reason
) -> None:
    options = {"norm_bound": 1000.0, "refusals_allowed": 2, "start_with": 4}
    stage = Stage(tmp_path, {"rounds": 6, "fraction": 1.0, "lag_tolerance": 5}, options)
    stage.players[1].forge = forged(kind)
    run = stage.play()
    number = stage.conductor.attendance.roster.number_of("client-1")
    assert number is not None
    assert f"refused: client-1, {reason}" in log.text
    assert "set aside: client-1" in log.text
    assert run.summary is not None
    assert run.summary["refusals"][str(reason)] == 2
    first = [0] if kind in ("replay", "stale") else []  # its first update is honest, or there is no older version
    taken = [r for record in run.records() for r in record.client[record.verdict != Verdict.REFUSED] if r == number]
    assert len(taken) == len(first)
    assert any(number in record.left for record in run.records()), "whom nobody trusts has left the fleet"
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_a_pardoned_client_takes_part_again(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path, {"rounds": 9, "fraction": 1.0}, {"refusals_allowed": 1})
    stage.players[1].forge = forged("nan")
    number = 1
    stage.play(until=lambda: number in stage.conductor.screening.set_aside and stage.conductor.protocol.round > 2)
    stage.players[1].forge = None
    (tmp_path / "run" / "pardons.json").write_text(json.dumps(["client-1"]))
    stage.kill_server()
    run = stage.play()
    assert "client-1 is pardoned" in log.text
    assert any(number in record.picked for record in run.records())
    assert not (tmp_path / "run" / "pardons.json").exists()


def test_a_round_does_not_wait_for_whoever_failed(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    stage = Stage(tmp_path, {"protocol": "fedavg", "fraction": 1.0, "rounds": 3})
    stage.players[2].forge = lambda order, answer: Failure(why="out of memory")
    records = list(stage.play().records())
    assert [record.ended_by for record in records] == [EndedBy.NOBODY_LEFT] * 3
    assert all(len(record.picked) == 3 for record in records)
    assert "lost: client-2, code 0: out of memory" in log.text


def test_two_nodes_of_one_name_do_not_take_turns(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"rounds": 4})
    twin = stage.join("client-0", 0)
    twin.device = stage.players[0].device
    stage.play()
    roster = stage.conductor.attendance.roster
    assert len(roster) == 4
    invitations = len(stage.players[0].orders) + len(twin.orders)
    assert invitations
    assert roster[roster.number_of("client-0") or 0].node == twin.node


def test_with_keys_a_name_is_its_keys(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    prepare(tmp_path / "run", {"rounds": 2})
    (tmp_path / "run" / "nodes.json").write_text(json.dumps({"7": "ann", "8": "bob"}))
    conductor = Conductor(tmp_path / "run", now=0.0)
    conductor.observe([7, 8], now=1.0)
    to_ann, to_bob = conductor.posts
    conductor.hear(to_bob, Introduction(name="ann", size=10.0), now=2.0)
    conductor.hear(to_ann, Introduction(name="ann", size=10.0), now=2.0)
    conductor.stop()
    assert conductor.attendance.roster.number_of("ann") == 0
    assert conductor.attendance.roster[0].node == 7
    assert "its key is registered as 'bob'" in log.text


@pytest.mark.parametrize("wire", ["float16", "int8"])
def test_a_narrow_wire_saves_bytes_and_costs_little(tmp_path: Path, wire: str) -> None:
    wide = Stage(tmp_path / "wide", {"rounds": 8}).play()
    narrow = Stage(tmp_path / wire, {"rounds": 8}, {"wire": wire}).play()
    sent, saved = (sum(record.bytes_up for record in run.records()) for run in (wide, narrow))
    assert saved < 0.6 * sent
    assert wide.summary is not None
    assert narrow.summary is not None
    assert abs(narrow.summary["last_accuracy"] - wide.summary["last_accuracy"]) < 0.02


def test_a_finished_run_and_habits_of_the_paper_are_refused(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"rounds": 1})
    stage.play()
    with pytest.raises(SafaError, match="came to its end"):
        Conductor(tmp_path / "run", now=0.0)
    prepare(tmp_path / "printed", {"server_optimiser": "safa.paper.habits:AsPrinted"})
    with pytest.raises(SafaError, match="cannot be deployed"):
        Conductor(tmp_path / "printed", now=0.0)


def test_a_copy_of_a_running_folder_is_a_backup(tmp_path: Path) -> None:
    """Checkpoint first, then rounds: then the rounds are never fewer than the checkpoint says."""
    stage = Stage(tmp_path, {"rounds": 6})
    stage.play(until=stage.in_round(3))
    backup = tmp_path / "backup"
    shutil.copytree(tmp_path / "run", backup, ignore=shutil.ignore_patterns("rounds.jsonl"))
    stage.play(until=stage.in_round(5))
    shutil.copy(tmp_path / "run" / "rounds.jsonl", backup)
    stage.conductor.stop()
    shutil.rmtree(tmp_path / "run")
    backup.rename(tmp_path / "run")
    stage.kill_server()
    assert stage.conductor.protocol.round == 2
    run = stage.play()
    assert [record.round for record in run.records()] == list(range(1, 7))
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_a_backup_that_lacks_rounds_is_turned_down(tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"rounds": 6})
    stage.play(until=stage.in_round(3))
    stage.conductor.stop()
    (tmp_path / "run" / "rounds.jsonl").write_text("")
    with pytest.raises(SafaError, match="holds 0 rounds, but a checkpoint made after round 2"):
        Conductor(tmp_path / "run", now=0.0)


def test_a_missing_model_is_sent_once_only(tmp_path: Path) -> None:
    """A client that claims to miss what it was just sent is asked again in the next round, not at once for ever."""
    stage = Stage(tmp_path, {"rounds": 3, "fraction": 0.5})
    stage.players[0].forge = lambda order, answer: Missing(attempt=order.attempt)
    stage.play()
    assert len(stage.players[0].orders) <= 3 * 2
