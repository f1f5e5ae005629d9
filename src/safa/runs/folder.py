"""The folder of a run: `config.toml`, `rounds.jsonl` (one record a line), `summary.json`, `model.safetensors`.

While a run goes on there is `checkpoint/`, too. A run that was stopped at any instant can be read, and taken up again.
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
from dataclasses import dataclass, field, fields
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safa.analysis import METRICS
from safa.errors import SafaError
from safa.protocol import registry
from safa.protocol.records import RecordOrder, RoundRecord
from safa.runs.settings import FORMAT, Settings, as_toml
from safa.runs.storage import PART, append, read_json, read_sealed, read_tensors, reading, write_atomically, write_sealed, writing

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ROSTER",
    "Checkpoint",
    "Run",
    "RunWriter",
    "has_checkpoint",
    "load_run",
    "new_folder",
    "next_folder",
    "plain",
    "write_atomically",
    "write_config",
]

_CONFIG, _ROUNDS, _SUMMARY, _MODEL = "config.toml", "rounds.jsonl", "summary.json", "model.safetensors"
_TABLE = "results.csv"
ROSTER = "roster.json"
"""In a deployment: who its clients are, by number, with name, size and details."""
_DEPLOYMENT, _LINK, _CLIENTS = "deployment.json", Path("flower", "link.json"), "clients"
_FILES = (
    "report.html", _SUMMARY, _MODEL, _ROUNDS, ROSTER, _DEPLOYMENT, "deploy.toml", "nodes.json", "unblock.json",
    "expel.json", "expel.applying.json", "server.log", "lock", _TABLE, _CONFIG,
)  # fmt: skip
"""The files that this program writes into the folder of a run or a sweep; those that mark it as such come last."""
_CHECKPOINTS, _GENERATION = "checkpoint", re.compile(r"state-([0-9]{6,})\.safetensors")
_CHECKPOINT_FORMAT = "safa checkpoint 1"
_GENERATIONS = 2
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
            _remove_run(path)
        elif any(path.iterdir()):
            raise SafaError(f"{path} holds other files; choose an empty or new folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise SafaError(f"cannot make the folder {path}: {problem.strerror}") from None
    return path


def write_config(folder: Path, settings: Settings) -> None:
    """Write the settings of a run into its folder; this marks it as a folder that this program wrote."""
    write_atomically(folder / _CONFIG, (f"format = {as_toml(FORMAT)}\n" + settings.to_toml()).encode())


def _is_ours(folder: Path) -> bool:
    """Whether this program wrote a run or a sweep into a folder."""
    try:
        if (folder / _CONFIG).is_file():
            return tomllib.loads((folder / _CONFIG).read_text(encoding="utf-8")).get("format") == FORMAT
        if (folder / _TABLE).is_file():
            with (folder / _TABLE).open(encoding="utf-8") as table:
                names = table.readline(100_000).rstrip("\n").split(",")
            return names[0] == "task" and names[-1] == "wall_time_s" and set(METRICS) <= set(names)
    except (OSError, ValueError, RecursionError):
        pass
    return False


def _remove_run(folder: Path) -> None:
    """Remove what this program wrote into the folder of a run or a sweep; nothing at all if that is not clear."""
    from safa.runs.lock import is_held

    files = [folder / f"{name}{end}" for name in _FILES for end in (PART, "")]
    checkpoints = _files_in(folder / _CHECKPOINTS)
    folders = [folder / _CHECKPOINTS]
    is_deployment = (folder / _LINK).is_file()
    if is_deployment:
        folders += [folder / _LINK.parent, folder / _CLIENTS, *_files_in(folder / _CLIENTS)]
    for path in [path for path in (*files, *folders) if path.is_symlink() or path.exists()]:
        if path.is_symlink() or path.is_dir() != (path in folders):
            raise SafaError(f"{path} is not what this program wrote under that name; remove or rename it first")
    if is_held(folder):
        raise SafaError(f"a server works on the run in {folder}; stop it first")
    states = [path for client in _files_in(folder / _CLIENTS) for path in _files_in(client)] if is_deployment else []
    with writing(folder):
        if is_deployment:
            shutil.rmtree(folder / _LINK.parent)
        for path in (
            *(path for path in checkpoints if _GENERATION.fullmatch(path.name.removesuffix(PART))),
            *(path for path in states if path.name.removesuffix(PART) == _DEVICE_STATE),
            *files,
        ):
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
    """Writes the folder of a run while it goes on. What is in it can be read at any moment."""

    def __init__(self, folder: Path, rounds: BinaryIO) -> None:
        self.folder = folder
        self._rounds = rounds
        self._fingerprint = _fingerprint(folder)

    @classmethod
    def begin(cls, folder: Path, settings: Settings, *, force: bool = False) -> RunWriter:
        """Begin a new folder."""
        new_folder(folder, force=force)
        with writing(folder / _CONFIG):
            write_config(folder, settings)
        with writing(folder / _ROUNDS):
            return cls(folder, (folder / _ROUNDS).open("ab", buffering=0))

    @classmethod
    def resume(cls, run: Run, finished: int) -> RunWriter:
        """Go on with a folder behind its first `finished` rounds; what was written after them is dropped."""
        if run.folder is None:
            raise SafaError("a run that is held in memory cannot be taken up again")
        for checkpoint in _generations(run.folder).values():
            if checkpoint.is_dir():
                raise SafaError(f"{checkpoint} is a folder, where a checkpoint has to be; remove or rename it first")
        path = run.folder / _ROUNDS
        with writing(path):
            rounds = path.open("ab", buffering=0)
            with path.open("rb") as lines:
                os.truncate(path, sum(len(line) for line in islice(lines, finished)))
        return cls(run.folder, rounds)

    def add(self, record: RoundRecord) -> None:
        """Append a round, as one line in one write."""
        with writing(self.folder / _ROUNDS):
            append(self._rounds, record.to_json().encode() + b"\n")

    def checkpoint(self, finished: int, state: dict[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
        """Keep what has been learnt after so many rounds; the rounds themselves are on the disk before it.

        `notes` is what else is to be kept with it, as text by name. The checkpoint before this one is kept, too.
        """
        folder = self.folder / _CHECKPOINTS
        head = {"format": _CHECKPOINT_FORMAT, "rounds": str(finished), "settings": self._fingerprint}
        with writing(folder):
            os.fsync(self._rounds.fileno())
            folder.mkdir(exist_ok=True)
            write_sealed(folder / f"state-{finished:06d}.safetensors", state, {**(notes or {}), **head})
            others = {rounds: path for rounds, path in _generations(self.folder).items() if rounds != finished}
            kept = [rounds for rounds in others if rounds < finished][: _GENERATIONS - 1]
            for path in [path for rounds, path in others.items() if rounds not in kept]:
                path.unlink(missing_ok=True)

    def close(self, summary: Mapping[str, Any] | None = None, model: dict[str, Tensor] | None = None) -> None:
        """Close the folder; a run that came to its end has a summary, and a model if one was trained."""
        self._rounds.close()
        with writing(self.folder):
            if model is not None:
                from safetensors.torch import save

                write_atomically(self.folder / _MODEL, save(model))
            if summary is not None:
                write_atomically(self.folder / _SUMMARY, (json.dumps(plain(summary), indent=2) + "\n").encode())
                _remove_checkpoints(self.folder)


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A run, finished or not: read back from its folder, or held in memory."""

    settings: Settings
    summary: dict[str, Any] | None
    """The metrics, or None where the run did not come to its end."""
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

    def has_rounds(self) -> bool:
        """Whether there is a file of rounds; a run that was stopped at its very beginning has none."""
        return self.folder is None or (self.folder / _ROUNDS).exists()

    def clients_at_start(self) -> int | None:
        """How many clients there were before the first round, as its record says; None where no round is finished."""
        first = next(self.records(), None)
        return None if first is None else first.clients - len(first.joined) + len(first.left)

    def model(self) -> dict[str, Tensor]:
        """The last global model, as a module's state."""
        if self.held_model is not None:
            return self.held_model
        if self.folder is None or not (self.folder / _MODEL).exists():
            raise SafaError("no model was trained in this run, or it did not come to its end")
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
        problems: list[str] = []
        fingerprint = _fingerprint(self.folder)
        for rounds, path in _generations(self.folder).items():
            if most is not None and rounds > most:
                problems.append(f"{path} is passed over: there are only {most} finished rounds in {_ROUNDS}")
                continue
            try:
                notes, state = _read_checkpoint(path, rounds)
            except SafaError as problem:
                problems.append(str(problem))
                continue
            if notes.pop("settings") != fingerprint:
                problems.append(f"{path} was made for other settings than those in {_CONFIG}")
                return Checkpoint(problems=tuple(problems), other_settings=True)
            return Checkpoint(rounds=rounds, notes=notes, state=state, problems=tuple(problems))
        return Checkpoint(problems=tuple(problems))


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """What a run had come to after some of its rounds; without any where no checkpoint can be used."""

    rounds: int = 0
    """After how many rounds it was made; 0 where none can be used."""
    notes: dict[str, str] = field(default_factory=dict)
    """What its writer noted beside the tensors."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """What had been learnt by then."""
    problems: tuple[str, ...] = ()
    """A sentence for each newer checkpoint that was passed over: damaged, unreadable, or made for other settings."""
    other_settings: bool = False
    """Whether it is for its settings that none can be used: those of the run were changed since."""


def has_checkpoint(folder: Path) -> bool:
    """Whether there is any checkpoint in the folder of a run, sound or not."""
    return bool(_generations(folder))


def _generations(folder: Path) -> dict[int, Path]:
    """The files of checkpoints in the folder of a run by their number of finished rounds, the newest first."""
    try:
        found = {path: _GENERATION.fullmatch(path.name) for path in (folder / _CHECKPOINTS).iterdir()}
    except OSError:
        return {}
    numbered = {int(match[1]): path for path, match in found.items() if match}
    return dict(sorted(numbered.items(), reverse=True))


def _read_checkpoint(path: Path, rounds: int) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The notes and the state of a checkpoint that should have been made after so many rounds."""
    notes, state = read_sealed(path)
    made_as, made_after = notes.pop("format", ""), notes.pop("rounds", "")
    if made_as != _CHECKPOINT_FORMAT or "settings" not in notes:
        raise SafaError(f"{path} is of another format: {made_as!r} instead of {_CHECKPOINT_FORMAT!r}")
    if made_after != str(rounds):
        raise SafaError(f"{path} has been renamed: it was made after round {made_after}")
    return notes, state


