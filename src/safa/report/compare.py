"""Runs and sweeps side by side on one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from safa.errors import SafaError
from safa.report.page import Cell, Section, Table, render
from safa.report.plan import Plan, distinct, title
from safa.report.sweep import comparison
from safa.report.tables import Row, is_sweep, read_sweep, run_row
from safa.report.words import number
from safa.runs import Run, load_run
from safa.runs.settings import Settings
from safa.runs.values import shown

__all__ = ["compare_page", "compare_sections"]

_FOLDER = "folder"
_NO_MATTER = ("trainer", "device", "threads", "memory_mb", "checkpoint_every", "tf32", "eval_clients")
"""Settings that say how a run is made, and not what it comes to."""
_MOST_NAMES = 2
"""With more settings that differ, some of them between folders, what is compared is called by its folder."""
_DEFAULTS = {item.name: shown(item.default) for item in fields(Settings) if item.default is not MISSING}


def compare_page(things: Sequence[Run | Path | str], *, target: str | None = None) -> str:
    """The page that compares runs and sweeps, each given as a run or as a folder.

    Runs that differ in nothing but their seed are one setting. They are compared by their time to `target`,
    METRIC=VALUE[,held=ROUNDS], or to the one that all of them have, or to one that the page chooses.
    """
    rows = _rows(things)
    tasks = ", ".join(distinct(rows, "task"))
    return render(f"Comparison on {tasks}", _lead(rows), _sections(rows, target))


def compare_sections(things: Sequence[Run | Path | str], *, target: str | None = None) -> list[Section]:
    """The sections of such a page."""
    return _sections(_rows(things), target)


def _sections(rows: Sequence[Row], target: str | None) -> list[Section]:
    plan = _plan(rows)
    *compared, rest = comparison(rows, plan, target=target)
    return [*compared, Section("What is compared", [_what(rows)], "what"), rest]


def _lead(rows: Sequence[Row]) -> str:
    counts = Counter(row[_FOLDER] for row in rows)
    parts = [f"`{name}`" + (f" ({count} runs)" if count > 1 else "") for name, count in counts.items()]
    return f"Compared: {', '.join(parts)}."


# -- rows --------------------------------------------------------------------------------------------------------------


def _rows(things: Sequence[Run | Path | str]) -> list[dict[str, Any]]:
    """The rows of all runs, with the same columns, and the name of the folder that each is from."""
    given = list({_identity(thing): thing if isinstance(thing, Run) else Path(thing) for thing in things}.values())
    named = zip(_names(given), given, strict=True)
    rows = [row | {_FOLDER: name} for name, thing in named for row in _rows_of(thing)]
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: _plain(row.get(name, _DEFAULTS.get(name))) for name in columns} for row in rows]


def _identity(thing: Run | Path | str) -> Path | int:
    """The same for the same thing: what is given twice is compared once."""
    folder = thing.folder if isinstance(thing, Run) else Path(thing)
    return id(thing) if folder is None else folder.resolve()


def _plain(value: Any) -> Any:
    """A value as the table of a sweep would have it."""
    return value if isinstance(value, list) else shown(value) if value != "" else None


def _rows_of(thing: Run | Path) -> list[dict[str, Any]]:
    if isinstance(thing, Path) and is_sweep(thing):
        rows = read_sweep(thing)
        if not rows:
            raise SafaError(f"the sweep in {thing} has no finished run yet, so there is nothing to compare")
        return rows
    if isinstance(thing, Path) and not (thing / "config.toml").is_file():
        raise SafaError(f"{thing} holds neither a run (config.toml) nor a sweep (results.csv)")
    run = load_run(thing) if isinstance(thing, Path) else thing
    if not run.has_rounds() or (next(run.evaluations(), None) is None and next(run.records(), None) is None):
        raise SafaError(f"the run in {thing} has no finished round yet, so there is nothing to compare")
    return [run_row(run)]


def _names(things: Sequence[Run | Path]) -> list[str]:
    """What each is called: by its folder, by the whole path where two have the same name, or by its place."""
    folders = [thing.folder if isinstance(thing, Run) else thing for thing in things]
    short = [folder.resolve().name if folder else f"run {place}" for place, folder in enumerate(folders, 1)]
    if len(set(short)) == len(short):
        return short
    return [str(folder) if folder else name for folder, name in zip(folders, short, strict=True)]


# -- what distinguishes them -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ByFolder(Plan):
    """What is varied in things of different designs: each is called by its folder, and by what varies in there."""

    within: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """For every folder, what varies in it."""

    @classmethod
    def made(cls, rows: Sequence[Row]) -> _ByFolder:
        """The plan of these rows."""
        groups = {name: [row for row in rows if row[_FOLDER] == name] for name in distinct(rows, _FOLDER)}
        within = {name: Plan.of(of, ignored=_NO_MATTER).distinguishing for name, of in groups.items()}
        names = dict.fromkeys(("task", _FOLDER, *(one for of in within.values() for one in of), "seed"))
        varied = {name: values for name in names if len(values := distinct(rows, name)) > 1}
        return cls(varied, None, tuple(name for name in names if name != "seed"), within)

    def place(self, row: Row) -> dict[str, Any]:
        """The folder, what varies in it, and the seed."""
        names = {title(name): self.shown(name, row[name]) for name in self.within[row[_FOLDER]]}
        return {_FOLDER: row[_FOLDER], **names, "seed": row["seed"]}

    def curve(self, row: Row) -> str:
        """The same as a name."""
        return ", ".join(str(value) for name, value in self.place(row).items() if name != "seed")


def _plan(rows: Sequence[Row]) -> Plan:
    """What is varied; the folder counts where nothing else tells two runs apart, or where it is the shorter name."""
    plan = Plan.of(rows, ignored=(*_NO_MATTER, _FOLDER))
    if len({_key(plan, row) for row in rows}) < len(rows):
        return _ByFolder.made(rows)
    between = [name for name in plan.distinguishing if _is_of_folder(rows, name)]
    return _ByFolder.made(rows) if between and len(plan.distinguishing) > _MOST_NAMES else plan


def _key(plan: Plan, row: Row) -> tuple[Any, ...]:
    return (row["task"], *plan.place(row).values())


def _is_of_folder(rows: Sequence[Row], name: str) -> bool:
    """Whether a setting is the same in all runs of a folder."""
    return len({(row[_FOLDER], row[name]) for row in rows}) == len(distinct(rows, _FOLDER))


def _what(rows: Sequence[Row]) -> Table:
    """A row for every setting and folder: the seeds, and in what the runs differ."""
    names = [name for name in Plan.of(rows, ignored=(*_NO_MATTER, _FOLDER)).varied if name != "seed"]
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row[_FOLDER], *(row[name] for name in names)), []).append(row)
    cells: list[list[str | Cell]] = [
        [str(folder), *(_cell(value) for value in values), _seeds(of)] for (folder, *values), of in groups.items()
    ]
    columns = ["folder", *(title(name) for name in names), "seeds"]
    caption = "Everything else is the same, or says only how a run is made."
    return Table(columns, cells, caption=caption, filterable=len(cells) > 8)


def _cell(value: Any) -> Cell:
    return Cell(number(value), value if isinstance(value, int | float) else None)


def _seeds(rows: Sequence[Row]) -> str:
    return ", ".join(str(row["seed"]) for row in rows)
