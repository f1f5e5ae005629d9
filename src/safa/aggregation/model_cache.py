"""The cache of SAFA: one entry per client, a model, and their weighted sum (Eq. 6-8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.aggregation.rows import RowTable, Versions, are_stacked, changes, in_double, rows_that_fit
from safa.errors import SafaError
from safa.protocol.records import Ids, Rule

__all__ = ["ModelCache"]

_CHUNK = 256  # rows that are summed at a time, if so many fit the memory; the last bits of sums depend on it
_ROUNDING = 1e-12  # coefficients that differ by no more than this, relative to them, are the same


class ModelCache(Aggregator):
    """The weighted sum of one entry per client, kept up to date by differences.

    An entry that equals a global model is a reference to its version and takes no room. The coefficient of an entry is
    the weight that the record gave to the picked update that made it, and n_k/n before there was one; where they do not
    sum to 1, the sum is divided by theirs. The sum is held in double precision and computed anew every `refresh` steps,
    so that rounding cannot drift. A client that has left keeps its entry, with no weight.
    """

    name = "cache"
    rules = frozenset({Rule.CACHE, Rule.AVERAGE})
    keeps_entries = True
    refresh: ClassVar[int] = 20

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin with w(0) as the entry of every client."""
        super().begin(versions, sizes, memory_mb=memory_mb)
        start, count = versions.model, len(sizes)
        self._own = RowTable(start, memory_mb=memory_mb)
        self._chunk = min(_CHUNK, rows_that_fit(start, memory_mb))
        self._exchanged = _CHUNK if start.device.type == "cpu" else self._chunk  # rows; on a CPU a block at a time
        self._size = np.array(sizes, dtype=np.float64)  # n_k
        self._present = np.ones(count, dtype=np.bool_)
        self._version = np.full(count, versions.latest)  # the version that an entry equals; -1 for a model of its own
        self._weight = _shares(self._sizes_present())
        self._sum = start.to(torch.float64, copy=True)
        self._age = 0

    def step(self, step: Step) -> Tensor:
        """Eq. 6-8; the undrafted updates of the round before (Eq. 8) come first among the updates."""
        forced = step.deprecated
        for part in step.updates:
            self.keep(part)
            if len(forced):
                forced = np.setdiff1d(forced, part.client[part.picked])
        self._refer(forced, step.version - 1)
        return self._aggregate()

    def keep(self, updates: Updates) -> None:
        """Entries of these clients := these updates."""
        updates = _last_of_each(updates)
        if len(updates):
            self._exchange(updates.client, updates.rows, are_kept=True)
            self._version[updates.client] = -1
            self._weigh(updates)

    def entries(self, clients: Ids) -> Tensor:
        """The entries of these clients, one row each."""
        version = self._version[clients]
        own, shared = np.flatnonzero(version < 0), np.flatnonzero(version >= 0)
        if not len(shared):
            return self._own.get(clients)
        if not len(own):
            return self.versions.rows(version)
        rows = self._sum.new_empty(len(clients), len(self._sum), dtype=self.versions.model.dtype)
        rows[torch.from_numpy(own).to(rows.device)] = self._own.get(clients[own])
        rows[torch.from_numpy(shared).to(rows.device)] = self.versions.rows(version[shared])
        return rows

    def _entry_views(self, clients: Ids) -> list[Tensor]:
        """The entries of these clients where they lie, not to be changed."""
        version = self._version[clients]
        own, shared = iter(self._own.views(clients[version < 0])), np.unique(version[version >= 0])
        models = {number: self.versions[number] for number in shared.tolist()}
        return [next(own) if number < 0 else models[number] for number in version.tolist()]

    def references(self) -> set[int]:
        """The versions that entries refer to."""
        return set(self._version[self._version >= 0].tolist())

    # -- who is there ------------------------------------------------------------------------------------------------

    def follow(self, joined: Ids, sizes: NDArray[np.float64], left: Ids) -> None:
        """Clients have come, with these n_k, and gone; all coefficients are n_k/n of those that are there.

        The entry of a new client is the latest global model; one that comes back finds its entry as it was. A client
        that both left and came ends as it began: there if it was there before, else (it came and left again) away.
        """
        if len(joined) or len(left):
            before = float(self._sizes_present().sum())
            self._make_room(int(joined.max(initial=-1)) + 1)
            present = self._present.astype(np.int64)
            np.add.at(present, joined, 1)
            np.subtract.at(present, left, 1)
            self._present = present > 0
            self._size[joined] = sizes
            self._share_anew(before)

    def _make_room(self, count: int) -> None:
        """Extend the arrays to `count` clients; the new ones are not there yet."""
        new = max(0, count - len(self._size))
        self._size = np.append(self._size, np.zeros(new))
        self._present = np.append(self._present, np.zeros(new, dtype=np.bool_))
        self._weight = np.append(self._weight, np.zeros(new))
        self._version = np.append(self._version, np.full(new, self.versions.latest))

    def _sizes_present(self) -> NDArray[np.float64]:
        return np.where(self._present, self._size, 0.0)

    def _share_anew(self, before: float) -> None:
        """Make all coefficients n_k/n; n was `before`.

        With another n all of them change by the same factor, and so does the sum; what else has changed are the terms
        of those who came, left or had another coefficient.
        """
        sizes = self._sizes_present()
        factor = before / sizes.sum() if sizes.any() else 0.0
        shares, scaled = _shares(sizes), self._weight * factor
        other = np.flatnonzero(_differ(shares, scaled))
        self._sum *= factor
        self._weight = shares
        self._add(other, (shares - scaled)[other])

    # -- the sum -----------------------------------------------------------------------------------------------------

    def _aggregate(self) -> Tensor:
        """Eq. 7: the weighted sum of all entries. While nobody has a weight, the latest model stays as it is."""
        whole = float(self._weight.sum())
        if not whole:
            return self.versions.model
        self._age += 1
        if self._age % self.refresh == 0:
            self._sum = self._exact_sum()
        total = self._sum if abs(whole - 1) < 1e-9 else self._sum / whole
        return total.to(self.versions.model.dtype, copy=True)

    def _exact_sum(self) -> Tensor:
        """The sum over all entries, from scratch."""
        total = torch.zeros_like(self._sum)
        for part in self._parts(np.arange(len(self._version))):
            weight = self._coefficients(self._weight[part])
            if are_stacked(total):
                total += weight @ self.entries(part).double()
                continue
            for rows, columns, entries in in_double(self._entry_views(part)):
                total[columns].add_(weight[rows] @ entries)
        return total

    def _coefficients(self, weight: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(weight).to(self._sum.device)

    def _parts(self, numbers: Ids) -> list[Ids]:
        return [numbers[first : first + self._chunk] for first in range(0, len(numbers), self._chunk)]

    def _refer(self, clients: Ids, version: int) -> None:
        """Entries of these clients := a global model."""
        if len(clients):
            self._exchange(clients, self.versions[version].expand(len(clients), -1), are_kept=False)
            self._version[clients] = version
            self._own.drop(clients)

    def _exchange(self, clients: Ids, new: Tensor, *, are_kept: bool) -> None:
        """Exchange the entries of these clients for new ones in the sum, and keep those as their own."""
        for first in range(0, len(clients), self._exchanged):
            some = clients[first : first + self._exchanged]
            weight, rows = torch.from_numpy(self._weight[some]).to(new), new[first : first + self._exchanged]
            if are_stacked(self._sum):
                change = rows - self.entries(some)
                if are_kept:
                    self._own.put(some, rows)
                self._sum += weight @ change
                continue
            old = self._entry_views(some)
            into = self._own.to_fill(some) if are_kept else []
            for those, columns, change in changes(old, lambda *block, rows=rows: rows[block], into):
                self._sum[columns].add_(weight[those] @ change)

    def _weigh(self, updates: Updates) -> None:
        """The coefficients of entries whose updates were picked := their weights, for clients that are there."""
        clients, weight = updates.client[updates.picked], updates.weight[updates.picked]
        before = self._weight[clients]
        if np.array_equal(weight, before):
            return
        weight = np.where(self._present[clients], weight, 0.0)
        other = _differ(weight, before)
        self._weight[clients[other]] = weight[other]
        self._add(clients[other], (weight - before)[other])

    def _add(self, clients: Ids, weight: NDArray[np.float64]) -> None:
        """Add the entries of these clients to the sum, so many times each; those that are one version at once."""
        version = self._version[clients]
        own = version < 0
        for part in self._parts(np.flatnonzero(own)):
            self._sum += self._coefficients(weight[part]) @ self._own.get(clients[part]).double()
        distinct, group = np.unique(version[~own], return_inverse=True)
        together = np.bincount(group, weights=weight[~own], minlength=len(distinct)).astype(np.float64)
        for part in self._parts(np.arange(len(distinct))):
            self._sum += self._coefficients(together[part]) @ self.versions.rows(distinct[part]).double()

    # -- to be continued later ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue later besides the entries that are models of their own."""
        return {
            "size": torch.tensor(self._size),
            "present": torch.tensor(self._present),
            "version": torch.tensor(self._version),
            "weight": torch.tensor(self._weight),
            "sum": self._sum.to("cpu", copy=True),
            "age": torch.tensor(self._age),
        }

    def tables(self) -> Mapping[str, RowTable]:
        """The entries that are models of their own, by client."""
        return {"entries": self._own}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`, whose clients may be more than those at the start."""
        if len({len(state[name]) for name in ("size", "present", "version", "weight")}) != 1:
            raise SafaError("the checkpoint holds arrays of different lengths for the entries of clients")
        if not np.array_equal(self._own.numbers, np.flatnonzero(state["version"].numpy() < 0)):
            raise SafaError("the checkpoint lacks entries of clients, or holds others")
        if state["sum"].shape != self._sum.shape:
            raise SafaError(f"the checkpoint holds a sum of {len(state['sum'])} numbers; a model has {len(self._sum)}")
        self._size = state["size"].numpy().copy()
        self._present = state["present"].numpy().copy()
        self._version = state["version"].numpy().copy()
        self._weight = state["weight"].numpy().copy()
        self._sum = state["sum"].to(self._sum.device, copy=True)
        self._age = int(state["age"])


def _shares(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """n_k/n."""
    return sizes / sizes.sum() if sizes.any() else np.zeros(len(sizes))


def _differ(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where two lists of coefficients differ by more than rounding."""
    return np.abs(one - other) > _ROUNDING * np.maximum(np.abs(one), np.abs(other))


def _last_of_each(updates: Updates) -> Updates:
    """The last update of each client, in order of arrival."""
    if len(set(updates.client.tolist())) == len(updates):
        return updates
    _, last = np.unique(updates.client[::-1], return_index=True)
    return updates.part(np.sort(len(updates) - 1 - last))
