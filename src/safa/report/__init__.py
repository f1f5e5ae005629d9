"""Figures and pages of runs, sweeps, arenas and reproductions.

`write_report` makes the page of a folder that holds a run or a sweep, or one that compares several. `page` has the
blocks of pages, `figures` the charts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import ArrayLike

from safa.errors import SafaError
from safa.fleet import make_fleet
from safa.report.arena import arena_page
from safa.report.compare import compare_page, compare_sections
from safa.report.page import render
from safa.report.run import run_page, run_sections
from safa.report.sweep import sweep_heading, sweep_page, sweep_sections
from safa.report.tables import is_sweep, read_sweep, read_table
from safa.runs import Run, load_run, write_atomically
from safa.runs.folder import ARENA, SWEEP
from safa.runs.sweep_folder import SweepFolder

__all__ = [
    "arena_page",
    "compare_page",
    "compare_sections",
    "page_of",
    "read_sweep",
    "read_table",
    "render",
    "run_page",
    "run_sections",
    "speeds_of",
    "sweep_heading",
    "sweep_page",
    "sweep_sections",
    "write_report",
]


class _InFolder(Protocol):
    """A sweep, which is in a folder."""

    @property
    def folder(self) -> Path: ...


_One = Run | _InFolder | str | Path


def write_report(run: _One | Sequence[_One], path: str | Path | None = None, *, target: str | None = None) -> Path:
    """Write the page of a run or a sweep, or of the folder of either or of an arena, and return its path.

    It is `report.html` in the folder unless another `path` is given, which a run that is held in memory needs. Several
    runs and sweeps are compared on one page, `comparison.html`. Settings are compared by their time to `target`,
    METRIC=VALUE[,held=ROUNDS], where that is given.
    """
    several = isinstance(run, Sequence) and not isinstance(run, str)
    things = [_thing(one) for one in cast(Sequence[_One], run if several else [run])]
    page = compare_page(things, target=target) if several else page_of(things[0], target)
    file = (
        Path(path) if path is not None else Path("comparison.html") if several else _folder(things[0]) / "report.html"
    )
    write_atomically(file, page.encode())
    return file


def _thing(one: _One) -> Run | Path:
    """A run, or the folder of one or of a sweep."""
    return one if isinstance(one, Run) else Path(one) if isinstance(one, str | Path) else one.folder


def _folder(thing: Run | Path) -> Path:
    folder = thing.folder if isinstance(thing, Run) else thing
    if folder is None:
        raise SafaError("a run that is held in memory has no folder; say where to write its page, path=FILE.html")
    return folder


def page_of(run: Run | Path, target: str | None = None) -> str:
    """The page of a run, or of the folder of a run, a sweep or an arena, as HTML."""
    if isinstance(run, Path) and is_sweep(run):
        planned = len(SweepFolder.read(run).varied) if (run / SWEEP).is_file() else None
        return sweep_page(read_sweep(run), target=target, planned=planned)
    if target is not None:
        raise SafaError("a target is for the page of a sweep, or of several runs")
    if isinstance(run, Path):
        if (run / ARENA).is_file():
            return arena_page(run)
        if not (run / "config.toml").is_file():
            raise SafaError(f"{run} holds neither a run (config.toml) nor a sweep (results.csv)")
        run = load_run(run)
    if not run.has_rounds():
        raise SafaError(f"{run.folder} holds the settings of a run, but no rounds.jsonl")
    return run_page(run, speeds_of(run))


def speeds_of(run: Run) -> ArrayLike | None:
    """The speeds of the clients, which do not depend on what they hold, if the run was simulated with such a fleet."""
    try:
        simulated = run.roster() is None and run.clients_at_start() == run.settings.clients
        return make_fleet(run.settings, np.ones(run.settings.clients)).speeds if simulated else None
    except SafaError:
        return None
