"""The page for the documentation, in Markdown, laid out as the paper lays its tables out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from safa.paper import findings
from safa.paper.corrected import CORRECTED, Corrected
from safa.paper.differences import DIFFERENCES
from safa.paper.grid import CRASH_RATES, FRACTIONS
from safa.paper.outcome import Reproduction
from safa.paper.tables import TABLE_METRICS, Comparison, PrintedTable

__all__ = ["corrected_page", "document", "table_page"]

_SIGN = "▲"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _grid(protocols: Sequence[str], cell: Callable[[str, float, float], str]) -> str:
    """A table laid out as in the paper: a row for each protocol and crash rate, a column for each fraction."""
    rows = [
        [findings.NAMES[protocol], f"{crash_rate:g}", *(cell(protocol, crash_rate, fraction) for fraction in FRACTIONS)]
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
    mark = "" if one.within else f" {_SIGN}"
    return f"{one.printed:g}<br>{one.mean:,.{digits}f}{spread}<br>{findings.deviation(one)}{mark}"


def table_page(table: PrintedTable, cells: Sequence[Comparison], level: int = 1) -> str:
    """A printed table beside what is measured."""
    parts = [f"{'#' * level} Table {table.name}: {table.title}\n"]
    for metric in table.metrics:
        own = [one for one in cells if one.cell[2] == metric]
        what = TABLE_METRICS[metric]
        parts.append(
            f"{what.title[0].upper()}{what.title[1:]}: {findings.count(own)}. In a cell: printed, measured mean "
            f"(central 95% of the worlds), deviation; {_SIGN} if it is not so that {what.tolerance}.\n"
        )
        parts.append(_printed_grid(table, metric, own))
    return "\n".join(parts)


def corrected_page(task: str, name: str, cells: Sequence[Corrected], level: int = 1) -> str:
    """A table with the accounting put right."""
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


def document(found: Reproduction) -> str:
    """The page for the documentation."""
    parts = [
        "# The paper, reproduced\n",
        findings.INTRODUCTION + " Made by `safa reproduce`; do not edit.\n",
        findings.in_short(found),
    ]
    if found.claims:
        parts += [
            "## What holds\n",
            _markdown(findings.CLAIM_HEAD, findings.claim_rows(found)),
            findings.ABOUT_CLAIMS + "\n",
        ]
        parts += [*(f"- {rule}" for rule in findings.rules(found)), ""]
    first = findings.first_rows(found)
    if first:
        parts += ["### Who is first\n", findings.ABOUT_FIRST + "\n", _markdown(findings.FIRST_HEAD, first)]
    parts += [
        "## What was met\n",
        _markdown(findings.CLASS_HEAD, findings.class_rows(found)),
        findings.ABOUT_PLACE + "\n",
    ]
    parts += [_markdown(findings.SUMMARY_HEAD, findings.summary_rows(found))]
    parts += ["### Tolerances\n", *(f"- {each.title}: {each.tolerance}." for each in TABLE_METRICS.values()), ""]
    exceptions = findings.exception_rows(found)
    if exceptions:
        parts += ["### Outside tolerance, and why\n", _markdown(["cells", "how many", "why"], exceptions)]
    parts += ["## Known differences from the paper\n", *(f"- {each}" for each in DIFFERENCES), ""]
    if found.sessions:
        head = ["command", "machine", "runs", "minutes"]
        parts += ["## Commands, machines, time\n", _markdown(head, findings.session_rows(found))]
    if found.figures:
        parts += ["## Figures\n"]
    for figure in found.figures:
        parts += [f"### {figure.title}\n", f"![{figure.title}](figures/{figure.name}.svg)\n", f"*{figure.caption}*\n"]
    parts += ["## Tables as printed\n", *(table_page(table, cells, 3) for table, cells in found.tables.items())]
    parts += ["## Tables corrected\n", *(corrected_page(*key, cells, 3) for key, cells in found.corrected.items())]
    return "\n".join(parts)
