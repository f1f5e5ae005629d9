"""What a reproduction says, as rows and sentences that the page for the browser and the document share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from safa.paper.corrected import Corrected
from safa.paper.differences import EXCEPTIONS, sort_out
from safa.paper.grid import CRASH_RATES, PROTOCOLS, TARGETS, TASKS
from safa.paper.outcome import Reproduction
from safa.paper.tables import TABLE_METRICS, Comparison

__all__ = [
    "ABOUT_CLAIMS", "ABOUT_FIRST", "ABOUT_PLACE", "CLAIM_HEAD", "CLASS_HEAD", "FIRST_HEAD", "INTRODUCTION", "NAMES",
    "SUMMARY_HEAD", "claim_rows", "class_rows", "count", "deviation", "exception_rows", "first_rows", "in_short",
    "rules", "session_rows", "summary_rows",
]  # fmt: skip

NAMES = {"safa": "SAFA", "fedavg": "FedAvg", "fedcs": "FedCS", "local": "Fully local"}
_CLASSES = {"SR, futility and T_dist": ("sync_ratio", "futility", "t_dist_s"), "round length": ("round_length_s",),
            "accuracy": ("best_accuracy",)}  # fmt: skip
_WANTED = {"SR, futility and T_dist": 0.95, "round length": 0.8, "accuracy": 0.9}
"""The share of the cells that should be within tolerance."""
INTRODUCTION = (
    "Every table and figure of Wu et al., SAFA (IEEE Transactions on Computers 2020, doi 10.1109/TC.2020.2994391), "
    "beside what `safa` measures for it, and beside what comes out when the paper's accounting is put right."
)


def deviation(one: Comparison) -> str:
    """How far the measured mean is from the printed figure."""
    return f"{one.deviation:+.1%}" if one.metric.relative else f"{one.deviation:+.{max(3, one.metric.digits)}f}"


def count(cells: Sequence[Comparison]) -> str:
    """How many cells are within tolerance, in words."""
    outside = sum(not one.within for one in cells)
    worlds = sorted({len(one.values) for one in cells})
    over = f"{worlds[0]}" if len(worlds) == 1 else f"{worlds[0]} to {worlds[-1]}"
    return f"{len(cells) - outside} of {len(cells)} cells within tolerance, {outside} outside ({over} worlds)"


def summary_rows(found: Reproduction) -> list[list[str]]:
    """Table, cells, near the mean, within, outside, mean place."""
    rows = []
    for table, cells in found.tables.items():
        counts = [len(cells), *(sum(getattr(one, name) for one in cells) for name in ("near", "within"))]
        rows.append([table.name, table.title, *map(str, counts), str(counts[0] - counts[2]), _mean_place(cells)])
    return rows


def _mean_place(cells: Sequence[Comparison]) -> str:
    """Where the printed figures are among the worlds on average, of cells in which worlds differ."""
    places = [one.place for one in cells if one.spread[0] < one.spread[1]]
    return f"{sum(places) / len(places):.2f}" if places else ""


SUMMARY_HEAD = ["table", "what", "cells", "near the mean", "within tolerance", "outside", "mean place"]


def class_rows(found: Reproduction) -> list[list[str]]:
    """How many cells of each kind are within tolerance."""
    rows = []
    for name, metrics in _CLASSES.items():
        cells = [one for one in found.cells if one.cell[2] in metrics]
        if cells:
            within = sum(one.within for one in cells)
            share = f"{within} of {len(cells)} ({within / len(cells):.1%})"
            rows.append([name, share, f"{_WANTED[name]:.0%}", _mean_place(cells)])
    return rows


CLASS_HEAD = ["cells of", "within tolerance", "wanted", "mean place"]
ABOUT_PLACE = (
    "A printed figure has a place among the worlds: the share of them that are below it. If the printed figures came "
    "from the same distribution, places would be spread evenly and their mean would be near 0.5."
)


def exception_rows(found: Reproduction) -> list[list[str]]:
    """The cells outside tolerance by their reason."""
    classes, left = sort_out([one for one in found.cells if not one.within])
    rows = [[each.what, f"{len(classes[each.what])}", each.why] for each in EXCEPTIONS if each.what in classes]
    if left:
        named = "; ".join(_where(one) for one in left)
        rows.append(["others", f"{len(left)}", f"No pattern; one cell in twenty is outside by chance: {named}."])
    return rows


def _where(one: Comparison) -> str:
    task, protocol, metric, crash_rate, fraction = one.cell
    return f"{TABLE_METRICS[metric].title}, {task}, {NAMES[protocol]}, cr = {crash_rate:g}, C = {fraction:g}"


def first_rows(found: Reproduction) -> list[list[str]]:
    """For each task and crash rate, the shortest time to target that each protocol reaches with its best fraction."""
    rows = []
    for task in TASKS:
        cells = found.corrected.get((task, "target_s"), [])
        for crash_rate in CRASH_RATES if cells else ():
            best = {p: _best(cells, p, crash_rate) for p in PROTOCOLS[:3]}
            reached = {p: one.middle for p, one in best.items() if one is not None and one.middle is not None}
            first = min(reached, key=lambda p: reached[p] or 0.0, default="")
            shown = [_told_best(best[p]) for p in PROTOCOLS[:3]]
            safa, fedavg = reached.get("safa"), reached.get("fedavg")
            ratio = f"{fedavg / safa:.2f}" if safa and fedavg else ""
            rows.append([task, f"{crash_rate:g}", *shown, ratio, NAMES.get(first, "")])
    return rows


def _best(cells: Sequence[Corrected], protocol: str, crash_rate: float) -> Corrected | None:
    own = [one for one in cells if (one.protocol, one.crash_rate) == (protocol, crash_rate) and one.middle is not None]
    return min(own, key=lambda one: one.middle or 0.0, default=None)


def _told_best(one: Corrected | None) -> str:
    return "not reached" if one is None or one.middle is None else f"{one.middle:,.0f} s (C = {one.fraction:g})"


FIRST_HEAD = ["task", "cr", "SAFA", "FedAvg", "FedCS", "FedAvg / SAFA", "first"]


def claim_rows(found: Reproduction) -> list[list[str]]:
    """The claims, what was found of each, and what decides it."""
    return [[one.words, f"**{one.finding}**", *one.figures] for one in found.claims]


def rules(found: Reproduction) -> list[str]:
    """What counts as holding, claim by claim."""
    rules = dict.fromkeys(one.rule for one in found.claims)
    return [f"{' / '.join(one.words for one in found.claims if one.rule == rule)}: {rule}." for rule in rules]


CLAIM_HEAD = ["claim", "finding", "the paper's own tables", "measured as the paper accounts", "measured, corrected"]
ABOUT_CLAIMS = (
    "What counts as holding was settled after first results had been seen, so hold the figures themselves against your "
    "own idea of it:"
)
ABOUT_FIRST = (
    "Median virtual time until the target accuracy ("
    + ", ".join(f"{task} {target:g}" for task, target in TARGETS.items())
    + ") was reached and held, every protocol with the fraction C that suits it best."
)


def session_rows(found: Reproduction) -> list[list[str]]:
    """What was run, where, and how long it took."""
    return [
        [f"`{each['command']}`", str(each["machine"]), f"{each['runs']:,}", f"{each['seconds'] / 60:.1f}"]
        for each in found.sessions
    ]


def in_short(found: Reproduction) -> str:
    """The reproduction in two sentences."""
    cells = found.cells
    within = sum(one.within for one in cells)
    counted = Counter(str(one.finding) for one in found.claims)
    judged = f" Of {len(found.claims)} claims, " + ", ".join(f"{n} {finding}" for finding, n in counted.items()) + "."
    met = f"{within} of {len(cells)} printed figures are within tolerance." if cells else "No table was run."
    return met + (judged if found.claims else "") + "\n"
