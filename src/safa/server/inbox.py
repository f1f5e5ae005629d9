"""Updates that were received instead of trained: in a deployed server, these take the place of a trainer.

The learner asks for updates of one client in the order in which they came in, each at most once, and may pass over some
(an undrafted update that was overwritten before any aggregation saw it). So a client's updates stand in a queue: the
one that is asked for is given away, and those before it can never be asked for any more and are dropped. The base
version tells whether the one in front is meant; it is no key, since under FedBuff and fully local training a client
commits more than once from the same version.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from safa.errors import MisuseError, SafaError
from safa.protocol.records import Ids
from safa.training.layout import Layout

__all__ = ["Received"]


class Received:
    """A trainer that trains nothing: it hands out the updates that were kept as they came in.

    Keep an update once the protocol has accepted it, in order of arrival, and no other.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._queues: dict[int, deque[tuple[int, Tensor]]] = {}  # by client: base version and update, oldest first

    def __len__(self) -> int:
        """How many updates are kept."""
        return sum(len(queue) for queue in self._queues.values())

    def keep(self, client: int, base: int, row: Tensor) -> None:
        """Keep a copy of an update, trained from version `base`, until it is asked for or overtaken."""
        if row.shape != (self.layout.size,):
            raise SafaError(f"an update of this model has {self.layout.size} numbers, not shape {tuple(row.shape)}")
        kept = row.detach().to(self.layout.dtype, copy=True)
        self._queues.setdefault(client, deque()).append((base, kept))

    def train(self, clients: Ids, start: Tensor, *, epochs: int, bases: Ids | None = None) -> Tensor:
        """The updates [K, d] of these clients from these versions; without `bases`, the oldest of each client.

        They are given away. `start` says where they go (dtype and device); `epochs` has no meaning here.
        """
        updates = torch.empty_like(start)
        wanted = [None] * len(clients) if bases is None else bases.tolist()
        for place, (client, base) in enumerate(zip(clients.tolist(), wanted, strict=True)):
            updates[place] = self._take(client, base)
        return updates

    def _take(self, client: int, base: int | None) -> Tensor:
        """A client's first update from that version; what came before it is dropped."""
        queue = self._queues.pop(client, deque())
        while queue:
            found, row = queue.popleft()
            if base is None or found == base:
                if queue:
                    self._queues[client] = queue
                return row
        raise MisuseError(f"no update of client {client} from version {base} was kept")

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on later; the names are none of the learner's."""
        kept = [(client, base, row) for client, queue in self._queues.items() for base, row in queue]
        rows = [row.cpu() for _, _, row in kept]
        return {
            "received.client": torch.tensor([client for client, _, _ in kept], dtype=torch.int64),
            "received.base": torch.tensor([base for _, base, _ in kept], dtype=torch.int64),
            "received.rows": torch.stack(rows) if rows else torch.empty(0, self.layout.size, dtype=self.layout.dtype),
        }

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`."""
        self._queues.clear()
        numbers = state["received.client"].tolist(), state["received.base"].tolist()
        for client, base, row in zip(*numbers, state["received.rows"], strict=True):
            self.keep(client, base, row)
