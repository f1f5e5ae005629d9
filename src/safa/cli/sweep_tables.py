"""What a sweep came to, in a terminal: a line for every setting, and which of them is the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from safa.analysis.compare import Best, Setting, Standing
from safa.analysis.statistics import Interval
from safa.cli.console import Terminal

__all__ = ["print_best", "print_settings"]

_SHOWN = {"round_length_s": "round, s", "virtual_time_s": "total, s", "futility": "futility", "starved": "starved"}
_TO_TARGET = {
    "time_to_target_s": "time to target, s",
    "rounds_to_target": "rounds to target",
    "bytes_to_target": "MB to target",
}
"""The metrics in the table of a sweep, with their titles."""
_SCALES = {"bytes_to_target": 1e-6}
_RELATIVE = "time, relative"
_MOST_ROWS = 40
_WIDEST = 500


def print_settings(settings: Sequence[Setting]) -> None:
    """The settings of a sweep as a table: what was varied, and means of the most important metrics over the seeds."""
    seeds, shown = len(settings[0].rows), _shown(settings)
    targets = _TO_TARGET if any("time_to_target_s" in setting.rows[0] for setting in settings) else {}
    reached = [setting for setting in settings if targets and setting.reached == len(setting.rows)]
    relative = [_RELATIVE] if len(reached) > 1 else []
    lines = [
        [
            *setting.values.values(),
            *(_spread(setting.mean(name)) for name in shown),
            *(_to_target(setting, reached)[: len(targets) + len(relative)] if targets else ()),
        ]
        for setting in settings[:_MOST_ROWS]
    ]
    _print_table(list(settings[0].values), [*shown.values(), *targets.values(), *relative], lines)
    if len(settings) > _MOST_ROWS:
        _print_line(f"... and {len(settings) - _MOST_ROWS} more")
    _print_line(
        f"Means over {seeds} seeds with 95% intervals." if seeds > 1 else "One seed, so there are no intervals."
    )
    if relative:
        _print_line(f"{_RELATIVE}: times as long as the setting that has 1 there, compared seed by seed.")


def _shown(settings: Sequence[Setting]) -> dict[str, str]:
    """The columns of a sweep's table with their titles: the best of the main metric comes first."""
    rows = [row for setting in settings for row in setting.rows]
    best = dict.fromkeys(next((name for name in row if name.startswith("best_")), "best_loss") for row in rows)
    shown = {name: name.removeprefix("best_") for name in best} | _SHOWN
    return {name: title for name, title in shown.items() if any(row.get(name) is not None for row in rows)}


def _to_target(setting: Setting, reached: Sequence[Setting]) -> list[str]:
    """The columns of the target; where not all seeds reached it, how many did."""
    if setting not in reached:
        return [f"{setting.reached} of {len(setting.rows)} seeds"]
    means = [_spread(setting.mean(name), _SCALES.get(name, 1.0)) for name in _TO_TARGET]
    reference = next(one for one in reached if one.rows[0]["task"] == setting.rows[0]["task"])
    return [*means, "1" if setting is reference else _ratio(setting.times_as_long(reference))]


def _spread(found: Interval | None, scale: float = 1.0) -> str:
    """A mean with half the width of its interval, to two digits of the latter."""
    if found is None:
        return ""
    mean = found.mean * scale
    half = (found.high - found.mean) * scale if found.high is not None else 0.0
    if not half or not math.isfinite(half):
        return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:,.{digits}f} ± {half:,.{digits}f}"


def _ratio(found: Interval | None) -> str:
    if found is None:
        return ""
    return f"{found.mean:.2f}" + ("" if found.low is None else f" ({found.low:.2f} to {found.high:.2f})")


def print_best(best: Best) -> None:
    """Which setting is first, in words, and where the others stand."""
    for sentence in best.sentences():
        _print_line(sentence)
    if not best.is_found or len(best.standings) < 2:
        return
    titles = ("time to target, s", "times as long") if best.target else (f"last {best.metric}", "worse by")
    lines = [_standing(standing, best) for standing in best.standings]
    print()
    _print_table(list(best.first.values), ["seeds", *titles, "95% interval", "told from the first"], lines)


def _standing(standing: Standing, best: Best) -> list[Any]:
    setting = standing.setting
    seeds = f"{setting.reached} of {best.seeds}" if best.target else str(best.seeds)
    value = "" if standing.value is None else _spread(Interval(standing.value))
    shown = [*setting.values.values(), seeds, value]
    if setting is best.first:
        return shown
    behind, told = standing.behind, "yes" if standing.is_told else "no"
    if behind is None:
        return [*shown, "", "", told]
    return [
        *shown,
        f"{behind.mean:.3g}",
        "" if behind.low is None else f"{behind.low:.3g} to {behind.high:.3g}",
        told,
    ]


def _print_table(settings: Sequence[str], titles: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """A table in its full width: a number that is cut off is worse than a line that wraps."""
    table = Table(box=None, pad_edge=False)
    for name in settings:
        table.add_column(name, style="cyan")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*("" if cell is None else escape(str(cell)) for cell in line))
    console = Terminal()
    console.width = _WIDEST
    console.print(table)


def _print_line(text: str) -> None:
    Terminal().print(escape(text), soft_wrap=True)
