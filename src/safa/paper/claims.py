"""The paper's headline claims, each with what was found of it and the figures that decide it.

A claim is held against the measured figures twice: accounted for as the paper did, and with the accounting put right.
What counts as holding is said in words beside it. The rules were written after first results had been seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from safa.paper.collect import Results
from safa.paper.corrected import corrected_cell
from safa.paper.grid import CRASH_RATES, FRACTIONS, LAG_CRASH_RATES, LAG_FRACTIONS, LAGS, TASKS
from safa.paper.printed import printed
from safa.paper.times import printed_name

__all__ = ["SOURCES", "Claim", "Finding", "claims"]

CELLS = [(crash_rate, fraction) for crash_rate in CRASH_RATES for fraction in FRACTIONS]
_NEARLY = 0.9
"""A ratio is confirmed if nine tenths of it are measured."""
_SLIGHT = 0.1
"""What a tenth makes worse is still good."""
_SUGGESTED = 5


class Finding(StrEnum):
    """What was found of a claim."""

    CONFIRMED = "confirmed"
    PAPER_ONLY = "confirmed under the paper's accounting only"
    NOT_CONFIRMED = "not confirmed"


@dataclass(frozen=True)
class Claim:
    """A claim, the rule it is judged by, and the figures."""

    words: str
    rule: str
    figures: tuple[str, ...]
    """By source: what the paper's own tables say, and what is measured under the two accountings."""
    finding: Finding


def claims(results: Results) -> list[Claim]:
    """All claims for which there are results."""
    judged = (
        _speed_up(results, "mnist", "up to 27 and 6 times shorter rounds than FedAvg and FedCS (Task 2)", (27.0, 6.0)),
        _speed_up(results, "kdd99", "7.7 and 3.7 times shorter rounds than FedAvg and FedCS (Task 3)", (7.7, 3.7)),
        _futility(results),
        _lag_tolerance(results),
        _accuracy(results),
    )
    return [claim for claim in judged if claim is not None]


def _finding(as_printed: bool, corrected: bool) -> Finding:
    if not as_printed:
        return Finding.NOT_CONFIRMED
    return Finding.CONFIRMED if corrected else Finding.PAPER_ONLY


Figures = dict[tuple[float, float], float]
"""A figure for every crash rate and fraction."""

SOURCES = ("in print", "as printed", "corrected")
"""Where figures come from: the paper's tables, and what is measured under the two accountings."""


def _figures(results: Results, source: str, task: str, protocol: str, metric: str) -> Figures | None:
    """A metric of the printed tables for all cells of a task, or None if one is missing."""
    found = {cell: _figure(results, source, task, protocol, metric, *cell) for cell in CELLS}
    known = {cell: value for cell, value in found.items() if value is not None}
    return known if len(known) == len(CELLS) else None


def _figure(
    results: Results, source: str, task: str, protocol: str, metric: str, crash_rate: float, fraction: float
) -> float | None:
    if source == "in print":
        return printed()[task, protocol, metric, crash_rate, fraction]
    if source == "corrected":
        right = "last_accuracy" if metric == "best_accuracy" else metric
        cell = corrected_cell(results, task, protocol, right, crash_rate=crash_rate, fraction=fraction)
        return cell.middle if cell.values else None
    rows = results.cell(
        source, task, protocol, crash_rate=crash_rate, fraction=fraction, train=metric == "best_accuracy"
    )
    name = printed_name(metric)
    return statistics.fmean(row["summary"][name] for row in rows) if rows else None


# -- round length ------------------------------------------------------------------------------------------------------


def _speed_up(results: Results, task: str, words: str, claimed: tuple[float, float]) -> Claim | None:
    ratios = {source: _largest_ratios(results, source, task) for source in SOURCES}
    if any(len(found) < len(claimed) for found in ratios.values()):
        return None
    holds = {
        source: all(ratio >= _NEARLY * wanted for (ratio, _), wanted in zip(found, claimed, strict=True))
        for source, found in ratios.items()
    }
    figures = [", ".join(_ratio(*each) for each in found) for found in ratios.values()]
    return Claim(
        words,
        f"the largest ratio over the 20 cells is at least {_NEARLY:.0%} of the claimed one, against both baselines",
        tuple(figures),
        _finding(holds["as printed"], holds["corrected"]),
    )


def _largest_ratios(results: Results, source: str, task: str) -> list[tuple[float, tuple[float, float]]]:
    """How many times longer the rounds of FedAvg and of FedCS are than SAFA's at most, and in which cell."""
    lengths = [_figures(results, source, task, name, "round_length_s") for name in ("safa", "fedavg", "fedcs")]
    safa, *baselines = lengths
    if safa is None:
        return []
    return [max((other[cell] / safa[cell], cell) for cell in CELLS) for other in baselines if other is not None]


