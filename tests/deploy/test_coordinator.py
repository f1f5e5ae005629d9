"""The server of a deployment: the protocol driven by devices that answer, fail, lie, come and go."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from safa.deploy.exchange.codec import encode
from safa.deploy.exchange.coordinator import Coordinator
from safa.deploy.exchange.messages import Failure, JoinReply, ModelMissing, Reply, TrainRequest, Update
from safa.deploy.exchange.screening import RejectReason
from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.protocol.records import EndedBy, Refusal, Verdict
from safa.runs import load_run
from tests.deploy.harness import PROTOCOLS, Harness, apart, fed_again, prepare


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_runs_and_its_replay_is_its_model(tmp_path: Path, protocol: str) -> None:
    run = Harness(tmp_path, {"protocol": protocol, "buffer_size": 3, "rounds": 8}).run()
    assert run.summary is not None
    assert len(list(run.records())) == 8
    assert apart(replay(run), run.model()) <= 1e-6
    assert apart(fed_again(run), run.model()) <= 1e-6


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shuffled_samples_and_a_schedule_are_replayed(tmp_path: Path, protocol: str) -> None:
    """Device and replay know the same version, round and number of a client, across a restart of the server, too."""
    given = {"shuffle": True, "schedule": "warmup:3+cosine", "local_steps": 7}
    harness = Harness(tmp_path, {"protocol": protocol, "buffer_size": 3, "rounds": 6} | given)
    harness.run(until=harness.in_round(4))
    harness.kill_server()
    run = harness.run()
    assert apart(replay(run), run.model()) <= 1e-6
    asked = {request.round for peer in harness.peers for request in peer.requests}
    assert len(asked) >= 3  # the learning rate did change


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_server_that_is_killed_at_any_instant_loses_and_doubles_nothing(
    tmp_path: Path, protocol: str, seed: int
) -> None:
    """Killed in every third second or so, the run finishes, and is what its arrivals make without a fault."""
    harness = Harness(tmp_path, {"protocol": protocol, "buffer_size": 3, "rounds": 6}, delays_s={3: 14.0})
    draws = np.random.default_rng(seed)
    kills = 0

    def kill() -> bool:
        nonlocal kills
        if kills < 12 and draws.random() < 0.3:
            kills += 1
            harness.kill_server()
        return False

    run = harness.run(until=kill)
    assert kills >= 5
    assert [record.round for record in run.records()] == list(range(1, 7))
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_a_client_that_answered_in_a_lost_round_is_not_trained_twice(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"epochs": 3})
    harness.run(until=harness.in_round(3))
    harness.run(until=lambda: len(harness.peers[0].requests) >= 3)
    written = (tmp_path / "client-0" / "state.safetensors").stat().st_mtime_ns
    harness.step()
    harness.kill_server()
    harness.run(until=lambda: len(harness.peers[0].requests) >= 4)
    first, again = harness.peers[0].requests[2:4]
    assert (first.version, first.digest) == (again.version, again.digest)
    assert (tmp_path / "client-0" / "state.safetensors").stat().st_mtime_ns == written
    harness.run()


def test_a_straggler_continues_across_rounds_and_is_deprecated_in_the_end(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    harness = Harness(tmp_path, {"clients": 5, "fraction": 0.4, "rounds": 9}, delays_s={4: 25.0})
    records = list(harness.run().records())
    straggler = harness.coordinator.membership.roster.number_of("client-4")
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
    requests = harness.peers[4].requests
    assert len(requests) <= len(deprecated) + 1  # one request an attempt, however many rounds it takes
    assert "refused: client-4, abandoned" in log.text
    assert "deprecated: client-4" in log.text


def test_a_device_that_was_lost_is_tolerable_and_continues_where_it_was(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 8, "lag_tolerance": 5})
    harness.run(until=harness.in_round(2))
    lost = harness.peers[0]
    number = harness.coordinator.membership.roster.number_of("client-0")
    assert number is not None
    lost.is_online = False
    harness.run(until=harness.in_round(4))
    held = int(harness.coordinator.protocol.versions[number])
    assert held == 1
    harness.restart(lost)
    requests = len(lost.requests)
    run = harness.run()
    assert lost.requests[requests].version == held
    assert lost.requests[requests].model is None, "a tolerable client is sent nothing"
    commits = [(r.round, int(r.base[r.client == number][0])) for r in run.records() if number in r.client]
    assert (commits[1][0] >= 4, commits[1][1]) == (True, held)
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_a_device_that_lost_its_state_is_sent_the_version_that_it_held(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 7, "lag_tolerance": 5})
    harness.run(until=harness.in_round(2))
    lost = harness.peers[0]
    lost.is_online = False
    harness.run(until=harness.in_round(4))
    for file in (tmp_path / "client-0").iterdir():
        file.unlink()
    harness.restart(lost)
    requests = len(lost.requests)
    run = harness.run()
    bare, full = lost.requests[requests : requests + 2]
    assert (bare.model, bare.version, bare.digest) == (None, full.version, full.digest)
    assert full.model is not None
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_clients_come_and_go_and_the_fleet_follows(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path, {"clients": 5, "rounds": 12, "fraction": 0.5}, {"start_with": 3, "leave_after_s": 20.0})
    late, leaver = harness.peers[4], harness.peers[0]
    late.is_online = harness.peers[3].is_online = False
    harness.run(until=harness.in_round(2))
    assert harness.coordinator.protocol.quota == 2
    late.is_online = harness.peers[3].is_online = True
    harness.run(until=harness.in_round(4))
    assert harness.coordinator.protocol.quota == 3
    leaver.is_online = False
    harness.run(until=lambda: int(harness.coordinator.protocol.active.sum()) == 4)
    left_in = harness.coordinator.protocol.round
    harness.restart(leaver)
    run = harness.run()
    records = list(run.records())
    number = harness.coordinator.membership.roster.number_of("client-0")
    assert number in next(record for record in records if record.round == left_in).left
    assert any(number in record.joined for record in records if record.round > left_in)
    assert len(run.roster() or []) == 5
    assert "client-0 has left" in log.text
    assert "client-0 is back" in log.text
    assert apart(fed_again(run), run.model()) <= 1e-6


def forged(kind: str) -> Any:
    first: list[Update] = []

    def forge(request: TrainRequest, answer: Reply) -> Reply:
        assert isinstance(answer, Update)
        first.append(answer)
        tensors = {
            name: np.frombuffer(packed.data, np.float32).reshape(packed.shape).copy()
            for name, packed in answer.encoded.tensors.items()
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
        forgery = replace(answer, encoded=encode(tensors, "float32"))
        if kind == "stale":
            forgery = replace(forgery, version=max(request.version - 1, 0))
        if kind == "future":
            forgery = replace(forgery, version=request.version + 1)
        if kind == "unknown":
            forgery = replace(forgery, version=-7)
        if kind == "replay":
            forgery = first[0]
        if kind == "kind":
            forgery = replace(forgery, encoded=encode(tensors, "float16"))
        return forgery

    return forge


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nan", RejectReason.NOT_FINITE),
        ("shapes", RejectReason.SHAPES),
        ("norm", RejectReason.NORM),
        ("large", RejectReason.TOO_LARGE),
        ("stale", RejectReason.STALE_VERSION),
        ("future", RejectReason.FUTURE_VERSION),
        ("unknown", RejectReason.UNKNOWN_VERSION),
        ("replay", RejectReason.NOT_ASKED),
        ("kind", RejectReason.UNREADABLE),
    ],
)
def test_a_bad_update_is_refused_by_name_and_the_others_make_the_model(
    tmp_path: Path, log: pytest.LogCaptureFixture, kind: str, reason: RejectReason
) -> None:
    options = {"norm_bound": 1000.0, "rejections_allowed": 2, "start_with": 4}
    harness = Harness(tmp_path, {"rounds": 6, "fraction": 1.0, "lag_tolerance": 5}, options)
    harness.peers[1].forge = forged(kind)
    run = harness.run()
    number = harness.coordinator.membership.roster.number_of("client-1")
    assert number is not None
    assert f"rejected: client-1, {reason}" in log.text
    assert "blocked: client-1" in log.text
    assert run.summary is not None
    assert run.summary["refusals"][str(reason)] == 2
    first = [0] if kind in ("replay", "stale") else []  # its first update is honest, or there is no older version
    taken = [r for record in run.records() for r in record.client[record.verdict != Verdict.REFUSED] if r == number]
    assert len(taken) == len(first)
    assert any(number in record.left for record in run.records()), "whom nobody trusts has left the fleet"
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_an_unblocked_client_takes_part_again(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path, {"rounds": 9, "fraction": 1.0}, {"rejections_allowed": 1})
    harness.peers[1].forge = forged("nan")
    number = 1
    harness.run(
        until=lambda: number in harness.coordinator.screening.blocked and harness.coordinator.protocol.round > 2
    )
    harness.peers[1].forge = None
    (tmp_path / "run" / "unblock.json").write_text(json.dumps(["client-1"]))
    harness.kill_server()
    run = harness.run()
    assert "client-1 is unblocked" in log.text
    assert any(number in record.picked for record in run.records())
    assert not (tmp_path / "run" / "unblock.json").exists()


def test_a_round_does_not_wait_for_whoever_failed(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path, {"protocol": "fedavg", "fraction": 1.0, "rounds": 3})
    harness.peers[2].forge = lambda request, answer: Failure(why="out of memory")
    records = list(harness.run().records())
    assert [record.ended_by for record in records] == [EndedBy.NOBODY_LEFT] * 3
    assert all(len(record.picked) == 3 for record in records)
    assert "lost: client-2, code 0: out of memory" in log.text


def test_two_nodes_of_one_name_do_not_take_turns(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 4})
    twin = harness.join("client-0", 0)
    twin.device = harness.peers[0].device
    harness.run()
    roster = harness.coordinator.membership.roster
    assert len(roster) == 4
    requests = len(harness.peers[0].requests) + len(twin.requests)
    assert requests
    assert roster[roster.number_of("client-0") or 0].node == twin.node


def test_with_keys_a_name_is_its_keys(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    prepare(tmp_path / "run", {"rounds": 2})
    (tmp_path / "run" / "nodes.json").write_text(json.dumps({"7": "ann", "8": "bob"}))
    coordinator = Coordinator(tmp_path / "run", now=0.0)
    coordinator.on_nodes([7, 8], now=1.0)
    to_ann, to_bob = coordinator.outbox
    coordinator.on_reply(to_bob, JoinReply(name="ann", size=10.0), now=2.0)
    coordinator.on_reply(to_ann, JoinReply(name="ann", size=10.0), now=2.0)
    coordinator.stop()
    assert coordinator.membership.roster.number_of("ann") == 0
    assert coordinator.membership.roster[0].node == 7
    assert "its key is registered as 'bob'" in log.text


@pytest.mark.parametrize("codec", ["float16", "int8"])
def test_a_narrow_codec_saves_bytes_and_costs_little(tmp_path: Path, codec: str) -> None:
    wide = Harness(tmp_path / "wide", {"rounds": 8}).run()
    narrow = Harness(tmp_path / codec, {"rounds": 8}, {"codec": codec}).run()
    sent, saved = (sum(record.bytes_up for record in run.records()) for run in (wide, narrow))
    assert saved < 0.6 * sent
    assert wide.summary is not None
    assert narrow.summary is not None
    assert abs(narrow.summary["last_accuracy"] - wide.summary["last_accuracy"]) < 0.02


def test_a_finished_run_and_habits_of_the_paper_are_refused(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 1})
    harness.run()
    with pytest.raises(SafaError, match="is finished"):
        Coordinator(tmp_path / "run", now=0.0)
    prepare(tmp_path / "warm", {"server_optimiser": "safa.paper.habits:AsPrinted"})
    with pytest.raises(SafaError, match="cannot be deployed"):
        Coordinator(tmp_path / "warm", now=0.0)


def test_a_copy_of_a_running_folder_is_a_backup(tmp_path: Path) -> None:
    """Checkpoint first, then rounds: then the rounds are never fewer than the checkpoint says."""
    harness = Harness(tmp_path, {"rounds": 6})
    harness.run(until=harness.in_round(3))
    backup = tmp_path / "backup"
    shutil.copytree(tmp_path / "run", backup, ignore=shutil.ignore_patterns("rounds.jsonl"))
    harness.run(until=harness.in_round(5))
    shutil.copy(tmp_path / "run" / "rounds.jsonl", backup)
    harness.coordinator.stop()
    shutil.rmtree(tmp_path / "run")
    backup.rename(tmp_path / "run")
    harness.kill_server()
    assert harness.coordinator.protocol.round == 2
    run = harness.run()
    assert [record.round for record in run.records()] == list(range(1, 7))
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_a_backup_that_lacks_rounds_is_turned_down(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 6})
    harness.run(until=harness.in_round(3))
    harness.coordinator.stop()
    (tmp_path / "run" / "rounds.jsonl").write_text("")
    with pytest.raises(SafaError, match="holds 0 rounds, but a checkpoint made after round 2"):
        Coordinator(tmp_path / "run", now=0.0)


def test_a_missing_model_is_sent_once_only(tmp_path: Path) -> None:
    """A client that claims to miss what it was just sent is asked again in the next round, not at once for ever."""
    harness = Harness(tmp_path, {"rounds": 3, "fraction": 0.5})
    harness.peers[0].forge = lambda request, answer: ModelMissing(attempt=request.attempt)
    harness.run()
    assert len(harness.peers[0].requests) <= 3 * 2


def target_of(folder: Path, number: int) -> str:
    """A target of the loss that is first met in that round and the one behind it."""
    losses = [record.loss or 0.0 for record in Harness(folder, {"rounds": 8}).run().records()]
    bound = sorted(losses[: number - 1])[0] * 0.5 + max(losses[number - 1 : number + 1]) * 0.5
    assert [loss <= bound for loss in losses[: number + 1]] == [False] * (number - 1) + [True, True]
    return f"loss={bound},held=2"


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_deployment_ends_when_its_target_was_held(
    tmp_path: Path, log: pytest.LogCaptureFixture, is_killed: bool
) -> None:
    until = target_of(tmp_path / "before", 4)
    log.clear()
    harness = Harness(tmp_path / "until", {"rounds": 8, "until": until})
    if is_killed:
        harness.run(until=harness.in_round(5))
        harness.kill_server()
    run = harness.run()
    assert run.summary is not None
    assert len(list(run.records())) == 5
    assert run.summary["rounds_to_target"] == 4
    assert "run finished after 5 rounds" in log.text
    assert apart(fed_again(run), run.model()) <= 1e-6
    assert apart(replay(run), run.model()) <= 1e-6


def test_a_server_that_was_killed_when_its_target_was_held_only_has_to_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed() -> None:
        raise KeyboardInterrupt

    harness = Harness(tmp_path / "until", {"rounds": 8, "until": target_of(tmp_path / "before", 4)})
    monkeypatch.setattr(harness.coordinator, "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        harness.run()
    harness.coordinator.stop()
    assert not (tmp_path / "until" / "run" / "summary.json").exists()
    again = Coordinator(tmp_path / "until" / "run", now=harness.now)
    assert again.finished
    summary = load_run(tmp_path / "until" / "run").summary
    assert summary is not None
    assert summary["rounds_to_target"] == 4
