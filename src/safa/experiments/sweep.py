"""Sweeps: a run for every combination of the given values, and one table with a row for each."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safa.analysis import METRICS, TARGET_METRICS, client_metrics, score_metrics
from safa.errors import SafaError
from safa.experiments.simulate import Experiment, fleet_of
from safa.experiments.workers import pool
from safa.fleet import check_sizes
from safa.protocol import build
from safa.runs.settings import Settings, refuse_unused
from safa.runs.storage import append, writing
from safa.simulation import run_rounds
from safa.tasks import find_task

__all__ = ["columns", "combinations", "one_thread", "run_one", "run_sweep"]


def combinations(
    tasks: Sequence[str], given: Mapping[str, Sequence[Any]], *, preset: str | Path | None = None
) -> list[Settings]:
    """The settings of every run of a sweep, all checked, the last list varying fastest.

    What is given must have an effect in one of the runs at least: `lag_tolerance` may be given for safa and fedavg.
    """
    for name, listed in {"task": tasks, **given}.items():
        _refuse_twice(name, listed)
    made = [
        Settings.combined(task, preset=preset, **dict(zip(given, values, strict=True)))
        for task in tasks
        for values in itertools.product(*given.values())
    ]
    refuse_unused(made)
    runs = [settings for settings, _ in made]
    for settings in _one_per_world(runs):
        fleet = fleet_of(settings)
        run_rounds(settings, fleet)
        if settings.train:
            check_sizes(settings, fleet, find_task(settings.task).samples)
            _check_aggregator(settings)
    return runs


def _check_aggregator(settings: Settings) -> None:
    """Refuse an aggregator or a server optimiser that makes no sense with the protocol; by default there is none."""
    if settings.aggregator != "auto" or settings.server_optimiser != "none":
        from safa.server.setup import make_aggregator

        make_aggregator(settings, build(settings.protocol, [1.0], settings.values(), settings.protocol_options))


def _refuse_twice(name: str, values: Sequence[Any]) -> None:
    """Refuse a list that contains a value twice: the runs would be the same."""
    seen = set()
    for value in values:
        key = value if isinstance(value, Hashable) else repr(value)
        if key in seen:
            raise SafaError(f"{name} lists {value} twice, and the runs would be the same")
        seen.add(key)


def _one_per_world(runs: Sequence[Settings]) -> list[Settings]:
    """A selection of runs that reads every file and builds every protocol under every clock."""
    files = ("speeds", "sizes", "links", "trace")
    names = ("task", "train", "protocol", "clock", "clients", "partition", *files, "aggregator", "server_optimiser")
    return list({tuple(getattr(run, name) for name in names): run for run in runs}.values())


def run_one(settings: Settings) -> dict[str, Any]:
    """Simulate one run and return its row: settings, metrics and wall time."""
    start = time.perf_counter()
    with one_thread() if settings.train else contextlib.nullcontext():
        experiment = Experiment(settings)
        for _ in experiment.rounds():
            pass
        summary = experiment.summary()
    return experiment.settings.values() | summary | {"wall_time_s": time.perf_counter() - start}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread for a run of a sweep, so that its result does not depend on the number of workers.

    A run whose settings say how many threads it uses, uses those.
    """
    from safa.training import torch_threads

    with torch_threads(1):
        yield


def columns(runs: Sequence[Settings]) -> list[str]:
    """The columns of the table: settings first, then metrics."""
    names = dict.fromkeys(name for settings in runs for name in settings.values())
    more: dict[str, str] = {}
    for run in runs:
        more |= score_metrics(run.metrics)
        more |= TARGET_METRICS if run.until else {}
        more |= client_metrics(run.metrics) if run.train and run.eval_clients else {}
    return [*names, *METRICS, *more, "wall_time_s"]


def run_sweep(runs: Sequence[Settings], table: Path, *, workers: int = 1) -> Iterator[dict[str, Any]]:
    """Simulate all runs and append their rows to the table, in the order of `runs`."""
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
        several = max(1, min(8, len(runs) // (4 * workers)))  # short runs are sent to the workers several at a time
        yield from processes.map(run_one, runs, chunksize=1 if runs[0].train else several)


def _csv_line(values: Sequence[Any]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue().encode()
