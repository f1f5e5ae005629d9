"""What a person sees in a terminal: progress, summaries, tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from safa.analysis import CLIENT_METRICS, METRICS
from safa.runs import RunWriter
from safa.runs.settings import Settings

__all__ = ["TABLE_WIDTH", "print_rows", "print_summary", "with_progress"]

TABLE_WIDTH = 110
"""Tables are at least so wide: a figure that is cut off is worse than a line that wraps."""
_PROGRESS_AFTER_S = 2.0
_MOST_ROWS = 40
_T = TypeVar("_T")


def with_progress(
    items: Iterable[_T],
    total: float,
    unit: str,
    *,
    quiet: bool,
    done: int = 0,
    weigh: Callable[[_T], float] | None = None,
) -> Iterator[_T]:
    """The items, `done` of which came earlier, with a progress bar on stderr if they take more than two seconds.

    Where items take unlike long, `weigh` says how much of the `total` each of them is.
    """
    columns = (MofNCompleteColumn(),) if weigh is None else (TaskProgressColumn(), TextColumn("{task.fields[count]}"))
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    start = time.perf_counter()
    job = bar.add_task(unit, total=total, completed=done, count="")
    completed = float(done)
    try:
        for number, item in enumerate(items, start=done):
            if not quiet and not bar.live.is_started and time.perf_counter() - start > _PROGRESS_AFTER_S:
                bar.start()
            completed = number if weigh is None else completed + weigh(item)
            bar.update(job, completed=completed, count=f"{number + 1} done")
            yield item
    finally:
        if bar.live.is_started:
            bar.stop()


def print_summary(settings: Settings, values: dict[str, Any], writer: RunWriter | None) -> None:
    """What was run, in words, and what came out."""
    console = Console(highlight=False)
    console.print(
        f"[bold]{settings.protocol}[/bold] on {settings.task}: {settings.clients:,} clients, {settings.rounds} rounds, "
        f"C = {settings.fraction:g}, crash rate {settings.crash_rate:g}, tau = {settings.lag_tolerance}, "
        f"{settings.clock} clock, seed {settings.seed}.",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, meaning in (METRICS | CLIENT_METRICS).items():
        if values.get(name) is not None:
            table.add_row(name, _number(values[name]), meaning)
    console.print(table)
    hours = values["virtual_time_s"] / 3600
    learnt = ""
    if values["last_accuracy"] is not None:
        learnt = f" The model has an accuracy of {values['last_accuracy']:.3f} on data that it was not trained on."
    console.print(
        f"Such devices would have taken {hours:,.1f} hours; here it took {values['wall_time_s']:.1f} s.{learnt}",
        soft_wrap=True,
    )
    console.print(
        f"Written to {writer.folder}; safa report {writer.folder} makes a page of it."
        if writer
        else "Nothing was written; --out DIR keeps the run.",
        soft_wrap=True,
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def print_rows(rows: Sequence[dict[str, Any]], varied: Sequence[str], several_tasks: bool) -> None:
    """The runs of a sweep as a table: what was varied, and the metrics that matter most."""
    names = [*(["task"] if several_tasks else []), *varied]
    shown = {
        "round_length_s": "round, s",
        "virtual_time_s": "total, s",
        "sync_ratio": "SR",
        "effective_update_ratio": "EUR",
        "futility": "futility",
        "starved": "starved",
        "fairness": "fairness",
        "best_accuracy": "accuracy",
    }
    table = Table(box=None, pad_edge=False)
    for name in names:
        table.add_column(name, style="cyan")
    shown = {name: title for name, title in shown.items() if rows and rows[0][name] is not None}
    for title in shown.values():
        table.add_column(title, justify="right")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*(str(row[name]) for name in names), *(_number(row[name]) for name in shown))
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # a figure that is cut off is worse than a line that wraps
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"... and {len(rows) - _MOST_ROWS} more", highlight=False)
