"""What distinguishes the runs of a sweep, and what their settings are called."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from safa.analysis.compare import Setting, by_setting
from safa.report.tables import DIRECTION, Row, is_setting
from safa.report.words import TITLES, number, protocol_name

__all__ = ["Plan", "directions", "distinct", "is_number", "short_title", "title"]

_SERIES = 8
"""The most curves in one chart."""


@dataclass(frozen=True)
class Plan:
    """What was varied in a sweep, and how that is drawn."""

    varied: dict[str, list[Any]]
    """The settings that were varied, with their values."""
    x: str | None
    """The numerical setting along the axis."""
    series: tuple[str, ...]
    """The settings that distinguish the curves; the others are averaged over."""

    @classmethod
    def of(cls, rows: Sequence[Row], ignored: Sequence[str] = ()) -> Plan:
        """The plan of the runs that these rows are of; some settings may be no matter."""
        settings = [name for name in rows[0] if is_setting(name) and name not in ignored]
        settings.sort(key=lambda name: (name != "task", name != "protocol", name == "seed"))
        values = {name: distinct(rows, name) for name in settings}
        varied = {name: several for name, several in values.items() if len(several) > 1 and not _is_tasks(rows, name)}
        others = [name for name in varied if name != "seed"]
        numeric = [name for name in others if all(is_number(value) for value in varied[name])]
        x = max(numeric, key=lambda name: len(varied[name]), default=None)
        rest = sorted((name for name in others if name != x), key=lambda name: (name != "protocol", name != "task"))
        while len(rest) > 1 and x and len({_values(row, rest) for row in rows}) > _SERIES:
            rest.pop()
        return cls(varied, x, tuple(rest) if rest or x else tuple(name for name in varied if name == "seed"))

    @property
    def words(self) -> str:
        """What was varied, in a sentence."""
        if not self.varied:
            return "Nothing was varied."
        parts = [f"{_explained(name)} ({_list(values)})" for name, values in self.varied.items()]
        rest = "comes with the task" if "task" in self.varied else "is the same in every run"
        return f"Varied: {'; '.join(parts)}. Everything else {rest}."

    @property
    def averaged(self) -> list[str]:
        """The settings that charts average over."""
        return [name for name in self.varied if name != self.x and name not in self.series]

    @property
    def distinguishing(self) -> list[str]:
        """What distinguishes the settings of one task."""
        return [name for name in self.varied if name not in ("task", "seed")]

    def place(self, row: Row) -> dict[str, Any]:
        """The setting and the seed of a run, for readers."""
        return {title(name): self.shown(name, row.get(name)) for name in self.distinguishing} | {"seed": row["seed"]}

    def shown(self, name: str, value: Any) -> str:
        """The value of a setting for readers: short, if it differs from the other values then."""
        if name == "protocol":
            return protocol_name(value)
        values = self.varied.get(name, ())
        return number(value) or "none" if len(set(map(number, values))) == len(values) else str(value)

    def settings(self, rows: Sequence[Row]) -> list[Setting]:
        """The settings of one task, each with its runs."""
        return by_setting([self.place(row) for row in rows], [dict(row) for row in rows])

    def curve(self, row: Row) -> str:
        """The name of the curve that a run belongs to, in charts along `x`."""
        return ", ".join(
            self.shown(name, row[name])
            if isinstance(row[name], str)
            else f"{short_title(name)} {self.shown(name, row[name])}"
            for name in self.series
        )


def directions(rows: Sequence[Row]) -> dict[str, str]:
    """The metrics of the tasks of these runs, the main one first, with what is better: higher or lower."""
    columns = [name for name in rows[0] if name.startswith(DIRECTION)]
    found = {name: next((row[name] for row in rows if row.get(name) is not None), None) for name in columns}
    return {name.removeprefix(DIRECTION): better for name, better in found.items() if better is not None}


def distinct(rows: Sequence[Row], name: str) -> list[Any]:
    """The values of a column, each once."""
    return list(dict.fromkeys(row.get(name) for row in rows))


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def title(name: str) -> str:
    """What a column is called."""
    return TITLES.get(name, name.replace("_", " "))


def _explained(name: str) -> str:
    """The title, with the setting's own name where that is another one."""
    return title(name) if title(name) == name.replace("_", " ") else f"{short_title(name)}, `{name}`"


def short_title(name: str) -> str:
    """The title without its unit."""
    return title(name).split(",")[0]


def _values(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in names)


def _is_tasks(rows: Sequence[Row], name: str) -> bool:
    """Whether a setting differs only because every task brings its own."""
    pairs = {(row.get("task"), row.get(name)) for row in rows}
    return name != "task" and len(pairs) == len({task for task, _ in pairs}) > 1


def _list(values: Sequence[Any]) -> str:
    shown = [number(value) for value in values[:8]]
    return ", ".join(shown) + (f" and {len(values) - 8} more" if len(values) > 8 else "")
