"""The page for the browser."""

from __future__ import annotations

from collections.abc import Sequence

from safa.paper import findings
from safa.paper.corrected import CORRECTED, Corrected
from safa.paper.differences import DIFFERENCES
from safa.paper.outcome import Reproduction
from safa.paper.tables import TABLE_METRICS, Comparison, PrintedTable
from safa.report.page import OUTSIDE, Block, Cell, Column, Mark, Section, Table, Words, render

__all__ = ["webpage"]

_TONES = {"confirmed": Mark("✓", "confirmed", "good"), "not confirmed": Mark("✗", "not confirmed", "bad")}


def webpage(found: Reproduction) -> str:
    """The whole page, as HTML."""
    return render("SAFA, reproduced", f"{findings.INTRODUCTION}\n\n{findings.in_short(found)}", _sections(found))


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
        rows = [[cell.strip("`") for cell in row] for row in findings.session_rows(found)]
        differences.append(Table(["command", "machine", "runs", "minutes"], rows, "Commands, machines, time", False))
    return [*sections, Section("Known differences", differences)]


def _what_holds(found: Reproduction) -> list[Block]:
    blocks: list[Block] = []
    if found.claims:
        rows: list[list[str | Cell]] = [
            [one.words, Cell(one.finding, mark=_TONES.get(one.finding, Mark("~", "by the paper's accounting only"))),
             *one.figures]
            for one in found.claims
        ]  # fmt: skip
        blocks.append(Table(findings.CLAIM_HEAD, rows, "The paper's claims", filterable=False))
        blocks.append(Words("\n\n".join([findings.ABOUT_CLAIMS, *findings.rules(found)])))
    first = findings.first_rows(found)
    if first:
        blocks += [
            Words(findings.ABOUT_FIRST),
            Table(findings.FIRST_HEAD, first, "Who is first to the target", filterable=False),
        ]
    return blocks or [Words("Nothing was run yet that decides a claim.")]


def _what_was_met(found: Reproduction) -> list[Block]:
    summary = [[Cell(text, _sorted_by(text)) for text in row] for row in findings.summary_rows(found)]
    blocks: list[Block] = [
        Table(findings.CLASS_HEAD, findings.class_rows(found), "Cells within tolerance", filterable=False),
        Words(findings.ABOUT_PLACE),
        Table(findings.SUMMARY_HEAD, summary, "Cells by table", filterable=False),
    ]
    exceptions = findings.exception_rows(found)
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
        digits = TABLE_METRICS[metric].digits
        shown = [f"{crash_rate:g}", f"{fraction:g}", f"{one.printed:g}", *(f"{x:.{digits}f}" for x in numbers[3:])]
        rows.append([
            findings.NAMES[protocol], TABLE_METRICS[metric].title, *map(Cell, shown, numbers),
            Cell(str(len(one.values)), len(one.values)),
            Cell(findings.deviation(one), one.deviation, None if one.within else OUTSIDE),
        ])  # fmt: skip
    return Table(columns, rows, f"Table {table.name}: {table.title}. {findings.count(cells)}.")


def _corrected_table(task: str, name: str, cells: Sequence[Corrected]) -> Table:
    measure = CORRECTED[name]
    rows: list[list[str | Cell]] = []
    for one in cells:
        low, high = one.spread if one.reached else (None, None)
        values = [one.middle, low, high]
        shown = [Cell("" if value is None else measure.shown(value), value) for value in values]
        reached = Cell(f"{len(one.reached)} of {len(one.values)}", len(one.reached))
        rows.append(
            [
                findings.NAMES[one.protocol],
                Cell(f"{one.crash_rate:g}", one.crash_rate),
                Cell(f"{one.fraction:g}", one.fraction),
                *shown,
                reached,
            ]
        )
    unit = f", {measure.unit}" if measure.unit else ""
    middle = "median" if name == "target_s" else "mean"
    head = ["protocol", "cr", "C", middle, "lowest", "highest", "worlds with a value"]
    return Table(head, rows, f"{task}: {measure.title}{unit}. {measure.about}.")
