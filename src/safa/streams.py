"""Named random streams.

Every random number of a run comes from a stream keyed by (seed, purpose, further keys), and within it the number for
client k is at place k. So every protocol meets the very same world, whatever it asks for and in whatever order.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["stream", "uniform_at"]

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator for one purpose, such as ("partition",)."""
    name = zlib.crc32(purpose.encode())
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(name, *keys))))


def uniform_at(
    seed: int, purpose: str, clients: NDArray[np.integer[Any]], numbers: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """A number from 0 to 1 for each client and each count of something that it does, such as its nth stretch.

    It is computed from its place alone: where the counts of the clients differ, nothing has to be drawn in between.
    """
    of_client, of_number = _keys(seed, purpose)
    mixed = _mixed(of_client + clients.astype(np.uint64) * np.uint64(_STEP))
    mixed = _mixed(mixed ^ (of_number + numbers.astype(np.uint64) * np.uint64(_STEP)))
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


@lru_cache(maxsize=64)
def _keys(seed: int, purpose: str) -> NDArray[np.uint64]:
    sequence = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()),))
    return np.asarray(sequence.generate_state(2, np.uint64))


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the outcome depends on all that are given."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_SECOND)
    return bits ^ (bits >> np.uint64(31))
