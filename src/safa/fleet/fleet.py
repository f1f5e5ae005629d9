"""The fleet: what every client needs for one attempt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.fleet.faults import Faults

__all__ = ["Fleet"]

_MEGABITS_PER_MEGABYTE = 8.0


@dataclass(frozen=True, eq=False)
class Fleet:
    """m clients: how fast they are, how much they hold, how they are linked, how they fail."""

    speeds: NDArray[np.float64]
    """s_k, mini-batches per second."""
    sizes: NDArray[np.int64] | NDArray[np.float64]
    """n_k, samples."""
    batches: NDArray[np.float64]
    """Mini-batches of one attempt: |B_k| * E, not rounded, or as many as the settings say."""
    down_s: NDArray[np.float64]
    up_s: NDArray[np.float64]
    copy_s: float
    """How long the server takes to send one copy of the model (Eq. 19 for one)."""
    model_size_mb: float
    faults: Faults

    @classmethod
    def assemble(
        cls,
        *,
        speeds: NDArray[np.float64],
        sizes: NDArray[np.int64] | NDArray[np.float64],
        epochs: int,
        local_steps: int = 0,
        batch_size: int,
        down_mbps: ArrayLike,
        up_mbps: ArrayLike,
        server_mbps: float,
        model_size_mb: float,
        faults: Faults,
    ) -> Fleet:
        """A fleet from speeds, sizes and bandwidths (in Mbit/s; a single number serves for all clients).

        An attempt takes so many epochs, or where they are given, so many mini-batches of every client.
        """
        megabits = model_size_mb * _MEGABITS_PER_MEGABYTE
        down, up = np.asarray(down_mbps, dtype=np.float64), np.asarray(up_mbps, dtype=np.float64)
        if not (np.all(down > 0) and np.all(up > 0) and server_mbps > 0 and model_size_mb >= 0):
            raise SafaError("down_mbps, up_mbps and server_mbps must be above 0, and model_size_mb not negative")
        return cls(
            speeds=speeds,
            sizes=sizes,
            batches=np.full(len(sizes), float(local_steps)) if local_steps else sizes / batch_size * epochs,
            down_s=np.broadcast_to(megabits / down, speeds.shape),
            up_s=np.broadcast_to(megabits / up, speeds.shape),
            copy_s=megabits / server_mbps,
            model_size_mb=model_size_mb,
            faults=faults,
        )

    def __len__(self) -> int:
        return len(self.speeds)

    @cached_property
    def train_s(self) -> NDArray[np.float64]:
        """T_train (Eq. 18)."""
        return np.asarray(self.batches / self.speeds)

    @cached_property
    def turnaround_s(self) -> NDArray[np.float64]:
        """T_k: download, train, upload."""
        return np.asarray(self.down_s + self.train_s + self.up_s)
