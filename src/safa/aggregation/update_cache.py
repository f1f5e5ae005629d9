"""Caches of updates: what the training of every client changed last counts for it while it is silent.

An entry is a delta, the update less the model that it was trained from. MIFA and FedVARP hold one per client. Both
papers keep the entry of a client for as long as it is silent, however old it is. So do these, also where a protocol
deprecates a client (Eq. 3): that concerns the model that the client trains from next, not what it has contributed. An
update that was undrafted (Eq. 8) replaces the entry of its client before the step that follows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.aggregation.rows import RowTable, Versions
from safa.errors import SafaError
from safa.protocol.records import Ids, Rule

__all__ = ["FedVarp", "Mifa", "UpdateCache"]

_CHUNK_BYTES = 2**24  # what is summed at a time, in double precision; not a part of memory_mb: sums depend on it
_REFRESH = 20  # steps from one exact sum to the next


class UpdateCache(Aggregator):
    """The latest delta D_k of every client, zero before its first, and the sum of n_k D_k over the clients present.

    The sum is held in double precision, kept up to date by differences and computed anew every 20 steps, so that
    rounding cannot drift. A client that has sent nothing takes no row; one that has left keeps its row, without weight,
    for its return. A step costs as much as its updates, and one in 20 as much as all entries.

    The weights of `Rule.DELTA` say how far each update moves the model. Here the cache decides that, so it is refused.
    """

    rules = frozenset({Rule.AVERAGE, Rule.CACHE})
    keeps_entries = True

    def __init__(self, *, server_step: float = 1.0) -> None:
        """`server_step` is the server's step size: how far the model goes along the direction of the cache."""
        if not 0 < server_step < float("inf"):
            raise SafaError(f"server_step must be above 0 and finite, not {server_step!r}")
        self.server_step = server_step

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin without an entry."""
        super().begin(versions, sizes, memory_mb=memory_mb)
        self._size = sizes.astype(np.float64)  # n_k; astype makes a copy
        self._active = np.ones(len(sizes), dtype=np.bool_)
        self._table = RowTable(versions.model, memory_mb=memory_mb)
        self._has_row = np.zeros(len(sizes), dtype=np.bool_)
        self._sum = torch.zeros_like(versions.model, dtype=torch.float64)  # of n_k D_k, over the clients present
        self._age = 0
        self._chunk = max(1, _CHUNK_BYTES // (8 * versions.model.numel()))

    def follow(self, joined: Ids, sizes: NDArray[np.float64], left: Ids) -> None:
        """Correct the sum by the entries of those who came, went or have a new n_k; no other entry is read."""
        self._make_room(int(joined.max(initial=-1)) + 1)
        before = self._shares()
        present = self._active.astype(np.int64)
        np.add.at(present, joined, 1)
        np.subtract.at(present, left, 1)
        self._active = present > 0
        self._size[joined] = sizes
        change = self._shares() - before
        self._sum += self._sum_of(np.flatnonzero(self._has_row & (change != 0)), change)

    def step(self, step: Step) -> Tensor:
        """Replace the entries of those that sent something and move along what the cache then says."""
        self._age += 1
        if self._age % _REFRESH == 0:
            self._sum = self.exact_sum()
        direction = self._direction(step)
        model = self.versions.model
        return (model.double() + self.server_step * direction).to(model.dtype)

    @abstractmethod
    def _direction(self, step: Step) -> Tensor:
        """Where the model goes for a server step of 1, in double precision; all updates are entries afterwards."""

    def keep(self, updates: Updates) -> None:
        """Entries of these clients := what their training changed."""
        for some in _each_client_once(updates):
            change = self._replace(some.client, some.deltas)
            self._sum += _weighted(self._shares()[some.client], change)

    def entries(self, clients: Ids) -> Tensor:
        """The deltas of these clients; zero for one that has sent nothing."""
        model = self.versions.model
        rows = torch.zeros(len(clients), model.numel(), dtype=model.dtype, device=model.device)
        known = np.flatnonzero(self._has_row[clients])
        if len(known):
            rows[torch.from_numpy(known).to(rows.device)] = self._table.get(clients[known])
        return rows

    def exact_sum(self) -> Tensor:
        """The sum of n_k D_k over the clients present, from scratch."""
        shares = self._shares()
        return self._sum_of(np.flatnonzero(self._has_row & (shares != 0)), shares)

    def _mean(self) -> Tensor:
        """The sum of c_k D_k, c_k = n_k / n over the clients present; zero while nobody is there."""
        total = float(self._shares().sum())
        return self._sum / total if total else torch.zeros_like(self._sum)

    def _replace(self, clients: Ids, deltas: Tensor) -> Tensor:
        """The entries of these clients, each named once, := these deltas; by how much each has changed."""
        change = deltas.double() - self.entries(clients).double()
        self._table.put(clients, deltas)
        self._has_row[clients] = True
        return change

    def _sum_of(self, clients: Ids, weight: NDArray[np.float64]) -> Tensor:
        """The weighted sum of the entries of these clients, all of which have one; `weight` is by client."""
        total = torch.zeros_like(self._sum)
        for first in range(0, len(clients), self._chunk):
            some = clients[first : first + self._chunk]
            total += _weighted(weight[some], self._table.get(some).double())
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
        """The deltas, by client."""
        return {"updates": self._table}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        self._size = state["size"].numpy().copy()
        self._active = state["active"].numpy().copy()
        self._has_row = np.zeros(len(self._size), dtype=np.bool_)
        self._has_row[self._table.numbers] = True
        self._sum = state["sum"].to(self._sum.device, copy=True)
        self._age = int(state["age"])


class Mifa(UpdateCache):
    """MIFA (Gu et al. 2021): w := w + server_step * sum of c_k D_k over all clients present, c_k = n_k / n.

    The paper weighs all clients alike, which is the same where their n_k are equal. The weights of the record are not
    used: a client that sends nothing counts as much as one that does.
    """

    name = "mifa"

    def _direction(self, step: Step) -> Tensor:
        for part in step.updates:
            self.keep(part)
        return self._mean()


class FedVarp(UpdateCache):
    """FedVARP (Jhunjhunwala et al. 2022): the entries reduce the variance that comes from who takes part.

    w := w + server_step * (sum over participants i of a_i (D_i - y_i) + sum over all present j of c_j y_j), then
    y_i := D_i. y are the entries, a_i the weights of the record scaled to sum to 1, and c_j = n_j / n. The paper weighs
    all alike, which is the same where n_k are equal. Undrafted updates become entries before the step and do not take
    part.
    """

    name = "fedvarp"

    def _direction(self, step: Step) -> Tensor:
        correction, replaced = torch.zeros_like(self._sum), torch.zeros_like(self._sum)
        total = 0.0
        for part in step.updates:
            for some in _each_client_once(part):
                change = self._replace(some.client, some.deltas)
                share = self._shares()[some.client]
                correction += _weighted(some.weight * some.picked, change)
                replaced += _weighted(share * some.picked, change)
                self._sum += _weighted(share * ~some.picked, change)
                total += float(some.weight[some.picked].sum())
        direction = (correction / total if total else correction) + self._mean()
        self._sum += replaced
        return direction


def _weighted(weight: NDArray[np.float64], rows: Tensor) -> Tensor:
    return torch.from_numpy(weight).to(rows.device) @ rows


def _each_client_once(updates: Updates) -> Iterator[Updates]:
    """Updates as they are, or, where a client has several, its first, then its second, and so on."""
    order = np.argsort(updates.client, kind="stable")
    ordered = updates.client[order]
    earlier = np.empty(len(order), dtype=np.int64)  # how many updates of its client come before each
    earlier[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    for number in range(int(earlier.max(initial=-1)) + 1):
        chosen = np.flatnonzero(earlier == number)
        yield updates.part(chosen)
