"""How far a command is, and that as lines of a terminal or as one sentence. Nothing here draws or reads a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from safa.deploy.exchange.text import printable
from safa.protocol.records import RoundRecord

__all__ = ["Part", "Progress", "curve", "duration", "rate"]

Part = tuple[str, str]
"""A piece of a line, and its style."""

_STEPS = "▁▂▃▄▅▆▇█"
_KINDS = {
    "picked": ("█", "green"),
    "undrafted": ("▓", "cyan"),
    "refused": ("▚", "magenta"),
    "crashed": ("░", "red"),
    "deprecated": ("▒", "yellow"),
}
"""What becomes of clients and their updates in a round: how it is drawn, told apart by shape as well as by colour."""
_Elastic = Callable[[int], list[Part]]
"""A piece of a line that takes the room that is left."""
_LEAST, _MOST, _GAP = 8, 40, "  "
_INSTANT_S = 0.002
"""No run is simulated in so little time: it was finished before."""


@dataclass
class Progress:
    """How far a command is with its rounds or runs, and what the last one came to."""

    total: int
    unit: str
    """What is counted: "round", "run"."""
    title: str = ""
    done: int = 0
    work: float | None = None
    """The sum of the weights of all that is counted; None where all take about the same time."""
    worked: float = 0.0
    """The weights of those that are `done`, where there are weights."""
    at_most: bool = False
    """Whether it may end before `total`."""
    time_name: str = "virtual time"
    time_s: float | None = None
    """Virtual time: of the run, or what the last run took."""
    metric: str = ""
    """The name of the main metric."""
    values: list[float] = field(default_factory=list)
    """The main metric: of all models that were evaluated, or of all runs."""
    record: RoundRecord | None = None
    """The last round."""

    def start(self, now_s: float) -> None:
        """Count from now on; what was `done` before took no time."""
        self.worked = float(self.done) if self.work is None else self.worked
        self._started_s = self._last_s = now_s
        self._since, self._before, self._instant = (now_s, self.worked), self.done, True

    def add_round(self, record: RoundRecord) -> None:
        """Take in a round."""
        self.done = record.round
        self.worked = float(record.round)
        self.record, self.time_s = record, record.closed_s
        if record.loss is not None:
            self.metric, value = next(iter(record.metrics.items()), ("loss", record.loss))
            self.values.append(value)

    def add_run(self, summary: Mapping[str, Any], now_s: float, weight: float = 1.0) -> None:
        """Take in a finished run, with its metrics. Runs that were finished before say nothing of the rate."""
        self.done += 1
        self.worked += weight
        self._instant &= self.done == self._before + 1 or now_s - self._last_s < _INSTANT_S
        if self._instant and self.done > self._before + 1:
            self._since = now_s, self.worked
        self._last_s, self.time_s = now_s, summary.get("virtual_time_s")
        found = [(name, value) for name, value in summary.items() if name.startswith("last_") and value is not None]
        if found:
            self.metric = found[0][0].removeprefix("last_")
            self.values.append(float(found[0][1]))

    # -- numbers -----------------------------------------------------------------------------------------------------

    @property
    def share(self) -> float:
        """How much of the work is done, from 0 to 1."""
        return min(1.0, self.worked / (self.work or self.total or 1.0))

    def per_second(self, now_s: float) -> float:
        """The work done a second since this session began; 0 before the first."""
        start_s, before = self._since
        return (self.worked - before) / (now_s - start_s) if now_s > start_s else 0.0

    def left_s(self, now_s: float) -> float | None:
        """How long the rest takes at this rate; None where that is not known."""
        speed = self.per_second(now_s)
        return ((self.work or self.total) - self.worked) / speed if speed else None

    def counts(self) -> dict[str, int]:
        """What became of clients and updates in the last round; refused ones are named where there are any."""
        if self.record is None:
            return {}
        found = {kind: len(getattr(self.record, kind)) for kind in _KINDS}
        return {kind: count for kind, count in found.items() if count or kind != "refused"}

    # -- words -------------------------------------------------------------------------------------------------------

    def sentence(self, now_s: float) -> str:
        """All of it in one line of text."""
        counts = [f"{kind} {count:,}" for kind, count in self.counts().items()]
        parts = [self._counted(), *self._learnt(), *counts, *self._pace(now_s)]
        return f"{printable(self.title) or 'safa'}: {', '.join(parts)}"

    def lines(self, width: int, now_s: float) -> list[list[Part]]:
        """All of it in lines of at most this width; where there is little room, there are more of them."""
        head: list[Part | _Elastic] = [(printable(self.title), "bold")] if self.title else []
        head += [(self._counted(), "bold"), self._bar, *((words, "") for words in self._pace(now_s))]
        learnt: list[Part | _Elastic] = [(words, "") for words in self._learnt()]
        learnt += [lambda room: [(curve(self.values, room), "cyan")]] if self.values else []
        counts = self.counts()
        legend: list[Part | _Elastic] = [_legend(kind, count) for kind, count in counts.items()]
        legend[:0] = [lambda room: _stack(counts, room)] if any(counts.values()) else []
        return [line for row in (head, learnt, legend) for line in _flow(row, width)]

    def _counted(self) -> str:
        most = "at most " * self.at_most
        if self.unit == "round":
            return f"round {self.done:,} of {most}{self.total:,}"
        return f"{self.done:,} of {most}{self.total:,} {self.unit}s"

    def _pace(self, now_s: float) -> list[str]:
        """The rate and the time left; before they are known, how long it has taken so far."""
        left = self.left_s(now_s)
        if left is None:
            return [f"{duration(now_s - self._started_s)} so far"]
        rates = [rate(self.per_second(now_s), self.unit)] if self.work is None else []
        return [*rates, f"{'at most ' * self.at_most}{duration(left)} left"]

    def _learnt(self) -> list[str]:
        """The virtual time, the clients and the main metric."""
        of = "last run: " * (self.unit == "run")
        found = [] if self.time_s is None else [f"{of}{self.time_name} {duration(self.time_s)}"]
        found += [f"{self.record.clients:,} clients"] if self.record else []
        return found + ([f"{printable(self.metric)} {self.values[-1]:.4g}"] if self.values else [])

    def _bar(self, room: int) -> list[Part]:
        full = round(self.share * room)
        return [("━" * full, "cyan"), ("─" * (room - full), "dim")]


def _legend(kind: str, count: int) -> Part:
    sign, style = _KINDS[kind]
    return f"{sign} {kind} {count:,}", style


def _stack(counts: Mapping[str, int], room: int) -> list[Part]:
    """A bar of this length, divided in proportion."""
    ends = [round(room * part / sum(counts.values())) for part in accumulate(counts.values())]
    lengths = [end - start for start, end in pairwise([0, *ends])]
    return [(_KINDS[kind][0] * length, _KINDS[kind][1]) for kind, length in zip(counts, lengths, strict=True)]


def _flow(row: Sequence[Part | _Elastic], width: int) -> list[list[Part]]:
    """The pieces of a row in as many lines as they need."""
    lines: list[list[Part | _Elastic]] = []
    for part in row:
        if not lines or _length([*lines[-1], part]) > width:
            lines.append([])
        lines[-1].append(part)
    return [_filled(line, width) for line in lines]


def _length(line: Sequence[Part | _Elastic]) -> int:
    """The least length of a line."""
    return sum(_LEAST if callable(part) else len(part[0]) for part in line) + len(_GAP) * (len(line) - 1)


def _filled(line: Sequence[Part | _Elastic], width: int) -> list[Part]:
    """A line in which what is elastic takes the room that is left, up to a limit."""
    room = min(_MOST, _LEAST + width - _length(line))
    found: list[Part] = []
    for part in line:
        found += [(_GAP, "")] * bool(found)
        found += part(room) if callable(part) else [part]
    return found


def curve(values: Sequence[float], room: int) -> str:
    """Numbers as a row of so many characters at most, from the lowest to the highest; NaN and infinity are gaps."""
    places = min(room, len(values))
    shown = [values[(place + 1) * len(values) // places - 1] for place in range(places)]
    half = [value / 2 if math.isfinite(value) else None for value in shown]  # differences of halves are finite
    known = [value for value in half if value is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    most = len(_STEPS) - 1
    return "".join(" " if v is None else _STEPS[round((v - low) / span * most) if span else 0] for v in half)


def duration(seconds: float) -> str:
    """A time in the unit that suits it."""
    for size, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.{int(seconds < 10 * size)}f} {name}"
    return f"{seconds:.0f} s"


def rate(per_second: float, unit: str) -> str:
    """So many a second, a minute or an hour."""
    size, name = next((pair for pair in ((1, "s"), (60, "min")) if per_second * pair[0] >= 1), (3600, "h"))
    value = per_second * size
    return f"{value:,.{int(value < 10)}f} {unit}s/{name}"
