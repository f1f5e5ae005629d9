"""What was computed once and is kept for later programs: a folder of files, each of which can be made again.

The folder is that of the environment variable SAFA_CACHE, else `safa` in the user's cache. It is made when something is
first written. What cannot be read is made again, and what cannot be written is done without.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["cache_folder", "cached_arrays"]

Arrays = dict[str, NDArray[Any]]


def cache_folder() -> Path:
    """Where files are kept that can be made again; it need not be there yet."""
    own = os.environ.get("SAFA_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "safa"


def cached_arrays(
    name: str, make: Callable[[], Arrays], *, is_good: Callable[[Arrays], bool] = lambda kept: True
) -> Arrays:
    """The arrays that are kept under a name, which are made where they are not there whole, or are not good.

    The name must say everything that they depend on: the source, by its checksum, and the version of what made them.
    """
    path = cache_folder() / f"{name}.npz"
    found = _read(path)
    if found is None or not is_good(found):
        found = make()
        with suppress(OSError):
            _write(path, found)
    return found


def _read(path: Path) -> Arrays | None:
    """The arrays in a file, whose checksums are looked at; None where it is not there or is damaged."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, TypeError):
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Write a file so that it is there whole or not at all; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