def _ratio(value: float, cell: tuple[float, float]) -> str:
    return f"{value:.1f} times (cr = {cell[0]:g}, C = {cell[1]:g})"


# -- futility ----------------------------------------------------------------------------------------------------------


def _futility(results: Results) -> Claim | None:
    bound = 0.04
    found = [_figures(results, source, "kdd99", "safa", "futility") for source in SOURCES]
    worst = [max((value, cell) for cell, value in each.items()) for each in found if each is not None]
    if len(worst) < len(SOURCES):
        return None
    return Claim(
        "futility below 4% (SAFA, Task 3)",
        "the largest futility over the 20 cells is below 0.04",
        tuple(f"at most {value:.3f} (cr = {cell[0]:g}, C = {cell[1]:g})" for value, cell in worst),
        _finding(worst[1][0] < bound, worst[2][0] < bound),
    )


# -- lag tolerance -----------------------------------------------------------------------------------------------------


def _over_lags(
    results: Results, accounting: str, read: Callable[[dict[str, Any]], float | None]
) -> Iterator[list[float]]:
    """For each setting of Figures 3 and 4, the mean of something over worlds for tau = 1 to 10, Task 1."""
    for fraction in LAG_FRACTIONS:
        for crash_rate in LAG_CRASH_RATES:
            means = []
            for lag in LAGS:
                rows = results.lag(accounting, "boston", lag, crash_rate=crash_rate, fraction=fraction)
                values = [value for value in map(read, rows) if value is not None]
                if values and len(values) == len(rows):
                    means.append(statistics.fmean(values))
            if len(means) == len(LAGS):
                yield means


def _lag_tolerance(results: Results) -> Claim | None:
    five = _SUGGESTED - 1
    losses = list(_over_lags(results, "as printed", lambda row: row["summary"]["best_loss"]))
    copies = list(_over_lags(results, "as printed", lambda row: row["summary"]["sync_ratio"]))
    times = list(_over_lags(results, "corrected", lambda row: row.get("target_s")))
    wasted = list(_over_lags(results, "corrected", lambda row: row["summary"]["futility"]))
    if not losses or not times:
        return None
    loss = max(each[five] / min(each) - 1 for each in losses)
    saved = max(1 - each[five] / each[0] for each in copies)
    late = max(each[five] / min(each) - 1 for each in times)
    waste = max(each[five] for each in wasted)
    least = max(each[-1] for each in wasted)
    return Claim(
        "tau = 5 is a good choice",
        "over the six settings of Figures 3 and 4 (Task 1), tau = 5 costs at most 10% of the best tau's loss while it "
        "saves copies; corrected: it takes at most 10% longer to the target accuracy than the best tau, and throws at "
        "most 10% of the work away",
        (
            "Figures 3 and 4, without numbers",
            f"best loss at most {loss:.0%} above that of the best tau; SR up to {saved:.0%} below that of tau = 1",
            f"time to target up to {late:.0%} longer than with the best tau; up to {waste:.0%} of the work thrown away "
            f"(tau = 10: {least:.0%})",
        ),
        _finding(loss <= _SLIGHT and saved > 0, late <= _SLIGHT and waste <= _SLIGHT),
    )


# -- accuracy ----------------------------------------------------------------------------------------------------------


def _accuracy(results: Results) -> Claim | None:
    gained = {source: _gains_of(results, source) for source in SOURCES}
    tasks = gained["as printed"].keys() & gained["corrected"].keys()
    if not tasks:
        return None
    known = [{task: each for task, each in gained[source].items() if task in tasks} for source in SOURCES]
    holds = [all(sum(gain > 0 for gain in each) > len(each) / 2 for each in one.values()) for one in known]
    return Claim(
        "higher accuracy than FedAvg",
        "the mean accuracy is higher in more than half of the cells of every task that was run (corrected: of the last "
        "model after as many rounds)",
        tuple(_gains(one) for one in known),
        _finding(holds[1], holds[2]),
    )


def _gains_of(results: Results, source: str) -> dict[str, list[float]]:
    """By how much SAFA's accuracy is above FedAvg's, cell by cell, for every task that was run."""
    gained = {}
    for task in TASKS:
        ours, theirs = (_figures(results, source, task, name, "best_accuracy") for name in ("safa", "fedavg"))
        if ours is not None and theirs is not None:
            gained[task] = [ours[cell] - theirs[cell] for cell in CELLS]
    return gained


def _gains(gained: dict[str, list[float]]) -> str:
    return "; ".join(
        f"{task}: higher in {sum(gain > 0 for gain in each)} of {len(each)} cells, by {statistics.fmean(each):+.4f} on "
        "average"
        for task, each in gained.items()
    )
