"""Checkpoints of tables: only changed rows are written, and no crash and no damage mixes or loses any."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from safa.errors import SafaError
from safa.protocol.records import Ids
from safa.runs import Checkpoint, Run, RunWriter, load_run
from safa.runs.settings import Settings

SETTINGS = Settings.of("boston", clients=3, rounds=9)


class Rows:
    """Rows by number, as a `RowTable` holds them."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        self._none = torch.empty(0, width, dtype=dtype)
        self._rows: dict[int, Tensor] = {}
        self._changed: set[int] = set()

    def put(self, numbers: Ids, rows: Tensor) -> None:
        self._rows |= dict(zip(numbers.tolist(), rows.clone(), strict=True))
        self._changed |= set(numbers.tolist())

    def drop(self, numbers: Ids) -> None:
        for number in numbers.tolist():
            del self._rows[number]
            self._changed.discard(number)

    @property
    def numbers(self) -> Ids:
        return np.array(sorted(self._rows), dtype=np.int64)

    def get(self, numbers: Ids) -> Tensor:
        return torch.stack([self._rows[number] for number in numbers.tolist()]) if len(numbers) else self._none.clone()

    def take_changed(self) -> Ids:
        changed, self._changed = sorted(self._changed), set()
        return np.array(changed, dtype=np.int64)


def ids(*numbers: int) -> Ids:
    return np.array(numbers, dtype=np.int64)


# -- a run with tables -------------------------------------------------------------------------------------------------


def new_tables() -> dict[str, Rows]:
    return {"cache": Rows(1500), "models": Rows(3, torch.float64), "none": Rows(2)}


def advance(tables: Mapping[str, Rows], number: int) -> None:
    """What one round does to the tables: entries of some of 60 clients, and a new model in the place of an old one."""
    draw = np.random.default_rng(number)
    clients = np.arange(60) if number == 1 else draw.choice(60, 8, replace=False)
    tables["cache"].put(clients, torch.from_numpy(draw.standard_normal((len(clients), 1500), dtype=np.float32)))
    tables["models"].put(ids(number), torch.full((1, 3), float(number), dtype=torch.float64))
    if number > 3:
        tables["models"].drop(ids(number - 3))
    if number == 4:
        tables["cache"].drop(ids(5, 6))


def content(tables: Mapping[str, Rows]) -> dict[str, tuple[list[int], Tensor]]:
    return {name: (table.numbers.tolist(), table.get(table.numbers)) for name, table in tables.items()}


def same(found: Checkpoint, wanted: Mapping[str, tuple[list[int], Tensor]]) -> bool:
    return found.tables.keys() == wanted.keys() and all(
        found.tables[name][0].tolist() == numbers
        and torch.equal(found.tables[name][1], rows)
        and found.tables[name][1].dtype == rows.dtype
        for name, (numbers, rows) in wanted.items()
    )


def history(rounds: int) -> dict[int, dict[str, tuple[list[int], Tensor]]]:
    """What the tables hold after every round."""
    tables, found = new_tables(), {}
    for number in range(1, rounds + 1):
        advance(tables, number)
        found[number] = content(tables)
    return found


def restored(found: Checkpoint) -> dict[str, Rows]:
    """Tables as they were at a checkpoint: none of their rows has changed since."""
    tables = new_tables()
    for name, (numbers, rows) in found.tables.items():
        tables[name].put(numbers, rows)
        tables[name].take_changed()
    return tables


def go_on(writer: RunWriter, tables: Mapping[str, Rows], done: int, rounds: int) -> Iterator[int]:
    """The rounds behind those that are done, each with its checkpoint."""
    try:
        for number in range(done + 1, rounds + 1):
            advance(tables, number)
            writer.checkpoint(number, {"round": torch.tensor(number)}, {"after": str(number)}, tables)
            yield number
    finally:
        writer.close()


def stopped(folder: Path, rounds: int) -> Run:
    """A run that was stopped after so many rounds, with a checkpoint after each."""
    for _ in go_on(RunWriter.begin(folder, SETTINGS), new_tables(), 0, rounds):
        pass
    return load_run(folder)


def resumed(run: Run, rounds: int) -> Checkpoint:
    """What was found in the folder of a run that was resumed from there, up to so many rounds."""
    found = run.load_checkpoint()
    for _ in go_on(RunWriter.resume(run, found.rounds), restored(found), found.rounds, rounds):
        pass
    return found


