"""The checkpoints of a run, in `checkpoint/` of its folder: what it had come to after some of its rounds.

A checkpoint is a file `state-ROUNDS.safetensors`. It holds small tensors, notes, and where the rows of tables lie:
these are in files `rows-NUMBER.safetensors`, the segments. A checkpoint writes segments of the rows that have changed
since the last one; for all others it names the segments in which they lie already, each with its checksum. Segments are
never changed, and the state is written last: a crash at any instant leaves the checkpoints of before, or of after.

Two checkpoints are kept, and the segments that one of them needs. So that segments of which few rows are live do not
stay for ever, their live rows are written again: at most an eighth of what changed anyway, and 64 kB. With c bytes that
change, 9/8 c are written and as many have to become free, of which c/8 may be live: a ninth. Where every row is as
likely to change as any other, a ninth of a segment is live after ln 9 * N / c checkpoints, N being the bytes of all
rows, and what was written since is on the disk: 9/8 * ln 9 * N = 2.47 N, and 9/8 c for the older checkpoint. However
rows change, it is no more than 9 N, since otherwise some segment has less than a ninth of its rows live.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from safa.errors import SafaError
from safa.protocol.records import Ids
from safa.runs.storage import PART, read_sealed, write_sealed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FOLDER",
    "Checkpoint",
    "CheckpointWriter",
    "RowSource",
    "checkpoint_files",
    "has_checkpoint",
    "load_checkpoint",
    "remove_checkpoints",
]

_T = TypeVar("_T")
FOLDER = "checkpoint"
"""Where the checkpoints are in the folder of a run."""
_FORMAT = "safa checkpoint 2"
_FILE_NAME = re.compile(r"(state|rows)-([0-9]{6,})\.safetensors")
_STATE, _ROWS = "state", "rows"
_GENERATIONS = 2
_UNWRITTEN = -1
_MOVED = 1 / 8
_SMALL = 1 << 16
"""A file costs as much as so many bytes: smaller segments are written again together."""
_SEGMENTS, _LARGEST_SEGMENT = 32, 1 << 26
"""All rows take so many segments when they are written at once, of at most so many bytes each."""


class RowSource(Protocol):
    """Rows of one length by number, as in a `RowTable`: it knows which of them were put since it was last asked."""

    @property
    def numbers(self) -> Ids:
        """The numbers that have a row, in rising order."""

    def get(self, numbers: Ids) -> Tensor:
        """The rows of these numbers, [K, d]; also of none, [0, d]."""

    def take_changed(self) -> Ids:
        """The numbers whose rows were put since this was last asked."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What a run had come to after some of its rounds; without any where no checkpoint can be used."""

    rounds: int = 0
    """After how many rounds it was made; 0 where none can be used."""
    notes: dict[str, str] = field(default_factory=dict)
    """What its writer noted beside the tensors."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """What had been learnt by then."""
    tables: dict[str, tuple[Ids, Tensor]] = field(default_factory=dict)
    """The rows of every table: their numbers, rising, and the rows themselves, [K, d]."""
    problems: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that was skipped: damaged, unreadable, or made for other settings."""
    other_settings: bool = False
    """Whether it is for its settings that none can be used: those of the run were changed since."""


# -- where rows lie ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Segment:
    """A file of rows."""

    check: str
    size: int
    """The bytes of its rows."""


@dataclass(frozen=True, eq=False)
class _Places:
    """In which segment each row of a table lies."""

    numbers: Ids
    segment: Ids
    """By row; `_UNWRITTEN` where it has to be written."""
    like: Tensor
    """Rows of the same length and type, [0, d]."""

    @property
    def row_bytes(self) -> int:
        return max(1, self.like.shape[1] * self.like.element_size())


@dataclass(frozen=True, eq=False)
class _Index:
    """Where all rows of a checkpoint lie."""

    tables: dict[str, _Places] = field(default_factory=dict)
    segments: dict[int, _Segment] = field(default_factory=dict)
    """Those that it needs."""


def _bytes_by_segment(tables: Iterable[_Places]) -> Counter[int]:
    """How many bytes of live rows lie in each segment, and how many have to be written."""
    found: Counter[int] = Counter()
    for places in tables:
        for segment, rows in zip(*np.unique(places.segment, return_counts=True), strict=True):
            found[int(segment)] += int(rows) * places.row_bytes
    return found


def _empty_segments(tables: Iterable[_Places], segments: Mapping[int, _Segment]) -> None:
    """Mark rows to be written again, so that segments of which less than half is live can be removed."""
    live = _bytes_by_segment(tables)
    changed = live.pop(_UNWRITTEN, 0)
    if not changed:
        return
    left = int(changed * _MOVED) + _SMALL
    share = {number: size / (segments[number].size + _SMALL) for number, size in live.items()}
    for number in sorted(share, key=lambda number: (share[number], number)):
        if share[number] < 0.5:
            left = _move(tables, number, left)