def _remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a run, and their folder unless there is something else in it."""
    with suppress(OSError):
        for path in _files_in(folder / _CHECKPOINTS):
            if _GENERATION.fullmatch(path.name.removesuffix(PART)):
                path.unlink()
        (folder / _CHECKPOINTS).rmdir()


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
    except SafaError as problem:
        raise SafaError(str(problem) if str(path) in str(problem) else f"{path}: {problem}") from None
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
    is_score = name not in METRICS or name.endswith(("_loss", "_accuracy"))  # which may be negative
    return _is_number(value) and (is_score or value >= 0)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def _is_member(value: Any) -> bool:
    """Whether it is what a roster holds of a client."""
    if not isinstance(value, dict):
        return False
    name, size, details = value.get("name"), value.get("size"), value.get("details")
    return isinstance(name, str) and size is not None and _is_number(size) and size > 0 and isinstance(details, dict)


def _record(line: bytes, order: RecordOrder, place: str) -> RoundRecord:
    """The record of a line, if it follows those before it."""
    try:
        record = RoundRecord.from_json(line.decode())
        order.check(record)
    except UnicodeDecodeError:
        raise SafaError(f"{place}: it is not UTF-8 text") from None
    except ValueError as problem:
        raise SafaError(f"{place}: {problem}") from None
    return record
