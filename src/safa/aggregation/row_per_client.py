"""A row per client and their weighted sum, for aggregators that remember something of every client."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.aggregation.rows import Block, RowTable, Versions, are_stacked, blocks, changes, in_double
from safa.errors import SafaError
from safa.protocol.records import Ids

__all__ = ["RowPerClient", "each_client_once", "weighted"]

_CHUNK_BYTES = 2**24  # what is summed at a time, in double precision; not a part of memory_mb: sums depend on it
_GPU_CHUNK_BYTES = 2**28  # the same on a GPU, which is waited for at every chunk
_REFRESH = 20  # steps from one exact sum to the next


class RowPerClient(Aggregator):
    """A row of every client, zero before its first, and the sum of n_k times the row over the clients present.

    The sum is held in double precision, kept up to date by differences and computed anew every 20 steps, so that
    rounding cannot drift. A client that has sent nothing takes no row; one that has left keeps its row, without weight,
    for its return. A step costs as much as its updates, and one in 20 as much as all rows.
    """

    table: ClassVar[str]
    """What the rows are called in a checkpoint."""

    def __init__(self, *, server_step: float = 1.0) -> None:
        """`server_step` is the server's step size: how far the model goes along the direction that is found."""
        if not 0 < server_step < float("inf"):
            raise SafaError(f"server_step must be above 0 and finite, not {server_step!r}")
        self.server_step = server_step

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin without a row."""
        super().begin(versions, sizes, memory_mb=memory_mb)
        self._size = sizes.astype(np.float64)  # n_k; astype makes a copy
        self._active = np.ones(len(sizes), dtype=np.bool_)
        self._table = RowTable(versions.model, memory_mb=memory_mb)
        self._has_row = np.zeros(len(sizes), dtype=np.bool_)
        self._sum = torch.zeros_like(versions.model, dtype=torch.float64)  # of n_k times the row, of who is present
        self._age = 0
        room = _CHUNK_BYTES if versions.model.device.type == "cpu" else _GPU_CHUNK_BYTES
        self._chunk = max(1, room // (8 * versions.model.numel()))

    def follow(self, joined: Ids, sizes: NDArray[np.float64], left: Ids) -> None:
        """Correct the sum by the rows of those who came, went or have a new n_k; no other row is read."""
        self._make_room(int(joined.max(initial=-1)) + 1)
        before = self._shares()
        present = self._active.astype(np.int64)
        np.add.at(present, joined, 1)
        np.subtract.at(present, left, 1)
        self._active = present > 0
        self._size[joined] = sizes
        change = self._shares() - before
        self._reweigh(np.flatnonzero(self._has_row & (change != 0)), change)

    def _reweigh(self, clients: Ids, change: NDArray[np.float64]) -> None:
        """The n_k of these clients, all of which have a row, changed by `change`, which is by client."""
        self._sum += self._sum_of(clients, change)

    def step(self, step: Step) -> Tensor:
        """Move the model along what the updates and the rows say."""
        self._age += 1
        if self._age % _REFRESH == 0:
            self._refresh()
        direction, factor = self._direction(step)
        model = self.versions.model
        moved = torch.empty_like(model)
        for _, columns in blocks(1, model):
            moved[columns] = torch.add(model[columns], direction[columns], alpha=self.server_step * factor)
        return moved

    @abstractmethod
    def _direction(self, step: Step) -> tuple[Tensor, float]:
        """Where the model goes for a server step of 1, in double precision, as a row and a factor of it.

        Rows and sum are renewed afterwards.
        """

    def _refresh(self) -> None:
        """Compute the sum anew."""
        self._sum = self.exact_sum()

    def exact_sum(self) -> Tensor:
        """The sum of n_k times the row over the clients present, from scratch."""
        shares = self._shares()
        return self._sum_of(np.flatnonzero(self._has_row & (shares != 0)), shares)

    def _rows_of(self, clients: Ids) -> Tensor:
        """The rows of these clients; zero for one that has none."""
        model = self.versions.model
        rows = torch.zeros(len(clients), model.numel(), dtype=model.dtype, device=model.device)
        known = np.flatnonzero(self._has_row[clients])
        if len(known):
            rows[torch.from_numpy(known).to(rows.device)] = self._table.get(clients[known])
        return rows

    def _mean(self) -> Tensor:
        """The sum of c_k times the row, c_k = n_k / n over the clients present; zero while nobody is there."""
        return self._sum * self._one_over_n()

    def _one_over_n(self) -> float:
        """1 / n over the clients present; 0 while nobody is there, when the sum is zero, too."""
        total = float(self._shares().sum())
        return 1 / total if total else 0.0

    def _replace(self, clients: Ids, new: Callable[[slice, slice], Tensor]) -> Iterator[Block]:
        """The rows of these clients, each named once, := what `new` gives of them, by rows and columns.

        By how much they have changed, block by block; the caller goes through all of them.
        """
        if are_stacked(self._sum):
            everything = slice(None)
            rows = new(everything, everything)
            change = rows - self._rows_of(clients)
            self._table.put(clients, rows)
            found = iter([(everything, everything, change)])
        else:
            old = self._views_of(clients)
            found = changes(old, new, self._table.to_fill(clients))
        self._has_row[clients] = True
        return found

    def _views_of(self, clients: Ids) -> list[Tensor]:
        """The rows of these clients where they lie, not to be changed; zero for one that has none."""
        known = self._has_row[clients]
        own, zero = iter(self._table.views(clients[known])), self.versions.model.new_zeros(1).expand(len(self._sum))
        return [next(own) if there else zero for there in known.tolist()]

    def _sum_of(self, clients: Ids, weight: NDArray[np.float64]) -> Tensor:
        """The weighted sum of the rows of these clients, all of which have one; `weight` is by client."""
        total = torch.zeros_like(self._sum)
        for first in range(0, len(clients), self._chunk):
            some = clients[first : first + self._chunk]
            if are_stacked(total):
                total += weighted(weight[some], self._table.get(some).double())
                continue
            for those, columns, rows in in_double(self._table.views(some)):
                total[columns].add_(weighted(weight[some[those]], rows))
        return total

    def _shares(self) -> NDArray[np.float64]:
        """n_k of the clients present, 0 for the others."""
        return np.where(self._active, self._size, 0.0)

    def _make_room(self, count: int) -> None:
        new = max(0, count - len(self._size))
        self._size = np.append(self._size, np.zeros(new))
        self._active = np.append(self._active, np.zeros(new, dtype=np.bool_))
        self._has_row = np.append(self._has_row, np.zeros(new, dtype=np.bool_))

    # -- to be continued later ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Who is there with which n_k, the sum, and how old it is."""
        return {
            "size": torch.from_numpy(self._size.copy()),
            "active": torch.from_numpy(self._active.copy()),
            "sum": self._sum.to("cpu", copy=True),
            "age": torch.tensor(self._age),
        }

    def tables(self) -> Mapping[str, RowTable]:
        """The rows, by client."""
        return {self.table: self._table}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        self._size = state["size"].numpy().copy()
        self._active = state["active"].numpy().copy()
        self._has_row = np.zeros(len(self._size), dtype=np.bool_)
        self._has_row[self._table.numbers] = True
        self._sum = state["sum"].to(self._sum.device, copy=True)
        self._age = int(state["age"])


def weighted(weight: NDArray[np.float64], rows: Tensor) -> Tensor:
    """The weighted sum of rows, in their precision."""
    return torch.from_numpy(weight).to(rows) @ rows


def each_client_once(updates: Updates) -> Iterator[Updates]:
    """Updates as they are, or, where a client has several, its first, then its second, and so on."""
    order = np.argsort(updates.client, kind="stable")
    ordered = updates.client[order]
    earlier = np.empty(len(order), dtype=np.int64)  # how many updates of its client come before each
    earlier[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    for number in range(int(earlier.max(initial=-1)) + 1):
        chosen = np.flatnonzero(earlier == number)
        yield updates.part(chosen)
