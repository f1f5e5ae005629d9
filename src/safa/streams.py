"""Named random streams.

Every random number of a run comes from a stream keyed by (seed, purpose, further keys), and within it the number for
client k is at place k. So every protocol meets the very same world, whatever it asks for and in whatever order.
"""

from __future__ import annotations

import zlib

import numpy as np

__all__ = ["stream"]


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator for one purpose, such as ("partition",)."""
    name = zlib.crc32(purpose.encode())
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(name, *keys))))
