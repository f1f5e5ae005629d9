"""Worlds from files: speeds, sizes, links and availability, each checked line by line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError

__all__ = ["read_column", "read_links", "read_trace"]

_TRACE_HEADER = ("client", "online_from_s", "online_until_s")
_LINKS_HEADER = ("down_mbps", "up_mbps")


def read_column(path: str | Path, *, count: int, what: str) -> NDArray[np.float64]:
    """One positive number per line, one line per client; empty lines and lines that start with # do not count."""
    values = [_positive(text, f"{path}, line {line}", what) for line, text in _lines(Path(path))]
    _right_count(path, len(values), count, what)
    return np.array(values)


def read_links(path: str | Path, *, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A CSV `down_mbps,up_mbps`, one line per client: the clients' download and upload bandwidths."""
    rows = [
        [_positive(text, f"{path}, line {line}", name) for name, text in zip(_LINKS_HEADER, row, strict=True)]
        for line, row in _table(Path(path), _LINKS_HEADER)
    ]
    _right_count(path, len(rows), count, "links")
    columns = np.array(rows).reshape(-1, 2)
    return columns[:, 0], columns[:, 1]


def read_trace(path: str | Path, *, count: int) -> NDArray[np.float64]:
    """A CSV `client,online_from_s,online_until_s`: rows of (client, from, until), by client and time."""
    rows = []
    for line, row in _table(Path(path), _TRACE_HEADER):
        where = f"{path}, line {line}"
        client, start, end = (_number(text, where, name) for name, text in zip(_TRACE_HEADER, row, strict=True))
        if client != int(client) or not 0 <= client < count:
            raise SafaError(f"{where}: client must be a number from 0 to {count - 1}, not {row[0].strip()!r}")
        if not 0 <= start < end:
            raise SafaError(f"{where}: a time online must start at 0 s or later and end after it starts")
        rows.append((client, start, end, line))
    if not rows:
        raise SafaError(f"{path} names no time at which a client is online: nobody would ever train")
    table = np.array(sorted(rows)).reshape(-1, 4)
    overlaps = np.flatnonzero((table[1:, 0] == table[:-1, 0]) & (table[1:, 1] < table[:-1, 2]))
    if len(overlaps):
        raise SafaError(f"{path}, line {int(table[overlaps[0] + 1, 3])}: this client is online already at that time")
    return table[:, :3]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SafaError(f"cannot read {path}: {_reason(error)}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, line


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _table(path: Path, header: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """The lines of a CSV under its header, with their numbers."""
    lines = _lines(path)
    expected = ",".join(header)
    first = next(lines, (1, ""))[1]
    if tuple(name.strip() for name in first.split(",")) != header:
        raise SafaError(f"{path}: the first line must be {expected!r}, not {first!r}")
    for number, line in lines:
        try:
            row = next(csv.reader([line]))
        except csv.Error as error:
            raise SafaError(f"{path}, line {number}: {error}") from None
        if len(row) != len(header):
            raise SafaError(f"{path}, line {number}: needs {expected}, not {line!r}")
        yield number, row


def _number(text: str, where: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SafaError(f"{where}: {what} must be a number, not {text.strip()!r}")
    return value


def _positive(text: str, where: str, what: str) -> float:
    value = _number(text, where, what)
    if value <= 0:
        raise SafaError(f"{where}: {what} must be above 0, not {text.strip()}")
    return value


def _right_count(path: str | Path, found: int, count: int, what: str) -> None:
    if found != count:
        raise SafaError(f"{path} holds {what} for {found} clients, but there are {count}")
