"""The page of a sweep: many runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from safa.analysis import METRICS, TARGET_METRICS, all_metrics, higher_is_better
from safa.errors import SafaError
from safa.report import figures
from safa.report.figures import Axis
from safa.report.page import BEST, Block, Cell, Column, Fact, Facts, Figure, Section, Table, Words, render
from safa.report.words import TITLES, capital, number, value_of
from safa.runs.settings import Settings
from safa.runs.table import parsed_row, read_cells

__all__ = ["read_table", "sweep_page", "sweep_sections"]

Row = Mapping[str, Any]

_CURVES = ("sync_ratio", "effective_update_ratio", "futility", "starved")
_COLUMNS = ("round_length_s", "virtual_time_s", "sync_ratio", "effective_update_ratio", "version_variance", "futility",
            "starved", "fairness")  # fmt: skip
_TIME = "time_to_target_s"
_NOT_REACHED = " Only settings are shown with which every run reached it."
_SCORES = ("best_", "last_", "client_")
"""How the columns of a model's scores begin; behind that comes the name of a metric."""
_DIRECTION = "metric."
"""How the columns begin that say of a metric whether higher or lower is better."""
_TIME = "time_to_target_s"
_SERIES, _CHARTED = 8, 4
"""The most curves in one chart, and the most metrics that have charts."""

_NEEDED = ("task", "protocol", "clock", "seed", "fraction", "crash_rate", "rounds", "clients", *_COLUMNS)
"""Columns that are needed to distinguish and compare runs."""
_KINDS = {item.name: str(item.type) for item in fields(Settings)}


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a `results.csv`, numbers as numbers; an incomplete last row is ignored."""
    (_, names), *lines = read_cells(path) or [("", [])]
    return [_row(names, cells, where) for where, cells in lines]


def _row(names: Sequence[str], cells: Sequence[str], where: str) -> dict[str, Any]:
    values = parsed_row(names, cells)
    for name, value in values.items():
        _check_kind(name, value, where)
    return values


def _check_kind(name: str, value: Any, where: str) -> None:
    """Refuse a value that the column cannot hold; a metric may be missing, since not every run has all of them."""
    kind = _KINDS.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "bool" and not isinstance(value, bool):
        raise SafaError(f"{where}: {name} must be True or False, not {value!r}")
    if kind in ("int", "float") and not is_number:
        raise SafaError(f"{where}: {name} must be a number, not {value!r}")
    if _is_metric(name) and not is_number and value is not None:
        raise SafaError(f"{where}: {name} must be a number or nothing, not {value!r}")
    if name in ("task", "protocol") and value is None:
        raise SafaError(f"{where}: there is no {name}")


def _is_metric(name: str) -> bool:
    """Whether a column holds what a run came to, and no setting."""
    return name in METRICS or name in TARGET_METRICS or name.startswith(_SCORES)


def _directions(rows: Sequence[Row]) -> dict[str, str]:
    """The metrics of the tasks of these runs, the main one first, with what is better: higher or lower."""
    columns = [name for name in rows[0] if name.startswith(_DIRECTION)]
    found = {name: next((row[name] for row in rows if row.get(name) is not None), None) for name in columns}
    return {name.removeprefix(_DIRECTION): better for name, better in found.items() if better is not None}


def sweep_page(rows: Sequence[Row], *, title: str | None = None, lead: str | None = None) -> str:
    """The page of a sweep, from the rows of its table; title and lead are made from what was varied, unless given."""
    if not rows:
        raise SafaError("the sweep has no finished run yet, so there is nothing to report")
    missing = [name for name in _NEEDED if name not in rows[0]]
    if missing:
        raise SafaError(f"this is not the table of a sweep: it has no column {', '.join(missing)}")
    plan = _Plan.of(rows)
    tasks = ", ".join(str(task) for task in _distinct(rows, "task"))
    words = f"{len(rows):,} {'run' if len(rows) == 1 else 'runs'} on {tasks}. {plan.words}"
    return render(title or f"Sweep on {tasks}", lead or words, sweep_sections(rows))


def sweep_sections(rows: Sequence[Row]) -> list[Section]:
    """The sections of a sweep's page, for pages that contain more."""
    plan = _Plan.of(rows)
    best, words = _best(rows, plan)
    return [
        Section("Overview", [Words(words), Facts(_fixed(rows))]),
        Section("Curves" if plan.x else "Comparison", _charts(rows, plan)),
        Section("All runs", [_table(rows, plan, best)]),
    ]


