"""What a sweep came to: its rows, its runs, and which setting is the best one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safa.analysis import METRICS, TARGET_METRICS, Curve, Target, higher_is_better, reached
from safa.analysis.compare import Best, Row, Setting, by_setting, rank_by_metric, rank_by_target
from safa.errors import SafaError
from safa.runs import Run
from safa.runs.frames import frame
from safa.runs.sweep_folder import SweepFolder
from safa.runs.table import parsed_row, read_cells, row_of

if TYPE_CHECKING:
    import altair as alt

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
        chosen, numbers = self._task(task), self._numbers(task)
        rows = [self.rows[number] for number in numbers]
        if all(row.get("last_loss") is None for row in rows):
            raise SafaError(f"no model was evaluated in the runs of {self.folder}, so that there is no best setting")
        varied = [self.place.varied[number] for number in numbers]
        directions = _directions(rows[0])
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

    def curves(self, metric: str | None = None, *, task: str | None = None) -> dict[str, list[Curve]]:
        """A metric of the global models over time, the main one by default: for every setting a curve a seed."""
        numbers = self._numbers(task)
        places = by_setting([self.place.varied[number] for number in numbers], [{"run": n} for n in numbers])
        return {place.name: [self._curve(row["run"], metric) for row in place.rows] for place in places}

    def plot(self, metric: str | None = None, *, over: str = "time", task: str | None = None) -> alt.LayerChart:
        """A chart of Altair: the mean over the seeds, with a band from the lowest to the highest.

        Over time it shows a metric of the problem or the loss, the main metric by default. Over a setting that was
        varied, such as `over="fraction"`, it shows a column of `rows`: the time to the target by default, or the main
        metric of the last model where there is no target.
        """
        from safa.report.plots import curves_chart, rows_chart

        row = self.rows[self._numbers(task)[0]]
        directions, until = _directions(row), row.get("until")
        main = next(iter(directions), "loss")
        if over == "time":
            target = Target.parse(until, directions) if until else None
            return curves_chart(self.curves(metric, task=task), metric or main, target)
        column = metric or ("time_to_target_s" if until else main)
        return rows_chart(self._against(over, task), over, column if column in row else f"last_{column}", "others")

    def _against(self, setting: str, task: str | None) -> list[Row]:
        """The rows, each with the value of a setting as the plan has it, and the other values in words."""
        varied = [self.place.varied[number] for number in self._numbers(task)]
        names = [name for name in varied[0] if name not in (setting, "seed")]
        if setting not in varied[0]:
            raise SafaError(f"{setting} was not varied in this sweep; over may be time, {', '.join(varied[0])}")
        others = [Setting({name: values[name] for name in names}, []).name if names else "" for values in varied]
        rows = (self.rows[number] for number in self._numbers(task))
        return [
            row | {setting: values[setting], "others": words}
            for row, values, words in zip(rows, varied, others, strict=True)
        ]

    def _repr_html_(self) -> str:
        from safa.report.cards import sweep_card

        return sweep_card(f"Sweep on {', '.join(self.tasks)}", self._planned(), list(map(self._answer, self.tasks)))

    def __repr__(self) -> str:
        return f"<Sweep on {', '.join(self.tasks)}, {self._planned()}>"

    def _planned(self) -> str:
        """How many runs there are, and of what, in words."""
        settings = self.settings()
        counts = {"setting": len(settings), "seed": len(settings[0].rows)}
        parts = [f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items()]
        return f"{len(self.rows)} runs: {' x '.join(parts)}"

    def _answer(self, task: str) -> Best | str:
        """The best setting on a task, or why there is none."""
        try:
            return self.best(task=task)
        except SafaError as error:
            return str(error)

    def _curve(self, number: int, metric: str | None) -> Curve:
        """A metric over the time of a run, from its records, or as it was kept."""
        row, directions = self.rows[number], _directions(self.rows[number])
        main = next(iter(directions), "loss")
        name = metric or main
        if name not in (*directions, "loss"):
            raise SafaError(f"there is no metric {name!r}; there is {', '.join((*directions, 'loss'))}")
        if self.place.keeps_runs:
            return _curve_of(self.place.run(number), name, higher=higher_is_better(name, directions))
        if name != main or "curve" not in row:
            raise SafaError(f"the sweep in {self.folder} kept no {name} over time")
        return Curve.parse(row["curve"], higher=higher_is_better(name, directions))

    def _numbers(self, task: str | None) -> list[int]:
        """The places of the runs of a task in `rows`."""
        chosen = self._task(task)
        return [number for number, row in enumerate(self.rows) if row["task"] == chosen]

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


def _directions(row: Row) -> dict[str, str]:
    """The metrics of a run's problem, the main one first: "higher" or "lower", whichever is better."""
    return {name.removeprefix("metric."): way for name, way in row.items() if name.startswith("metric.") and way}


def _curve_of(run: Run, metric: str, *, higher: bool) -> Curve:
    found = [(at_s, scores[metric]) for at_s, scores in run.evaluations() if metric in scores]
    return Curve([at_s for at_s, _ in found], [value for _, value in found], higher)


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
    _check_metrics(names, lines)
    return [parsed_row(names, cells) for _, cells in lines]


def _check_metrics(names: Sequence[str], lines: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Refuse a table in which a metric is neither a number nor missing."""
    metrics = [name for name in names if name in METRICS | TARGET_METRICS or name.startswith(("best_", "last_"))]
    for where, cells in lines:
        row = parsed_row(names, cells)
        for name in metrics:
            if isinstance(row[name], str | bool):
                raise SafaError(f"{where}: {name} must be a number or nothing, not {row[name]!r}")


def read_rows(path: Path, names: Sequence[str]) -> list[list[str]]:
    """The cells of the rows that are whole in the table of a sweep with these columns; none where there is no table."""
    if not path.exists():
        return []
    (_, head), *rows = read_cells(path) or [("", [])]
    if head != list(names):
        raise SafaError(f"{path} is not the table of this sweep: it has other columns")
    _check_metrics(names, rows)
    return [cells for _, cells in rows]
