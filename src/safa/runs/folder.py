"""The folder of a run: `config.toml`, `rounds.jsonl` (one record a line), `summary.json`, `model.safetensors`.

While a run is unfinished there is `checkpoint/`, too. A run that was stopped at any instant can be read, and resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from safa.analysis import METRICS
from safa.errors import SafaError
from safa.protocol import registry
from safa.protocol.records import RecordOrder, RoundRecord
from safa.runs.checkpoints import FOLDER as CHECKPOINTS
from safa.runs.checkpoints import (
    Checkpoint,
    CheckpointWriter,
    RowSource,
    checkpoint_files,
    has_checkpoint,
    load_checkpoint,
    remove_checkpoints,
)
from safa.runs.fields import as_toml
from safa.runs.settings import FORMAT, Settings
from safa.runs.storage import PART, append, read_json, read_tensors, reading, write_atomically, writing

if TYPE_CHECKING:
    import altair as alt
    from torch import Tensor

__all__ = [
    "ARENA",
    "ARENA_FORMAT",
    "ROSTER",
    "RUNS",
    "STATUS",
    "STATUS_FORMAT",
    "SWEEP",
    "SWEEP_FORMAT",
    "TABLE",
    "TRACKING",
    "Checkpoint",
    "Run",
    "RunWriter",
    "has_checkpoint",
    "load_run",
    "new_folder",
    "next_folder",
    "plain",
    "remove_run",
    "write_atomically",
    "write_config",
]

_CONFIG, _ROUNDS, _SUMMARY, _MODEL = "config.toml", "rounds.jsonl", "summary.json", "model.safetensors"
SWEEP, TABLE = "sweep.json", "results.csv"
"""In the folder of a sweep: its plan, and a row for every run."""
SWEEP_FORMAT = "safa sweep 1"
ARENA, ARENA_FORMAT = "tables.json", "safa arena tables 1"
"""The tables of an arena in its folder, of which its page is made."""
RUNS = "runs"
"""In the folder of a sweep: the folders of its runs."""
ROSTER = "roster.json"
"""In a deployment: who its clients are, by number, with name, size and details."""
STATUS, STATUS_FORMAT = "status.json", "safa status 1"
"""In a deployment: the round under way and the clients, as of a second ago."""
TRACKING = "tracking.json"
"""Where a run or a sweep is tracked: the key by which trackers find it again."""
_DEPLOYMENT, _LINK, _CLIENTS = "deployment.json", Path("flower", "link.json"), "clients"
_FILES = (
    "report.html", _SUMMARY, _MODEL, _ROUNDS, ROSTER, STATUS, _DEPLOYMENT, "deploy.toml", "nodes.json", "unblock.json",
    "expel.json", "expel.applying.json", "server.log", "lock", TRACKING, TABLE, _CONFIG, SWEEP,
)  # fmt: skip
"""The files that this program writes into the folder of a run or a sweep; those that mark it as such come last."""
_BEGUN = (_CONFIG + PART, SWEEP + PART)
"""All that a program leaves which was killed when it had just made a folder."""
_SWEPT = re.compile(r"\d{4,}(\.part-\d+(\.old)?)?")
"""The folders of the runs of a sweep, finished or not."""
_LARGEST = 1e300  # no number in a file is larger
_DEVICE_STATE = "state.safetensors"


def new_folder(path: Path, *, force: bool) -> Path:
    """Make a folder for results. One that holds a run or a sweep already is used only with `force`.

    Then the files that this program wrote are removed from it; what others put there stays.
    """
    if path.exists():
        if not path.is_dir():
            raise SafaError(f"{path} is not a folder")
        if _is_ours(path):
            if not force:
                raise SafaError(f"{path} already holds a run; choose another folder, or replace it with --force")
            remove_run(path)
        elif any(entry.name not in _BEGUN or entry.is_symlink() for entry in path.iterdir()):
            raise SafaError(f"{path} holds other files; choose an empty or new folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SafaError(f"cannot make the folder {path}: {error.strerror}") from None
    return path


def write_config(folder: Path, settings: Settings) -> None:
    """Write the settings of a run into its folder; this marks it as a folder that this program wrote."""
    write_atomically(folder / _CONFIG, (f"format = {as_toml(FORMAT)}\n" + settings.to_toml()).encode())


def _is_ours(folder: Path) -> bool:
    """Whether this program wrote a run or a sweep into a folder."""
    try:
        if (folder / _CONFIG).is_file():
            return tomllib.loads((folder / _CONFIG).read_text(encoding="utf-8")).get("format") == FORMAT
        if (folder / SWEEP).is_file():
            found = json.loads((folder / SWEEP).read_bytes())
            return isinstance(found, dict) and found.get("format") == SWEEP_FORMAT
    except (OSError, ValueError, RecursionError):
        pass
    return False


def remove_run(folder: Path) -> None:
    """Remove what this program wrote into the folder of a run or a sweep; nothing at all if that is not clear."""
    from safa.runs.lock import is_held

    swept = [path for path in _files_in(folder / RUNS) if _SWEPT.fullmatch(path.name)] if _is_sweep(folder) else []
    for path in (folder, *swept):
        _check_names(path, [path] if path in swept else [])
    if is_held(folder):
        raise SafaError(f"a {'sweep' if _is_sweep(folder) else 'server'} works on the run in {folder}; stop it first")
    for path in swept:
        _remove_files(path)
    for path in (*swept, *([folder / RUNS] if swept else [])):
        with suppress(OSError):  # where there is something else in it, it stays
            path.rmdir()
    _remove_files(folder)


def _is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).is_file()


def _is_deployment(folder: Path) -> bool:
    return (folder / _LINK).is_file()


def _files_of(folder: Path) -> list[Path]:
    """Where this program may have written a file of a run, in the order in which they are removed."""
    return [folder / f"{name}{end}" for name in _FILES for end in (PART, "")]


def _folders_of(folder: Path) -> list[Path]:
    """Where this program may have made a folder in that of a run, outer ones first."""
    deployed = [folder / _LINK.parent, folder / _CLIENTS, *_files_in(folder / _CLIENTS)]
    return [folder / CHECKPOINTS, *(deployed if _is_deployment(folder) else ())]


def _check_names(folder: Path, more: Sequence[Path] = ()) -> None:
    """Refuse a folder in which one of the names stands for something else; `more` are to be folders, too."""
    folders = [*more, *_folders_of(folder)]
    for path in [path for path in (*_files_of(folder), *folders) if path.is_symlink() or path.exists()]:
        if path.is_symlink() or path.is_dir() != (path in folders):
            raise SafaError(f"{path} is not what this program wrote under that name; remove or rename it first")


def _remove_files(folder: Path) -> None:
    """Remove the files of a run, and its folders where nothing else is in them."""
    is_deployment, folders = _is_deployment(folder), _folders_of(folder)
    states = [path for client in _files_in(folder / _CLIENTS) for path in _files_in(client)] if is_deployment else []
    states = [path for path in states if path.name.removesuffix(PART) == _DEVICE_STATE]
    with writing(folder):
        if is_deployment:
            shutil.rmtree(folder / _LINK.parent)
        for path in (*checkpoint_files(folder), *states, *_files_of(folder)):
            path.unlink(missing_ok=True)
    for path in reversed(folders):
        with suppress(OSError):  # where there is something else in it, it stays
            path.rmdir()


def _files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []


def next_folder(name: str) -> Path:
    """The first folder runs/name-1, runs/name-2, ... that does not exist."""
    plain_name = name.replace(":", ".")
    return next(path for n in count(1) if not (path := Path("runs", f"{plain_name}-{n}")).exists())


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: an infinite number is a string, since JSON has none."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class RunWriter:
    """Writes the folder of a run while it runs. What is in it can be read at any moment."""

    def __init__(self, folder: Path, rounds: BinaryIO, checkpoints: CheckpointWriter) -> None:
        self.folder = folder
        self._rounds = rounds
        with suppress(ImportError):  # a system without such locks
            from safa.runs.lock import mark_written

            mark_written(rounds)
        self._checkpoints = checkpoints

    @classmethod
    def begin(cls, folder: Path, settings: Settings, *, force: bool = False) -> RunWriter:
        """Begin a new folder."""
        new_folder(folder, force=force)
        with writing(folder / _CONFIG):
            write_config(folder, settings)
        with writing(folder / _ROUNDS):
            rounds = (folder / _ROUNDS).open("ab", buffering=0)
        return cls(folder, rounds, CheckpointWriter(folder, settings=_fingerprint(folder)))

    @classmethod
    def resume(cls, run: Run, finished: int) -> RunWriter:
        """Continue a folder behind its first `finished` rounds; what was written after them is dropped.

        The next checkpoint writes of its tables what has changed since the one that was made after these rounds. So let
        each table forget which rows were put to restore it (`take_changed`); else they are all written again.
        """
        if run.folder is None:
            raise SafaError("a run that is held in memory cannot be resumed")
        for checkpoint in checkpoint_files(run.folder):
            if checkpoint.is_dir():
                raise SafaError(f"{checkpoint} is a folder, where a checkpoint has to be; remove or rename it first")
        with writing(run.folder / CHECKPOINTS):
            checkpoints = CheckpointWriter.resume(run.folder, settings=_fingerprint(run.folder), finished=finished)
        path = run.folder / _ROUNDS
        with writing(path):
            rounds = path.open("ab", buffering=0)
            with path.open("rb") as lines:
                os.truncate(path, sum(len(line) for line in islice(lines, finished)))
        return cls(run.folder, rounds, checkpoints)

    def add(self, record: RoundRecord) -> None:
        """Append a round, as one line in one write."""
        with writing(self.folder / _ROUNDS):
            append(self._rounds, record.to_json().encode() + b"\n")

    def checkpoint(
        self,
        finished: int,
        state: Mapping[str, Tensor],
        notes: Mapping[str, str] | None = None,
        tables: Mapping[str, RowSource] | None = None,
    ) -> None:
        """Keep what has been learnt after so many rounds; the rounds themselves are on the disk before it.

        `notes` is what else is to be kept with it, as text by name. Of `tables`, only rows are written that have
        changed since the last checkpoint. The checkpoint before this one is kept, too.
        """
        with writing(self.folder / CHECKPOINTS):
            os.fsync(self._rounds.fileno())
            self._checkpoints.write(finished, state, notes or {}, tables or {})

    def close(self, summary: Mapping[str, Any] | None = None, model: dict[str, Tensor] | None = None) -> None:
        """Close the folder; a run that came to its end has a summary, and a model if one was trained."""
        if summary is not None:
            os.fsync(self._rounds.fileno())  # where there is a summary, all rounds are on the disk
        self._rounds.close()
        with writing(self.folder):
            if model is not None:
                from safetensors.torch import save

                write_atomically(self.folder / _MODEL, save(model))
            if summary is not None:
                write_atomically(self.folder / _SUMMARY, (json.dumps(plain(summary), indent=2) + "\n").encode())
                remove_checkpoints(self.folder)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run, finished or not: read back from its folder, or held in memory."""

    settings: Settings
    summary: dict[str, Any] | None
    """The metrics, or None where the run is not finished."""
    folder: Path | None = None
    held_records: Sequence[RoundRecord] = ()
    held_model: dict[str, Tensor] | None = None

    def records(self) -> Iterator[RoundRecord]:
        """The rounds that were finished, checked one by one; a last line that was cut off does not count."""
        if self.folder is None:
            yield from self.held_records
            return
        path = self.folder / _ROUNDS
        order = RecordOrder(rule=registry.find(self.settings.protocol).rule, clients=self.settings.clients)
        with reading(path), path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n"):
                    yield _record(line, order, f"{path}, line {number}")

    def evaluations(self) -> Iterator[tuple[float, dict[str, float]]]:
        """When models were evaluated, and their loss and metrics by name; nothing else of the records is checked.

        That is many times as fast as reading the records.
        """
        if self.folder is None:
            yield from (
                (one.closed_s, {"loss": one.loss, **one.metrics}) for one in self.held_records if one.loss is not None
            )
            return
        path = self.folder / _ROUNDS
        with reading(path), path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.endswith(b"\n") and (found := _evaluation(line, f"{path}, line {number}")):
                    yield found

    def to_pandas(self) -> Any:
        """A data frame of pandas with a row a round: its numbers, counts of clients, loss and metrics."""
        from safa.runs.frames import rounds_frame

        return rounds_frame(self.records())

    def updates(self) -> Any:
        """A data frame of pandas with a row an update that came in, in order of arrival, and what became of it."""
        from safa.runs.frames import updates_frame

        return updates_frame(self.records())

    def plot(self, metric: str | None = None, *, over: Literal["time", "round"] = "time") -> alt.LayerChart:
        """A chart of Altair: a metric of the problem, or the loss, over time or rounds; the main one by default."""
        from safa.report.plots import run_chart

        return run_chart(self, metric, over)

    def plot_clients(self) -> alt.LayerChart:
        """A chart of Altair: what every client did in every round, the fastest clients on top."""
        from safa.report.plots import clients_chart

        return clients_chart(self)

    def _repr_html_(self) -> str:
        from safa.report.cards import run_card

        return run_card(self)

    def __repr__(self) -> str:
        rounds = "not finished" if self.summary is None else "finished"
        where = "in memory" if self.folder is None else str(self.folder)
        return f"<Run of {self.settings.protocol} on {self.settings.task}, {rounds}, {where}>"

    def has_rounds(self) -> bool:
        """Whether there is a file of rounds; a run that was stopped at its very beginning has none."""
        return self.folder is None or (self.folder / _ROUNDS).exists()

    def has_model(self) -> bool:
        """Whether its last model is there; a sweep does not keep those of its runs, unless it is told to."""
        return self.held_model is not None or (self.folder is not None and (self.folder / _MODEL).exists())

    def finished_rounds(self) -> int:
        """How many rounds are finished, each of which is checked."""
        return sum(1 for _ in self.records()) if self.has_rounds() else 0

    def clients_at_start(self) -> int | None:
        """How many clients there were before the first round, as its record says; None where no round is finished."""
        first = next(self.records(), None)
        return None if first is None else first.clients - len(first.joined) + len(first.left)

    def model(self) -> dict[str, Tensor]:
        """The last global model, as a module's state."""
        if self.held_model is not None:
            return self.held_model
        if self.folder is None or not self.has_model():
            raise SafaError("no model was trained in this run, or it is not finished, or its model was not kept")
        return read_tensors(self.folder / _MODEL)[1]

    def roster(self) -> list[dict[str, Any]] | None:
        """The clients of a deployment by number, each with name, size and details; None for a simulation."""
        path = self.folder / ROSTER if self.folder else None
        if path is None or not path.exists():
            return None
        members = read_json(path)
        if not isinstance(members, list) or not all(map(_is_member, members)):
            raise SafaError(f"{path} is damaged: it is not a list of clients with name, size and details")
        return members

    def load_checkpoint(self, most: int | None = None) -> Checkpoint:
        """The newest checkpoint that is sound, and made after at most `most` rounds where that is given."""
        if self.folder is None:
            return Checkpoint()
        return load_checkpoint(self.folder, settings=_fingerprint(self.folder), most=most)


