"""What holds: the same cells with the accounting put right, and the questions that follow from it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from safa.paper.collect import HOLD, Results
from safa.paper.grid import CRASH_RATES, FRACTIONS, PROTOCOLS, TARGETS

__all__ = ["CORRECTED", "Corrected", "Measure", "corrected", "corrected_cell"]


@dataclass(frozen=True)
class Measure:
    """A quantity of the corrected tables."""

    title: str
    unit: str
    about: str
    shown: Callable[[float], str]
    read: Callable[[dict[str, Any]], float | None]
    protocols: tuple[str, ...] = PROTOCOLS[:3]


def _of_summary(name: str) -> Callable[[dict[str, Any]], float | None]:
    return lambda row: None if row["summary"][name] is None else float(row["summary"][name])


CORRECTED: dict[str, Measure] = {
    "target_s": Measure(
        "time to the target accuracy", "s",
        f"virtual time until the accuracy has reached the target and held it for {HOLD} rounds ("
        + ", ".join(f"{task}: {target:g}" for task, target in TARGETS.items())
        + "); the run may take four times the paper's number of rounds to it",
        lambda value: f"{value:,.0f}", lambda row: row.get("target_s"),
    ),
    "last_accuracy": Measure(
        "accuracy of the last model", "", "after the paper's number of rounds, whatever time they took",
        lambda value: f"{value:.4f}", _of_summary("last_accuracy"), PROTOCOLS,
    ),
    "round_length_s": Measure(
        "average length of a round", "s", "from one close to the next", lambda value: f"{value:,.1f}",
        _of_summary("round_length_s"),
    ),
    "t_dist_s": Measure("average T_dist", "s", "Eq. 19", lambda value: f"{value:.3f}", _of_summary("t_dist_s")),
    "sync_ratio": Measure(
        "SR", "", "copies of the model sent, per client and round", lambda value: f"{value:.3f}",
        _of_summary("sync_ratio"),
    ),
    "futility": Measure(
        "futility", "", "share of the local work that was thrown away: abandoned, refused or lost in a crash",
        lambda value: f"{value:.3f}", _of_summary("futility"),
    ),
    "starved": Measure(
        "starved clients", "", "share of the clients of which no update reached the model",
        lambda value: f"{value:.3f}", _of_summary("starved"),
    ),
}  # fmt: skip
"""The tables of what holds, the most telling first."""


@dataclass(frozen=True, eq=False)
class Corrected:
    """What the worlds give for a cell; None where the target was not reached."""

    task: str
    protocol: str
    measure: str
    crash_rate: float
    fraction: float
    values: Sequence[float | None]

    @property
    def reached(self) -> list[float]:
        """The values that there are."""
        return [value for value in self.values if value is not None]

    @property
    def median(self) -> float | None:
        """The median over worlds, those in which the target was not reached counting as later than all others."""
        ordered = sorted(self.reached)
        middle = (len(self.values) - 1) // 2
        if middle >= len(ordered):
            return None
        return statistics.median(ordered) if len(ordered) == len(self.values) else ordered[middle]

    @property
    def mean(self) -> float | None:
        """The mean over worlds, if there is a value in each."""
        return statistics.fmean(self.reached) if len(self.reached) == len(self.values) else None

    @property
    def middle(self) -> float | None:
        """What is given for the cell: the median of a time to target, the mean of everything else."""
        return self.median if self.measure == "target_s" else self.mean

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return min(self.reached), max(self.reached)


def corrected_cell(
    results: Results, task: str, protocol: str, measure: str, *, crash_rate: float, fraction: float
) -> Corrected:
    """One cell, from runs that trained a model or, where there are more of them, from those that did not."""
    cell = {"crash_rate": crash_rate, "fraction": fraction}
    rows = results.cell("corrected", task, protocol, train=True, **cell)
    if measure not in ("target_s", "last_accuracy"):
        rows = max(rows, results.cell("corrected", task, protocol, train=False, **cell), key=len)
    read = CORRECTED[measure].read
    return Corrected(task, protocol, measure, crash_rate, fraction, [read(row) for row in rows])


def corrected(results: Results, task: str, measure: str) -> list[Corrected]:
    """All cells of a corrected table for which there are results."""
    cells = [
        corrected_cell(results, task, protocol, measure, crash_rate=crash_rate, fraction=fraction)
        for protocol in CORRECTED[measure].protocols
        for crash_rate in CRASH_RATES
        for fraction in FRACTIONS
    ]
    return [cell for cell in cells if cell.values]
