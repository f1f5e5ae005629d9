"""Figures and pages of runs, sweeps and reproductions.

`write_report` makes the page of a folder that holds a run or a sweep. `page` has the blocks of pages,
`figures` the charts.
"""

from __future__ import annotations

from pathlib import Path

from numpy.typing import ArrayLike

from safa.errors import SafaError
from safa.report.page import render
from safa.report.run import run_page, run_sections
from safa.report.sweep import read_table, sweep_page, sweep_sections
from safa.runs import load_run, write_atomically

__all__ = ["read_table", "render", "run_page", "run_sections", "sweep_page", "sweep_sections", "write_report"]


def write_report(folder: Path, *, speeds: ArrayLike | None = None) -> Path:
    """Write `report.html` into the folder of a run or a sweep, and return its path.

    `speeds` orders the clients of a run, the fastest first; see `run_page`.
    """
    if (folder / "config.toml").is_file():
        if not (folder / "rounds.jsonl").exists():
            raise SafaError(f"{folder} holds the settings of a run, but no rounds.jsonl")
        page = run_page(load_run(folder), speeds)
    elif (folder / "results.csv").is_file():
        page = sweep_page(read_table(folder / "results.csv"))
    else:
        raise SafaError(f"{folder} holds neither a run (config.toml) nor a sweep (results.csv)")
    path = folder / "report.html"
    write_atomically(path, page.encode())
    return path
