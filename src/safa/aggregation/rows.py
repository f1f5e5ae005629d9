"""Rows of numbers, one per client or per version, bounded in memory; and the global models, by version."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise, repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from safa.errors import SafaError
from safa.protocol.records import Ids

__all__ = [
    "Block",
    "RowTable",
    "Versions",
    "are_stacked",
    "blocks",
    "changes",
    "give_back_memory",
    "in_double",
    "rows_that_fit",
]

_BLOCK_BYTES = 2**24  # rows are allocated in blocks of about this size
_CACHED = 2**18  # numbers of a block of rows and columns, which stays in a processor's cache
_COLUMNS = 2**16  # of a block at most
_SHORT = 4096  # numbers of a row that is so short that a call costs more than it computes
_NO_END = 2**62


def rows_that_fit(like: Tensor, memory_mb: float, *, times: int = 1) -> int:
    """How many rows like this one fit a budget if each takes so many times its size; at least one."""
    return max(1, int(memory_mb * 2**20 / (times * like.numel() * like.element_size())))


Block = tuple[slice, slice, Tensor]
"""Some of the rows, some of their columns, and a number for each [rows, columns]."""


def blocks(count: int, row: Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of so many rows like this one that stay in the cache, by rows and columns; on a GPU one for everything.

    All rows of some columns come before the next columns. So fewer bytes go to the memory and back.
    """
    is_whole = row.device.type != "cpu"
    width = max(1, len(row) if is_whole else min(len(row), _COLUMNS))
    height = max(1, count if is_whole else _CACHED // width)
    for left in range(0, len(row), width):
        for top in range(0, count, height):
            yield slice(top, min(top + height, count)), slice(left, min(left + width, len(row)))


def are_stacked(like: Tensor) -> bool:
    """Whether rows like this one are best computed with as one tensor [K, d]: short ones, and those on a GPU."""
    return like.numel() <= _SHORT or like.device.type != "cpu"


def in_double(rows: Sequence[Tensor]) -> Iterator[Block]:
    """Rows on a CPU in double precision, block by block; each block overwrites the one before."""
    if rows:
        room = rows[0].new_empty(min(len(rows) * len(rows[0]), _CACHED), dtype=torch.float64)
        for some, columns in blocks(len(rows), rows[0]):
            block = _shaped(room, some, columns)
            for place, row in zip(block, rows[some], strict=True):
                place.copy_(row[columns])
            yield some, columns, block


def changes(old: Sequence[Tensor], new: Callable[[slice, slice], Tensor], into: Sequence[Tensor]) -> Iterator[Block]:
    """`new` less `old`, on a CPU, block by block; each block overwrites the one before.

    `new` gives some rows and columns. They are written into the rows `into`, if there are any.
    """
    if old:
        room = old[0].new_empty(min(len(old) * len(old[0]), _CACHED))
        for some, columns in blocks(len(old), old[0]):
            change, values = _shaped(room, some, columns), new(some, columns)
            for place, row, value, target in zip(change, old[some], values, into[some] or repeat(None), strict=False):
                torch.sub(value, row[columns], out=place)
                if target is not None:
                    target[columns].copy_(value)
            yield some, columns, change


def _shaped(room: Tensor, rows: slice, columns: slice) -> Tensor:
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return room[: height * width].view(height, width)


def give_back_memory() -> None:
    """Let the system have memory that was freed; glibc keeps pieces of up to 32 MB, in which no new row may fit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class RowTable:
    """Rows of one length by number (of a client, a version, ...), made as they are put.

    They lie in blocks that are allocated one after the other, so that a new row moves no other. The first blocks are in
    memory, beside the row that the table was made like; all others are memory-mapped files. The place of a row that was
    dropped is used again, one in memory first.
    """

    def __init__(self, like: Tensor, *, memory_mb: float) -> None:
        """Rows are like this one in length, type and device; beyond `memory_mb` they are held in files."""
        size = like.numel() * like.element_size()
        fit = int(memory_mb * 2**20 / size)
        per_block = max(1, _BLOCK_BYTES // size)
        self._per_block = min(per_block, fit) if fit else per_block
        self.room = fit // self._per_block * self._per_block
        """How many rows are held in memory at most."""
        self._like = like.new_empty(1).expand(like.numel())
        self._blocks: dict[int, Tensor] = {}
        self._in_memory, self._in_files = _Places(0, self.room), _Places(self.room, _NO_END)
        self._place = np.empty(0, dtype=np.int64)  # of each number; -1 where there is no row
        self._changed = np.empty(0, dtype=np.bool_)

    def put(self, numbers: Ids, rows: Tensor) -> None:
        """The rows of these numbers, which are different ones, := these."""
        if len(numbers):
            self._write(self._places_for(numbers), rows)

    def to_fill(self, numbers: Ids) -> list[Tensor]:
        """The rows of these numbers, which are different ones, where they lie, for the caller to fill."""
        return self._views(self._places_for(numbers)) if len(numbers) else []

    def get(self, numbers: Ids) -> Tensor:
        """A copy of the rows of these numbers, [K, d]; a `KeyError` where there is none."""
        return self._read(self._places_of(numbers))

    def views(self, numbers: Ids) -> list[Tensor]:
        """The rows of these numbers where they lie, not to be changed; a `KeyError` where there is none."""
        return self._views(self._places_of(numbers))

    def drop(self, numbers: Iterable[int]) -> None:
        """Forget these rows; a number that has none is ignored."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        chosen = np.unique(chosen[chosen < len(self._place)])
        self._give_back(self._place[chosen])
        self._place[chosen] = -1
        self._changed[chosen] = False

    @property
    def numbers(self) -> Ids:
        """The numbers that have a row, in rising order."""
        return np.flatnonzero(self._place >= 0)

    def take_changed(self) -> Ids:
        """The numbers whose rows were put since this was last asked, in rising order; dropped ones are left out."""
        changed = np.flatnonzero(self._changed)
        self._changed[:] = False
        return changed

    def restore(self, numbers: Ids, rows: Tensor) -> None:
        """These rows, which a checkpoint has, in place of all that are here; none of them counts as changed."""
        self.drop(self.numbers)
        self.put(numbers, rows)
        self.take_changed()

    # -- places ------------------------------------------------------------------------------------------------------

    def _know(self, count: int) -> None:
        """Extend the lists of numbers to `count`, with as much again for those to come."""
        if count > len(self._place):
            more = max(count, 2 * len(self._place)) - len(self._place)
            self._place = np.append(self._place, np.full(more, -1))
            self._changed = np.append(self._changed, np.zeros(more, dtype=np.bool_))

    def _places_for(self, numbers: Ids) -> Ids:
        """Where the rows of these numbers are put; they count as changed."""
        self._know(int(numbers.max()) + 1)
        places = self._place[numbers]
        new = np.flatnonzero(places < 0)
        places[new] = self._new_places(len(new))
        for block in np.unique(places[new] // self._per_block).tolist():
            self._block(block)  # if there is no room for it, nothing has changed
        self._place[numbers] = places
        self._changed[numbers] = True
        return places

    def _places_of(self, numbers: Ids) -> Ids:
        known = numbers[numbers < len(self._place)]
        if len(known) < len(numbers) or np.any(self._place[known] < 0):
            raise KeyError(f"there is no row of {sorted(set(numbers.tolist()) - set(self.numbers.tolist()))[0]}")
        return self._place[numbers]

    def _new_places(self, count: int) -> Ids:
        """Places for so many new rows, in memory as far as there is room."""
        found = self._in_memory.take(count)
        return np.array(found + self._in_files.take(count - len(found)), dtype=np.int64)

    def _give_back(self, places: Ids) -> None:
        self._in_memory.give_back(places[(places >= 0) & (places < self.room)])
        self._in_files.give_back(places[places >= self.room])

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _write(self, places: Ids, rows: Tensor) -> None:
        if self._are_in_first(places):
            self._block(0).index_copy_(0, _index(places, self._block(0)), rows.to(self._block(0)))
            return
        for held, offsets, which in self._by_block(places):
            held[offsets] = rows[which.to(rows.device)].to(held)

    def _read(self, places: Ids) -> Tensor:
        if self._are_in_first(places):
            held = self._block(0)
            return held.index_select(0, _index(places, held)).to(self._like.device)
        found = self._like.new_empty(len(places), self._like.numel())
        for held, offsets, which in self._by_block(places):
            found[which] = held[offsets].to(found.device)
        return found

    def _views(self, places: Ids) -> list[Tensor]:
        where = zip(*(part.tolist() for part in np.divmod(places, self._per_block)), strict=True)
        return [self._block(block)[offset] for block, offset in where]

    def _are_in_first(self, places: Ids) -> bool:
        """Whether all of these places are in the first block, as they are where rows are small or few."""
        return len(places) > 0 and int(places.max()) < self._per_block

    def _by_block(self, places: Ids) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each block that has some of these places, with where they are in it and which of the places they are.

        The indices of all blocks are copied to a GPU at once: it has to be waited for at every copy.
        """
        blocks, offsets = np.divmod(places, self._per_block)
        order = np.argsort(blocks, kind="stable")
        all_offsets, all_which = _index(offsets[order], self._like), _index(order, self._like)
        ends = [*(np.flatnonzero(np.diff(blocks[order])) + 1).tolist(), len(order)]
        for first, end in pairwise([0, *ends]):
            if end > first:
                held = self._block(int(blocks[order[first]]))
                yield held, all_offsets[first:end].to(held.device), all_which[first:end]

    def _block(self, number: int) -> Tensor:
        if number not in self._blocks:
            in_memory = number * self._per_block < self.room
            shape = self._per_block, self._like.numel()
            self._blocks[number] = self._like.new_empty(shape) if in_memory else _mapped(self._per_block, self._like)
        return self._blocks[number]


class Versions:
    """The global models that somebody may still start from, by version.

    They may be as many as there are clients. A quarter of `memory_mb` is for them; beyond that, the oldest are moved to
    memory-mapped files. The latest is always in memory. A checkpoint sees them as a `RowTable`.
    """

    def __init__(self, start: Tensor, *, memory_mb: float = 4096.0, trained: int | None = None) -> None:
        """`start` is w(0) as a row, whose first `trained` numbers are parameters (None: all of them)."""
        self.trained = start.numel() if trained is None else trained
        """How many numbers of a row are trained; those behind them are buffers, such as the means of batch norm."""
        self.latest, self._changed = 0, {0}
        self._models = {0: start}
        self._most = rows_that_fit(start, memory_mb, times=4)
        self._spilled = RowTable(start, memory_mb=0.0)

    @property
    def model(self) -> Tensor:
        """The latest global model."""
        return self._models[self.latest]

    def add(self, version: int, model: Tensor) -> None:
        """Keep a new version, which is the latest from now on."""
        if self._models.pop(version, None) is None and len(self._spilled.numbers):
            self._spilled.drop([version])
        self._models[version] = model
        self._changed.add(version)
        self.latest = version
        while len(self._models) > self._most:
            oldest = next(iter(self._models))
            self._spilled.put(np.array([oldest]), self._models.pop(oldest).unsqueeze(0))

    def __getitem__(self, version: int) -> Tensor:
        return self._models[version] if version in self._models else self._spilled.get(np.array([version]))[0]

    def rows(self, versions: Ids) -> Tensor:
        """The models of these versions, one row each; not to be changed."""
        if np.all(versions == self.latest):
            return self.model.expand(len(versions), -1)
        distinct, places = np.unique(versions, return_inverse=True)
        found = self.get(distinct)
        return found[_index(places, found)]

    def forget_all_but(self, needed: Iterable[int]) -> None:
        """Drop the versions that nobody needs any more; the latest always stays."""
        keep = {*needed, self.latest}
        for version in self._models.keys() - keep:
            del self._models[version]
        if len(self._spilled.numbers):
            self._spilled.drop(set(self._spilled.numbers.tolist()) - keep)
        self._changed &= keep

    # -- as a table --------------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> Ids:
        """The versions that are kept, in rising order."""
        return np.array(sorted({*self._models, *self._spilled.numbers.tolist()}), dtype=np.int64)

    def get(self, numbers: Ids) -> Tensor:
        """A copy of the models of these versions, [K, d]."""
        if not len(numbers):
            return self.model.new_empty(0, len(self.model))
        return torch.stack([self[version] for version in numbers.tolist()])

    def take_changed(self) -> Ids:
        """The versions that were added since this was last asked, in rising order."""
        changed, self._changed = self._changed, set()
        return np.array(sorted(changed), dtype=np.int64)

    def restore(self, numbers: Ids, rows: Tensor) -> None:
        """These models, which a checkpoint has, in place of all that are here; none of them counts as changed."""
        device = self.model.device
        self._models = {}
        self._spilled.drop(self._spilled.numbers)
        for place in np.argsort(numbers).tolist():
            self.add(int(numbers[place]), rows[place].to(device, copy=True))
        self._changed = set()


class _Places:
    """The places from `first` up to `end`: taken in order, those that were given back before all others."""

    def __init__(self, first: int, end: int) -> None:
        self._next, self._end = first, end
        self._free: list[int] = []

    def take(self, most: int) -> list[int]:
        """As many as there are, at most so many."""
        again = [self._free.pop() for _ in range(min(most, len(self._free)))]
        fresh = range(self._next, min(self._end, self._next + most - len(again)))
        self._next += len(fresh)
        return [*again, *fresh]

    def give_back(self, places: Ids) -> None:
        self._free.extend(places.tolist())


def _index(places: Ids, of: Tensor) -> Tensor:
    return torch.from_numpy(places).to(of.device)


def _mapped(count: int, like: Tensor) -> Tensor:
    """Room for `count` rows in a memory-mapped file, which is gone when nothing refers to it any more."""
    size = count * like.numel()
    try:
        with tempfile.TemporaryDirectory(prefix="safa-models-") as folder:
            path = Path(folder) / "rows"
            with path.open("wb") as file:  # takes the room on the disk now: later, there is no way to report its lack
                os.posix_fallocate(file.fileno(), 0, size * like.element_size())
            return torch.from_file(str(path), shared=True, size=size, dtype=like.dtype).view(count, like.numel())
    except OSError as error:
        needed = size * like.element_size() / 2**20
        raise SafaError(
            f"models of {needed:.0f} MB do not fit memory_mb and cannot be held in a file in {tempfile.gettempdir()}: "
            f"{error.strerror}"
        ) from None
