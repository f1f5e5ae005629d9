"""How many threads torch computes with: the order of a sum depends on it, and with that the last bits of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["torch_threads"]


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads, and with as many as before afterwards; 0 changes nothing."""
    if not count:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)  # even if it is the same: only then do libraries below torch stick to it
    try:
        yield
    finally:
        torch.set_num_threads(before)
