"""What a sweep came to: its rows, its runs, and which setting is the best one."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safa.analysis import METRICS, TARGET_METRICS, Target, reached
from safa.errors import SafaError
from safa.experiments.compare import Best, Row, Setting, by_setting, rank_by_metric, rank_by_target
from safa.runs import Run
from safa.runs.storage import reading
from safa.runs.sweep_folder import SweepFolder, short

__all__ = ["Sweep", "best", "csv_line", "load_sweep", "parsed_row", "read_rows", "row_of"]


_MOST_DIGITS = 19  # a number with more is no whole one that this program wrote


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
        if self.place.keep == "nothing":
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
        try:
            import pandas
        except ModuleNotFoundError:
            raise SafaError("a data frame needs pandas, which is not installed: pip install 'safa[pandas]'") from None
        return pandas.DataFrame(self.rows)

    def best(self, target: str | None = None, *, task: str | None = None) -> Best:
        """Which setting is first to a target, by how much, and whether the seeds allow saying so.

        The target is `METRIC=VALUE[,held=ROUNDS]`. Without one it is that of the sweep (`until`); where there is none,
        the settings are compared by the main metric of the last model.
        """
        chosen = self._task(task)
        numbers = [number for number, row in enumerate(self.rows) if row["task"] == chosen]
        first = self.rows[numbers[0]]
        if not any(self.rows[number].get("last_loss") is not None for number in numbers):
            raise SafaError(f"no model was evaluated in the runs of {self.folder}, so that there is no best setting")
        directions = {n.removeprefix("metric."): row for n, row in first.items() if n.startswith("metric.") and row}
        own = str(first.get("until") or "")
        asked = target or own
        settings = by_setting([self.place.varied[n] for n in numbers], [self.rows[n] for n in numbers])
        if not asked:
            return rank_by_metric(chosen, settings, directions)
        wanted = Target.parse(asked, directions)
        until = Target.parse(own, directions) if own else None
        if wanted != until:
            rows = [self.rows[n] | self._reached(n, wanted, until) for n in numbers]
            settings = by_setting([self.place.varied[n] for n in numbers], rows)
        return rank_by_target(chosen, settings, wanted, until)

    def _task(self, task: str | None) -> str:
        if task is None and len(self.tasks) > 1:
            raise SafaError(f"the sweep has several tasks; name one of {', '.join(self.tasks)}")
        if task not in (None, *self.tasks):
            raise SafaError(f"the sweep has no task {task!r}; it has {', '.join(self.tasks)}")
        return task or self.tasks[0]

    def _reached(self, number: int, target: Target, until: Target | None) -> dict[str, Any]:
        """When a run reached a target, from its records."""
        if self.place.keep == "nothing":
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
    if place.keep == "nothing":
        rows = _read_table(place.table)
    else:
        rows = [row_of(place.run(number)) for number in range(runs) if place.is_finished(number)]
    if len(rows) != runs:
        raise SafaError(f"{len(rows)} of the {runs} runs in {folder} are finished; the command of the sweep resumes it")
    return Sweep(place, rows)


def _read_table(path: Path) -> list[Row]:
    """The rows of the table of a sweep, checked."""
    names, *lines = _lines(path)
    if not {"task", *METRICS} <= set(names) or len(names) > len(set(names)):
        raise SafaError(f"{path} is not the table of a sweep: it has other columns")
    rows = [parsed_row(names, line) for line in lines]
    for name in (name for name in names if name in METRICS | TARGET_METRICS or name.startswith(("best_", "last_"))):
        for number, row in enumerate(rows, 2):
            if isinstance(row[name], str | bool):
                raise SafaError(f"{path}, line {number}: {name} must be a number or nothing, not {row[name]!r}")
    return rows


def row_of(run: Run) -> Row:
    """The row of a finished run: settings and metrics."""
    numbers = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
    summary = {k: numbers.get(v, v) if isinstance(v, str) else v for k, v in (run.summary or {}).items()}
    return run.settings.values() | summary


def read_rows(path: Path, names: Sequence[str]) -> list[list[str]]:
    """The cells of the rows that are whole in the table of a sweep with these columns; none where there is no table."""
    if not path.exists():
        return []
    head, *rows = _lines(path)
    if head != list(names):
        raise SafaError(f"{path} is not the table of this sweep: it has other columns")
    return rows


def _lines(path: Path) -> list[list[str]]:
    """The lines of a table, split into cells; a last one that was cut off does not count."""
    try:
        with reading(path):
            text = path.read_bytes().decode()
        lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))
    except (UnicodeDecodeError, csv.Error):
        raise SafaError(f"{path} is damaged: it is not a table") from None
    head = lines[0] if lines else []
    for number, line in enumerate(lines, 1):
        if len(line) != len(head):
            raise SafaError(f"{path}, line {number}: needs {len(head)} fields, not {len(line)}")
    return lines or [[]]


def csv_line(values: Sequence[Any]) -> bytes:
    """A line of a table."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([_cell(value) for value in values])
    return line.getvalue().encode()


def _cell(value: Any) -> Any:
    """A value as a table has it; numbers as Python writes them, whoever computed them."""
    return repr(float(value)) if isinstance(value, float) else short(value)


def parsed_row(names: Sequence[str], cells: Sequence[str]) -> Row:
    """A row with numbers as numbers."""
    return {name: _parsed(cell) for name, cell in zip(names, cells, strict=True)}


def _parsed(text: str) -> Any:
    words = {"": None, "True": True, "False": False}
    if text in words:
        return words[text]
    try:
        return int(text) if text.lstrip("-").isdecimal() and len(text) < _MOST_DIGITS else float(text)
    except ValueError:
        return text
