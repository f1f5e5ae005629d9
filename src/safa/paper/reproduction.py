"""The reproduction of the paper as files: tables, figures, a page for the browser and one for the documentation.

Everything is made of the results that the folder holds, however they came there; so it can be written anew at any time,
and grows as more is run.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safa.paper.bias import BiasReport, bias_report
from safa.paper.claims import Claim, claims
from safa.paper.collect import RESULTS, Results, device_name
from safa.paper.corrected import CORRECTED, Corrected, corrected
from safa.paper.differences import DIFFERENCES, EXCEPTIONS, sort_out
from safa.paper.figures import PaperFigure, all_figures
from safa.paper.grid import CRASH_RATES, FRACTIONS, PROTOCOLS, TARGETS, TASKS
from safa.paper.tables import METRICS, PRINTED_TABLES, Comparison, PrintedTable, compare
from safa.report.page import OUTSIDE, Block, Cell, Column, Mark, Section, Table, Words, render
from safa.runs import write_atomically

__all__ = [
    "SESSIONS",
    "Reproduction",
    "bias_of_figure_5",
    "has_figure_5",
    "machine",
    "note_session",
    "write_reproduction",
]

SESSIONS = "sessions.jsonl"
_NAMES = {"safa": "SAFA", "fedavg": "FedAvg", "fedcs": "FedCS", "local": "Fully local"}
_SIGN = "▲"
_CLASSES = {"SR, futility and T_dist": ("sync_ratio", "futility", "t_dist_s"), "round length": ("round_length_s",),
            "accuracy": ("best_accuracy",)}  # fmt: skip
_WANTED = {"SR, futility and T_dist": 0.95, "round length": 0.8, "accuracy": 0.9}
"""The share of the cells that should be within tolerance."""
_INTRODUCTION = (
    "Every table and figure of Wu et al., SAFA (IEEE Transactions on Computers 2020, doi 10.1109/TC.2020.2994391), "
    "beside what `safa` measures for it, and beside what comes out when the paper's accounting is put right."
)


def bias_of_figure_5() -> list[BiasReport]:
    """The three cases of Figure 5, all crash rates 0.3."""
    return [bias_report(0.3, 0.3, fraction, 0.3) for fraction in (0.8, 0.5, 0.1)]


def has_figure_5(folder: Path) -> bool:
    """Whether the bias was asked for in this folder before."""
    return (folder / "figures" / "figure-5.svg").is_file()


def machine(device: str) -> str:
    """This machine in words, for readers of figures that took time."""
    gpu = f", {device_name(device)}" if device != "cpu" else ""
    return f"{platform.machine()}, {os.cpu_count() or 1} cores{gpu}, Python {platform.python_version()}"


def note_session(folder: Path, **session: Any) -> None:
    """Keep what was run for a reproduction, where, and how long it took."""
    with (folder / SESSIONS).open("ab", buffering=0) as file:
        file.write(json.dumps(session).encode() + b"\n")


@dataclass(frozen=True)
class Reproduction:
    """What there is to show, read from the results."""

    results: Results
    bias: Sequence[BiasReport]
    sessions: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path, bias: Sequence[BiasReport] = ()) -> Reproduction:
        """The reproduction in a folder."""
        lines = (folder / SESSIONS).read_text(encoding="utf-8").splitlines() if (folder / SESSIONS).is_file() else []
        return cls(Results(folder / RESULTS), bias, [json.loads(line) for line in lines])

    @cached_property
    def tables(self) -> dict[PrintedTable, list[Comparison]]:
        """The printed tables for which there are results, in the paper's order."""
        ordered = sorted(PRINTED_TABLES, key=lambda table: table.number)
        found = {table: compare(table, self.results) for table in ordered}
        return {table: cells for table, cells in found.items() if cells}

    @cached_property
    def corrected(self) -> dict[tuple[str, str], list[Corrected]]:
        """The corrected tables for which there are results, by task and measure."""
        found = {(task, name): corrected(self.results, task, name) for task in TASKS for name in CORRECTED}
        return {key: cells for key, cells in found.items() if any(cell.reached for cell in cells)}

    @cached_property
    def claims(self) -> list[Claim]:
        """The verdicts."""
        return claims(self.results)

    @cached_property
    def figures(self) -> list[PaperFigure]:
        """The figures."""
        return all_figures(self.results, self.bias)

    @property
    def cells(self) -> list[Comparison]:
        """All cells of all tables."""
        return [one for cells in self.tables.values() for one in cells]

    def met(self) -> tuple[list[str], list[list[str]]]:
        """How many cells are within tolerance: the heads and rows of a table."""
        return _CLASS_HEAD, _class_rows(self)

    def holds(self) -> tuple[list[str], list[list[str]]]:
        """The claims and their verdicts: the heads and rows of a table."""
        return ["claim", "verdict"], [[one.words, one.verdict] for one in self.claims]


