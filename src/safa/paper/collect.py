"""Runs what the reproduction consists of, and keeps every result as soon as it is there.

`results.jsonl` has one line per finished run. A run whose line is there is not run again, so that a reproduction which
was stopped at any instant continues where it was, and parts of it can be run on different machines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safa.analysis import METRICS
from safa.errors import SafaError
from safa.experiments.engines import Engine, LocalEngine
from safa.experiments.simulate import Experiment
from safa.experiments.sweep import one_thread
from safa.paper.grid import Job, job, lag_job
from safa.paper.times import PRINTED_TIMES, PrintedTimes
from safa.runs import plain
from safa.runs.lock import mark_written
from safa.runs.storage import append, reading, writing

__all__ = ["HOLD", "RESULTS", "Results", "collect", "device_name", "reached"]

RESULTS = "results.jsonl"
"""What the file is called."""
HOLD = 5
"""An accuracy counts as reached by the first round from which on it was held for so many rounds."""


_SCORES = ("best_accuracy", "best_loss", "last_accuracy", "last_loss")
_CURVES = ("closed_s", "loss", "accuracy")


class Results:
    """The results that are there, by the key of their job."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one. A last line that was cut off does not count; `add` writes over it."""
        self._path = path
        self._rows: dict[str, dict[str, Any]] = {}
        self._cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        self._cut_at: int | None = None
        if path.exists():
            with reading(path):
                whole = path.read_bytes()
            end = whole.rfind(b"\n") + 1
            self._cut_at = end if end < len(whole) else None
            for number, line in enumerate(whole[:end].splitlines(), 1):
                try:
                    row = _read_row(line)
                except (ValueError, RecursionError) as error:
                    raise SafaError(f"{path}, line {number}: {error}") from None
                self._rows[row.pop("key")] = row

    def __contains__(self, asked: Job) -> bool:
        return asked.key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, asked: Job) -> dict[str, Any] | None:
        """The result of a job, or None."""
        return self._rows.get(asked.key)

    def add(self, done: Job, row: dict[str, Any]) -> None:
        """Keep a result: one line in one write."""
        line = json.dumps({"key": done.key} | row, separators=(",", ":")) + "\n"
        with writing(self._path), self._path.open("ab", buffering=0) as file:
            if self._cut_at is not None:
                file.truncate(self._cut_at)
                self._cut_at = None
            append(file, line.encode())
        self._rows[done.key] = row
        self._cells.clear()

    @contextlib.contextmanager
    def being_written(self) -> Iterator[None]:
        """Let others see that results are being added."""
        with writing(self._path):
            file = self._path.open("ab")
        with file:
            mark_written(file)
            yield

    def cell(self, accounting: str, task: str, protocol: str, **cell: Any) -> list[dict[str, Any]]:
        """The results of a cell of the tables in all its worlds, seed by seed."""
        key = (accounting, task, protocol, *cell.items())
        return self._by_seed(key, lambda seed: job(accounting, task, protocol, seed=seed, **cell))

    def lag(self, accounting: str, task: str, lag: int, **cell: Any) -> list[dict[str, Any]]:
        """The results for a lag tolerance in all worlds, seed by seed."""
        key = (accounting, task, lag, *cell.items())
        return self._by_seed(key, lambda seed: lag_job(accounting, task, lag, seed=seed, **cell))

    def _by_seed(self, key: tuple[Any, ...], of_seed: Callable[[int], Job]) -> list[dict[str, Any]]:
        """Seed by seed, from 0 up to the first that is missing; what was asked for once is remembered."""
        if key not in self._cells:
            rows = (self.get(of_seed(seed)) for seed in itertools.count())
            self._cells[key] = list(itertools.takewhile(lambda row: row is not None, rows))  # type: ignore[arg-type]
        return self._cells[key]

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of the jobs that are still to be done."""
        return [each for each in jobs if each not in self]


def _read_row(line: bytes) -> dict[str, Any]:
    """A result as `Results.add` wrote it; a `ValueError` says what is wrong with any other line."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        raise ValueError("it is not a result with a key")
    row["summary"] = _metrics(row.get("summary"))
    if not all(row.get(name) is None or _is_number(row[name]) for name in ("target_s", "target_round")):
        raise ValueError("target_s and target_round must be numbers or null")
    curves = [row[name] for name in _CURVES if name in row]
    if len(curves) not in (0, len(_CURVES)) or not all(isinstance(curve, list) for curve in curves):
        raise ValueError(f"{', '.join(_CURVES)} must be lists, all of them or none")
    if len({len(curve) for curve in curves}) > 1:
        raise ValueError(f"{', '.join(_CURVES)} must be lists of one length")
    if not all(value is None or _is_number(value) for curve in curves for value in curve) or (
        curves and None in curves[0]
    ):
        raise ValueError(f"{', '.join(_CURVES)} must hold numbers")
    return row


