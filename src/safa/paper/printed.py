"""The figures that the paper prints: Tables IV to XV, cell by cell."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

__all__ = ["TableCell", "printed"]

TableCell = tuple[str, str, str, float, float]
"""Task, protocol, metric, crash rate, fraction."""


@cache
def printed() -> dict[TableCell, float]:
    """All 960 cells (Wu et al., IEEE Transactions on Computers 2020, doi 10.1109/TC.2020.2994391)."""
    text = (files("safa.paper") / "tables.csv").read_text(encoding="utf-8")
    return {
        (row["task"], row["protocol"], row["metric"], float(row["crash_rate"]), float(row["fraction"])): float(
            row["value"]
        )
        for row in csv.DictReader(text.splitlines())
    }
