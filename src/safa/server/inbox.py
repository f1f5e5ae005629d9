"""Updates that were received, until a version is made of them: in a deployed server, these take the place of training.

The learner asks for the updates of one client in the order in which they came in, each at most once, and says of those
that it will never ask for. So a client's updates are in a queue. The base version tells which of them is meant; it is
no key, since under FedBuff and fully local training a client commits more than once from the same version.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.rows import RowTable
from safa.errors import MisuseError, SafaError
from safa.protocol.records import Ids

__all__ = ["Inbox"]


class Inbox:
    """The updates that have come in and are not used yet. Put one in once the protocol has accepted it, in order."""

    train = None
    """Nothing is trained here."""

    def __init__(self, like: Tensor, *, memory_mb: float) -> None:
        """`like` is a model as a row."""
        self._size = like.numel()
        self._rows = RowTable(like, memory_mb=memory_mb)
        self._queues: dict[int, deque[tuple[int, int]]] = {}  # by client: base version and row, oldest first
        self._free = [0]  # numbers of rows that can be used, a heap; the largest of them and all beyond are unused

    def __len__(self) -> int:
        """How many updates are kept."""
        return len(self._rows.numbers)

    def put(self, client: int, base: int, row: Tensor) -> None:
        """Keep a copy of an update, trained from version `base`, until it is asked for or discarded."""
        if row.shape != (self._size,):
            raise SafaError(f"an update of this model has {self._size} numbers, not shape {tuple(row.shape)}")
        number = heapq.heappop(self._free)
        if not self._free:
            self._free.append(number + 1)
        self._rows.put(np.array([number]), row.detach().unsqueeze(0))
        self._queues.setdefault(client, deque()).append((base, number))

    def updates(
        self,
        clients: Ids,
        bases: Ids,
        start: Tensor,
        *,
        rounds: Ids,
        work: NDArray[np.float64],
        correction: Tensor | None = None,
    ) -> Tensor:
        """The updates [K, d] of these clients from these versions, which are given away; nothing else is needed."""
        numbers = self._take(clients, bases)
        rows = self._rows.get(numbers)
        self._drop(numbers)
        return rows.to(start)

    def step_sizes(self, clients: Ids, rounds: Ids, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """Nobody knows here how clients have trained."""
        raise MisuseError("the step sizes of updates that were received are not known")

    def discard(self, clients: Ids, bases: Ids) -> None:
        """These updates will never be asked for."""
        self._drop(self._take(clients, bases))

    def _drop(self, numbers: Ids) -> None:
        self._rows.drop(numbers.tolist())
        for number in numbers.tolist():
            heapq.heappush(self._free, number)

    def _take(self, clients: Ids, bases: Ids) -> Ids:
        pairs = zip(clients.tolist(), bases.tolist(), strict=True)
        return np.array([self._first(client, base) for client, base in pairs], dtype=np.int64)

    def _first(self, client: int, base: int) -> int:
        """The row of a client's first update from that version; what came before it is dropped."""
        queue = self._queues.pop(client, deque())
        while queue:
            found, number = queue.popleft()
            if found == base:
                if queue:
                    self._queues[client] = queue
                return number
            self._drop(np.array([number]))
        raise MisuseError(f"no update of client {client} from version {base} was kept")

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue later besides the rows."""
        kept = [(client, base, number) for client, queue in self._queues.items() for base, number in queue]
        return {"inbox": torch.tensor(kept, dtype=torch.int64).reshape(-1, 3)}

    def tables(self) -> Mapping[str, RowTable]:
        """The updates."""
        return {"inbox": self._rows}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`; the rows have been restored before, and are those of the updates in it."""
        used = set(self._rows.numbers.tolist())
        if sorted(state["inbox"][:, 2].tolist()) != sorted(used):
            raise SafaError("the checkpoint lacks updates that were received, or holds others")
        self._queues = {}
        for client, base, number in state["inbox"].tolist():
            self._queues.setdefault(client, deque()).append((base, number))
        self._free = [number for number in range(max(used, default=-1) + 2) if number not in used]
