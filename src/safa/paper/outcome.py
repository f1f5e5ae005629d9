"""What there is of a reproduction: comparisons, corrected cells, claims and figures, read from a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safa.errors import SafaError
from safa.paper.bias import BiasReport
from safa.paper.claims import Claim, claims
from safa.paper.collect import RESULTS, Results
from safa.paper.corrected import CORRECTED, Corrected, corrected
from safa.paper.figures import PaperFigure, all_figures
from safa.paper.grid import TASKS
from safa.paper.tables import PRINTED_TABLES, Comparison, PrintedTable, compare
from safa.runs.storage import reading

__all__ = ["SESSIONS", "Reproduction"]

SESSIONS = "sessions.jsonl"
"""What was run, where, and how long it took."""


@dataclass(frozen=True)
class Reproduction:
    """What there is to show, read from the results."""

    results: Results
    bias: Sequence[BiasReport]
    sessions: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path, bias: Sequence[BiasReport] = ()) -> Reproduction:
        """The reproduction in a folder."""
        return cls(Results(folder / RESULTS), bias, _sessions(folder / SESSIONS))

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
        """The claims for which there are results, with what was found of them."""
        return claims(self.results)

    @cached_property
    def figures(self) -> list[PaperFigure]:
        """The figures."""
        return all_figures(self.results, self.bias)

    @property
    def cells(self) -> list[Comparison]:
        """All cells of all tables."""
        return [one for cells in self.tables.values() for one in cells]


def _sessions(path: Path) -> list[dict[str, Any]]:
    """What was noted of each session; a last line that was cut off does not count."""
    if not path.exists():
        return []
    with reading(path):
        *lines, _ = path.read_bytes().split(b"\n")
    sessions = []
    for number, line in enumerate(lines, 1):
        try:
            session = json.loads(line.decode())
            words, numbers = (session["command"], session["machine"]), (session["runs"], session["seconds"])
            if not all(isinstance(word, str) for word in words) or not all(0 <= n < 2**63 for n in numbers):
                raise ValueError
        except (ValueError, TypeError, LookupError, RecursionError):
            raise SafaError(f"{path}, line {number}: it is not the note of a session") from None
        sessions.append(session)
    return sessions
