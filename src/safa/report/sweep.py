"""The page of a sweep: which setting is first, by how much, how sure that is, and the trade-offs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from safa.analysis import TARGET_METRICS, all_metrics
from safa.analysis.compare import Setting, Standing
from safa.analysis.statistics import Interval
from safa.errors import SafaError
from safa.report import figures
from safa.report.answer import Answer, find_answer
from safa.report.figures import Axis, Style
from safa.report.page import (
    BEST,
    Block,
    Cell,
    Column,
    Fact,
    Facts,
    Figure,
    Folded,
    Headline,
    Section,
    Table,
    Words,
    render,
)
from safa.report.plan import Plan, directions, distinct, is_number, short_title, title
from safa.report.rank_figures import ranks
from safa.report.setting_figures import MOST, curves, looks
from safa.report.tables import SCORES, Row
from safa.report.tradeoff_figures import Tradeoff, time_s, tradeoff
from safa.report.words import capital, counted, duration, goal, label, number, percent, some_of, value_of

__all__ = ["comparison", "sweep_heading", "sweep_page", "sweep_sections"]

_CURVES = ("sync_ratio", "effective_update_ratio", "futility", "starved")
_COLUMNS = ("round_length_s", "virtual_time_s", "sync_ratio", "effective_update_ratio", "version_variance", "futility",
            "starved", "fairness")  # fmt: skip
_TIME = "time_to_target_s"
_NOT_REACHED = " Only settings are shown with which every run reached it."
_CHARTED = 4
"""The most metrics that have charts."""

_NEEDED = ("task", "protocol", "clock", "seed", "fraction", "crash_rate", "rounds", "clients", *_COLUMNS)
"""Columns that are needed to distinguish and compare runs."""


def sweep_page(rows: Sequence[Row], *, target: str | None = None, planned: int | None = None) -> str:
    """The page of a sweep, from its rows (`read_sweep`).

    `target` is what is to be reached, where that is not the target of the sweep; `planned` is the number of its runs,
    of which not all may be finished.
    """
    sections = sweep_sections(rows, target=target)
    return render(*sweep_heading(rows, planned), sections)


def sweep_heading(rows: Sequence[Row], planned: int | None = None) -> tuple[str, str]:
    """The title of a sweep's page, and what was varied."""
    tasks = ", ".join(str(task) for task in distinct(rows, "task"))
    runs = counted(len(rows), "run")
    if planned is not None and planned > len(rows):
        runs = f"Not finished: {len(rows):,} of {counted(planned, 'run')}"
    return f"Sweep on {tasks}", f"{runs} on {tasks}. {Plan.of(rows).words}"


def sweep_sections(rows: Sequence[Row], *, target: str | None = None) -> list[Section]:
    """The sections of a sweep's page, for pages that contain more."""
    if not rows:
        raise SafaError("the sweep has no finished run yet, so there is nothing to report")
    missing = [name for name in _NEEDED if name not in rows[0]]
    if missing:
        raise SafaError(f"this is not the table of a sweep: it has no column {', '.join(missing)}")
    return comparison(rows, Plan.of(rows), target=target)


def comparison(rows: Sequence[Row], plan: Plan, *, target: str | None = None) -> list[Section]:
    """The sections that compare the settings of runs, task by task."""
    tasks = distinct(rows, "task")
    answers = [find_answer([row for row in rows if row["task"] == task], plan, target) for task in tasks]
    sections = [section for answer in answers for section in _of_task(answer, plan, several=len(tasks) > 1)]
    return [*sections, Section("All metrics and runs", _rest(rows, plan, answers), "all")]


def _of_task(answer: Answer, plan: Plan, *, several: bool) -> list[Section]:
    """What is said about a task: which setting is first, and the trade-offs."""
    on = f" on {answer.task}" if several else ""
    styled = looks(answer.settings, plan)
    head = f"Which setting is first{on}" if answer.target else f"Which setting is best{on}"
    traded = _tradeoffs(answer, styled)
    sections = [Section(head, _first(answer, styled), f"first-{answer.task}" if several else "first")]
    return sections + (
        [Section(f"Trade-offs{on}", traded, f"trade-offs-{answer.task}" if several else "trade-offs")] if traded else []
    )


# -- which is first ----------------------------------------------------------------------------------------------------


