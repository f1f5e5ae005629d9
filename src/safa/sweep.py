"""Many runs, one table: every combination of the values given, a row each."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safa.analysis import METRICS
from safa.experiment import CLIENT_METRICS, Experiment
from safa.settings import Settings
from safa.simulation import make_fleet, run_rounds
from safa.storage import append, writing
from safa.workers import pool

__all__ = ["columns", "combinations", "one_thread", "run_one", "run_sweep"]


def combinations(
    tasks: Sequence[str], given: Mapping[str, Sequence[Any]], *, preset: str | None = None
) -> list[Settings]:
    """The settings of every run of a sweep, all checked, the last list varying fastest."""
    runs = [
        Settings.of(task, preset=preset, **dict(zip(given, values, strict=True)))
        for task in tasks
        for values in itertools.product(*given.values())
    ]
    for settings in _one_per_world(runs):
        run_rounds(settings, make_fleet(settings))
    return runs


def _one_per_world(runs: Sequence[Settings]) -> list[Settings]:
    """Runs that between them read every file and build every protocol under every clock."""
    files = ("protocol", "clock", "clients", "speeds", "sizes", "links", "trace")
    return list({tuple(getattr(run, name) for name in files): run for run in runs}.values())


def run_one(settings: Settings) -> dict[str, Any]:
    """Simulate one run and return its row: settings, metrics and how long it took."""
    start = time.perf_counter()
    experiment = Experiment(settings)
    with one_thread() if settings.train else contextlib.nullcontext():
        for _ in experiment.rounds():
            pass
    return settings.values() | experiment.summary() | {"wall_time_s": time.perf_counter() - start}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """A run of a sweep takes one core, so that it comes out the same with any number of workers beside it."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def columns(runs: Sequence[Settings]) -> list[str]:
    """The columns of the table: settings first, then metrics."""
    names = dict.fromkeys(name for settings in runs for name in settings.values())
    clients = CLIENT_METRICS if any(run.train and run.eval_clients for run in runs) else {}
    return [*names, *METRICS, *clients, "wall_time_s"]


def run_sweep(runs: Sequence[Settings], table: Path, *, workers: int = 1) -> Iterator[dict[str, Any]]:
    """Simulate all runs and append each row to the table as soon as its turn comes; the order is that of `runs`."""
    names = columns(runs)
    with writing(table):
        file = table.open("wb", buffering=0)
        append(file, _csv_line(names))
    with file:
        for row in _rows(runs, workers):
            with writing(table):
                append(file, _csv_line([row.get(name) for name in names]))
            yield row


def _rows(runs: Sequence[Settings], workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        yield from map(run_one, runs)
        return
    with pool(workers) as processes:
        several = max(1, min(8, len(runs) // (4 * workers)))  # short runs are handed out several at a time
        yield from processes.map(run_one, runs, chunksize=1 if runs[0].train else several)


def _csv_line(values: Sequence[Any]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue().encode()
