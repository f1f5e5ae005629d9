"""Tables IV to XV: what the paper prints beside what is measured.

A printed figure is one run in one random world that is not known. So it is held against many worlds: it is within
tolerance if it is near their mean, or if it lies among the central 95% of them. The first is the rule for quantities
that hardly depend on the world, the second for those that do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from safa.paper.collect import Results
from safa.paper.grid import CRASH_RATES, FRACTIONS, PROTOCOLS
from safa.paper.printed import TableCell, printed
from safa.paper.times import printed_name
from safa.tasks import TASKS

__all__ = ["PRINTED_TABLES", "TABLE_METRICS", "Comparison", "PrintedTable", "TableMetric", "compare"]


@dataclass(frozen=True)
class TableMetric:
    """A quantity of the tables."""

    title: str
    unit: str
    digits: int
    """As many are printed."""
    near: float
    """How far from the mean a printed figure may be, whatever the spread."""
    relative: bool = False
    """Whether `near` is a share of the printed figure."""

    @property
    def tolerance(self) -> str:
        """The rule in words."""
        near = f"{self.near:.0%}" if self.relative else f"{self.near:g}"
        return f"the mean is within {near} of the printed figure, or that is among the central 95% of the worlds"


TABLE_METRICS = {
    "round_length_s": TableMetric("average length of a round", "s", 2, 0.05, relative=True),
    "t_dist_s": TableMetric("average T_dist", "s", 2, 0.02, relative=True),
    "sync_ratio": TableMetric("SR", "", 3, 0.02),
    "futility": TableMetric("futility", "", 2, 0.02),
    "best_accuracy": TableMetric("best accuracy", "", 4, 0.02),
}
"""The metrics of the printed tables."""


@dataclass(frozen=True)
class PrintedTable:
    """One of the paper's tables of results."""

    number: int
    task: str
    metrics: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its number as the paper writes it."""
        return _ROMAN[self.number]

    @property
    def title(self) -> str:
        """What it shows."""
        what = " and ".join(TABLE_METRICS[metric].title for metric in self.metrics)
        return f"{what[0].upper()}{what[1:]}, Task {_TASK_NUMBER[self.task]} ({self.task})"

    @property
    def protocols(self) -> tuple[str, ...]:
        """Fully local training is in the tables of accuracy alone."""
        return PROTOCOLS if "best_accuracy" in self.metrics else PROTOCOLS[:3]


_ROMAN = {4: "IV", 5: "V", 6: "VI", 7: "VII", 8: "VIII", 9: "IX", 10: "X", 11: "XI", 12: "XII", 13: "XIII", 14: "XIV",
          15: "XV"}  # fmt: skip
_TASK_NUMBER = {"boston": 1, "mnist": 2, "kdd99": 3}
PRINTED_TABLES = [
    table
    for place, task in enumerate(_TASK_NUMBER)
    for table in (
        PrintedTable(4 + 2 * place, task, ("round_length_s",)),
        PrintedTable(5 + 2 * place, task, ("t_dist_s",)),
        PrintedTable(10 + 2 * place, task, ("best_accuracy",)),
        PrintedTable(11 + 2 * place, task, ("sync_ratio", "futility")),
    )
]
"""Tables IV to XV; they are found by task, not in the order of their numbers."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """A printed figure and what many worlds give for it."""

    cell: TableCell
    printed: float
    values: Sequence[float]

    @property
    def metric(self) -> TableMetric:
        """What is compared."""
        return TABLE_METRICS[self.cell[2]]

    @cached_property
    def mean(self) -> float:
        """The mean over worlds."""
        return math.fsum(self.values) / len(self.values)

    @cached_property
    def spread(self) -> tuple[float, float]:
        """Between which two figures the central 95% of the worlds are."""
        low, high = np.quantile(self.values, [0.025, 0.975]).tolist()
        return low, high

    @property
    def deviation(self) -> float:
        """Measured mean less printed: as a share of it where the tolerance is one."""
        return (self.mean - self.printed) / self.printed if self.metric.relative else self.mean - self.printed

    @property
    def near(self) -> bool:
        """Whether the printed figure is near the mean."""
        allowed = self.metric.near * (self.printed if self.metric.relative else 1.0)
        return abs(self.mean - self.printed) <= allowed + self._rounding

    @property
    def within(self) -> bool:
        """Whether it is within tolerance: near the mean, or among the worlds."""
        return self.near or self.spread[0] - self._rounding <= self.printed <= self.spread[1] + self._rounding

    @property
    def place(self) -> float:
        """The share of the worlds that are below the printed figure, those that equal it counted half."""
        values = np.asarray(self.values)
        below, equal = values < self.printed - self._rounding, np.abs(values - self.printed) <= self._rounding
        return float(below.mean() + equal.mean() / 2)

    @property
    def _rounding(self) -> float:
        return 0.5 * 10.0**-self.metric.digits + 1e-9


def compare(table: PrintedTable, results: Results) -> list[Comparison]:
    """All cells of a table for which there are results."""
    cells = [
        (table.task, protocol, metric, crash_rate, fraction)
        for metric in table.metrics
        for protocol in table.protocols
        for crash_rate in CRASH_RATES
        for fraction in FRACTIONS
    ]
    found = [Comparison(cell, printed()[cell], _values(cell, results)) for cell in cells]
    return [comparison for comparison in found if comparison.values]


def _values(cell: TableCell, results: Results) -> list[float]:
    """What the worlds give for a cell, accounted for as the paper did."""
    task, protocol, metric, crash_rate, fraction = cell
    train = metric == "best_accuracy"
    rows = results.cell("as printed", task, protocol, crash_rate=crash_rate, fraction=fraction, train=train)
    name = printed_name(metric)
    scale = _asked(task, fraction) if metric == "sync_ratio" and protocol in ("fedavg", "fedcs") else 1.0
    return [scale * row["summary"][name] for row in rows]


def _asked(task: str, fraction: float) -> float:
    """C over the share of clients that was really asked for: the paper prints C where it is ceil(C*m)/m."""
    clients = TASKS[task].clients
    return fraction * clients / math.ceil(round(fraction * clients, 9))