def _first(answer: Answer, styled: dict[str, Style]) -> list[Block]:
    facts, note = answer.headline(), answer.note()
    blocks: list[Block] = [Headline(facts)] if facts else []
    blocks += [block for block in (_curves(answer, styled), _ranks(answer, styled)) if block]
    if len(answer.settings) == 1:
        note = f"There is one setting only, so there is nothing to compare. {note}"
    return blocks + ([Words(note)] if note else [])


def _curves(answer: Answer, styled: dict[str, Style]) -> Figure | None:
    chart = curves(answer, styled)
    if chart is None:
        return None
    metric = answer.target.metric if answer.target else answer.metric
    seeds = max(len(setting.rows) for setting in answer.settings)
    caption = "Mean over the seeds; the band spans lowest to highest." if seeds > 1 else "One run a setting."
    caption += (
        " A dot marks when the target is reached." if answer.best and answer.best.is_found and answer.target else ""
    )
    caption += f" Grey: settings behind the first {MOST}." if len(answer.settings) > len(styled) else ""
    said = f"{capital(metric)} over time, a curve for each of {len(answer.settings)} settings."
    return Figure(chart, f"{capital(metric)} over time", caption, said, wide=False)


def _ranks(answer: Answer, styled: dict[str, Style]) -> Figure | None:
    best = answer.best
    if best is None or not best.is_found or len(best.standings) < 2:
        return None
    what = f"Time to {goal(best.target)}" if best.target else f"{capital(_ranked_by(best.metric))}, the best first"
    caption = "The best is on top. "
    if best.seeds > 1:
        caption += (
            "The line on a bar is the 95% interval of how far it is behind the first, seed by seed; one that "
            "crosses the grey mark of the first cannot be told from it."
        )
    if len(best.standings) > len(styled):
        caption += f" The first {len(styled)} of {len(best.standings)}."
    return Figure(ranks(best, styled), what, caption, " ".join(best.sentences()), wide=False)


def _ranked_by(metric: str) -> str:
    return "length of a round" if metric == "round_length_s" else f"{metric} of the last model"


# -- trade-offs --------------------------------------------------------------------------------------------------------


def _tradeoffs(answer: Answer, styled: dict[str, Style]) -> list[Block]:
    worst = f"client_{answer.metric}_worst_decile"
    wanted = [
        Tradeoff(f"best_{answer.metric}", f"best {answer.metric}", answer.higher),
        Tradeoff("futility", "work thrown away", False, "~%"),
        Tradeoff(worst, f"{answer.metric} of the worst-served tenth", answer.higher),
        Tradeoff("starved", "clients left out", False, "~%"),
    ]
    if any(row.get(worst) is not None for setting in answer.settings for row in setting.rows):
        wanted.pop()
    wanted.append(Tradeoff("bytes_up", "bytes sent by clients", False, ".3~s"))
    figures_ = [figure for what in wanted if (figure := _tradeoff(answer, styled, what))]
    return [Words(_tradeoff_words(answer, has_worst=wanted[2].column == worst)), *figures_] if figures_ else []


def _tradeoff_words(answer: Answer, *, has_worst: bool) -> str:
    words = (
        "A point is a setting, a mean over its seeds. On the dashed line, the Pareto front, no setting is both sooner "
        "and better; the others are faint."
    )
    if answer.target:
        left = [setting.name for setting in answer.settings if time_s(answer, setting) is None]
        words += " Runs ended at the target: their best is hardly above it." if _ended_there(answer) else ""
        words += f" Not drawn, as they did not reach the target with every seed: {some_of(left)}." if left else ""
    if not has_worst:
        words += " How the worst-served tenth of the clients fares is known with `--eval-clients true`."
    return words


def _ended_there(answer: Answer) -> bool:
    """Whether the runs ended when they had reached the target."""
    return all(str(row.get("until") or "") == str(answer.target) for one in answer.settings for row in one.rows)


def _tradeoff(answer: Answer, styled: dict[str, Style], what: Tradeoff) -> Figure | None:
    found = tradeoff(answer, styled, what)
    if found is None:
        return None
    chart, front = found
    said = f"On the front, the soonest first: {'; '.join(front)}."
    better = "Higher is better" if what.higher else "Lower is better"
    return Figure(chart, f"Time against {what.name}", f"{better}. {said}", said, wide=False)


# -- everything else ---------------------------------------------------------------------------------------------------


