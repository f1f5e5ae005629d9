"""What `safa deploy` prints during a run."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safa.analysis import target_words
from safa.cli.console import Terminal
from safa.cli.live import LiveView
from safa.cli.progress import Progress
from safa.deploy.exchange.files import finished_rounds
from safa.deploy.exchange.text import printable
from safa.protocol.records import RoundRecord
from safa.runs import load_run
from safa.trackers import find_trackers, track_folder

__all__ = ["show_run", "sigterm_like_ctrl_c"]


@contextmanager
def sigterm_like_ctrl_c() -> Iterator[None]:
    """Be stopped by a service manager (SIGTERM) as by a person (Ctrl-C)."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def show_run(
    arguments: argparse.Namespace, kind: str, folder: Path, run: Callable[[Path, Callable[[Any], None]], None]
) -> None:
    """Run a deployment to its end, and print what happens and the result."""
    settings = load_run(folder).settings
    rounds, done = settings.rounds, finished_rounds(folder)
    progress = Progress(rounds, "round", done=done, at_most=bool(settings.until), time_name="time")
    show = _Show(quiet=arguments.quiet, progress=progress)
    try:
        with sigterm_like_ctrl_c(), track_folder(find_trackers(arguments.track), folder, tell=show.warn) as tracking:
            show.line(f"Written to {folder} as it happens.")
            with show.view:
                run(folder, tracking.before(show))
            tracking.on_end(load_run(folder))
    except KeyboardInterrupt:
        kept = f"{finished_rounds(folder)} of {rounds} rounds are finished and can be read in {folder}"
        raise KeyboardInterrupt(f"{kept}; resume with safa deploy {kind} --resume {folder}") from None
    show.end(folder)


class _Show:
    """Shows rounds in the live view or, where that cannot be drawn, as rows of a table; other lines go to stderr.

    A table that is read by another program is written in either case.
    """

    _COLUMNS = ("round", "time, s", "picked", "undrafted", "refused", "clients", "loss", "metric")

    def __init__(self, *, quiet: bool, progress: Progress | None = None) -> None:
        self._quiet, self._headed = quiet, False
        self._out = Terminal()
        self.view = LiveView(progress or Progress(0, "round"), quiet=quiet, lines=False)
        self._has_rows = not quiet and not (self.view.is_drawn and sys.stdout.isatty())

    def __call__(self, event: RoundRecord | str) -> None:
        if isinstance(event, str):
            self.line(event)
            return
        self.view.round(event)
        if self._has_rows:
            self._round(event)

    def _round(self, record: RoundRecord) -> None:
        if not self._headed:
            self._row(*self._COLUMNS[:-1], next(iter(record.metrics), "metric"), style="cyan")
            self._headed = True
        counts = len(record.picked), len(record.undrafted), len(record.refused), record.clients
        scores = record.loss, next(iter(record.metrics.values()), None)
        learnt = ("" if value is None else f"{value:.4g}" for value in scores)
        self._row(str(record.round), f"{record.closed_s:.1f}", *map(str, counts), *learnt)

    def line(self, text: str) -> None:
        """A line that is no round."""
        if not self._quiet:
            self.view.line(printable(text))

    def warn(self, text: str) -> None:
        """A line that is in no log, and therefore shown in any case."""
        self.view.line(printable(f"safa: {text}"))

    def _row(self, *cells: str, style: str = "") -> None:
        text = "  ".join(cell.rjust(max(len(title), 7)) for cell, title in zip(cells, self._COLUMNS, strict=True))
        self._out.print(text, style=style, soft_wrap=True, markup=False)

    def end(self, folder: Path) -> None:
        """The result."""
        if self._quiet:
            return
        run = load_run(folder)
        summary = run.summary or {}
        names = [*run.settings.metrics, "loss"]
        found = [f"{k} {float(summary[f'last_{k}']):.4g}" for k in names if summary.get(f"last_{k}") is not None]
        learnt = f"The model has {' and '.join(found)}. " if found else ""
        target = target_words(run.settings.target, summary)
        learnt += f"{target} " if target else ""
        self._out.print(
            f"Run finished: {finished_rounds(folder)} rounds. {learnt}Written to {folder}; safa report {folder} makes "
            f"a page of it, safa replay {folder} trains its model again.",
            soft_wrap=True,
            markup=False,
        )
