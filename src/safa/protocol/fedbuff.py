"""FedBuff (Nguyen et al., AISTATS 2022): updates are gathered in a buffer of K, which makes a version when it is full.

w := w + server_lr/K * sum of s(lag) * (update - its base), with s(lag) = (1 + lag)^-1/2 as in that paper. A buffer that
is not full when a record closes continues to fill in the next one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.continuous import Continuous, Staleness
from safa.protocol.records import Ids, Rule

__all__ = ["FedBuff"]


class FedBuff(Continuous):
    """Changes are buffered and merged K at a time."""

    name = "fedbuff"
    rule = Rule.DELTA

    def __init__(
        self,
        sizes: ArrayLike,
        *,
        fraction: float,
        buffer_size: int = 10,
        server_lr: float = 1.0,
        round_limit_s: float = math.inf,
    ) -> None:
        """`buffer_size` is K; `server_lr` scales every step of the global model."""
        if buffer_size < 1:
            raise SafaError(f"buffer_size must be a whole number, at least 1, not {buffer_size}")
        if not server_lr > 0:
            raise SafaError(f"server_lr must be above 0, not {server_lr}")
        self.buffer_size = buffer_size
        self.server_lr = server_lr
        self.staleness = Staleness("polynomial", 0.5, 0.0, 0.0)
        self._buffered = 0
        super().__init__(sizes, fraction=fraction, round_limit_s=round_limit_s)

    def _merge(self, clients: Ids, bases: Ids) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        position = self._buffered + np.arange(len(bases))
        now = self.version + position // self.buffer_size
        after = self.version + (position + 1) // self.buffer_size
        self.version += (self._buffered + len(bases)) // self.buffer_size
        self._buffered = (self._buffered + len(bases)) % self.buffer_size
        return self.server_lr / self.buffer_size * self.staleness(now - bases), now + 1, after