def _rest(rows: Sequence[Row], plan: Plan, answers: Sequence[Answer]) -> list[Block]:
    first = {id_ for answer in answers if answer.best and answer.best.is_found for id_ in _places(rows, answer, plan)}
    charts = _charts(rows, plan)
    fixed = _fixed(rows)
    return [
        *(_settings_table(answer, plan) for answer in answers),
        *([Folded("Charts of all metrics", charts)] if charts else []),
        Folded("All runs", [_runs_table(rows, plan, first)]),
        *([Folded("What was the same", [Facts(fixed)])] if fixed else []),
    ]


def _places(rows: Sequence[Row], answer: Answer, plan: Plan) -> list[int]:
    """The places of the runs of the best setting of a task, if there are several settings."""
    assert answer.best is not None
    if len(answer.best.standings) < 2:
        return []
    first = answer.best.first.values
    return [
        n
        for n, row in enumerate(rows)
        if row["task"] == answer.task and plan.place(row) | {"seed": 0} == first | {"seed": 0}
    ]


def _settings_table(answer: Answer, plan: Plan) -> Table:
    """A row a setting, in their order: how it stands, and means of what matters most."""
    places = {one.setting.name: (n, one) for n, one in enumerate(answer.best.standings)} if answer.best else {}
    shown = _shown(answer)
    meanings = all_metrics({answer.metric: "higher" if answer.higher else "lower"})
    columns = [
        Column("setting"),
        Column("seeds"),
        *(_standing_columns(answer)),
        *(Column(said, meanings.get(name, "")) for name, said in shown.items()),
    ]
    rows: list[list[str | Cell]] = [
        [
            setting.name,
            _seeds(answer, setting, places),
            *_standing_cells(answer, places.get(setting.name)),
            *(_mean_cell(name, setting.mean(name)) for name in shown),
        ]
        for setting in answer.settings
    ]
    several = any(len(setting.rows) > 1 for setting in answer.settings)
    caption = f"Settings on {answer.task}, the best first." + (
        " Means over the seeds with 95% intervals." if several else ""
    )
    marks = {0: BEST} if answer.best and answer.best.is_found and len(answer.best.standings) > 1 else {}
    return Table(columns, rows, caption=caption, row_marks=marks, filterable=len(rows) > MOST)


def _shown(answer: Answer) -> dict[str, str]:
    """The metrics of the table of settings, with their names for readers."""
    metric, which = answer.metric, "best" if answer.target else "last"
    names = {
        f"{which}_{metric}": f"{which} {metric}",
        f"client_{metric}_worst_decile": "worst-served tenth", "futility": "work thrown away",
        "starved": "clients left out", "round_length_s": "round", "virtual_time_s": "whole run",
    }  # fmt: skip
    return {name: said for name, said in names.items() if any(setting.mean(name) for setting in answer.settings)}


def _standing_columns(answer: Answer) -> list[Column]:
    if answer.best is None:
        return []
    if answer.target is None:
        return [Column("behind the first"), Column("told from the first")]
    return [
        Column("time to target", "geometric mean over the seeds"),
        Column("times as long"),
        Column("told from the first"),
    ]


def _standing_cells(answer: Answer, found: tuple[int, Standing] | None) -> list[Cell]:
    """How a setting stands behind the first one."""
    if answer.best is None:
        return []
    value = [] if answer.target is None else [Cell("")]
    if found is None:
        return [*value, Cell(""), Cell("")]
    place, standing = found
    if answer.target is not None and standing.value is not None:
        value = [Cell(duration(standing.value), standing.value)]
    if place == 0:
        return [*value, Cell("first", 1.0 if answer.target else 0.0), Cell("")]
    behind = Cell(_interval(standing.behind), standing.behind.mean) if standing.behind else Cell("")
    return [*value, behind, Cell("yes" if standing.is_told else "cannot tell")]


def _interval(found: Interval) -> str:
    return f"{found.mean:.3g}" + ("" if found.low is None else f" ({found.low:.3g} to {found.high:.3g})")


def _seeds(answer: Answer, setting: Setting, places: dict[str, tuple[int, Standing]]) -> Cell:
    if answer.target is None or setting.name not in places:
        return Cell(str(len(setting.rows)), len(setting.rows))
    reached = places[setting.name][1].setting.reached
    return Cell(f"{reached} of {len(setting.rows)}", reached)


def _mean_cell(name: str, found: Interval | None) -> Cell:
    """A mean with half the width of its interval, to two digits of that."""
    if found is None:
        return Cell("")
    shown = duration if name.endswith("_s") else percent if name in ("futility", "starved") else number
    half = found.high - found.mean if found.high is not None else 0.0
    if not half or not math.isfinite(half):
        return Cell(shown(found.mean), found.mean)
    digits = max(0, 1 - math.floor(math.log10(half)))
    plain = f"{found.mean:,.{digits}f} ± {half:,.{digits}f}"
    return Cell(plain if shown is number else f"{shown(found.mean)} ± {shown(half)}", found.mean)


