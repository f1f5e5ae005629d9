"""Output in a terminal: summaries and tables. What draws them is loaded when there is something to show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from safa.analysis import all_metrics, target_words
from safa.runs import RunWriter
from safa.runs.settings import Settings

if TYPE_CHECKING:
    from rich.table import Table

    from safa.cli.console import Terminal

__all__ = ["print_names", "print_summary", "print_table"]

_TABLE_WIDTH = 110
"""The least width of a table: a number that is cut off is worse than a line that wraps."""


def print_names(title: str, summaries: Mapping[str, str]) -> None:
    """Names with a line each on what they mean."""
    print_table([title, "summary"], list(summaries.items()))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain table, at least so wide that no number is cut off."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*head, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    _wide_console().print(table)


def _wide_console() -> Terminal:
    from safa.cli.console import Terminal

    console = Terminal()
    console.width = max(console.width, _TABLE_WIDTH)
    return console


def print_summary(settings: Settings, values: dict[str, Any], writer: RunWriter | None) -> None:
    """The most important settings of a run, its metrics, and where it was written."""
    from safa.cli.console import Terminal

    console = Terminal()
    of_protocol = {"C": "fraction", "tau": "lag_tolerance"}
    shown = [
        f"{settings.clients:,} clients, {'at most ' * bool(settings.until)}{settings.rounds} rounds",
        *(f"{sign} = {getattr(settings, name):g}" for sign, name in of_protocol.items() if not settings.unmet(name)),
        f"crash rate {settings.crash_rate:g}, {settings.clock} clock, seed {settings.seed}",
    ]
    console.print(f"[bold]{settings.protocol}[/bold] on {settings.task}: {', '.join(shown)}.", soft_wrap=True)
    console.print(_metrics_table(values, settings.metrics))
    console.print(_times(values, settings), soft_wrap=True)
    console.print(
        f"Written to {writer.folder}; safa report {writer.folder} makes a page of it."
        if writer
        else "Nothing was written; --out DIR keeps the run.",
        soft_wrap=True,
    )


def _metrics_table(values: dict[str, Any], directions: Mapping[str, str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, meaning in all_metrics(directions).items():
        if values.get(name) is not None:
            table.add_row(name, _number(values[name]), meaning)
    return table


def _times(values: dict[str, Any], settings: Settings) -> str:
    hours, wall_s, main = values["virtual_time_s"] / 3600, values["wall_time_s"], next(iter(settings.metrics), "loss")
    last = values.get(f"last_{main}")
    learnt = "" if last is None else f" On the test set the {main} of the last model is {last:.3f}."
    target = target_words(settings.target, values)
    said = f"The devices would have taken {hours:,.1f} hours; the simulation took {wall_s:.1f} s.{learnt}"
    return f"{said} {target}" if target else said


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
