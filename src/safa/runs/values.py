"""Settings that hold numbers of every client: the name of a file, or the numbers themselves.

From Python they may be given as a list, an array, or a data frame, whose columns are called as those of the file. A
setting holds them as tuples, so that settings can be compared, and a config file as lists.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError

__all__ = ["COLUMNS", "Given", "file_or_values", "shown"]


class _HasArray(Protocol):
    """An array, a tensor, a data frame or one of its columns."""

    def __array__(self) -> NDArray[Any]: ...


Given = str | os.PathLike[str] | Sequence[float] | Sequence[Sequence[float]] | _HasArray
"""What such a setting may be given as."""

COLUMNS = {
    "speeds": ("speeds",),
    "sizes": ("sizes",),
    "links": ("down_mbps", "up_mbps"),
    "trace": ("client", "online_from_s", "online_until_s"),
}
"""The settings, each with its columns in a data frame."""


def file_or_values(name: str, value: Any) -> str | tuple[Any, ...] | None:
    """A file's name as text; numbers as a tuple, of floats for one column and of rows for several."""
    if value is None or isinstance(value, str | os.PathLike):
        return None if value is None else str(value)
    columns = COLUMNS[name]
    table = _of_frame(name, value, columns) if hasattr(value, "columns") else _numbers(name, name, value)
    if table.size == 0:
        return ()
    if len(columns) == 1 and table.ndim == 1:
        return tuple(table.tolist())
    if len(columns) == 1 or table.ndim != 2 or table.shape[1] != len(columns):
        raise _wrong(name, value)
    return tuple(map(tuple, table.tolist()))


def shown(value: Any) -> Any:
    """The value of a setting as tables show it: of several values, how many there are."""
    return f"{len(value)} values" if isinstance(value, tuple | list) else value


def _of_frame(name: str, frame: Any, columns: tuple[str, ...]) -> NDArray[np.float64]:
    for column in columns:
        if column not in frame.columns:
            raise SafaError(f"{name} need a column {column}; the frame has {', '.join(map(str, frame.columns))}")
    found = [_numbers(name, column, frame[column]) for column in columns]
    return found[0] if len(found) == 1 else np.stack(found, axis=-1)


def _numbers(name: str, column: str, value: Any) -> NDArray[np.float64]:
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "iuf" and array.ndim:
            _refuse_words(name, column, np.asarray(value, dtype=object))
        return np.asarray(array, dtype=np.float64)
    except SafaError:
        raise
    except (TypeError, ValueError, OverflowError):  # rows of different lengths, numbers beyond all bounds
        raise _wrong(name, value) from None


def _refuse_words(name: str, column: str, array: NDArray[Any]) -> None:
    """Refuse an array in which something is no number."""
    for place, row in enumerate(array.tolist()):
        for item in row if isinstance(row, list) else [row]:
            if isinstance(item, bool) or not isinstance(item, Real):
                raise SafaError(f"{name}, element {place}: {column} must be a number, not {reprlib.repr(item)}")


def _wrong(name: str, value: Any) -> SafaError:
    columns = COLUMNS[name]
    wanted = "a number for each client" if len(columns) == 1 else f"rows of {','.join(columns)}"
    return SafaError(f"{name} must be the name of a file, or {wanted}, not {reprlib.repr(value)}")
