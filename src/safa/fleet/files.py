"""Worlds from files, or from numbers that were given: speeds, sizes, links and availability, each checked by row."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError

__all__ = ["Source", "read_column", "read_links", "read_trace"]

Source = str | Path | tuple[Any, ...]
"""The name of a file, or numbers as a setting holds them."""

_TRACE_HEADER = ("client", "online_from_s", "online_until_s")
_LINKS_HEADER = ("down_mbps", "up_mbps")


@dataclass(frozen=True)
class _Table:
    """Rows of finite numbers, and where each was read."""

    name: str
    """The file, or the setting."""
    values: NDArray[np.float64]
    lines: NDArray[np.int64] | None
    """The lines of a file; None: numbers that were given, which are counted from 0."""

    def where(self, row: int | np.integer[Any]) -> str:
        return f"{self.name}, element {row}" if self.lines is None else f"{self.name}, line {self.lines[row]}"


def read_column(source: Source, *, count: int, what: str) -> NDArray[np.float64]:
    """One positive number per line, one line per client; empty lines and lines that start with # do not count."""
    table = _given(source, what, (what,)) if isinstance(source, tuple) else _column(Path(source), what)
    _positive(table, (what,))
    _right_count(table, count, what)
    return table.values[:, 0]


def read_links(source: Source, *, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """A CSV `down_mbps,up_mbps`, one line per client: the clients' download and upload bandwidths."""
    table = _rows(source, "links", _LINKS_HEADER)
    _positive(table, _LINKS_HEADER)
    _right_count(table, count, "links")
    return table.values[:, 0], table.values[:, 1]


def read_trace(source: Source, *, count: int) -> NDArray[np.float64]:
    """A CSV `client,online_from_s,online_until_s`: rows of (client, from, until), by client and time."""
    table = _rows(source, "trace", _TRACE_HEADER)
    client, start, end = table.values.T
    for row in np.flatnonzero(~((client == np.floor(client)) & (client >= 0) & (client < count)))[:1]:
        raise SafaError(f"{table.where(row)}: client must be a number from 0 to {count - 1}, not '{client[row]:g}'")
    for row in np.flatnonzero(~((start >= 0) & (start < end)))[:1]:
        raise SafaError(f"{table.where(row)}: a time online must start at 0 s or later and end after it starts")
    if not len(client):
        raise SafaError(f"{table.name} names no time at which a client is online: nobody would ever train")
    order = np.lexsort((end, start, client))
    client, start, end = table.values[order].T
    for place in np.flatnonzero((client[1:] == client[:-1]) & (start[1:] < end[:-1]))[:1]:
        raise SafaError(f"{table.where(order[place + 1])}: this client is online already at that time")
    return table.values[order]


def _rows(source: Source, name: str, header: tuple[str, ...]) -> _Table:
    return _given(source, name, header) if isinstance(source, tuple) else _csv(Path(source), header)


def _given(values: tuple[Any, ...], name: str, header: tuple[str, ...]) -> _Table:
    table = _Table(name, np.array(values, dtype=np.float64).reshape(-1, len(header)), None)
    for row, column in np.argwhere(~np.isfinite(table.values))[:1]:
        found = table.values[row, column]
        raise SafaError(f"{table.where(row)}: {header[column]} must be a number, not '{found:g}'")
    return table


def _column(path: Path, what: str) -> _Table:
    found = [(_number(text, f"{path}, line {line}", what), line) for line, text in _lines(path)]
    values, lines = np.array(found).reshape(-1, 2).T
    return _Table(str(path), values[:, None], lines.astype(np.int64))


def _csv(path: Path, header: tuple[str, ...]) -> _Table:
    rows, lines = [], []
    for line, row in _cells(path, header):
        rows.append([_number(text, f"{path}, line {line}", name) for name, text in zip(header, row, strict=True)])
        lines.append(line)
    return _Table(str(path), np.array(rows).reshape(-1, len(header)), np.array(lines))


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


def _cells(path: Path, header: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
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


def _positive(table: _Table, names: tuple[str, ...]) -> None:
    for row, column in np.argwhere(table.values <= 0)[:1]:
        found = table.values[row, column]
        raise SafaError(f"{table.where(row)}: {names[column]} must be above 0, not {found:g}")


def _right_count(table: _Table, count: int, what: str) -> None:
    found = len(table.values)
    if found != count:
        holds = f"{what} are given" if table.lines is None else f"{table.name} holds {what}"
        raise SafaError(f"{holds} for {found} clients, but there are {count}")