@dataclass(frozen=True)
class _Plan:
    """What was varied in a sweep, and how that is drawn."""

    varied: dict[str, list[Any]]
    """The settings that were varied, with their values."""
    x: str | None
    """The numerical setting along the axis."""
    series: tuple[str, ...]
    """The settings that distinguish the curves; the others are averaged over."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> _Plan:
        settings = [name for name in rows[0] if not _is_metric(name) and not name.startswith(_DIRECTION)]
        settings.sort(key=lambda name: (name != "task", name != "protocol", name == "seed"))
        values = {name: _distinct(rows, name) for name in settings}
        varied = {name: several for name, several in values.items() if len(several) > 1 and not _is_tasks(rows, name)}
        others = [name for name in varied if name != "seed"]
        numeric = [name for name in others if all(_is_number(value) for value in varied[name])]
        x = max(numeric, key=lambda name: len(varied[name]), default=None)
        rest = sorted((name for name in others if name != x), key=lambda name: (name != "protocol", name != "task"))
        while len(rest) > 1 and x and len({_key(row, rest) for row in rows}) > _SERIES:
            rest.pop()
        return cls(varied, x, tuple(rest) if rest or x else tuple(name for name in varied if name == "seed"))

    @property
    def words(self) -> str:
        """What was varied, in a sentence."""
        if not self.varied:
            return "Nothing was varied."
        parts = [f"{_title(name)} ({_list(values)})" for name, values in self.varied.items()]
        rest = "comes with the task" if "task" in self.varied else "is the same in every run"
        return f"Varied: {'; '.join(parts)}. Everything else {rest}."

    @property
    def averaged(self) -> list[str]:
        """The settings that charts average over."""
        return [name for name in self.varied if name != self.x and name not in self.series]


def _distinct(rows: Sequence[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row.get(name) for row in rows))


def _is_tasks(rows: Sequence[Row], name: str) -> bool:
    """Whether a setting differs only because every task brings its own."""
    pairs = {(row.get("task"), row.get(name)) for row in rows}
    return name != "task" and len(pairs) == len({task for task, _ in pairs}) > 1


def _is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _title(name: str) -> str:
    return TITLES.get(name, name.replace("_", " "))


def _name(name: str) -> str:
    """The title without its unit."""
    return _title(name).split(",")[0]


def _list(values: Sequence[Any]) -> str:
    shown = [number(value) for value in values[:8]]
    return ", ".join(shown) + (f" and {len(values) - 8} more" if len(values) > 8 else "")


def _key(row: Row, names: Sequence[str]) -> str:
    """The name of a curve: the values that distinguish it."""
    return ", ".join(
        str(row[name]) if isinstance(row[name], str) else f"{_name(name)} {number(row[name])}" for name in names
    )


def _fixed(rows: Sequence[Row]) -> list[Fact]:
    """The settings that matter most and are the same in all runs."""
    wanted = ("protocol", "clients", "rounds", "fraction", "lag_tolerance", "crash_rate", "clock", "seed", "until")
    same = [name for name in wanted if len(_distinct(rows, name)) == 1 and rows[0].get(name) is not None]
    return [Fact(_title(name), number(rows[0][name])) for name in same]


def _measured(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    return [name for name in names if any(_is_number(row.get(name)) for row in rows)]


def _means(rows: Sequence[Row], metric: str, plan: _Plan) -> list[dict[str, Any]]:
    """The metric by x and series: mean, lowest and highest over the runs that differ in something else.

    Where a run did not reach its target there is no mean of times to it: that of the other runs would be too short.
    """
    groups: dict[tuple[Any, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row[plan.x] if plan.x else None, _key(row, plan.series)), []).append(row.get(metric))
    found = {key: [value for value in values if _is_number(value)] for key, values in groups.items()}
    return [
        {"x": x, "series": series, "mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
        for (x, series), values in found.items()
        if values and (metric != _TIME or len(values) == len(groups[x, series]))
    ]


def _charts(rows: Sequence[Row], plan: _Plan) -> list[Block]:
    if not plan.varied:
        return [Words("There is one setting only, so there is nothing to compare.")]
    kinds = {name: "seeds" if name == "seed" else f"values of {_title(name)}" for name in plan.averaged}
    over = " and ".join(f"{len(plan.varied[name])} {kind}" for name, kind in kinds.items())
    how = f"Mean over {over}; the band spans lowest to highest." if over else ""
    blocks: list[Block] = [Words(how)] if how else []
    return blocks + [_chart(rows, metric, plan) for metric in _curves(rows) if _means(rows, metric, plan)]


def _curves(rows: Sequence[Row]) -> list[str]:
    """The metrics that have charts."""
    names = list(_directions(rows))[:_CHARTED] or ["loss"]
    scores = [f"last_{names[0]}", f"best_{names[0]}", *(f"last_{name}" for name in names[1:])]
    return [_TIME, "round_length_s", *scores, *_CURVES]


def _chart(rows: Sequence[Row], metric: str, plan: _Plan) -> Figure:
    points = sorted(_means(rows, metric, plan), key=lambda point: point["x"] or 0)
    band = ("lowest", "highest") if plan.averaged else None
    nothing = all(point["highest"] == point["lowest"] == 0 for point in points)
    domain = (0.0, 1.0) if nothing else None
    y = Axis("mean", _title(metric), ",.3~r", zero=not metric.startswith(_SCORES), domain=domain)
    if plan.x:
        values = plan.varied[plan.x]
        x = Axis("x", _title(plan.x), ticks=values if len(values) <= 8 else None)
        names = list(dict.fromkeys(_key(row, plan.series) for row in rows))
        chart = figures.lines(points, x, y, series="series", names=names, band=band, points=True, height=220)
    else:
        chart = figures.dots(points, "series", y, band)
    name = _name(metric) + (f" by {_name(plan.x)}" if plan.x else "")
    low, high = (pick(points, key=lambda point: point["mean"]) for pick in (min, max))
    said = f"{name}: from {number(low['mean'])} ({low['series']}) to {number(high['mean'])} ({high['series']})."
    meaning = all_metrics(_directions(rows)).get(metric, metric)
    more = _NOT_REACHED if metric == _TIME and any(row.get(_TIME) is None for row in rows) else ""
    return Figure(chart, capital(name), f"{capital(meaning)}.{more}", said, wide=False)


def _best(rows: Sequence[Row], plan: _Plan) -> tuple[set[int], str]:
    """The rows of the best setting of every task, and a sentence that says by which metric."""
    places: set[int] = set()
    said: dict[str, list[str]] = {}
    for task in _distinct(rows, "task"):
        settings = _settings_of(rows, task, plan)
        metric, word, sign = _judged_by([row for row in rows if row.get("task") == task])
        means = {key: mean for key, its in settings.items() if (mean := _mean(rows, its, metric)) is not None}
        if len(settings) > 1 and means:
            best = min(means, key=lambda key: sign * means[key])
            places |= set(settings[best])
            on = f" on {task}" if "task" in plan.varied else ""
            kind = "geometric mean" if metric == _TIME else "mean"
            by = f"{word} ({kind} over the seeds)" if "seed" in plan.varied else word
            said.setdefault(by, []).append(f"{best}, with {value_of(metric, means[best])}{on}")
    if not said:
        return set(), _NONE_BEST if len(_settings_of(rows, rows[0]["task"], plan)) > 1 else _ONE_SETTING
    words = [f"The best setting is the one with the {by}: {'; '.join(found)}." for by, found in said.items()]
    return places, f"{' '.join(words)} It is marked in the table."


_ONE_SETTING = "There is one setting only, the seed aside, so none is marked as the best."
_NONE_BEST = "No setting has a finite score, or reached its target, in every run, so none is marked as the best."


def _judged_by(rows: Sequence[Row]) -> tuple[str, str, int]:
    """What decides which setting of a task is the best: the metric, that in words, and -1 where more is better."""
    if any(row.get("until") for row in rows):
        return _TIME, "shortest time to the target", 1
    directions = _directions(rows)
    main = next(iter(directions), "loss")
    if not any(row.get(f"last_{main}") is not None for row in rows):
        return "round_length_s", "shortest rounds", 1
    higher = higher_is_better(main, directions)
    return f"last_{main}", f"{'highest' if higher else 'lowest'} {main} of the last model", -1 if higher else 1


def _settings_of(rows: Sequence[Row], task: Any, plan: _Plan) -> dict[str, list[int]]:
    """For every setting that was tried on a task, the places of its rows."""
    names = [name for name in plan.varied if name not in ("seed", "task")]
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if row.get("task") == task:
            groups.setdefault(_key(row, names), []).append(place)
    return groups


def _mean(rows: Sequence[Row], places: Sequence[int], metric: str) -> float | None:
    """The mean of a metric over these rows, the geometric one of times to a target, as `safa best` has it.

    None where one of them has no finite number.
    """
    values: list[Any] = [rows[place].get(metric) for place in places]
    if not all(map(_is_number, values)):
        return None
    return geometric_mean(values) if metric == _TIME and min(values) > 0 else sum(values) / len(values)


def _table(rows: Sequence[Row], plan: _Plan, best: set[int]) -> Table:
    settings = list(plan.varied) or ["protocol", "seed"]
    metrics = _measured(rows, [*_COLUMNS, *TARGET_METRICS, *(name for name in rows[0] if name.startswith(_SCORES))])
    meanings = all_metrics(_directions(rows))
    columns = [Column(_title(name), meanings.get(name, "")) for name in (*settings, *metrics)]
    cells = [
        [*(_cell(row.get(name)) for name in settings), *(_score_cell(name, row.get(name)) for name in metrics)]
        for row in rows
    ]
    caption = "One row is one run. Click a heading to sort; the box filters rows by words."
    return Table(columns, cells, caption=caption, row_marks=dict.fromkeys(sorted(best), BEST))


def _cell(value: Any) -> Cell:
    return Cell(number(value), value if isinstance(value, int | float) else None)


def _score_cell(name: str, value: Any) -> Cell:
    """A metric, which may be infinite or no number; bytes with their unit."""
    if name.startswith("bytes_") and _is_number(value):
        return Cell(value_of(name, value), value)
    return _cell(value) if value is None or _is_number(value) else Cell(str(value), value)