def _fingerprint(folder: Path) -> str:
    """A checksum of the settings that a run's own file names: a later version may have more, each with a default."""
    named = json.dumps(Settings.read_toml(folder / _CONFIG), sort_keys=True, default=str)
    return hashlib.sha256(named.encode()).hexdigest()


def load_run(folder: str | Path) -> Run:
    """Read the folder of a run, finished or not."""
    path = Path(folder)
    if not (path / _CONFIG).is_file():
        raise SafaError(f"{path} holds no run: there is no {_CONFIG} in it")
    return Run(folder=path, settings=_settings(path / _CONFIG), summary=_summary(path / _SUMMARY))


def _settings(path: Path) -> Settings:
    try:
        settings = Settings(**Settings.read_toml(path))
        for item in fields(settings):
            if item.type == "str" and not isinstance(getattr(settings, item.name), str):
                raise SafaError(f"{item.name} must be text, not {getattr(settings, item.name)!r}")
        if not isinstance(settings.train, bool):
            raise SafaError(f"train must be true or false, not {settings.train!r}")
    except SafaError as error:
        raise SafaError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        raise SafaError(f"{path} does not hold the settings of a run") from None
    return settings


def _summary(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or not all(_is_metric(name, value) for name, value in found.items()):
        raise SafaError(f"{path} is damaged: it does not hold the metrics of a run")
    return found


def _is_metric(name: str, value: Any) -> bool:
    """Whether it is what a summary may hold: a number, nothing, or how often something was counted."""
    if isinstance(value, dict):
        return all(type(count) is int and 0 <= count < 2**63 for count in value.values())
    if value is None or value in ("inf", "-inf", "nan"):
        return True
    return _is_number(value) and (name not in METRICS or value >= 0)  # a score may be negative


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _is_member(value: Any) -> bool:
    """Whether it is what a roster holds of a client."""
    if not isinstance(value, dict):
        return False
    name, size, details = value.get("name"), value.get("size"), value.get("details")
    return isinstance(name, str) and size is not None and _is_number(size) and size > 0 and isinstance(details, dict)


def _evaluation(line: bytes, place: str) -> tuple[float, dict[str, float]] | None:
    """Time and scores in the record of a line; None where no model was evaluated."""
    try:
        values = json.loads(line)
        if values["loss"] is None:
            return None
        scores = {"loss": values["loss"], **values["metrics"]}
        return float(values["closed_s"]), {name: float(score) for name, score in scores.items()}
    except (ValueError, TypeError, KeyError, RecursionError):
        raise SafaError(f"{place}: it is not the record of a round") from None


def _record(line: bytes, order: RecordOrder, place: str) -> RoundRecord:
    """The record of a line, if it follows those before it."""
    try:
        record = RoundRecord.from_json(line.decode())
        order.check(record)
    except UnicodeDecodeError:
        raise SafaError(f"{place}: it is not UTF-8 text") from None
    except ValueError as error:
        raise SafaError(f"{place}: {error}") from None
    return record
