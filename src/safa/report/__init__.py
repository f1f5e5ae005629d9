"""Figures and pages of runs, sweeps, arenas and reproductions.

`write_report` makes the page of a folder that holds a run or a sweep. `page` has the blocks of pages,
`figures` the charts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from safa.errors import SafaError
from safa.fleet import make_fleet
from safa.report.arena import arena_page
from safa.report.page import render
from safa.report.run import run_page, run_sections
from safa.report.sweep import read_table, sweep_page, sweep_sections
from safa.runs import Run, load_run, write_atomically
from safa.runs.folder import ARENA, SWEEP
from safa.runs.sweep_folder import SweepFolder

__all__ = [
    "arena_page",
    "page_of",
    "read_table",
    "render",
    "run_page",
    "run_sections",
    "speeds_of",
    "sweep_page",
    "sweep_sections",
    "write_report",
]


class _InFolder(Protocol):
    """A sweep, which is in a folder."""

    @property
    def folder(self) -> Path: ...


def write_report(run: Run | _InFolder | str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run or a sweep, or of the folder of either or of an arena, and return its path.

    It is `report.html` in the folder unless another `path` is given, which a run that is held in memory needs.
    """
    folder = Path(run) if isinstance(run, str | Path) else run.folder
    if path is None and folder is None:
        raise SafaError("a run that is held in memory has no folder; say where to write its page, path=FILE.html")
    page = page_of(run if isinstance(run, Run) else Path(folder or "."))
    target = Path(path) if path is not None else Path(folder or ".") / "report.html"
    write_atomically(target, page.encode())
    return target


def page_of(run: Run | Path) -> str:
    """The page of a run, or of the folder of a run, a sweep or an arena, as HTML."""
    if isinstance(run, Path):
        if (run / ARENA).is_file():
            return arena_page(run)
        if (run / "results.csv").is_file() and not (run / "config.toml").is_file():
            return sweep_page(_as_planned(read_table(run / "results.csv"), run))
        if not (run / "config.toml").is_file():
            raise SafaError(f"{run} holds neither a run (config.toml) nor a sweep (results.csv)")
        run = load_run(run)
    if not run.has_rounds():
        raise SafaError(f"{run.folder} holds the settings of a run, but no rounds.jsonl")
    return run_page(run, speeds_of(run))


def _as_planned(rows: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The rows of a sweep with the learning rate that was asked for: one that was found may differ by seed."""
    if not (folder / SWEEP).is_file():
        return list(rows)
    rates = {row.get("task"): {one.get("lr") for one in rows if one.get("task") == row.get("task")} for row in rows}
    plan = SweepFolder.read(folder).varied
    return [
        row | {"lr": varied.get("lr", "auto")} if "lr" in varied or len(rates[row.get("task")]) > 1 else row
        for row, varied in zip(rows, plan, strict=False)
    ]


def speeds_of(run: Run) -> ArrayLike | None:
    """The speeds of the clients, which do not depend on what they hold, if the run was simulated with such a fleet."""
    try:
        simulated = run.roster() is None and run.clients_at_start() == run.settings.clients
        return make_fleet(run.settings, np.ones(run.settings.clients)).speeds if simulated else None
    except SafaError:
        return None
