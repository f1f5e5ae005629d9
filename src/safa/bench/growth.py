"""How costs grow: a simulated round with the clients, a step of an aggregator with the model and with its updates.

Every size is measured several times, each time in a process of its own, and an exponent is fitted to the times: 1 means
that twice the size takes twice as long. Everything is measured on one thread.
"""

from __future__ import annotations

import csv
import io
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from safa.errors import SafaError, did_you_mean
from safa.runs import write_atomically

__all__ = ["WHAT", "Fit", "Job", "Point", "exponent", "fits", "measure", "plan", "write"]

WHAT = {
    "clients": "seconds of a simulated round of SAFA, by clients",
    "model": "seconds of a step of an aggregator, by parameters of the model",
    "updates": "seconds of a step of an aggregator, by updates",
}
"""What can be measured, by name."""

_AGGREGATORS = ("mean", "buffer", "cache", "mifa")
_FULL: dict[str, tuple[int, ...]] = {
    "clients": (1_000, 10_000, 100_000, 1_000_000),
    "model": (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000),
    "updates": (1, 10, 100),
}
_QUICK: dict[str, tuple[int, ...]] = {
    "clients": (1_000, 10_000, 100_000),
    "model": (10_000, 100_000, 1_000_000),
    "updates": (1, 10, 100),
}
_QUICK_AGGREGATORS = ("mean", "cache")
_UPDATES = 4  # of a step, where the model grows
_PARAMETERS = 1_000_000, 100_000  # of the model, where the updates grow: in full, and quickly


@dataclass(frozen=True)
class Job:
    """One thing to be measured."""

    what: str
    series: str
    """The protocol, or the aggregator."""
    size: int
    workload: Mapping[str, Any] = field(default_factory=dict)
    """What the process is given (`safa.bench.workloads`)."""
    repeats: int = 1


@dataclass(frozen=True)
class Point:
    """What was measured for one size."""

    what: str
    series: str
    size: int
    seconds: tuple[float, ...]
    """Of every repetition."""
    peak_mib: float
    """The most memory that a process of it had."""
    times_copy: float | None = None
    """The time as a multiple of that of a plain copy of the bytes concerned; None where that makes no sense."""

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Fit:
    """How one series grows."""

    what: str
    series: str
    exponent: float
    """Of the medians."""
    least: float
    """The least exponent of a repetition."""
    most: float


def plan(what: Iterable[str] = tuple(WHAT), *, quick: bool = False, repeats: int = 3) -> list[Job]:
    """What is measured, the smallest first; `quick` leaves out the largest sizes and some aggregators."""
    if repeats < 1:
        raise SafaError(f"repeats must be at least 1, not {repeats}")
    chosen = list(what)
    for name in chosen:
        if name not in WHAT:
            raise SafaError(f"cannot measure {name!r}{did_you_mean(name, WHAT)}; there are {', '.join(WHAT)}")
    sizes = _QUICK if quick else _FULL
    return [job for name in dict.fromkeys(chosen) for size in sizes[name] for job in _jobs(name, size, quick, repeats)]


def _jobs(what: str, size: int, quick: bool, repeats: int) -> Iterator[Job]:
    if what == "clients":
        yield Job(what, "safa", size, {"kind": "rounds", "clients": size, "rounds": 10 if quick else 50}, repeats)
        return
    for aggregator in _QUICK_AGGREGATORS if quick else _AGGREGATORS:
        given = {"kind": "steps", "aggregator": aggregator}
        parameters, updates = (size, _UPDATES) if what == "model" else (_PARAMETERS[quick], size)
        yield Job(what, aggregator, size, given | {"parameters": parameters, "updates": updates}, repeats)


def measure(job: Job) -> Point:
    """Measure one thing as often as it says, each time in a process of its own."""
    found = [_in_process(job) for _ in range(job.repeats)]
    ratios = [one["seconds"] / one["copy_seconds"] for one in found if "copy_seconds" in one]
    return Point(
        job.what,
        job.series,
        job.size,
        seconds=tuple(one["seconds"] for one in found),
        peak_mib=max(one["peak_mib"] for one in found),
        times_copy=statistics.median(ratios) if ratios else None,
    )


def _in_process(job: Job) -> dict[str, float]:
    command = [sys.executable, "-m", "safa.bench.workloads", json.dumps(dict(job.workload))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        why = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}; is there enough memory?"]
        raise SafaError(f"{job.what} of {job.series} could not be measured for {job.size:,}: {why[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The slope of log(seconds) over log(sizes), by least squares."""
    if len(set(sizes)) < 2:
        raise SafaError("an exponent needs at least two sizes")
    slope, _ = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return float(slope)


def fits(points: Sequence[Point]) -> list[Fit]:
    """The exponent of every series that was measured for several sizes, with those of its repetitions."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        groups.setdefault((point.what, point.series), []).append(point)
    return [_fit(*key, group) for key, group in groups.items() if len(group) > 1]


def _fit(what: str, series: str, points: Sequence[Point]) -> Fit:
    sizes = [point.size for point in points]
    single = [exponent(sizes, seconds) for seconds in zip(*(point.seconds for point in points), strict=False)]
    return Fit(what, series, exponent(sizes, [point.median for point in points]), min(single), max(single))


def write(points: Sequence[Point], folder: Path) -> list[Path]:
    """Write growth.csv, and a plot for each thing that was measured, into a folder."""
    from safa.report.figures import save

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["what", "series", "size", "seconds", "least_seconds", "most_seconds", "peak_mib", "times_copy"])
    writer.writerows(map(_cells, points))
    write_atomically(folder / "growth.csv", text.getvalue().encode())
    whats = dict.fromkeys(point.what for point in points)
    plots = [save(_plot([one for one in points if one.what == what]), folder / what)[0] for what in whats]
    return [folder / "growth.csv", *plots]


def _cells(point: Point) -> list[Any]:
    times = (point.median, min(point.seconds), max(point.seconds))
    ratio = "" if point.times_copy is None else f"{point.times_copy:.2f}"
    return [point.what, point.series, point.size, *(f"{one:.6g}" for one in times), f"{point.peak_mib:.0f}", ratio]


def _plot(points: Sequence[Point]) -> Any:
    from safa.report.figures import Axis, lines

    rows = [
        {
            "size": point.size,
            "series": point.series,
            "seconds": point.median,
            "least": min(point.seconds),
            "most": max(point.seconds),
        }
        for point in points
    ]
    unit = {"clients": "clients", "model": "parameters", "updates": "updates in a step"}[points[0].what]
    x, y = Axis("size", unit, format="~s", log=True), Axis("seconds", "seconds", format="~g", log=True)
    return lines(rows, x, y, series="series", band=("least", "most"), points=True)