def _fixed(rows: Sequence[Row]) -> list[Fact]:
    """The settings that matter most and are the same in all runs."""
    wanted = ("protocol", "clients", "rounds", "fraction", "lag_tolerance", "crash_rate", "clock", "seed", "until")
    same = [name for name in wanted if len(distinct(rows, name)) == 1 and rows[0].get(name) is not None]
    return [Fact(title(name), number(rows[0][name])) for name in same]


def _measured(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    return [name for name in names if any(is_number(row.get(name)) for row in rows)]


def _means(rows: Sequence[Row], metric: str, plan: Plan) -> list[dict[str, Any]]:
    """The metric by x and series: mean, lowest and highest over the runs that differ in something else.

    Where a run did not reach its target there is no mean of times to it: that of the other runs would be too short.
    """
    groups: dict[tuple[Any, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row[plan.x] if plan.x else None, plan.curve(row)), []).append(row.get(metric))
    found = {key: [value for value in values if is_number(value)] for key, values in groups.items()}
    return [
        {"x": x, "series": series, "mean": sum(values) / len(values), "lowest": min(values), "highest": max(values)}
        for (x, series), values in found.items()
        if values and (metric != _TIME or len(values) == len(groups[x, series]))
    ]


def _charts(rows: Sequence[Row], plan: Plan) -> list[Block]:
    """Every metric by what was varied."""
    if not plan.varied:
        return []
    kinds = {name: "seeds" if name == "seed" else f"values of {title(name)}" for name in plan.averaged}
    over = " and ".join(f"{len(plan.varied[name])} {kind}" for name, kind in kinds.items())
    blocks: list[Block] = [Words(f"Mean over {over}; the band spans lowest to highest.")] if over else []
    return blocks + [_chart(rows, metric, plan) for metric in _charted(rows) if _means(rows, metric, plan)]


def _charted(rows: Sequence[Row]) -> list[str]:
    """The metrics that have charts."""
    names = list(directions(rows))[:_CHARTED] or ["loss"]
    scores = [f"last_{names[0]}", f"best_{names[0]}", *(f"last_{name}" for name in names[1:])]
    return [_TIME, "round_length_s", *scores, *_CURVES]


def _chart(rows: Sequence[Row], metric: str, plan: Plan) -> Figure:
    points = sorted(_means(rows, metric, plan), key=lambda point: point["x"] or 0)
    band = ("lowest", "highest") if plan.averaged else None
    nothing = all(point["highest"] == point["lowest"] == 0 for point in points)
    domain = (0.0, 1.0) if nothing else None
    y = Axis("mean", title(metric), ",.3~r", zero=not metric.startswith(SCORES), domain=domain)
    if plan.x:
        values = plan.varied[plan.x]
        x = Axis("x", title(plan.x), ticks=values if len(values) <= MOST else None)
        names = list(dict.fromkeys(plan.curve(row) for row in rows))
        chart = figures.lines(points, x, y, series="series", names=names, band=band, points=True, height=220)
    else:
        chart = figures.dots(points, "series", y, band)
    name = label(metric) + (f" by {short_title(plan.x)}" if plan.x else "")
    low, high = (pick(points, key=lambda point: point["mean"]) for pick in (min, max))
    said = f"{name}: from {number(low['mean'])} ({low['series']}) to {number(high['mean'])} ({high['series']})."
    meaning = all_metrics(directions(rows)).get(metric, metric)
    more = _NOT_REACHED if metric == _TIME and any(row.get(_TIME) is None for row in rows) else ""
    return Figure(chart, name, f"{capital(meaning)}.{more}", said, wide=False)


def _runs_table(rows: Sequence[Row], plan: Plan, best: set[int]) -> Table:
    settings = list(plan.varied) or ["protocol", "seed"]
    metrics = _measured(rows, [*_COLUMNS, *TARGET_METRICS, *(name for name in rows[0] if name.startswith(SCORES))])
    meanings = all_metrics(directions(rows))
    columns = [Column(title(name), meanings.get(name, "")) for name in (*settings, *metrics)]
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
    if name.startswith("bytes_") and is_number(value):
        return Cell(value_of(name, value), value)
    return _cell(value) if value is None or is_number(value) else Cell(str(value), value)