def write_reproduction(folder: Path, *, bias: Sequence[BiasReport] = ()) -> Path:
    """Write tables, figures and both pages into the folder, each file whole or not at all; the path of the page."""
    found = Reproduction.read(folder, bias)
    for name in ("tables", "figures"):
        (folder / name).mkdir(exist_ok=True)
    for table, cells in found.tables.items():
        write_atomically(folder / "tables" / f"table-{table.name}.csv", _csv(_comparison_rows(cells)))
        write_atomically(folder / "tables" / f"table-{table.name}.md", _table_page(table, cells).encode())
    for (task, name), right in found.corrected.items():
        write_atomically(folder / "tables" / f"corrected-{task}-{name}.csv", _csv(_corrected_rows(right)))
        write_atomically(folder / "tables" / f"corrected-{task}-{name}.md", _corrected_page(task, name, right).encode())
    for figure in found.figures:
        figure.save(folder / "figures")
    write_atomically(folder / "reproduction.md", _document(found).encode())
    path = folder / "report.html"
    write_atomically(
        path, render("SAFA, reproduced", f"{_INTRODUCTION}\n\n{_in_short(found)}", _sections(found)).encode()
    )
    return path


# -- CSV ---------------------------------------------------------------------------------------------------------------


def _csv(rows: Iterable[dict[str, Any]]) -> bytes:
    kept = list(rows)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(kept[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    return text.getvalue().encode()


def _comparison_rows(cells: Sequence[Comparison]) -> Iterable[dict[str, Any]]:
    for one in cells:
        yield dict(zip(("task", "protocol", "metric", "crash_rate", "fraction"), one.cell, strict=True)) | {
            "printed": one.printed,
            "mean": f"{one.mean:.6g}",
            "low": f"{one.spread[0]:.6g}",
            "high": f"{one.spread[1]:.6g}",
            "worlds": len(one.values),
            "deviation": f"{one.deviation:.4f}",
            "within": "yes" if one.within else "no",
        }


def _corrected_rows(cells: Sequence[Corrected]) -> Iterable[dict[str, Any]]:
    for one in cells:
        low, high = one.spread if one.reached else ("", "")
        yield {
            "task": one.task,
            "protocol": one.protocol,
            "measure": one.measure,
            "crash_rate": one.crash_rate,
            "fraction": one.fraction,
            "middle": "" if one.middle is None else f"{one.middle:.6g}",
            "lowest": low,
            "highest": high,
            "reached": len(one.reached),
            "worlds": len(one.values),
        }


# -- Markdown ----------------------------------------------------------------------------------------------------------


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _grid(protocols: Sequence[str], cell: Callable[[str, float, float], str]) -> str:
    """A table laid out as in the paper: a row for each protocol and crash rate, a column for each fraction."""
    rows = [
        [_NAMES[protocol], f"{crash_rate:g}", *(cell(protocol, crash_rate, fraction) for fraction in FRACTIONS)]
        for protocol in protocols
        for crash_rate in CRASH_RATES
    ]
    return _markdown(["protocol", "cr", *(f"C = {fraction:g}" for fraction in FRACTIONS)], rows)


def _printed_grid(table: PrintedTable, metric: str, cells: Sequence[Comparison]) -> str:
    by_place = {(one.cell[1], one.cell[3], one.cell[4]): one for one in cells if one.cell[2] == metric}
    return _grid(table.protocols, lambda *place: _told(by_place[place]) if place in by_place else "")


def _told(one: Comparison) -> str:
    """Printed, measured with its spread, deviation."""
    digits = min(one.metric.digits, 1 if one.printed >= 100 else 4)
    low, high = one.spread
    spread = f" ({low:,.{digits}f} to {high:,.{digits}f})" if f"{low:.{digits}f}" != f"{high:.{digits}f}" else ""
    return (
        f"{one.printed:g}<br>{one.mean:,.{digits}f}{spread}<br>{_deviation(one)}{' ' + _SIGN if not one.within else ''}"
    )


def _deviation(one: Comparison) -> str:
    return f"{one.deviation:+.1%}" if one.metric.relative else f"{one.deviation:+.{max(3, one.metric.digits)}f}"


def _count(cells: Sequence[Comparison]) -> str:
    outside = sum(not one.within for one in cells)
    worlds = sorted({len(one.values) for one in cells})
    over = f"{worlds[0]}" if len(worlds) == 1 else f"{worlds[0]} to {worlds[-1]}"
    return f"{len(cells) - outside} of {len(cells)} cells within tolerance, {outside} outside ({over} worlds)"


def _table_page(table: PrintedTable, cells: Sequence[Comparison], level: int = 1) -> str:
    parts = [f"{'#' * level} Table {table.name}: {table.title}\n"]
    for metric in table.metrics:
        own = [one for one in cells if one.cell[2] == metric]
        what = METRICS[metric]
        parts.append(
            f"{what.title[0].upper()}{what.title[1:]}: {_count(own)}. In a cell: printed, measured mean (central 95% "
            f"of the worlds), deviation; {_SIGN} if it is not so that {what.tolerance}.\n"
        )
        parts.append(_printed_grid(table, metric, own))
    return "\n".join(parts)


def _corrected_page(task: str, name: str, cells: Sequence[Corrected], level: int = 1) -> str:
    measure = CORRECTED[name]
    by_place = {(one.protocol, one.crash_rate, one.fraction): one for one in cells}
    grid = _grid(measure.protocols, lambda *place: _told_right(by_place[place]) if place in by_place else "")
    worlds = max(len(one.values) for one in cells)
    unit = f", {measure.unit}" if measure.unit else ""
    middle = "Median" if name == "target_s" else "Mean"
    return (
        f"{'#' * level} {task}: {measure.title}{unit}\n\n{measure.about[0].upper()}{measure.about[1:]}. {middle} "
        f"(lowest to highest) over {worlds} world{'s' * (worlds > 1)}.\n\n{grid}"
    )  # fmt: skip


def _told_right(one: Corrected) -> str:
    show = CORRECTED[one.measure].shown
    if one.middle is None:
        return f"not reached ({len(one.reached)} of {len(one.values)} did)" if one.reached else "not reached"
    low, high = map(show, one.spread)
    missed = f", {len(one.values) - len(one.reached)} not" if len(one.reached) < len(one.values) else ""
    return show(one.middle) + (f"<br>({low} to {high}{missed})" if low != high else "")


def _summary_rows(found: Reproduction) -> list[list[str]]:
    """Table, cells, near the mean, within, outside, mean place."""
    rows = []
    for table, cells in found.tables.items():
        counts = [len(cells), *(sum(getattr(one, name) for one in cells) for name in ("near", "within"))]
        rows.append([table.name, table.title, *map(str, counts), str(counts[0] - counts[2]), _mean_place(cells)])
    return rows


def _mean_place(cells: Sequence[Comparison]) -> str:
    """Where the printed figures stand among the worlds on average, of cells in which worlds differ."""
    places = [one.place for one in cells if one.spread[0] < one.spread[1]]
    return f"{sum(places) / len(places):.2f}" if places else ""


_SUMMARY_HEAD = ["table", "what", "cells", "near the mean", "within tolerance", "outside", "mean place"]


def _class_rows(found: Reproduction) -> list[list[str]]:
    rows = []
    for name, metrics in _CLASSES.items():
        cells = [one for one in found.cells if one.cell[2] in metrics]
        if cells:
            within = sum(one.within for one in cells)
            share = f"{within} of {len(cells)} ({within / len(cells):.1%})"
            rows.append([name, share, f"{_WANTED[name]:.0%}", _mean_place(cells)])
    return rows


_CLASS_HEAD = ["cells of", "within tolerance", "wanted", "mean place"]
_ABOUT_PLACE = (
    "A printed figure has a place among the worlds: the share of them that are below it. If the printed figures came "
    "from the same distribution, places would be spread evenly and their mean would be near 0.5."
)


def _exception_rows(found: Reproduction) -> list[list[str]]:
    classes, left = sort_out([one for one in found.cells if not one.within])
    rows = [[each.what, f"{len(classes[each.what])}", each.why] for each in EXCEPTIONS if each.what in classes]
    if left:
        named = "; ".join(_where(one) for one in left)
        rows.append(["others", f"{len(left)}", f"No pattern; one cell in twenty is outside by chance: {named}."])
    return rows


def _where(one: Comparison) -> str:
    task, protocol, metric, crash_rate, fraction = one.cell
    return f"{METRICS[metric].title}, {task}, {_NAMES[protocol]}, cr = {crash_rate:g}, C = {fraction:g}"


def _first_rows(found: Reproduction) -> list[list[str]]:
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
            rows.append([task, f"{crash_rate:g}", *shown, ratio, _NAMES.get(first, "")])
    return rows


def _best(cells: Sequence[Corrected], protocol: str, crash_rate: float) -> Corrected | None:
    own = [one for one in cells if (one.protocol, one.crash_rate) == (protocol, crash_rate) and one.middle is not None]
    return min(own, key=lambda one: one.middle or 0.0, default=None)


def _told_best(one: Corrected | None) -> str:
    return "not reached" if one is None or one.middle is None else f"{one.middle:,.0f} s (C = {one.fraction:g})"


_FIRST_HEAD = ["task", "cr", "SAFA", "FedAvg", "FedCS", "FedAvg / SAFA", "first"]


def _claim_rows(found: Reproduction) -> list[list[str]]:
    return [[one.words, f"**{one.verdict}**", *one.figures] for one in found.claims]


def _rules(found: Reproduction) -> list[str]:
    """What counts as holding, claim by claim."""
    rules = dict.fromkeys(one.rule for one in found.claims)
    return [f"{' / '.join(one.words for one in found.claims if one.rule == rule)}: {rule}." for rule in rules]


_CLAIM_HEAD = ["claim", "verdict", "the paper's own tables", "measured as the paper accounts", "measured, corrected"]
_ABOUT_CLAIMS = "What counts as holding is fixed in the code of the command:"
_ABOUT_FIRST = (
    "Median virtual time until the target accuracy ("
    + ", ".join(f"{task} {target:g}" for task, target in TARGETS.items())
    + ") was reached and held, every protocol with the fraction C that suits it best."
)


def _session_rows(found: Reproduction) -> list[list[str]]:
    return [
        [f"`{each['command']}`", str(each["machine"]), f"{each['runs']:,}", f"{each['seconds'] / 60:.1f}"]
        for each in found.sessions
    ]


def _in_short(found: Reproduction) -> str:
    """The reproduction in two sentences."""
    cells = found.cells
    within = sum(one.within for one in cells)
    verdicts = Counter(str(one.verdict) for one in found.claims)
    judged = f" Of {len(found.claims)} claims, " + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()) + "."
    met = f"{within} of {len(cells)} printed figures are within tolerance." if cells else "No table was run."
    return met + (judged if found.claims else "") + "\n"


def _document(found: Reproduction) -> str:
    """The page for the documentation."""
    parts = ["# The paper, reproduced\n", _INTRODUCTION + " Made by `safa reproduce`; do not edit.\n", _in_short(found)]
    if found.claims:
        parts += ["## What holds\n", _markdown(_CLAIM_HEAD, _claim_rows(found)), _ABOUT_CLAIMS + "\n"]
        parts += [*(f"- {rule}" for rule in _rules(found)), ""]
    first = _first_rows(found)
    if first:
        parts += ["### Who is first\n", _ABOUT_FIRST + "\n", _markdown(_FIRST_HEAD, first)]
    parts += ["## What was met\n", _markdown(_CLASS_HEAD, _class_rows(found)), _ABOUT_PLACE + "\n"]
    parts += [_markdown(_SUMMARY_HEAD, _summary_rows(found))]
    parts += ["### Tolerances\n", *(f"- {each.title}: {each.tolerance}." for each in METRICS.values()), ""]
    exceptions = _exception_rows(found)
    if exceptions:
        parts += ["### Outside tolerance, and why\n", _markdown(["cells", "how many", "why"], exceptions)]
    parts += ["## Known differences from the paper\n", *(f"- {each}" for each in DIFFERENCES), ""]
    if found.sessions:
        head = ["command", "machine", "runs", "minutes"]
        parts += ["## Commands, machines, time\n", _markdown(head, _session_rows(found))]
    if found.figures:
        parts += ["## Figures\n"]
    for figure in found.figures:
        parts += [f"### {figure.title}\n", f"![{figure.title}](figures/{figure.name}.svg)\n", f"*{figure.caption}*\n"]
    parts += ["## Tables as printed\n", *(_table_page(table, cells, 3) for table, cells in found.tables.items())]
    parts += ["## Tables corrected\n", *(_corrected_page(*key, cells, 3) for key, cells in found.corrected.items())]
    return "\n".join(parts)


# -- HTML --------------------------------------------------------------------------------------------------------------

_TONES = {"confirmed": Mark("✓", "confirmed", "good"), "not confirmed": Mark("✗", "not confirmed", "bad")}


def _sections(found: Reproduction) -> list[Section]:
    """The page for the browser."""
    sections = [Section("What holds", _what_holds(found)), Section("What was met", _what_was_met(found))]
    figures: list[Block] = [block for figure in found.figures for block in figure.blocks()]
    if figures:
        sections.append(Section("Figures", figures))
    if found.tables:
        tables = [_printed_table(table, cells) for table, cells in found.tables.items()]
        sections.append(Section("Tables as printed", tables))
    if found.corrected:
        sections.append(Section("Tables corrected", [_corrected_table(*key, c) for key, c in found.corrected.items()]))
    differences: list[Block] = [Words("\n\n".join(DIFFERENCES))]
    if found.sessions:
        rows = [[cell.strip("`") for cell in row] for row in _session_rows(found)]
        differences.append(Table(["command", "machine", "runs", "minutes"], rows, "Commands, machines, time", False))
    return [*sections, Section("Known differences", differences)]


def _what_holds(found: Reproduction) -> list[Block]:
    blocks: list[Block] = []
    if found.claims:
        rows: list[list[str | Cell]] = [
            [one.words, Cell(one.verdict, mark=_TONES.get(one.verdict, Mark("~", "by the paper's accounting only"))),
             *one.figures]
            for one in found.claims
        ]  # fmt: skip
        blocks.append(Table(_CLAIM_HEAD, rows, "The paper's claims", filterable=False))
        blocks.append(Words("\n\n".join([_ABOUT_CLAIMS, *_rules(found)])))
    first = _first_rows(found)
    if first:
        blocks += [Words(_ABOUT_FIRST), Table(_FIRST_HEAD, first, "Who is first to the target", filterable=False)]
    return blocks or [Words("Nothing was run yet that decides a claim.")]


def _what_was_met(found: Reproduction) -> list[Block]:
    blocks: list[Block] = [
        Table(_CLASS_HEAD, _class_rows(found), "Cells within tolerance", filterable=False),
        Words(_ABOUT_PLACE),
        Table(_SUMMARY_HEAD, [[Cell(text, _sorted_by(text)) for text in row] for row in _summary_rows(found)],
              "Cells by table", filterable=False),
    ]  # fmt: skip
    exceptions = _exception_rows(found)
    if exceptions:
        blocks.append(Table(["cells", "how many", "why"], exceptions, "Outside tolerance, and why", filterable=False))
    return blocks


def _sorted_by(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _printed_table(table: PrintedTable, cells: Sequence[Comparison]) -> Table:
    columns: list[str | Column] = [
        "protocol", "metric", "cr", "C", "printed", "measured", Column("from", "2.5% of the worlds are below"),
        Column("to", "2.5% of the worlds are above"), "worlds", "deviation",
    ]  # fmt: skip
    rows: list[list[str | Cell]] = []
    for one in cells:
        _, protocol, metric, crash_rate, fraction = one.cell
        numbers = [crash_rate, fraction, one.printed, one.mean, *one.spread]
        digits = METRICS[metric].digits
        shown = [f"{crash_rate:g}", f"{fraction:g}", f"{one.printed:g}", *(f"{x:.{digits}f}" for x in numbers[3:])]
        rows.append([
            _NAMES[protocol], METRICS[metric].title, *map(Cell, shown, numbers),
            Cell(str(len(one.values)), len(one.values)),
            Cell(_deviation(one), one.deviation, None if one.within else OUTSIDE),
        ])  # fmt: skip
    return Table(columns, rows, f"Table {table.name}: {table.title}. {_count(cells)}.")


def _corrected_table(task: str, name: str, cells: Sequence[Corrected]) -> Table:
    measure = CORRECTED[name]
    rows: list[list[str | Cell]] = []
    for one in cells:
        low, high = one.spread if one.reached else (None, None)
        values = [one.middle, low, high]
        shown = [Cell("" if value is None else measure.shown(value), value) for value in values]
        reached = Cell(f"{len(one.reached)} of {len(one.values)}", len(one.reached))
        rows.append([
            _NAMES[one.protocol], Cell(f"{one.crash_rate:g}", one.crash_rate), Cell(f"{one.fraction:g}", one.fraction),
            *shown, reached,
        ])  # fmt: skip
    unit = f", {measure.unit}" if measure.unit else ""
    middle = "median" if name == "target_s" else "mean"
    head = ["protocol", "cr", "C", middle, "lowest", "highest", "worlds with a value"]
    return Table(head, rows, f"{task}: {measure.title}{unit}. {measure.about}.")