def files(folder: Path, kind: str = "") -> dict[str, int]:
    """The files of checkpoints, and how large each is."""
    return {path.name: path.stat().st_size for path in sorted((folder / "checkpoint").glob(f"{kind}*"))}


def segments_of(folder: Path, rounds: int) -> set[str]:
    """The segments that a checkpoint needs, as its file says."""
    with safe_open(folder / "checkpoint" / f"state-{rounds:06d}.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.endswith(".segment")]  # noqa: SIM118
        return {f"rows-{number:06d}.safetensors" for name in names for number in file.get_tensor(name).tolist()}


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_tables_come_back_and_two_generations_are_kept_with_what_they_need(tmp_path: Path) -> None:
    run = stopped(tmp_path, 9)
    wanted = history(9)
    found = run.load_checkpoint()
    assert (found.rounds, found.notes, found.state["round"].item(), found.problems) == (9, {"after": "9"}, 9, ())
    assert same(found, wanted[9])
    older = run.load_checkpoint(8)
    assert older.rounds == 8
    assert same(older, wanted[8])
    assert list(files(tmp_path, "state")) == ["state-000008.safetensors", "state-000009.safetensors"]
    assert set(files(tmp_path, "rows")) == segments_of(tmp_path, 8) | segments_of(tmp_path, 9)


def test_a_checkpoint_writes_what_changed_and_nothing_where_nothing_did(tmp_path: Path) -> None:
    table = Rows(50_000)  # 200 kB a row
    table.put(np.arange(40), torch.zeros(40, 50_000))
    writer = RunWriter.begin(tmp_path, SETTINGS)
    writer.checkpoint(1, {}, tables={"cache": table})
    first = files(tmp_path, "rows")
    assert sum(first.values()) == pytest.approx(40 * 200_000, rel=0.01)
    table.put(ids(3, 8), torch.ones(2, 50_000))
    writer.checkpoint(2, {}, tables={"cache": table})
    second = files(tmp_path, "rows")
    assert sum(second.values()) - sum(first.values()) == pytest.approx(2 * 200_000, rel=0.01)
    assert second.items() > first.items()
    writer.checkpoint(3, {}, tables={"cache": table})
    writer.checkpoint(4, {}, tables={"cache": table})
    assert files(tmp_path, "rows").items() <= second.items()
    assert max(files(tmp_path, "state").values()) < 20_000
    writer.close()
    assert load_run(tmp_path).load_checkpoint().tables["cache"][1].sum() == 100_000


def test_rows_that_are_gone_and_tables_that_are_gone_take_no_space(tmp_path: Path) -> None:
    tables = {"one": Rows(4), "two": Rows(4)}
    for number, table in enumerate(tables.values()):
        table.put(np.arange(9), torch.full((9, 4), float(number)))
    writer = RunWriter.begin(tmp_path, SETTINGS)
    writer.checkpoint(1, {}, tables=tables)
    tables["one"].drop(np.arange(8))
    writer.checkpoint(2, {}, tables={"one": tables["one"]})
    found = load_run(tmp_path).load_checkpoint()
    assert {name: numbers.tolist() for name, (numbers, _) in found.tables.items()} == {"one": [8]}
    tables["one"].drop(ids(8))
    for number in (3, 4):
        writer.checkpoint(number, {}, tables={"one": tables["one"]})
    assert files(tmp_path, "rows") == {}
    assert load_run(tmp_path).load_checkpoint().tables["one"][1].shape == (0, 4)
    writer.checkpoint(5, {}, tables=tables)  # a table that comes back is written whole
    assert load_run(tmp_path).load_checkpoint().tables["two"][1].tolist() == [[1.0] * 4] * 9
    writer.close()


def test_a_row_larger_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    table = Rows(100_000)
    table.put(ids(1, 5, 9), torch.arange(3.0)[:, None].expand(3, 100_000))
    writer = RunWriter.begin(tmp_path, SETTINGS)
    writer.checkpoint(1, {}, tables={"cache": table})
    writer.close()
    assert len(files(tmp_path, "rows")) == 3
    numbers, rows = load_run(tmp_path).load_checkpoint().tables["cache"]
    assert (numbers.tolist(), rows[:, -1].tolist()) == ([1, 5, 9], [0.0, 1.0, 2.0])


@pytest.mark.slow
def test_1000_clients_of_which_100_change_write_an_eighth_more_and_take_two_and_a_half_times_the_space(
    tmp_path: Path,
) -> None:
    """Rows of 16 kB, so that the 64 kB that are free are four of them."""
    width = 4000
    row = width * 4
    draw = np.random.default_rng(0)
    table, writer = Rows(width), RunWriter.begin(tmp_path, SETTINGS)
    table.put(np.arange(1000), torch.zeros(1000, width))
    writer.checkpoint(0, {}, tables={"cache": table})
    most = 0.0
    for number in range(1, 61):
        clients = draw.choice(1000, 100, replace=False)
        table.put(clients, torch.full((100, width), float(number)))
        before = files(tmp_path, "rows")
        writer.checkpoint(number, {}, tables={"cache": table})
        after = files(tmp_path, "rows")
        written = sum(size for name, size in after.items() if name not in before)
        assert 100 <= written / row <= 100 + 100 / 8 + 4 + 1  # names and checksums are less than a row
        most = max(most, sum(after.values()) / row / 1000)
        assert sum(files(tmp_path, "state").values()) / row < 4
    writer.close()
    assert 1.5 < most <= 2.5
    numbers, rows = load_run(tmp_path).load_checkpoint().tables["cache"]
    assert torch.equal(rows, table.get(numbers))


def test_small_segments_are_put_together(tmp_path: Path) -> None:
    """Many checkpoints of one small row each do not leave as many files."""
    table, writer = Rows(4), RunWriter.begin(tmp_path, SETTINGS)
    for number in range(30):
        table.put(ids(number), torch.full((1, 4), float(number)))
        writer.checkpoint(number, {}, tables={"models": table})
    writer.close()
    assert len(files(tmp_path, "rows")) <= 3
    assert load_run(tmp_path).load_checkpoint().tables["models"][1][:, 0].tolist() == list(range(30))


# -- going on ----------------------------------------------------------------------------------------------------------


def test_the_first_checkpoint_after_a_resume_writes_what_changed_since(tmp_path: Path) -> None:
    run = stopped(tmp_path, 3)
    before = files(tmp_path, "rows")
    resumed(run, 4)
    written = sum(size for name, size in files(tmp_path, "rows").items() if name not in before)
    assert written < (8 + 1 + 11 + 2) * 6000  # eight entries, an eighth of them, 64 kB, the models
    assert same(load_run(tmp_path).load_checkpoint(), history(4)[4])


def test_restored_rows_that_are_called_changed_are_written_again_and_are_right(tmp_path: Path) -> None:
    run = stopped(tmp_path, 3)
    found = run.load_checkpoint()
    tables = restored(found)
    tables["cache"].put(*found.tables["cache"])
    for _ in go_on(RunWriter.resume(run, 3), tables, 3, 5):
        pass
    assert same(load_run(tmp_path).load_checkpoint(), history(5)[5])


@pytest.mark.parametrize("what", ["state", "rows"])
def test_an_abandoned_generation_is_never_mixed_with_what_comes_after(what: str, tmp_path: Path) -> None:
    """The newest is damaged: the run goes on from the older one, and does other things than before."""
    run = stopped(tmp_path, 6)
    own = segments_of(tmp_path, 6) - segments_of(tmp_path, 5)
    name = "state-000006.safetensors" if what == "state" else min(own)
    flip(tmp_path / "checkpoint" / name, -1)
    left = set(files(tmp_path))
    found = run.load_checkpoint()
    assert (found.rounds, len(found.problems)) == (5, 1)
    assert f"{name} is damaged" in found.problems[0]
    tables, writer = restored(found), RunWriter.resume(run, 5)
    assert "state-000006.safetensors" not in files(tmp_path)
    tables["cache"].put(ids(1), torch.full((1, 1500), -1.0))
    writer.checkpoint(6, {}, tables=tables)
    writer.close()
    assert not own & set(files(tmp_path))
    assert set(files(tmp_path, "rows")) == segments_of(tmp_path, 5) | segments_of(tmp_path, 6)
    assert set(files(tmp_path, "rows")) - left  # under names that nothing had
    assert same(run.load_checkpoint(), content(tables))
    assert same(run.load_checkpoint(5), history(5)[5])


def test_a_run_that_starts_again_among_leftovers_uses_none_of_them(tmp_path: Path) -> None:
    run = stopped(tmp_path, 4)
    for path in (tmp_path / "checkpoint").glob("state*"):
        flip(path, -1)
    left = files(tmp_path)
    found = run.load_checkpoint()
    assert (found.rounds, found.tables, len(found.problems)) == (0, {}, 2)
    writer = RunWriter.resume(run, 0)
    table = Rows(2)
    table.put(ids(0), torch.ones(1, 2))
    writer.checkpoint(5, {}, tables={"cache": table})
    writer.close()
    assert not set(left) & set(files(tmp_path))
    assert list(files(tmp_path, "state")) == ["state-000005.safetensors"]
    assert run.load_checkpoint().tables["cache"][1].tolist() == [[1.0, 1.0]]


def test_segments_that_somebody_removed_are_written_again(tmp_path: Path) -> None:
    tables, writer = new_tables(), RunWriter.begin(tmp_path, SETTINGS)
    rounds = go_on(writer, tables, 0, 4)
    for _ in range(3):
        next(rounds)
    shutil.rmtree(tmp_path / "checkpoint")
    next(rounds)
    assert same(load_run(tmp_path).load_checkpoint(), history(4)[4])


def test_a_checkpoint_that_fails_leaves_no_segment_and_forgets_no_change(tmp_path: Path) -> None:
    tables, writer = new_tables(), RunWriter.begin(tmp_path, SETTINGS)
    rounds = go_on(writer, tables, 0, 2)
    assert next(rounds) == 1
    before = files(tmp_path)
    (tmp_path / "checkpoint" / "state-000002.safetensors.part").symlink_to("/dev/full")
    with pytest.raises(SafaError, match=r"cannot write .*state-000002.safetensors: No space left on device"):
        next(rounds)
    assert files(tmp_path) == before
    writer = RunWriter.resume(load_run(tmp_path), 1)
    (tmp_path / "checkpoint" / "state-000002.safetensors.part").symlink_to("/dev/full")
    tables = restored(load_run(tmp_path).load_checkpoint())
    advance(tables, 2)
    with pytest.raises(SafaError, match="No space left on device"):
        writer.checkpoint(2, {}, tables=tables)
    writer.checkpoint(2, {}, tables=tables)  # by the same writer, although nothing has changed since
    writer.close()
    assert same(load_run(tmp_path).load_checkpoint(), history(2)[2])


# -- crashes -----------------------------------------------------------------------------------------------------------


class CrashError(BaseException):
    """The machine stops here."""


class Machine:
    """Stops before the n-th operation on files; a file that was not brought to the disk by then is there in half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for owner, name in ((Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._counted(name, getattr(owner, name)))

    def _counted(self, name: str, real: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if name == "fsync" and stat.S_ISREG(os.fstat(arguments[0]).st_mode):
                    os.ftruncate(arguments[0], os.fstat(arguments[0]).st_size // 2)
                raise CrashError
            return None if name == "fsync" else real(*arguments, **named)

        return counted

    @contextmanager
    def stopping(self, operation: int) -> Iterator[None]:
        self.left = operation
        yield
        self.left = -1


@pytest.mark.slow
def test_a_crash_at_any_instant_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation of five checkpoints is the last one in a run that is resumed then."""
    rounds = 5
    wanted = history(rounds + 1)
    machine = Machine(monkeypatch)
    operation, crashes = 0, 0
    while crashes == operation:
        operation += 1
        folder = tmp_path / str(operation)
        writer = RunWriter.begin(folder, SETTINGS)
        done = 0
        try:
            with machine.stopping(operation):
                for number in go_on(writer, new_tables(), 0, rounds):
                    done = number
        except CrashError:
            crashes += 1
        check_after_crash(folder, done, wanted)
        resumed(load_run(folder), rounds + 1)
        check_after_crash(folder, rounds + 1, wanted)
        assert list(files(folder, "state")) == [f"state-{n:06d}.safetensors" for n in (rounds, rounds + 1)]
        assert set(files(folder, "rows")) == segments_of(folder, rounds) | segments_of(folder, rounds + 1)
        shutil.rmtree(folder)
    assert crashes > 40


def check_after_crash(folder: Path, done: int, wanted: Mapping[int, Any]) -> None:
    """The last checkpoint that was finished is there, or the next one, and also the one before each."""
    run = load_run(folder)
    found = run.load_checkpoint()
    assert (found.rounds in (done, done + 1), found.problems) == (True, ())
    assert found.rounds == 0 or same(found, wanted[found.rounds])
    older = run.load_checkpoint(found.rounds - 1)
    if found.rounds > 1:
        assert older.rounds == found.rounds - 1
        assert same(older, wanted[older.rounds])


# -- damage ------------------------------------------------------------------------------------------------------------


def damages(path: Path, other: Path) -> Iterator[str]:
    """Every way to lose a file, one after the other, and what is said of it."""
    content = path.read_bytes()
    for place in (3, 40, len(content) // 2, -1):
        flip(path, place)
        yield f"{path} is damaged"
        path.write_bytes(content)
    for part in (content[: len(content) // 2], content[:-1], b"", content + b"x"):
        path.write_bytes(part)
        yield f"{path} is damaged: it is not a whole safetensors file"
    path.write_bytes(other.read_bytes())
    yield f"{path} has been renamed" if path.name.startswith("state") else f"{path} is another file than the one"
    path.unlink()
    path.mkdir()
    yield f"cannot read {path}: Is a directory"
    path.rmdir()
    if not path.name.startswith("state"):
        yield f"cannot read {path}: No such file or directory"
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["state", "rows"])
def test_every_damaged_file_has_its_sentence_and_the_older_checkpoint_is_used(kind: str, tmp_path: Path) -> None:
    run, wanted = stopped(tmp_path, 7), history(7)
    folder = tmp_path / "checkpoint"
    own = min(segments_of(tmp_path, 7) - segments_of(tmp_path, 6))
    shared = min(segments_of(tmp_path, 6))
    path, other = (folder / "state-000007.safetensors", folder / "state-000006.safetensors")
    if kind == "rows":
        path, other = folder / own, folder / shared
    for sentence in damages(path, other):
        found = run.load_checkpoint()
        assert (found.rounds, len(found.problems)) == (6, 1), sentence
        assert found.problems[0].startswith(sentence)
        assert found.problems[0].endswith("state-000007.safetensors needs it") == (kind == "rows")
        assert same(found, wanted[6])
    assert run.load_checkpoint().rounds == 7


def test_a_damaged_segment_of_both_generations_is_reported_for_both(tmp_path: Path) -> None:
    run = stopped(tmp_path, 7)
    name = min(segments_of(tmp_path, 6) & segments_of(tmp_path, 7))
    flip(tmp_path / "checkpoint" / name, -1)
    found = run.load_checkpoint()
    assert (found.rounds, found.tables, found.state) == (0, {}, {})
    assert [name in problem for problem in found.problems] == [True, True]


def test_the_format_before_is_reported(tmp_path: Path) -> None:
    from safa.runs.storage import write_sealed

    run = stopped(tmp_path, 1)
    path = tmp_path / "checkpoint" / "state-000001.safetensors"
    write_sealed(path, {}, {"format": "safa checkpoint 1", "rounds": "1", "settings": ""})
    (problem,) = run.load_checkpoint().problems
    assert problem == f"{path} is of another format: 'safa checkpoint 1' instead of 'safa checkpoint 2'"


# -- removing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["finished", "replaced"])
def test_only_files_of_checkpoints_are_removed(how: str, tmp_path: Path) -> None:
    stopped(tmp_path, 4)
    (tmp_path / "checkpoint" / "rows-000099.safetensors.part").write_text("cut off")
    others = ["rows-1.safetensors", "rows-0000001.safetensors", "rows.safetensors", "state-000001.txt"]
    for name in others:
        (tmp_path / "checkpoint" / name).write_text("mine")
    if how == "finished":
        RunWriter.resume(load_run(tmp_path), 4).close({"rounds": 4})
    else:
        RunWriter.begin(tmp_path, SETTINGS, force=True).close()
    assert sorted(files(tmp_path)) == sorted(others)


def test_a_folder_in_the_place_of_a_segment_is_reported_before_anything_is_changed(tmp_path: Path) -> None:
    run = stopped(tmp_path, 2)
    (tmp_path / "checkpoint" / "rows-000077.safetensors").mkdir()
    before = files(tmp_path)
    with pytest.raises(SafaError, match=r"rows-000077\.safetensors is a folder, where a checkpoint has to be"):
        RunWriter.resume(run, 1)
    assert files(tmp_path) == before
