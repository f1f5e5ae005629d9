"""A server is started again: from which checkpoint it continues, and when it refuses to."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from safa.deploy.exchange.coordinator import Coordinator
from safa.errors import SafaError
from safa.protocol.records import Ids
from safa.runs import load_run
from safa.runs.checkpoints import CheckpointWriter
from safa.runs.storage import read_sealed, write_sealed
from tests.deploy.harness import Harness, apart, fed_again

Change = Callable[["Contents"], object]


def stopped(tmp_path: Path, rounds: int = 3, delays_s: Mapping[int, float] | None = None) -> Harness:
    """A deployment that was stopped in the round after so many."""
    harness = Harness(tmp_path, {"rounds": 6}, delays_s=delays_s)
    harness.run(until=harness.in_round(rounds + 1))
    harness.coordinator.stop()
    return harness


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def checkpoints(folder: Path) -> list[Path]:
    """The newest first."""
    return sorted((folder / "checkpoint").glob("state-*"), reverse=True)


def is_turned_down(folder: Path) -> str:
    """Why a run cannot be resumed; nothing in it has changed, and nothing is left open."""
    before = files(folder)
    with pytest.raises(SafaError) as refused:
        Coordinator(folder, now=0.0)
    assert files(folder) == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


def continues(harness: Harness) -> None:
    run = harness.run()
    assert [record.round for record in run.records()] == list(range(1, 7))
    assert apart(fed_again(run), run.model()) <= 1e-6


def test_there_is_a_checkpoint_before_the_first_round_opens(tmp_path: Path) -> None:
    harness = Harness(tmp_path, {"rounds": 6})
    harness.run(until=harness.in_round(1))
    assert load_run(tmp_path / "run").load_checkpoint().state
    harness.kill_server()
    assert len(harness.coordinator.membership.roster) == 4, "who has enrolled is known"
    continues(harness)


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
    continues(harness)


def test_rounds_that_are_run_again_are_reported(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    harness = stopped(tmp_path, 2)
    folder, kept = tmp_path / "run" / "checkpoint", tmp_path / "kept"
    shutil.copytree(folder, kept)
    harness.kill_server()
    harness.run(until=harness.in_round(5))
    harness.coordinator.stop()
    shutil.rmtree(folder)
    kept.rename(folder)
    harness.kill_server()
    assert "rounds 3 to 4 are run again: the checkpoint was made after round 2" in log.text
    continues(harness)


def test_both_checkpoints_damaged_is_an_error_that_names_them(tmp_path: Path) -> None:
    stopped(tmp_path)
    both = checkpoints(tmp_path / "run")
    assert len(both) == 2
    for path in both:
        path.write_bytes(flip(path.read_bytes()))
    why = is_turned_down(tmp_path / "run")
    assert all(path.name in why for path in both)
    assert "no checkpoint that can be used" in why


def test_a_kill_between_a_rounds_record_and_its_checkpoint_is_mended(tmp_path: Path) -> None:
    harness = stopped(tmp_path)
    checkpoints(tmp_path / "run")[0].unlink()
    harness.kill_server()
    assert harness.coordinator.protocol.round == 2
    continues(harness)


def test_a_last_round_that_is_lost_gives_way_to_the_checkpoint_before(tmp_path: Path) -> None:
    harness = stopped(tmp_path)
    rounds = tmp_path / "run" / "rounds.jsonl"
    rounds.write_bytes(b"".join(rounds.read_bytes().splitlines(keepends=True)[:2]))
    harness.kill_server()
    continues(harness)


@dataclass
class Contents:
    """What a checkpoint holds."""

    notes: dict[str, str]
    state: dict[str, Tensor]
    tables: dict[str, tuple[Ids, Tensor]]


@dataclass
class Table:
    """Rows to be written."""

    numbers: Ids
    rows: Tensor

    def get(self, numbers: Ids) -> Tensor:
        return self.rows[np.searchsorted(self.numbers, numbers)]

    def take_changed(self) -> Ids:
        return self.numbers


def rewrite(folder: Path, change: Change) -> None:
    """Change the newest checkpoint, which is a sound file afterwards, and the only one."""
    run = load_run(folder)
    found = run.load_checkpoint()
    settings = read_sealed(checkpoints(folder)[0])[0]["settings"]
    contents = Contents(found.notes, found.state, found.tables)
    change(contents)
    shutil.rmtree(folder / "checkpoint")
    tables = {name: Table(*rows) for name, rows in contents.tables.items()}
    CheckpointWriter(folder, settings=settings).write(found.rounds, contents.state, contents.notes, tables)


def inside(change: Callable[[dict[str, Any]], object]) -> Change:
    def changed(found: Contents) -> None:
        kept = json.loads(found.notes["coordinator"])
        change(kept)
        found.notes["coordinator"] = json.dumps(kept)

    return changed


def values(**changes: Any) -> Change:
    def changed(found: Contents) -> None:
        found.notes["protocol"] = json.dumps(json.loads(found.notes["protocol"]) | changes)

    return changed


def tensor(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda found: found.state.update({name: change(found.state[name]).contiguous()})


def fewer(name: str) -> Change:
    """A row less."""

    def changed(found: Contents) -> None:
        numbers, rows = found.tables[name]
        assert len(numbers)
        found.tables[name] = numbers[:-1], rows[:-1]

    return changed


def shorter(name: str) -> Change:
    """A number less in every row."""

    def changed(found: Contents) -> None:
        numbers, rows = found.tables[name]
        found.tables[name] = numbers, rows[:, :-1].contiguous()

    return changed


def test_a_checkpoint_that_is_written_again_as_it_was_is_used(tmp_path: Path) -> None:
    harness = stopped(tmp_path)
    rewrite(tmp_path / "run", lambda found: None)
    harness.kill_server()
    assert harness.coordinator.protocol.round == 3
    continues(harness)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.notes.pop("coordinator"),
        lambda found: found.notes.pop("protocol"),
        lambda found: found.notes.update(coordinator="{"),
        lambda found: found.notes.update(coordinator="[]"),
        lambda found: found.notes.update(protocol="[1]"),
        inside(lambda kept: kept.pop("roster")),
        inside(lambda kept: kept["roster"]["members"].pop()),
        inside(lambda kept: kept["roster"].update(members=3)),
        inside(lambda kept: kept.update(screening={})),
        inside(lambda kept: kept["requests"].update(took=[["a", 1]])),
        inside(lambda kept: kept["requests"].pop("attempts")),
        inside(lambda kept: kept.update(time_s="soon")),
        values(round=1),
        values(round="2"),
        values(is_open="no"),
        values(nonsense=1),
        tensor("protocol.versions", lambda old: old[:-1]),
        tensor("protocol.versions", lambda old: old.double()),
        shorter("models"),
        fewer("models"),
        tensor("latest", lambda old: old + 1),
        tensor("held", lambda old: old[:-1]),
        tensor("held", lambda old: old + 7),
        tensor("undrafted.base", lambda old: old + 7),
        tensor("aggregator.size", lambda old: old[:-1]),
        tensor("aggregator.sum", lambda old: old[:-1]),
        shorter("aggregator.entries"),
        fewer("aggregator.entries"),
        shorter("source.inbox"),
        fewer("source.inbox"),
        tensor("source.inbox", lambda old: old[:-1]),
        lambda found: found.state.pop("protocol.sizes"),
        lambda found: found.state.pop("held"),
        lambda found: found.state.pop("undrafted.client"),
        lambda found: found.state.pop("aggregator.sum"),
        lambda found: found.tables.pop("models"),
        lambda found: found.tables.pop("aggregator.entries"),
        lambda found: found.tables.pop("source.inbox"),
    ],
)
def test_whatever_is_wrong_inside_a_checkpoint_is_one_sentence(tmp_path: Path, change: Change) -> None:
    """Two clients are faster than the others: picked in one round, they are undrafted in the next."""
    stopped(tmp_path, 2, delays_s={0: 1.0, 1: 1.0, 2: 9.0, 3: 9.0})
    assert len(load_run(tmp_path / "run").load_checkpoint().tables["source.inbox"][0])
    rewrite(tmp_path / "run", change)
    why = is_turned_down(tmp_path / "run")
    assert "checkpoint" in why or "snapshot" in why


@pytest.mark.parametrize(
    "change",
    [
        lambda notes, tensors: notes.pop("segments"),
        lambda notes, tensors: notes.update(segments="[]"),
        lambda notes, tensors: notes.update(segments='{"1": {}}'),
        lambda notes, tensors: notes.update(tables="3"),
        lambda notes, tensors: notes.pop("settings"),
        lambda notes, tensors: tensors.pop("table.models.numbers"),
    ],
)
def test_a_checkpoint_that_does_not_say_where_its_rows_are_gives_way_to_the_one_before(
    tmp_path: Path, log: pytest.LogCaptureFixture, change: Callable[[dict[str, str], dict[str, Tensor]], object]
) -> None:
    harness = stopped(tmp_path)
    newest = checkpoints(tmp_path / "run")[0]
    notes, tensors = read_sealed(newest)
    change(notes, tensors)
    write_sealed(newest, tensors, notes)
    harness.kill_server()
    assert f"{newest.name} does not hold what a checkpoint does" in log.text
    assert harness.coordinator.protocol.round == 2
    continues(harness)


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
