"""What a run or a sweep shows of itself in a notebook: a few lines of HTML.

A card needs no script, no style sheet and no network. It has no colours of its own but that of its curve, which can be
seen on white and on black; everything else has the notebook's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from safa.analysis import Curve, Metrics, target_words
from safa.analysis.compare import Best, Standing
from safa.report.run import run_heading
from safa.report.words import capital, counted, duration, label, number, percent
from safa.runs import Run

__all__ = ["run_card", "sweep_card"]

_MOST_ROWS = 12
_FRAME = "font:13px/1.5 system-ui,sans-serif;max-width:60em;overflow-x:auto"
_FAINT = "opacity:.75"
_TABLE = "font:inherit;border-collapse:collapse;margin:.4em 0"
_CELL = "text-align:left;white-space:nowrap;padding:.15em 1.4em .15em 0;border-bottom:1px solid #8888"
_WIDTH, _HEIGHT = 240, 48
_CURVE = "#3b8bd0"


def run_card(run: Run) -> str:
    """The card of a run, finished or not: what was run, how good, how long, what was wasted, who was left out.

    Of a finished run no record is read, only when its models were evaluated and how good they were.
    """
    title, words = run_heading(run)
    rounds, values = _so_far(run) if run.summary is None else (run.settings.rounds, run.summary)
    if not rounds:
        return _card(title, f"{words}{_state(run, rounds)}", [])
    facts = _facts(run, values)
    parts = [_table(list(facts), [list(facts.values())]), _sentence(target_words(run.settings.target, values))]
    return _card(title, f"{words}{_state(run, rounds)}", [*parts, _sparkline(_curve(run))])


def _so_far(run: Run) -> tuple[int, dict[str, Any]]:
    """How many rounds of an unfinished run there are, and its metrics until now."""
    metrics, rounds = Metrics(run.settings.metrics, run.settings.target), 0
    for record in run.records() if run.has_rounds() else ():
        metrics.add(record)
        rounds += 1
    return rounds, metrics.values()


def _state(run: Run, rounds: int) -> str:
    """What the settings do not say: that a run is not finished, and where it is."""
    there = "" if run.summary is not None else f" Not finished: {counted(rounds, 'round')} of {run.settings.rounds:,}."
    return there if run.folder is None else f"{there} In {run.folder}."


def _facts(run: Run, values: Mapping[str, Any]) -> dict[str, str]:
    """Four numbers with their names; a run without a model has three."""
    main, clients = next(iter(run.settings.metrics), "loss"), len(run.roster() or ()) or run.settings.clients
    score = values.get(f"last_{main}")
    scores = {} if score is None else {f"{capital(main)} of the last model": number(score)}
    return scores | {
        label("virtual_time_s"): duration(values["virtual_time_s"]),
        label("futility"): percent(values["futility"]),
        label("starved"): f"{round(values['starved'] * clients):,} of {clients:,}",
    }


def _curve(run: Run) -> Curve:
    """The main metric, or the loss where there is none, over time."""
    main = next(iter(run.settings.metrics), "loss")
    found = [(at_s, scores[main]) for at_s, scores in run.evaluations() if main in scores]
    return Curve([at_s for at_s, _ in found], [value for _, value in found])


def _sparkline(curve: Curve) -> str:
    """A small curve without axes; nothing where there are fewer than two finite values."""
    pairs = zip(curve.times_s, curve.values, strict=True)
    points = [(time, value) for time, value in pairs if math.isfinite(value)]
    if len(points) < 2:
        return ""
    times, values = zip(*points, strict=True)
    xs, ys = _scaled(times, _WIDTH), _scaled(values, _HEIGHT)
    drawn = " ".join(f"{x + 2:.1f},{_HEIGHT - y + 2:.1f}" for x, y in zip(xs, ys, strict=True))
    said = f"from {number(values[0])} to {number(values[-1])}"
    return (
        f'<svg role="img" aria-label="{escape(said)}" width="{_WIDTH + 4}" height="{_HEIGHT + 4}">'
        f'<polyline points="{drawn}" fill="none" stroke="{_CURVE}" stroke-width="2"/></svg>'
    )


def _scaled(values: Sequence[float], length: float) -> list[float]:
    low, high = min(values), max(values)
    return [length * (value - low) / ((high - low) or 1.0) for value in values]


def sweep_card(title: str, planned: str, answers: Sequence[Best | str]) -> str:
    """The card of a sweep: its plan in words, and for every task the answer, or why there is none."""
    parts = [_sentence(one) if isinstance(one, str) else _answer(one) for one in answers]
    return _card(title, planned, parts)


def _answer(best: Best) -> str:
    """Which setting is the best, in words, and where the others stand."""
    numbers = ("time to target, s", "times as long") if best.target else (f"last {best.metric}", "worse by")
    titles = [*best.first.values, "seeds", *numbers, "95% interval", "told from the first"]
    ranked = [_standing(standing, best) for standing in best.standings[:_MOST_ROWS]]
    left = len(best.standings) - len(ranked)
    more = [f"... and {left:,} more"] if left else []
    return "".join([*map(_sentence, best.sentences()), _table(titles, ranked), *map(_sentence, more)])


def _standing(standing: Standing, best: Best) -> list[Any]:
    """A row of the answer."""
    setting, behind = standing.setting, standing.behind
    seeds = f"{setting.reached} of {best.seeds}" if best.target else best.seeds
    shown = [*setting.values.values(), seeds, standing.value]
    if setting is best.first:
        return [*shown, "", "", ""]
    told = "yes" if standing.is_told else "no"
    if behind is None:
        return [*shown, "", "", told]
    return [*shown, behind.mean, "" if behind.low is None else f"{behind.low:.3g} to {behind.high:.3g}", told]


def _card(title: str, line: str, parts: Sequence[str]) -> str:
    head = f'<div><strong>{escape(title)}</strong> <span style="{_FAINT}">{escape(line)}</span></div>'
    return f'<div style="{_FRAME}">{head}{"".join(parts)}</div>'


def _sentence(text: str) -> str:
    return f"<div>{escape(text)}</div>" if text else ""


def _table(titles: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A table; nothing where it has no rows."""
    head = "".join(f'<th style="{_CELL}">{escape(number(title))}</th>' for title in titles)
    lines = ["".join(f'<td style="{_CELL}">{escape(number(value))}</td>' for value in row) for row in rows]
    body = "".join(f"<tr>{cells}</tr>" for cells in lines)
    return f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>' if rows else ""
