"""Write the tables of docs/performance.md from docs/performance/growth.csv, which `safa bench --out` wrote.

    python docs/performance_tables.py

The time of an update of a 10 MB model is interpolated between the two nearest sizes of the model. What lies beyond the
measured sizes is extrapolated in proportion, and marked with a star.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np

from safa.bench.growth import exponent

PAGE = Path(__file__).with_name("performance.md")
MEASURED = Path(__file__).parent / "performance" / "growth.csv"
MODEL_BYTES = 10e6
DEVICES = 1_000_000, 100_000_000
FRACTION = 0.1  # C: a round wants the updates of so many of the clients
LINK_BYTES_S = 10e9 / 8  # 10 Gbit/s
UPDATES = 4  # of a step, where `safa bench` lets the model grow
DAY_S = 86_400

Row = dict[str, str]


class Series:
    """What was measured of one thing by size."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self.sizes, self.seconds, self.mib = (
            np.array([float(row[name]) for row in rows]) for name in ("size", "seconds", "peak_mib")
        )

    def seconds_at(self, size: float) -> float:
        """Seconds at a size between those that were measured."""
        return float(np.exp(np.interp(np.log(size), np.log(self.sizes), np.log(self.seconds))))


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table in markdown; all columns but the first are numbers."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def growth(rows: list[Row], what: str) -> str:
    """What was measured of one thing, with the exponents."""
    chosen = [row for row in rows if row["what"] == what]
    sizes = list(dict.fromkeys(int(row["size"]) for row in chosen))
    head = [
        {"clients": "", "model": "aggregator"}.get(what, "aggregator"),
        *(f"{size:,}" for size in sizes),
        "exponent",
    ]
    return table(head, (_growth_row(name, list(group)) for name, group in by_series(chosen)))


def by_series(rows: list[Row]) -> Iterator[tuple[str, Iterator[Row]]]:
    """The rows of each series, by size."""
    return groupby(sorted(rows, key=lambda row: (row["series"], int(row["size"]))), key=lambda row: row["series"])


def _growth_row(name: str, rows: list[Row]) -> list[str]:
    cells = [_milliseconds(row) for row in rows]
    fitted = exponent([int(row["size"]) for row in rows], [float(row["seconds"]) for row in rows])
    return [f"`{name}`", *cells, f"{fitted:.2f}"]


def _milliseconds(row: Row) -> str:
    more = f", {float(row['times_copy']):.1f}x" if row["times_copy"] else f", {row['peak_mib']} MiB"
    ms = 1e3 * float(row["seconds"])
    return f"{ms:,.0f} ms{more}" if ms >= 1000 else f"{ms:.3g} ms{more}"


def amount(value: float, unit: str) -> str:
    """A number with a unit of thousands, as 1.2 TB."""
    power = min(5, int(np.log10(max(1.0, value * 1.0001)) // 3))
    return f"{value / 1000**power:.3g} {('', 'k', 'M', 'G', 'T', 'P')[power]}{unit}"


def arithmetic(rows: list[Row]) -> Iterator[list[str]]:
    """What so many devices take."""
    measured = {(what, name): Series(group) for what in ("clients", "model") for name, group in by_series(
        [row for row in rows if row["what"] == what])}  # fmt: skip
    updates = [FRACTION * devices for devices in DEVICES]
    link_s = [count * MODEL_BYTES / LINK_BYTES_S for count in updates]
    yield ["updates in a round (C = 0.1)", *(f"{count:,.0f}" for count in updates)]
    yield ["bytes received in a round", *(amount(count * MODEL_BYTES, "B") for count in updates)]
    yield ["seconds to receive them at 10 Gbit/s", *(f"{seconds:,.0f}" for seconds in link_s)]
    yield [
        "rounds a day at 10 Gbit/s",
        *(f"{DAY_S / seconds:,.{0 if seconds < DAY_S / 10 else 1}f}" for seconds in link_s),
    ]
    for (what, name), series in measured.items():
        if what == "model":
            yield _aggregator_row(name, series.seconds_at(MODEL_BYTES / 4) / UPDATES, updates)
    yield ["entries of `cache` or `mifa`, a model per device", *(amount(count * MODEL_BYTES, "B") for count in DEVICES)]
    yield ["entries of `mean` or `buffer`", *("none" for _ in DEVICES)]
    yield from _simulation_rows(measured["clients", "safa"])


def _aggregator_row(name: str, update_s: float, updates: list[float]) -> list[str]:
    rate = f"{1 / update_s:,.0f} updates/s, {amount(MODEL_BYTES / update_s, 'B')}/s"
    return [f"`{name}` on one core ({rate}), seconds a round", *(f"{count * update_s:,.0f}*" for count in updates)]


def _simulation_rows(series: Series) -> Iterator[list[str]]:
    per_client = (series.mib[-1] - series.mib[0]) / (series.sizes[-1] - series.sizes[0]) * 2**20
    stars = ["*" if devices > series.sizes[-1] else "" for devices in DEVICES]
    seconds = [float(series.seconds[-1]) * devices / float(series.sizes[-1]) for devices in DEVICES]
    yield [
        "simulated round on one core, seconds",
        *(f"{one:.2g}{star}" for one, star in zip(seconds, stars, strict=True)),
    ]
    memory = [amount(per_client * devices, "B") for devices in DEVICES]
    yield [
        f"memory of the simulation ({per_client:.0f} bytes a client)",
        *map("".join, zip(memory, stars, strict=True)),
    ]


def with_tables(page: str) -> str:
    """The page with its tables as they are now."""
    rows = list(csv.DictReader(MEASURED.read_text(encoding="utf-8").splitlines()))
    tables = {what: growth(rows, what) for what in ("clients", "model", "updates")}
    tables["arithmetic"] = table(["", *(f"{devices:,} devices" for devices in DEVICES)], arithmetic(rows))
    for name, text in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
