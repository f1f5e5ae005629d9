"""Memory of tensors on a CPU: what is freed stays with the process, for the next tensor.

glibc gives large blocks back to the system as soon as they are freed. A step of training frees all that it has
computed, and the next one asks for as much again: the system has to clear and map every page anew, which takes up to
half of the time of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
from functools import cache

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT = 2**27  # bytes that are kept at most


@cache
def keep_freed_memory() -> None:
    """Let this process, and those forked from it, keep up to 128 MiB that are free; with another C library, nothing.

    Blocks that are larger are given back as before.
    """
    if platform.libc_ver()[0] == "glibc":
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallopt(_MMAP_THRESHOLD, _KEPT)
            library.mallopt(_TRIM_THRESHOLD, _KEPT)
