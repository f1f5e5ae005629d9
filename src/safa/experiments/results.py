"""What a sweep came to: its rows, its runs, and which setting is the best one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safa.analysis import METRICS, TARGET_METRICS, Target, reached
from safa.analysis.compare import Best, Row, Setting, by_setting, rank_by_metric, rank_by_target
from safa.errors import SafaError
from safa.runs import Run
from safa.runs.frames import frame
from safa.runs.sweep_folder import SweepFolder
from safa.runs.table import parsed_row, read_cells, row_of

__all__ = ["Sweep", "best", "load_sweep", "read_rows"]


@dataclass(frozen=True)
class Sweep:
    """A finished sweep, in its folder."""

    place: SweepFolder
    rows: list[Row]
    """For every run, in the order of the plan, its settings and metrics by name."""

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.place.path

    def runs(self) -> list[Run]:
        """The runs, in the order of `rows`, with their records; a sweep that kept nothing has none."""
        if not self.place.keeps_runs:
            raise SafaError(f"the runs of the sweep in {self.folder} were not kept; only its rows were")
        return [self.place.run(number) for number in range(len(self.rows))]

    def settings(self) -> list[Setting]:
        """The settings that were compared, each with its runs, one a seed."""
        return by_setting(self.place.varied, self.rows)

    @property
    def tasks(self) -> list[str]:
        """The tasks, in order."""
        return list(dict.fromkeys(row["task"] for row in self.rows))

    def to_pandas(self) -> Any:
        """The rows as a data frame of pandas."""
        return frame(self.rows)

    def best(self, target: str | None = None, *, task: str | None = None) -> Best:
        """Which setting is first to a target, by how much, and whether the seeds allow saying so.

        The target is `METRIC=VALUE[,held=ROUNDS]`. Without one it is that of the sweep (`until`); where there is none,
        the settings are compared by the main metric of the last model.
        """
        chosen = self._task(task)
        numbers = [number for number, row in enumerate(self.rows) if row["task"] == chosen]
        rows = [self.rows[number] for number in numbers]
        if all(row.get("last_loss") is None for row in rows):
            raise SafaError(f"no model was evaluated in the runs of {self.folder}, so that there is no best setting")
        varied = [self.place.varied[number] for number in numbers]
        directions = {n.removeprefix("metric."): way for n, way in rows[0].items() if n.startswith("metric.") and way}
        own = list(dict.fromkeys(str(row.get("until") or "") for row in rows))
        if target is None and len(own) > 1:
            raise SafaError(f"the runs of the sweep had several targets; name one, such as {own[0] or own[1]}")
        if not (target or own[0]):
            return rank_by_metric(chosen, by_setting(varied, rows), directions)
        wanted = Target.parse(target or own[0], directions)
        until = Target.parse(own[0], directions) if own[0] and len(own) == 1 else None
        if wanted != until:
            rows = [row | self._reached(number, wanted, until) for number, row in zip(numbers, rows, strict=True)]
        return rank_by_target(chosen, by_setting(varied, rows), wanted, until)

    def _task(self, task: str | None) -> str:
        if task is None and len(self.tasks) > 1:
            raise SafaError(f"the sweep has several tasks; name one of {', '.join(self.tasks)}")
        if task not in (None, *self.tasks):
            raise SafaError(f"the sweep has no task {task!r}; it has {', '.join(self.tasks)}")
        return task or self.tasks[0]

    def _reached(self, number: int, target: Target, until: Target | None) -> dict[str, Any]:
        """When a run reached a target, from its records."""
        if not self.place.keeps_runs:
            what = f"only its own target, {until}, can" if until else "no target can"
            raise SafaError(f"the records of the runs in {self.folder} were not kept, so that {what} be asked for")
        return reached(self.place.run(number).records(), target)


def best(folder: str | Path, target: str | None = None, *, task: str | None = None) -> Best:
    """Which setting of the sweep in a folder is first to a target; see `Sweep.best`."""
    return load_sweep(folder).best(target, task=task)


def load_sweep(folder: str | Path) -> Sweep:
    """Read the folder of a finished sweep."""
    place = SweepFolder.read(Path(folder))
    runs = len(place.varied)
    if not place.keeps_runs:
        rows = _read_table(place.table)
    else:
        rows = [row_of(place.run(number)) for number in range(runs) if place.is_finished(number)]
    if len(rows) != runs:
        raise SafaError(f"{len(rows)} of the {runs} runs in {folder} are finished; the command of the sweep resumes it")
    return Sweep(place, rows)


def _read_table(path: Path) -> list[Row]:
    """The rows of the table of a sweep, checked."""
    (_, names), *lines = read_cells(path) or [("", [])]
    if not {"task", *METRICS} <= set(names):
        raise SafaError(f"{path} is not the table of a sweep: it has other columns")
    metrics = [name for name in names if name in METRICS | TARGET_METRICS or name.startswith(("best_", "last_"))]
    rows = [(where, parsed_row(names, cells)) for where, cells in lines]
    for (where, row), name in itertools.product(rows, metrics):
        if isinstance(row[name], str | bool):
            raise SafaError(f"{where}: {name} must be a number or nothing, not {row[name]!r}")
    return [row for _, row in rows]


def read_rows(path: Path, names: Sequence[str]) -> list[list[str]]:
    """The cells of the rows that are whole in the table of a sweep with these columns; none where there is no table."""
    if not path.exists():
        return []
    (_, head), *rows = read_cells(path) or [("", [])]
    if head != list(names):
        raise SafaError(f"{path} is not the table of this sweep: it has other columns")
    return [cells for _, cells in rows]
