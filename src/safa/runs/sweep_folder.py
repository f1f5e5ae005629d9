"""The folder of a sweep: `sweep.json` (its plan), `results.csv` (a row a run), `runs/0001`, ... (its runs).

A run is written under another name, and gets its own when it is finished; so a folder `runs/0001` holds a whole run. A
run that was stopped half-way is run again: there are no checkpoints in a sweep.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safa.errors import SafaError
from safa.runs.folder import (
    RUNS,
    SWEEP,
    SWEEP_FORMAT,
    TABLE,
    Run,
    load_run,
    new_folder,
    plain,
    remove_run,
)
from safa.runs.settings import Settings
from safa.runs.storage import PART, read_json, write_atomically, writing
from safa.runs.values import shown

__all__ = ["KEEPS", "Keep", "SweepFolder", "finish_run", "unfinished_path", "write_run"]

Keep = Literal["records", "models", "curves", "nothing"]
KEEPS: tuple[Keep, ...] = ("records", "models", "curves", "nothing")
"""What a sweep keeps of its runs besides their rows: settings, records and metrics, their models too, or nothing.

Where it keeps curves, it keeps no folders; the rows have the main metric over time.
"""

_UNFINISHED = re.compile(r"\d{4,}\.part-\d+(\.old)?")
_GLANCE_S = 0.5  # a sweep that was just killed holds its folder no longer than this


@dataclass(frozen=True)
class SweepFolder:
    """A sweep on the disk. `varied` has for every run the settings in which the runs differ, and its seed."""

    path: Path
    keep: Keep
    varied: tuple[Mapping[str, Any], ...]
    checks: tuple[str, ...]
    """A checksum of the settings of every run."""

    @classmethod
    def of(cls, path: Path, runs: Sequence[Settings], keep: Keep) -> SweepFolder:
        """The folder of a sweep over these runs; nothing is written yet."""
        if keep not in KEEPS:
            raise SafaError(f"keep must be one of {', '.join(KEEPS)}, not {keep!r}")
        checks = (hashlib.sha256(settings.to_toml().encode()).hexdigest() for settings in runs)
        return cls(path, keep, tuple(_varied(runs)), tuple(checks))

    @classmethod
    def read(cls, path: Path) -> SweepFolder:
        """The sweep in a folder, finished or not."""
        if not (path / SWEEP).is_file():
            raise SafaError(f"{path} holds no sweep: there is no {SWEEP} in it")
        found = read_json(path / SWEEP)
        if not isinstance(found, dict) or found.get("format") != SWEEP_FORMAT:
            raise SafaError(f"{path / SWEEP} is of a format that this version cannot read")
        keep, runs = found.get("keep"), found.get("runs")
        if keep not in KEEPS or not isinstance(runs, list) or not all(map(_is_planned, runs)) or not _is_plan(runs):
            raise SafaError(f"{path / SWEEP} is damaged: it does not hold the plan of a sweep")
        return cls(path, keep, tuple(run["varied"] for run in runs), tuple(run["check"] for run in runs))

    @contextmanager
    def begin(self, *, force: bool) -> Iterator[None]:
        """Begin the sweep, or resume it if it is there already; nobody else works on it meanwhile.

        Another sweep is replaced only with `force`.
        """
        from safa.runs.lock import hold

        if force or not self._is_there():
            new_folder(self.path, force=force)
            with writing(self.path / SWEEP):
                write_atomically(self.path / SWEEP, self._plan())
        with hold(self.path, "sweep", wait_s=_GLANCE_S):
            with writing(self.path / RUNS):
                self._clear()
            yield

    def _is_there(self) -> bool:
        """Whether this very sweep is in the folder; another one is an error."""
        if not (self.path / SWEEP).is_file():
            return False
        if (self.path / SWEEP).read_bytes() != self._plan():
            raise SafaError(f"{self.path} holds another sweep; choose another folder, or replace it with --force")
        return True

    def _plan(self) -> bytes:
        runs = [{"varied": varied, "check": check} for varied, check in zip(self.varied, self.checks, strict=True)]
        lines = ",\n".join(json.dumps(run) for run in runs)
        return f'{{"format": "{SWEEP_FORMAT}", "keep": "{self.keep}", "runs": [\n{lines}\n]}}\n'.encode()

    def _clear(self) -> None:
        """Remove runs that were stopped half-way.

        A worker that outlives its sweep for a moment cannot finish such a run any more: it is renamed first.
        """
        if self.keeps_runs:
            (self.path / RUNS).mkdir(exist_ok=True)
        for path in sorted((self.path / RUNS).glob(f"*{PART}-*")):
            if _UNFINISHED.fullmatch(path.name):
                old = path if path.name.endswith(".old") else path.rename(path.with_name(f"{path.name}.old"))
                remove_run(old)
                old.rmdir()
        for number in range(len(self.varied)):
            path = self.run_path(number)
            if path.exists() and not self.is_finished(number) and any(path.iterdir()):
                raise SafaError(f"{path} holds no run of this sweep; remove or rename it first")

    @property
    def keeps_runs(self) -> bool:
        """Whether the runs have folders of their own."""
        return self.keep in ("records", "models")

    @property
    def table(self) -> Path:
        """The table of the finished runs, in the order of the plan."""
        return self.path / TABLE

    def run_path(self, number: int) -> Path:
        """The folder of a run; runs are counted from 0, and their folders from 1."""
        return self.path / RUNS / f"{number + 1:04d}"

    def is_finished(self, number: int) -> bool:
        """Whether a run is finished and kept."""
        return (self.run_path(number) / "summary.json").is_file()

    def run(self, number: int) -> Run:
        """A run that was kept."""
        if not self.is_finished(number):
            raise SafaError(f"{self.run_path(number)} holds no finished run; the command of the sweep makes it again")
        return load_run(self.run_path(number))


def unfinished_path(path: Path) -> Path:
    """Under which name this process writes a run until it is finished."""
    return path.with_name(f"{path.name}{PART}-{os.getpid()}")


def finish_run(path: Path) -> None:
    """Give the run that this process has written its own name."""
    written = unfinished_path(path)
    with writing(path):
        try:
            written.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            remove_run(written)  # somebody else was faster, and has written the same
            with suppress(OSError):
                written.rmdir()


def write_run(path: Path, files: Mapping[str, bytes]) -> None:
    """Write the folder of a finished run that was made elsewhere: whole, or not under its name."""
    part = unfinished_path(path)
    with writing(part):
        part.mkdir(exist_ok=True)
        for name, content in files.items():
            write_atomically(part / name, content)
    finish_run(path)


def _varied(runs: Sequence[Settings]) -> Iterator[dict[str, Any]]:
    """For every run the settings in which the runs of one task differ, its seed, and its task if there are several."""
    values = [run.values() for run in runs]
    names = list(dict.fromkeys(name for value in values for name in value))
    tasks = {run.task: [value for value in values if value["task"] == run.task] for run in runs}
    differing = [name for name in names if any(_differ(name, of_task) for of_task in tasks.values())]
    chosen = [*(["task"] if len(tasks) > 1 else []), *(name for name in differing if name != "seed"), "seed"]
    labels = {name: _labels([value.get(name) for value in values]) for name in chosen}
    for place in range(len(runs)):
        yield plain({name: labels[name][place] for name in chosen})


def _differ(name: str, values: Sequence[Mapping[str, Any]]) -> bool:
    return any(value.get(name) != values[0].get(name) for value in values)


def _labels(values: Sequence[Any]) -> list[Any]:
    """The values as a table shows them, those that differ differently."""
    labels: dict[str, Any] = {}
    counts: Counter[Any] = Counter()
    for value in values:
        if repr(value) not in labels:
            label = shown(value)
            counts[label] += 1
            labels[repr(value)] = f"{label} ({counts[label]})" if counts[label] > 1 else label
    return [labels[repr(value)] for value in values]


def _is_planned(run: Any) -> bool:
    """Whether it is what a plan says of a run."""
    if not isinstance(run, dict) or not isinstance(run.get("varied"), dict) or not isinstance(run.get("check"), str):
        return False
    values = run["varied"].values()
    return type(run["varied"].get("seed")) is int and all(isinstance(v, str | int | float | None) for v in values)


def _is_plan(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every setting has the same seeds."""
    seeds: dict[str, list[int]] = {}
    for run in runs:
        setting = {name: value for name, value in run["varied"].items() if name != "seed"}
        seeds.setdefault(json.dumps(setting), []).append(run["varied"]["seed"])
    return len({tuple(sorted(of)) for of in seeds.values()}) == 1 and all(
        len(of) == len(set(of)) for of in seeds.values()
    )