def _move(tables: Iterable[_Places], number: int, left: int) -> int:
    """Mark the rows of a segment to be written again, as far as so many bytes allow; what is left of these."""
    for places in tables:
        rows = np.flatnonzero(places.segment == number)[: left // places.row_bytes]
        places.segment[rows] = _UNWRITTEN
        left -= len(rows) * places.row_bytes
    return left


def _segment_limit(tables: Iterable[_Places]) -> int:
    """How many bytes of rows go into one segment.

    Many small segments are emptied one by one, and need less memory; few large ones are fewer files.
    """
    total = sum(len(places.numbers) * places.row_bytes for places in tables)
    return min(max(total // _SEGMENTS, 4 * _SMALL), _LARGEST_SEGMENT)


def _batches(tables: Mapping[str, _Places], limit: int) -> Iterator[dict[str, Ids]]:
    """The rows that have to be written, as positions by table: as many at a time as go into a segment."""
    batch: dict[str, Ids] = {}
    room = limit
    for name, places in tables.items():
        rows = np.flatnonzero(places.segment == _UNWRITTEN)
        while len(rows):
            if batch and room < places.row_bytes:
                yield batch
                batch, room = {}, limit
            fit = max(1, room // places.row_bytes)
            batch[name], rows = rows[:fit], rows[fit:]
            room -= len(batch[name]) * places.row_bytes
    if batch:
        yield batch


# -- writing -----------------------------------------------------------------------------------------------------------


class CheckpointWriter:
    """Writes the checkpoints of a run. It knows what those hold that it wrote, or continued from."""

    def __init__(self, folder: Path, *, settings: str) -> None:
        """`folder` is that of the run, `settings` a checksum of its settings."""
        self._folder, self._settings = folder / FOLDER, settings
        self._kept: dict[int, _Index] = {}  # the oldest first
        self._changed: dict[str, Ids] = {}  # since the last checkpoint that was written

    @classmethod
    def resume(cls, folder: Path, *, settings: str, finished: int) -> CheckpointWriter:
        """Continue from the checkpoint after so many rounds, if there is one; newer ones are removed."""
        writer = cls(folder, settings=settings)
        generations = _generations(folder)
        for path in (path for rounds, path in generations.items() if rounds > finished):
            path.unlink(missing_ok=True)
        if finished in generations:
            with suppress(SafaError):  # it is not continued from, then, and everything is written
                writer._kept[finished] = _read_state(generations[finished], finished).index
        return writer

    def write(
        self, finished: int, state: Mapping[str, Tensor], notes: Mapping[str, str], tables: Mapping[str, RowSource]
    ) -> None:
        """Write a checkpoint: the state, and the rows of the tables that are not on the disk already."""
        self._folder.mkdir(exist_ok=True)
        places = {name: self._places(name, table) for name, table in tables.items()}
        segments = self._latest.segments
        _empty_segments(places.values(), segments)
        written: dict[int, _Segment] = {}
        try:
            for number, batch in enumerate(_batches(places, _segment_limit(places.values())), self._next_segment()):
                written[number] = self._write_segment(number, tables, places, batch)
            index = _Index(places, _needed(places.values(), segments | written))
            self._write_state(finished, state, notes, index)
        except OSError:
            self._remove_segments(written)
            raise
        self._kept = {**dict([*self._older(finished)][1 - _GENERATIONS :]), finished: index}
        self._changed.clear()
        self._remove_others()

    @property
    def _latest(self) -> _Index:
        """Where the rows of the last checkpoint lie."""
        return next(reversed(self._kept.values()), _Index())

    def _older(self, finished: int) -> Iterator[tuple[int, _Index]]:
        return ((rounds, index) for rounds, index in self._kept.items() if rounds < finished)

    def _places(self, name: str, table: RowSource) -> _Places:
        """Where the rows of a table lie; those that have changed, or whose file is gone, have to be written."""
        numbers = np.array(table.numbers, dtype=np.int64)
        changed = self._changed[name] = np.union1d(self._changed.get(name, numbers[:0]), table.take_changed())
        segment = np.full(len(numbers), _UNWRITTEN, dtype=np.int64)
        before = self._latest.tables.get(name)
        if before is not None:
            _, here, there = np.intersect1d(numbers, before.numbers, assume_unique=True, return_indices=True)
            segment[here] = before.segment[there]
        is_lost = ~np.isin(segment, list(_numbered(self._folder, _ROWS)))
        segment[is_lost | np.isin(numbers, changed)] = _UNWRITTEN
        return _Places(numbers, segment, table.get(numbers[:0]).cpu())

    def _next_segment(self) -> int:
        """A number that no file has, so that nothing that was left behind is taken for one of ours."""
        there = [int(match[2]) for path in _listed(self._folder) if (match := _match(path)) and match[1] == _ROWS]
        return 1 + max([0, *there, *self._latest.segments])

    def _write_segment(
        self, number: int, tables: Mapping[str, RowSource], places: Mapping[str, _Places], batch: Mapping[str, Ids]
    ) -> _Segment:
        """Write rows, given as positions by table, as a segment of this number."""
        import torch

        tensors: dict[str, Tensor] = {}
        for name, rows in batch.items():
            numbers = places[name].numbers[rows]
            tensors[f"{name}.numbers"] = torch.from_numpy(numbers)
            tensors[f"{name}.rows"] = tables[name].get(numbers).detach().cpu().contiguous()
        check = write_sealed(_path(self._folder, _ROWS, number), tensors, {"format": _FORMAT, "segment": str(number)})
        for name, rows in batch.items():
            places[name].segment[rows] = number
        return _Segment(check, sum(len(rows) * places[name].row_bytes for name, rows in batch.items()))

    def _write_state(self, finished: int, state: Mapping[str, Tensor], notes: Mapping[str, str], index: _Index) -> None:
        import torch

        tensors = {f"state.{name}": tensor for name, tensor in state.items()}
        for name, places in index.tables.items():
            tensors[f"table.{name}.numbers"] = torch.from_numpy(places.numbers)
            tensors[f"table.{name}.segment"] = torch.from_numpy(places.segment)
            tensors[f"table.{name}.like"] = places.like
        head = {
            "format": _FORMAT,
            "rounds": str(finished),
            "settings": self._settings,
            "tables": json.dumps(list(index.tables)),
            "segments": json.dumps({number: asdict(segment) for number, segment in index.segments.items()}),
        }
        path = _path(self._folder, _STATE, finished)
        write_sealed(path, tensors, head | {f"note.{name}": text for name, text in notes.items()})

    def _remove_segments(self, numbers: Iterable[int]) -> None:
        """Remove segments of a checkpoint that could not be written."""
        with suppress(OSError):
            for number in numbers:
                _path(self._folder, _ROWS, number).unlink(missing_ok=True)

    def _remove_others(self) -> None:
        """Remove the checkpoints that are not kept, segments that none needs, and what a crash has left behind."""
        kept = {_path(self._folder, _STATE, rounds) for rounds in self._kept}
        kept |= {_path(self._folder, _ROWS, number) for index in self._kept.values() for number in index.segments}
        for path in _ours(self._folder):
            if path not in kept and not path.is_dir():
                path.unlink(missing_ok=True)


def _needed(tables: Iterable[_Places], segments: Mapping[int, _Segment]) -> dict[int, _Segment]:
    return {number: segments[number] for number in sorted(_bytes_by_segment(tables))}


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _State:
    """What the file of a checkpoint holds."""

    settings: str
    notes: dict[str, str]
    tensors: dict[str, Tensor]
    index: _Index


def load_checkpoint(folder: Path, *, settings: str, most: int | None = None) -> Checkpoint:
    """The newest checkpoint of a run that is sound, and made after at most `most` rounds where that is given.

    `settings` is the checksum of the run's settings.
    """
    problems: list[str] = []
    for rounds, path in _generations(folder).items():
        if most is not None and rounds > most:
            problems.append(f"{path} is skipped: there are only {most} finished rounds in rounds.jsonl")
            continue
        try:
            found = _read_state(path, rounds)
            if found.settings != settings:
                problems.append(f"{path} was made for other settings than those in config.toml")
                return Checkpoint(problems=tuple(problems), other_settings=True)
            tables = _read_tables(path, found.index)
        except SafaError as error:
            problems.append(str(error))
            continue
        skipped = tuple(problems)
        return Checkpoint(rounds=rounds, notes=found.notes, state=found.tensors, tables=tables, problems=skipped)
    return Checkpoint(problems=tuple(problems))


def _read_state(path: Path, rounds: int) -> _State:
    """The file of a checkpoint that should have been made after so many rounds."""
    try:
        return _parsed(path, rounds, *read_sealed(path))
    except SafaError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise SafaError(f"{path} does not hold what a checkpoint does ({what})") from None


def _parsed(path: Path, rounds: int, notes: dict[str, str], tensors: dict[str, Tensor]) -> _State:
    """What is in the file of a checkpoint."""
    made_as, made_after = notes.get("format", ""), notes.get("rounds", "")
    if made_as != _FORMAT:
        raise SafaError(f"{path} is of another format: {made_as!r} instead of {_FORMAT!r}")
    if made_after != str(rounds):
        raise SafaError(f"{path} has been renamed: it was made after round {made_after}")
    segments = {int(number): _Segment(**about) for number, about in json.loads(notes["segments"]).items()}
    tables = {name: _read_places(tensors, name) for name in json.loads(notes["tables"])}
    own_notes, own_tensors = _named(notes, "note."), _named(tensors, "state.")
    return _State(notes["settings"], own_notes, own_tensors, _Index(tables, segments))


def _read_places(tensors: Mapping[str, Tensor], name: str) -> _Places:
    numbers, segment, like = (tensors[f"table.{name}.{part}"].clone() for part in ("numbers", "segment", "like"))
    return _Places(numbers.numpy(), segment.numpy(), like)


def _named(values: Mapping[str, _T], prefix: str) -> dict[str, _T]:
    """Those of this prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _read_tables(state: Path, index: _Index) -> dict[str, tuple[Ids, Tensor]]:
    """The rows of all tables of a checkpoint, read segment by segment."""
    found = {
        name: (places.numbers, places.like.new_empty(len(places.numbers), places.like.shape[1]))
        for name, places in index.tables.items()
    }
    for number, segment in index.segments.items():
        path = _path(state.parent, _ROWS, number)
        try:
            _, tensors = read_sealed(path, check=segment.check)
            for name, places in index.tables.items():
                _copy_rows(found[name][1], places, number, tensors.get(f"{name}.numbers"), tensors.get(f"{name}.rows"))
        except (SafaError, ValueError) as error:
            sentence = str(error) if isinstance(error, SafaError) else f"{path} does not hold the rows it should"
            raise SafaError(f"{sentence}, and {state.name} needs it") from None
    return found


def _copy_rows(into: Tensor, places: _Places, number: int, held: Tensor | None, rows: Tensor | None) -> None:
    """Put those rows of a table into place that lie in a segment; a `ValueError` where they do not."""
    import torch

    wanted = np.flatnonzero(places.segment == number)
    if not len(wanted):
        return
    if held is None or rows is None or (rows.shape[1:], rows.dtype) != (into.shape[1:], into.dtype):
        raise ValueError("there are no such rows")
    at = np.searchsorted(held.numpy(), places.numbers[wanted])
    if at.max() >= len(held) or (held.numpy()[at] != places.numbers[wanted]).any():
        raise ValueError("some rows are not there")
    into[torch.from_numpy(wanted)] = rows[torch.from_numpy(at)]


# -- files -------------------------------------------------------------------------------------------------------------


def has_checkpoint(folder: Path) -> bool:
    """Whether there is any checkpoint in the folder of a run, sound or not."""
    return bool(_generations(folder))


def checkpoint_files(folder: Path) -> list[Path]:
    """All files of checkpoints in the folder of a run, also those that were not finished; no files of others."""
    return [] if (folder / FOLDER).is_symlink() else _ours(folder / FOLDER)


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a run, and their folder unless there is something else in it."""
    with suppress(OSError):
        for path in checkpoint_files(folder):
            path.unlink()
        (folder / FOLDER).rmdir()


def _generations(folder: Path) -> dict[int, Path]:
    """The checkpoints in the folder of a run by their number of finished rounds, the newest first."""
    return dict(sorted(_numbered(folder / FOLDER, _STATE).items(), reverse=True))


def _name(kind: str, number: int) -> str:
    return f"{kind}-{number:06d}.safetensors"


def _path(folder: Path, kind: str, number: int) -> Path:
    return folder / _name(kind, number)


def _listed(folder: Path) -> list[Path]:
    """What is in a folder, if it is there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _match(path: Path) -> re.Match[str] | None:
    """Kind and number of a file of a checkpoint, finished or not; None for a file of others."""
    match = _FILE_NAME.fullmatch(path.name.removesuffix(PART))
    return match if match and match[0] == _name(match[1], int(match[2])) else None


def _numbered(folder: Path, kind: str) -> dict[int, Path]:
    """The finished files of one kind by number."""
    found = {path: _match(path) for path in _listed(folder) if path.suffix != PART}
    return {int(match[2]): path for path, match in found.items() if match and match[1] == kind}


def _ours(folder: Path) -> list[Path]:
    """All files of checkpoints, finished or not: states first, so that none is there without its segments."""
    found = {path: match for path in _listed(folder) if (match := _match(path))}
    return sorted(found, key=lambda path: (found[path][1] != _STATE, path.name))
