"""The reproduction of the paper as files: tables, figures, a page for the browser and one for the documentation.

Everything is made of the results that the folder holds, however they came there; so it can be written anew at any time,
and grows as more is run.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safa.errors import SafaError
from safa.paper.bias import BiasReport, bias_report
from safa.paper.collect import RESULTS, device_name
from safa.paper.corrected import Corrected
from safa.paper.document import corrected_page, document, table_page
from safa.paper.outcome import SESSIONS, Reproduction
from safa.paper.tables import Comparison
from safa.paper.webpage import webpage
from safa.runs import write_atomically
from safa.runs.storage import append, writing

__all__ = ["Reproduction", "bias_of_figure_5", "has_figure_5", "machine", "note_session", "write_reproduction"]

_PAGE = "report.html"


def bias_of_figure_5() -> list[BiasReport]:
    """The three cases of Figure 5, all crash rates 0.3."""
    return [bias_report(0.3, 0.3, fraction, 0.3) for fraction in (0.8, 0.5, 0.1)]


def has_figure_5(folder: Path) -> bool:
    """Whether the bias was asked for in this folder before."""
    return (folder / "figures" / "figure-5.svg").is_file()


def machine(device: str) -> str:
    """This machine in words, for readers of figures that took time."""
    gpu = f", {device_name(device)}" if device != "cpu" else ""
    return f"{platform.machine()}, {os.cpu_count() or 1} cores{gpu}, Python {platform.python_version()}"


def note_session(folder: Path, **session: Any) -> None:
    """Keep what was run for a reproduction, where, and how long it took."""
    path = folder / SESSIONS
    with writing(path), path.open("ab", buffering=0) as file:
        append(file, json.dumps(session).encode() + b"\n")


def write_reproduction(folder: Path, *, bias: Sequence[BiasReport] = ()) -> Path:
    """Write tables, figures and both pages into the folder, each file whole or not at all; the path of the page.

    Nothing is written before everything could be made of the results.
    """
    found = Reproduction.read(folder, bias)
    try:
        files, figures = _files(found), found.figures
    except SafaError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise SafaError(f"the results in {folder / RESULTS} do not fit together: {error}") from error
    for name in ("tables", "figures"):
        (folder / name).mkdir(exist_ok=True)
    for figure in figures:
        figure.save(folder / "figures")
    for name, content in files.items():
        write_atomically(folder / name, content)
    return folder / _PAGE


def _files(found: Reproduction) -> dict[str, bytes]:
    """The content of all files but the figures, by name; the page comes last."""
    files: dict[str, bytes] = {}
    for table, cells in found.tables.items():
        files[f"tables/table-{table.name}.csv"] = _csv(_comparison_rows(cells))
        files[f"tables/table-{table.name}.md"] = table_page(table, cells).encode()
    for (task, name), right in found.corrected.items():
        files[f"tables/corrected-{task}-{name}.csv"] = _csv(_corrected_rows(right))
        files[f"tables/corrected-{task}-{name}.md"] = corrected_page(task, name, right).encode()
    return files | {"reproduction.md": document(found).encode(), _PAGE: webpage(found).encode()}


def _csv(rows: Iterable[dict[str, Any]]) -> bytes:
    kept = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(kept[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    return text.getvalue().encode()


def _comparison_rows(cells: Sequence[Comparison]) -> Iterable[dict[str, Any]]:
    for one in cells:
        yield dict(zip(("task", "protocol", "metric", "crash_rate", "fraction"), one.cell, strict=True)) | {
            "printed": one.printed,
            "mean": f"{one.mean:.6g}",
            "low": f"{one.spread[0]:.6g}",
            "high": f"{one.spread[1]:.6g}",
            "worlds": len(one.values),
            "deviation": f"{one.deviation:.4f}",
            "within": "yes" if one.within else "no",
        }


def _corrected_rows(cells: Sequence[Corrected]) -> Iterable[dict[str, Any]]:
    for one in cells:
        low, high = one.spread if one.reached else ("", "")
        yield {
            "task": one.task,
            "protocol": one.protocol,
            "measure": one.measure,
            "crash_rate": one.crash_rate,
            "fraction": one.fraction,
            "middle": "" if one.middle is None else f"{one.middle:.6g}",
            "lowest": low,
            "highest": high,
            "reached": len(one.reached),
            "worlds": len(one.values),
        }
