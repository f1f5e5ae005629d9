"""The table of a sweep, `results.csv`: a row a run, with its settings and metrics."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safa.errors import SafaError
from safa.runs.storage import reading
from safa.runs.values import shown

if TYPE_CHECKING:
    from safa.runs.folder import Run

__all__ = ["csv_line", "parsed_row", "read_cells", "row_of"]

_LARGEST_WHOLE = 2**63 - 1
_WORDS = {"": None, "True": True, "False": False}


def row_of(run: Run) -> dict[str, Any]:
    """The row of a run: its settings, and its metrics if it is finished."""
    numbers = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
    summary = {k: numbers.get(v, v) if isinstance(v, str) else v for k, v in (run.summary or {}).items()}
    return run.settings.values() | summary


def csv_line(values: Sequence[Any]) -> bytes:
    """A line of a table."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([_cell(value) for value in values])
    return line.getvalue().encode()


def _cell(value: Any) -> Any:
    """A value as a table has it; numbers as Python writes them, whoever computed them."""
    return repr(float(value)) if isinstance(value, float) else shown(value)


def read_cells(path: Path) -> list[tuple[str, list[str]]]:
    """Where each line of a table is, and its cells, the names of the columns first; one that was cut off is ignored."""
    try:
        with reading(path):
            text = path.read_bytes().decode()
    except UnicodeDecodeError:
        raise SafaError(f"cannot read {path}: it is not text") from None
    lines = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
    try:
        found = [(f"{path}, line {lines.line_num}", cells) for cells in lines]
    except csv.Error as error:
        raise SafaError(f"{path}, line {lines.line_num}: {error}") from None
    _check_columns(path, found)
    return found


def _check_columns(path: Path, lines: Sequence[tuple[str, Sequence[str]]]) -> None:
    names = lines[0][1] if lines else []
    for name in names:
        if names.count(name) > 1:
            raise SafaError(f"{path} has several columns {name!r}")
    for where, cells in lines:
        if len(cells) != len(names):
            raise SafaError(f"{where}: needs {len(names)} fields, as many as there are columns, not {len(cells)}")


def parsed_row(names: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    """A row with numbers as numbers."""
    return {name: _parsed(cell) for name, cell in zip(names, cells, strict=True)}


def _parsed(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if kind is float or abs(value) <= _LARGEST_WHOLE:
            return value
    return text
