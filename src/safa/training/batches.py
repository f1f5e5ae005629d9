"""Which samples are in which mini-batch of a client. Both trainers ask here, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from safa.streams import stream

__all__ = ["Batches", "Ids", "Shards"]

Ids = NDArray[np.int64]
Shards = Sequence[Ids]
"""For every client, which training samples are its own, in the order in which it goes through them."""


class Batches:
    """Every client goes through its samples epoch after epoch, in their given order or in a new one each time."""

    def __init__(
        self,
        shards: Shards,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | Ids = 0,
        first_client: int | Ids = 0,
    ) -> None:
        """With `shuffle`, an order depends on the seed, the client's number, the version trained from and the epoch.

        Shard k is that of the client with the number `first_client` + k. Where clients are those of several runs, seed
        and `first_client` are arrays with a value for every shard.
        """
        self._shards, self.shuffle = shards, shuffle
        self._seeds, self._first_clients = (np.broadcast_to(given, len(shards)) for given in (seed, first_client))
        self.lengths = np.array([len(shard) for shard in shards], dtype=np.int64)
        self.size = min(batch_size, max(1, int(self.lengths.max(initial=0))))
        """Samples in a mini-batch; never more than anybody has."""

    def per_epoch(self, clients: Ids) -> Ids:
        """How many mini-batches an epoch of each of these clients has."""
        return np.maximum(1, -(-self.lengths[clients] // self.size))

    def order(self, client: int, base: int, epoch: int) -> Ids:
        """A client's samples as it goes through them in an epoch (from 0) when it trains from version `base`."""
        shard = self._shards[client]
        if not self.shuffle:
            return shard
        number = int(self._first_clients[client]) + client
        return stream(int(self._seeds[client]), "shuffle", number, base, epoch).permutation(shard)

    def of(self, client: int, base: int, steps: int) -> Iterator[Ids]:
        """The samples of a client's first mini-batches, so many of them."""
        count = int(self.per_epoch(np.array([client]))[0])
        for step in range(steps):
            epoch, place = divmod(step, count)
            if place == 0:
                order = self.order(client, base, epoch)
            yield order[place * self.size : (place + 1) * self.size]