def _metrics(summary: Any) -> dict[str, Any]:
    """The metrics of a result, numbers as numbers; scores are there for all models or for none."""
    if not isinstance(summary, dict) or not summary.keys() >= {*METRICS, *PRINTED_TIMES, *_SCORES}:
        raise ValueError("summary must hold all metrics")
    found = {name: float(value) if value in ("inf", "-inf", "nan") else value for name, value in summary.items()}
    scores = [found.get(name) for name in _SCORES]
    has_none = [name for name, value in found.items() if value is None]
    wrong = [name for name, value in found.items() if value is not None and not _is_number(value)]
    if wrong or len(has_none) not in (0, len(scores)) or any(score is not None for score in scores if has_none):
        raise ValueError(f"summary must hold numbers, unlike {(wrong or has_none)[0]}")
    return found


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and not (type(value) is int and abs(value) > 2**63)


def collect(jobs: Sequence[Job], results: Results, *, engine: Engine | None = None) -> Iterator[Job]:
    """Do the jobs that are missing, in this process or by an engine, and yield each when its result is kept."""
    missing = {_name(each, number): each for number, each in enumerate(results.missing(jobs), 1)}
    work = {name: partial(_carry_out, each) for name, each in missing.items()}
    with results.being_written():
        for name, row in (engine or LocalEngine()).finished(work):
            results.add(missing[name], row)
            yield missing[name]


def _name(each: Job, number: int) -> str:
    """What a job is called, should it be lost."""
    return f"run {number} ({each.settings.protocol} on {each.settings.task}, seed {each.settings.seed})"


def _carry_out(task: Job) -> dict[str, Any]:
    """Do a job. A run that trains takes one core, so that it comes out the same with any number of workers."""
    start = time.perf_counter()
    with one_thread() if task.settings.train else contextlib.nullcontext():
        experiment = Experiment(task.settings)
        times = PrintedTimes()
        closed_s: list[float] = []
        losses: list[float | None] = []
        accuracies: list[float | None] = []
        for record in experiment.rounds():
            times.add(record)
            closed_s.append(record.closed_s)
            losses.append(record.loss)
            accuracies.append(record.metrics.get("accuracy"))
            if record.round == task.rounds:
                summary = plain(experiment.summary() | times.values())
            if record.round >= task.rounds and (task.target is None or reached(accuracies, task.target) is not None):
                break
    row: dict[str, Any] = {"summary": summary}
    if task.target is not None:
        first = reached(accuracies, task.target)
        row["target_s"] = None if first is None else closed_s[first]
        row["target_round"] = None if first is None else first + 1
    if task.traced:
        row |= {"closed_s": closed_s, "loss": losses, "accuracy": accuracies}
    return row | {"device": device_name(task.settings.device), "wall_time_s": time.perf_counter() - start}


def reached(accuracies: Sequence[float | None], target: float) -> int | None:
    """The place of the first round from which on the target was held for `HOLD` rounds."""
    held = 0
    for place, accuracy in enumerate(accuracies):
        held = held + 1 if accuracy is not None and accuracy >= target else 0
        if held == HOLD:
            return place - HOLD + 1
    return None


def device_name(device: str) -> str:
    """What a device is called by its maker."""
    if not device.startswith("cuda"):
        return device
    import torch

    return str(torch.cuda.get_device_name(device))
