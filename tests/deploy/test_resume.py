"""A server is started again: from which checkpoint it goes on, and when it refuses to."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safa.deploy.exchange.coordinator import Coordinator
from safa.errors import SafaError
from safa.runs import load_run
from safa.runs.storage import read_sealed, write_sealed
from tests.deploy.harness import Harness, apart, fed_again

Change = Callable[[dict[str, str], dict[str, torch.Tensor]], object]


def stopped(tmp_path: Path, rounds: int = 3, **given: Any) -> Harness:
    """A deployment that was stopped in the round after so many."""
    harness = Harness(tmp_path, {"rounds": 6} | given)
    harness.run(until=harness.in_round(rounds + 1))
    harness.coordinator.stop()
    return harness


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    return sorted((folder / "checkpoint").iterdir(), reverse=True)


def is_turned_down(folder: Path) -> str:
    """Why a folder cannot be taken up; nothing in it has changed, and nothing is left open."""
    before = files(folder)
    with pytest.raises(SafaError) as refused:
        Coordinator(folder, now=0.0)
    assert files(folder) == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


def goes_on(harness: Harness) -> None:
    run = harness.run()
    assert [record.round for record in run.records()] == list(range(1, 7))
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_there_is_a_checkpoint_before_the_first_round_opens(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 6})
    harness.run(until=harness.in_round(1))
    assert load_run(tmp_path / "run").load_checkpoint().state
    harness.kill_server()
    assert len(harness.coordinator.membership.roster) == 4, "who has enrolled is known"
    goes_on(harness)


def test_rounds_without_a_checkpoint_are_not_thrown_away(tmp_path: Path) -> None:
    harness = stopped(tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    why = is_turned_down(tmp_path / "run")
    assert "holds 3 rounds and no checkpoint that can be used" in why
    assert "backup" in why
    assert "--force" in why
    assert len(list(load_run(harness.folder / "run").records())) == 3


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 4]) + content[-8:]


@pytest.mark.parametrize("damage", [cut, flip, lambda content: b""])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, log: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    harness = stopped(tmp_path)
    newest = checkpoints(tmp_path / "run")[0]
    newest.write_bytes(damage(newest.read_bytes()))
    harness.kill_server()
    assert harness.coordinator.protocol.round == 2
    warnings = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    assert any(newest.name in line for line in warnings)
    assert "round 3 is run again: the checkpoint was made after round 2" in warnings
    goes_on(harness)


def test_rounds_that_are_run_again_are_reported(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    harness = stopped(tmp_path, 2)
    older = checkpoints(tmp_path / "run")[0]
    kept = older.read_bytes()
    harness.kill_server()
    harness.run(until=harness.in_round(5))
    harness.coordinator.stop()
    for path in checkpoints(tmp_path / "run"):
        path.unlink()
    older.write_bytes(kept)
    harness.kill_server()
    assert "rounds 3 to 4 are run again: the checkpoint was made after round 2" in log.text
    goes_on(harness)


def test_both_checkpoints_damaged_is_an_error_that_names_them(tmp_path: Path) -> None:
    stopped(tmp_path)
    for path in checkpoints(tmp_path / "run"):
        path.write_bytes(flip(path.read_bytes()))
    why = is_turned_down(tmp_path / "run")
    assert all(path.name in why for path in checkpoints(tmp_path / "run"))
    assert "no checkpoint that can be used" in why


def test_a_kill_between_a_rounds_record_and_its_checkpoint_is_mended(tmp_path: Path) -> None:
    harness = stopped(tmp_path)
    checkpoints(tmp_path / "run")[0].unlink()
    harness.kill_server()
    assert harness.coordinator.protocol.round == 2
    goes_on(harness)


def test_a_last_round_that_is_lost_gives_way_to_the_checkpoint_before(tmp_path: Path) -> None:
    harness = stopped(tmp_path)
    rounds = tmp_path / "run" / "rounds.jsonl"
    rounds.write_bytes(b"".join(rounds.read_bytes().splitlines(keepends=True)[:2]))
    harness.kill_server()
    goes_on(harness)


def inside(change: Callable[[dict[str, Any]], object]) -> Change:
    def changed(notes: dict[str, str], state: dict[str, torch.Tensor]) -> None:
        kept = json.loads(notes["coordinator"])
        change(kept)
        notes["coordinator"] = json.dumps(kept)

    return changed


def values(**changes: Any) -> Change:
    def changed(notes: dict[str, str], state: dict[str, torch.Tensor]) -> None:
        notes["protocol"] = json.dumps(json.loads(notes["protocol"]) | changes)

    return changed


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda notes, state: state.update({name: change(state[name]).contiguous()})


@pytest.mark.parametrize(
    "change",
    [
        lambda notes, state: notes.pop("coordinator"),
        lambda notes, state: notes.pop("protocol"),
        lambda notes, state: notes.update(coordinator="{"),
        lambda notes, state: notes.update(coordinator="[]"),
        lambda notes, state: notes.update(protocol="[1]"),
        inside(lambda kept: kept.pop("roster")),
        inside(lambda kept: kept["roster"]["members"].pop()),
        inside(lambda kept: kept["roster"].update(members=3)),
        inside(lambda kept: kept.update(screening={})),
        inside(lambda kept: kept.update(took=[["a", 1]])),
        inside(lambda kept: kept.update(time_s="soon")),
        values(round=2),
        values(round="3"),
        values(is_open="no"),
        values(nonsense=1),
        tensor("protocol.versions", lambda old: old[:-1]),
        tensor("protocol.versions", lambda old: old.double()),
        tensor("models.rows", lambda old: old[:, :-1]),
        tensor("models.rows", lambda old: old[:-1]),
        tensor("held", lambda old: old[:-1]),
        tensor("cache.size", lambda old: old[:-1]),
        tensor("cache.rows", lambda old: old[:, :-1]),
        tensor("received.rows", lambda old: old[:, :-1]),
        lambda notes, state: state.pop("protocol.sizes"),
        lambda notes, state: state.pop("held"),
        lambda notes, state: state.pop("cache.sum"),
        lambda notes, state: state.pop("models.version"),
    ],
)
def test_whatever_is_wrong_inside_a_checkpoint_is_one_sentence(tmp_path: Path, change: Change) -> None:
    stopped(tmp_path)
    newest = checkpoints(tmp_path / "run")[0]
    notes, state = read_sealed(newest)
    change(notes, state)
    write_sealed(newest, state, notes)
    assert "checkpoint" in is_turned_down(tmp_path / "run") or "snapshot" in is_turned_down(tmp_path / "run")


def test_a_checkpoint_of_other_settings_is_not_used(tmp_path: Path) -> None:
    stopped(tmp_path)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("fraction = 0.5", "fraction = 0.9"))
    assert "other settings" in is_turned_down(tmp_path / "run")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3"])
def test_a_damaged_name_of_a_deployment_is_an_error(tmp_path: Path, content: str) -> None:
    stopped(tmp_path)
    (tmp_path / "run" / "deployment.json").write_text(content)
    assert "deployment.json cannot be read" in is_turned_down(tmp_path / "run")


def test_rounds_out_of_order_are_turned_down(tmp_path: Path) -> None:
    stopped(tmp_path)
    rounds = tmp_path / "run" / "rounds.jsonl"
    first, second, third = rounds.read_bytes().splitlines(keepends=True)
    rounds.write_bytes(second + first + third)
    assert "round" in is_turned_down(tmp_path / "run")


def test_a_damaged_round_is_turned_down(tmp_path: Path) -> None:
    stopped(tmp_path)
    rounds = tmp_path / "run" / "rounds.jsonl"
    rounds.write_bytes(rounds.read_bytes().replace(b'"client":[', b'"client":["x",', 1))
    is_turned_down(tmp_path / "run")


def test_names_of_nodes_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    harness = stopped(tmp_path)
    (tmp_path / "run" / "nodes.json").write_text("[1]")
    coordinator = Coordinator(tmp_path / "run", now=0.0)
    with pytest.raises(SafaError, match=r"nodes\.json cannot be read"):
        coordinator.on_nodes([1], now=1.0)
    coordinator.stop()
    assert np.array_equal(coordinator.protocol.sizes, harness.coordinator.protocol.sizes)
