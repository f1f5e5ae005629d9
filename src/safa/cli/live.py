"""What a command shows while it works: one view, drawn again and again in a terminal, and lines of text elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, TypeVar

from safa.cli.progress import Progress
from safa.protocol.records import RoundRecord

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

__all__ = ["LiveView", "watched"]

_FIRST_S, _EVERY_S = 0.5, 0.25
"""What is over sooner is not drawn at all; what takes longer, so often."""
_LEAST_S, _MOST_S = 5.0, 60.0
"""Lines of text: one for every tenth, but not more often, and not more rarely."""
_T = TypeVar("_T")


class LiveView:
    """How far a command is, on stderr: in a terminal as a picture of a few lines, which is gone at the end.

    Elsewhere, and with NO_COLOR, it is a line of text for every tenth of the work. A thread draws: what is told costs
    nothing to speak of, and the time goes on while nothing happens.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        quiet: bool = False,
        lines: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`lines` says whether there are lines of text where nothing can be drawn."""
        self.progress, self._clock = progress, clock
        self.is_drawn = not quiet and _can_draw()
        """Whether it is a picture."""
        self._told = self._lines if lines and not quiet and not self.is_drawn else _nothing
        self._line_s, self._tenths = 0.0, 0
        self._said: int | None = None  # how far the last line was
        self._live: Live | None = None
        self._over, self._lock = threading.Event(), threading.RLock()
        self._drawing = threading.Thread(target=self._draw, daemon=True)

    def __enter__(self) -> Self:
        self._line_s = self._clock()
        self.progress.start(self._line_s)
        self._tenths = int(10 * self.progress.share)
        if self.is_drawn:
            self._drawing.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        if self.is_drawn:
            self._drawing.join()
        if self._live is not None:
            self._live.update("")
            self._live.stop()
        if kind is None:
            self._told(last=True)

    def round(self, record: RoundRecord) -> None:
        """Tell it of a round that was closed."""
        self.progress.add_round(record)
        self._told()

    def run(self, summary: Mapping[str, Any], weight: float = 1.0) -> None:
        """Tell it of a run that was finished, with its metrics by name."""
        self.progress.add_run(summary, self._clock(), weight)
        self._told()

    def line(self, text: str) -> None:
        """Print a line of text, above the picture where there is one."""
        with self._lock:
            print(text, file=sys.stderr, flush=True)

    def refresh(self) -> None:
        """Draw it as it is now, where it is drawn."""
        if not self.is_drawn:
            return
        from rich.live import Live

        from safa.cli.console import Terminal

        with self._lock:
            if self._live is None:
                console = Terminal(stderr=True)
                self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
                self._live.start()
            self._live.update(self._picture(self._live.console.width - 1), refresh=True)

    def _draw(self) -> None:
        while not self._over.wait(_EVERY_S if self._live else _FIRST_S):
            self.refresh()

    def _picture(self, width: int) -> RenderableType:
        """Its lines, and an empty one for the cursor: whatever is written next stands by itself."""
        from rich.console import Group
        from rich.text import Text

        lines = [Text.assemble(*line) for line in self.progress.lines(width, self._clock())]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Group(*lines, Text())

    def _lines(self, *, last: bool = False) -> None:
        """Print a line where one is due. A last one completes those before, or stands for a part that has a title."""
        now, progress = self._clock(), self.progress
        tenths, waited = int(10 * progress.share), now - self._line_s
        due = waited >= (_LEAST_S if tenths > self._tenths else _MOST_S)
        if due or (last and self._said != progress.done and (self._said is not None or progress.title)):
            print(progress.sentence(now), file=sys.stderr, flush=True)
            self._line_s, self._tenths, self._said = now, tenths, progress.done


def _nothing(*, last: bool = False) -> None:
    pass


def _can_draw() -> bool:
    """Whether stderr is a terminal that can be drawn on, and drawing is not switched off."""
    refused = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    unicode = (sys.stderr.encoding or "").lower().startswith("utf")
    return sys.stderr.isatty() and unicode and not refused and find_spec("rich") is not None


def watched(
    items: Iterable[_T], progress: Progress, summary: Callable[[_T], Mapping[str, Any]], *, quiet: bool
) -> Iterator[_T]:
    """The items, each a finished run, shown as they come."""
    with LiveView(progress, quiet=quiet) as view:
        for item in items:
            view.run(summary(item))
            yield item
