"""Where models are kept: global models by version, and the cache of SAFA with one entry per client (Eq. 6-8)."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.errors import SafaError
from safa.protocol.records import Ids

__all__ = ["Cache", "GlobalModels", "give_back_memory", "rows_that_fit"]

_CHUNK = 256  # rows that are summed at a time, if so many fit the memory
_BLOCK_BYTES = 2**24  # rows that are moved to a file one by one share a file up to this size


def rows_that_fit(like: Tensor, memory_mb: float, *, times: int = 1) -> int:
    """How many rows like this one fit a budget if each takes so many times its size; at least one."""
    return max(1, int(memory_mb * 2**20 / (times * like.numel() * like.element_size())))


def give_back_memory() -> None:
    """Let the system have memory that was freed; glibc keeps pieces of up to 32 MB, in which no new row may fit."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class GlobalModels:
    """The global models that somebody may still start from, as rows by version.

    They may be as many as there are clients. A quarter of `memory_mb` is for them; beyond that, the oldest are moved to
    memory-mapped files.
    """

    def __init__(self, start: Tensor, *, memory_mb: float = 4096.0) -> None:
        self._models: dict[int, Tensor] = {0: start}
        self._most = rows_that_fit(start, memory_mb, times=4)
        self._filed: dict[int, Tensor] = {}
        self._block, self._free = start[:0].unsqueeze(0), 0  # the file in which there is room, and for how many rows
        self.latest = 0

    def add(self, version: int, model: Tensor) -> None:
        """Keep a new version."""
        self._models.pop(version, None)
        self._filed.pop(version, None)
        self._models[version] = model
        self.latest = version
        while len(self._models) > self._most:
            oldest = next(iter(self._models))
            self._filed[oldest] = self._in_file(self._models.pop(oldest))

    def _in_file(self, model: Tensor) -> Tensor:
        """A model moved to a file; no place is used twice, and a file vanishes with the last of its models."""
        if not self._free:
            self._free = max(1, _BLOCK_BYTES // (model.numel() * model.element_size()))
            self._block = _mapped(self._free, model)
        place = self._block[-self._free]
        self._free -= 1
        return place.copy_(model)

    def __getitem__(self, version: int) -> Tensor:
        if version in self._filed:
            return self._filed[version].to(self._models[self.latest].device)
        return self._models[version]

    def rows(self, versions: Ids) -> Tensor:
        """The models of these versions, one row each."""
        distinct, places = np.unique(versions, return_inverse=True)
        stacked = torch.stack([self[int(version)] for version in distinct])
        return stacked[torch.from_numpy(places).to(stacked.device)]

    def forget_all_but(self, needed: Iterable[int]) -> None:
        """Drop the versions that nobody needs any more; the latest always stays."""
        keep = {*needed, self.latest}
        for models in (self._models, self._filed):
            for version in models.keys() - keep:
                del models[version]

    def items(self) -> list[tuple[int, Tensor]]:
        """All versions that are kept, oldest first."""
        return [(version, self[version]) for version in sorted(self._models.keys() | self._filed.keys())]


class Cache:
    """One entry per client and their weighted sum (Eq. 7), kept up to date by differences.

    An entry that equals a global model is a reference to its version and takes no room. The sum is held in double
    precision and computed anew every `refresh` changes of version, so that rounding cannot drift. Entries of more than
    `memory_mb` are held in a memory-mapped file. A client that has left keeps its entry, with no weight.
    """

    def __init__(
        self, sizes: NDArray[np.float64], models: GlobalModels, *, memory_mb: float, refresh: int = 20
    ) -> None:
        start = models[0]
        self._models = models
        self._memory_mb = memory_mb
        self._size = sizes.copy()  # n_k
        self._active = np.ones(len(sizes), dtype=np.bool_)
        self._weight = self._weights()
        self._version = np.zeros(
            len(sizes), dtype=np.int64
        )  # the version that an entry equals, -1 for a model of its own
        self._rows = _rows(len(sizes), start, memory_mb)
        self._chunk = min(_CHUNK, rows_that_fit(start, memory_mb, times=8))
        self._sum = start.to(torch.float64, copy=True)
        self._refresh = refresh
        self._age = 0

    @property
    def references(self) -> set[int]:
        """The versions that entries refer to."""
        return set(self._version[self._version >= 0].tolist())

    def entries(self, clients: Ids) -> Tensor:
        """The entries of these clients, one row each."""
        rows = self._rows[torch.from_numpy(clients).to(self._rows.device)].to(self._sum.device)
        shared = np.flatnonzero(self._version[clients] >= 0)
        if len(shared):
            rows[torch.from_numpy(shared).to(rows.device)] = self._models.rows(self._version[clients[shared]])
        return rows

    def put(self, clients: Ids, rows: Tensor) -> None:
        """Entries of these clients := these models."""
        if len(clients):
            self._move_sum(clients, rows)
            self._rows[torch.from_numpy(clients).to(self._rows.device)] = rows.to(self._rows.device)
            self._version[clients] = -1

    def refer(self, clients: Ids, version: int) -> None:
        """Entries of these clients := a global model."""
        if len(clients):
            self._move_sum(clients, self._models[version].expand(len(clients), -1))
            self._version[clients] = version

    def follow(self, joined: Ids, sizes: NDArray[np.float64], left: Ids) -> None:
        """Clients have come, with these n_k, and gone; the sum is then over those that are there.

        The entry of a new client is the latest global model; one that comes back finds its entry as it was. A client
        that both left and came ends as it began: there if it was there before, else (it came and left again) away.
        """
        present = np.zeros(max(len(self._size), int(joined.max(initial=-1)) + 1), dtype=np.int64)
        present[: len(self._active)] = self._active
        np.add.at(present, joined, 1)
        np.subtract.at(present, left, 1)
        self._make_room(len(present))
        self._active = present > 0
        self._size[joined] = sizes
        self._weight = self._weights()
        self._sum = self.exact_sum()

    def _weights(self) -> Tensor:
        """n_k over the sum of n_k of the clients that are there; 0 for the others."""
        sizes = np.where(self._active, self._size, 0.0)
        weights = sizes / sizes.sum() if self._active.any() else sizes
        return torch.from_numpy(weights).to(self._models[self._models.latest].device)

    def _make_room(self, count: int) -> None:
        """Extend the arrays to `count` clients; the new ones have no size yet."""
        known = len(self._size)
        if count > known:
            rows = _rows(count, self._models[self._models.latest], self._memory_mb)
            for own in torch.from_numpy(np.flatnonzero(self._version < 0)).split(self._chunk):
                rows[own.to(rows.device)] = self._rows[own.to(self._rows.device)].to(rows.device)
            self._rows = rows
            self._size = np.append(self._size, np.zeros(count - known))
            self._active = np.append(self._active, np.zeros(count - known, dtype=np.bool_))
            self._version = np.append(self._version, np.full(count - known, self._models.latest))

    def aggregate(self) -> Tensor:
        """Eq. 7: the weighted sum of all entries. While nobody is there, the latest model stays as it is."""
        if not self._active.any():
            return self._models[self._models.latest]
        self._age += 1
        if self._age % self._refresh == 0:
            self._sum = self.exact_sum()
        return self._sum.to(self._rows.dtype, copy=True)

    def exact_sum(self) -> Tensor:
        """The sum over all entries, from scratch."""
        total = torch.zeros_like(self._sum)
        for part in torch.arange(len(self._version)).split(self._chunk):
            clients = part.numpy()
            total += self._weight[part.to(total.device)] @ self.entries(clients).double()
        return total

    def _move_sum(self, clients: Ids, new: Tensor) -> None:
        for first in range(0, len(clients), self._chunk):
            members = clients[first : first + self._chunk]
            weight = self._weight[torch.from_numpy(members).to(self._weight.device)]
            change = new[first : first + self._chunk].double() - self.entries(members).double()
            self._sum += weight @ change

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on later."""
        own = np.flatnonzero(self._version < 0)
        return {
            "cache.size": torch.from_numpy(self._size.copy()),
            "cache.active": torch.from_numpy(self._active.copy()),
            "cache.version": torch.from_numpy(self._version.copy()),
            "cache.rows": self._rows[torch.from_numpy(own).to(self._rows.device)].cpu(),
            "cache.sum": self._sum.to("cpu", copy=True),
            "cache.age": torch.tensor(self._age),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`, whose clients may be more than those at the start."""
        self._make_room(len(state["cache.size"]))
        self._size = state["cache.size"].numpy().copy()
        self._active = state["cache.active"].numpy().copy()
        self._weight = self._weights()
        self._version = state["cache.version"].numpy().copy()
        own = torch.from_numpy(np.flatnonzero(self._version < 0)).to(self._rows.device)
        self._rows[own] = state["cache.rows"].to(self._rows.device)
        self._sum = state["cache.sum"].to(self._sum.device, copy=True)
        self._age = int(state["cache.age"])


def _rows(count: int, like: Tensor, memory_mb: float) -> Tensor:
    """Room for `count` rows, in memory if they fit the budget, else in a file that vanishes with the process."""
    if count * like.numel() * like.element_size() <= memory_mb * 2**20:
        return torch.empty(count, like.numel(), dtype=like.dtype, device=like.device)
    return _mapped(count, like)


def _mapped(count: int, like: Tensor) -> Tensor:
    """Room for `count` rows in a memory-mapped file, which is gone when nothing refers to it any more."""
    size = count * like.numel()
    try:
        with tempfile.TemporaryDirectory(prefix="safa-models-") as folder:
            path = Path(folder) / "rows"
            with path.open("wb") as file:  # takes the room on the disk now: later, there is no way to report its lack
                os.posix_fallocate(file.fileno(), 0, size * like.element_size())
            return torch.from_file(str(path), shared=True, size=size, dtype=like.dtype).view(count, like.numel())
    except OSError as problem:
        needed = size * like.element_size() / 2**20
        raise SafaError(
            f"models of {needed:.0f} MB do not fit memory_mb and cannot be held in a file in {tempfile.gettempdir()}: "
            f"{problem.strerror}"
        ) from None
