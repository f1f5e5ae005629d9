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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safa.errors import SafaError
from safa.records import RoundRecord
from safa.settings import Settings
from safa.storage import PART, read_sealed, write_atomically, write_sealed

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
]

_MARKS = ("config.toml", "results.csv")
_CONFIG, _ROUNDS, _SUMMARY, _MODEL = "config.toml", "rounds.jsonl", "summary.json", "model.safetensors"
ROSTER = "roster.json"
"""In a deployment: who its clients are, by number, with name, size and details."""
_CHECKPOINTS, _GENERATION = "checkpoint", re.compile(r"state-([0-9]{6,})\.safetensors")
_CHECKPOINT_FORMAT = "safa checkpoint 1"
_GENERATIONS = 2
_HEAD = ("format", "rounds", "settings")  # what every checkpoint notes, beside what its writer does


def new_folder(path: Path, *, force: bool) -> Path:
    """Make an empty folder for results; one that holds a run already is replaced only with `force`."""
    if path.exists():
        if not path.is_dir():
            raise SafaError(f"{path} is not a folder")
        holds_run = any((path / mark).exists() for mark in _MARKS)
        if holds_run and not force:
            raise SafaError(f"{path} already holds a run; choose another folder, or replace it with --force")
        if not holds_run and any(path.iterdir()):
            raise SafaError(f"{path} holds other files; choose an empty or new folder")
        shutil.rmtree(path)
    try:
        path.mkdir(parents=True)
    except OSError as problem:
        raise SafaError(f"cannot make the folder {path}: {problem.strerror}") from None
    return path


def next_folder(name: str) -> Path:
    """The first folder runs/name-1, runs/name-2, ... that does not exist."""
    plain_name = name.replace(":", ".")
    return next(path for n in count(1) if not (path := Path("runs", f"{plain_name}-{n}")).exists())


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: an infinite number is a string, since JSON has none."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class RunWriter:
    """Writes the folder of a run while it goes on. What is in it can be read at any moment."""

    def __init__(self, folder: Path, rounds: BinaryIO, settings: Settings) -> None:
        self.folder = folder
        self._rounds = rounds
        self._settings = settings

    @classmethod
    def begin(cls, folder: Path, settings: Settings, *, force: bool = False) -> RunWriter:
        """Begin a new folder."""
        new_folder(folder, force=force)
        write_atomically(folder / _CONFIG, settings.to_toml().encode())
        return cls(folder, (folder / _ROUNDS).open("ab", buffering=0), settings)

    @classmethod
    def resume(cls, run: Run, finished: int) -> RunWriter:
        """Go on with a folder behind its first `finished` rounds; what was written after them is dropped."""
        if run.folder is None:
            raise SafaError("a run that is held in memory cannot be taken up again")
        rounds = run.folder / _ROUNDS
        rounds.touch()
        with rounds.open("rb") as lines:
            length = sum(len(line) for line in islice(lines, finished))
        os.truncate(rounds, length)
        return cls(run.folder, rounds.open("ab", buffering=0), run.settings)

    def add(self, record: RoundRecord) -> None:
        """Append a round, as one line in one write."""
        self._rounds.write(record.to_json().encode() + b"\n")

    def checkpoint(self, finished: int, state: dict[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
        """Keep what has been learnt after so many rounds; the rounds themselves are on the disk before it.

        `notes` is what else is to be kept with it, as text by name. The checkpoint before this one is kept, too.
        """
        os.fsync(self._rounds.fileno())
        folder = self.folder / _CHECKPOINTS
        folder.mkdir(exist_ok=True)
        head = dict(zip(_HEAD, (_CHECKPOINT_FORMAT, str(finished), _fingerprint(self._settings)), strict=True))
        write_sealed(folder / f"state-{finished:06d}.safetensors", state, {**(notes or {}), **head})
        others = {rounds: path for rounds, path in _generations(self.folder).items() if rounds != finished}
        kept = [rounds for rounds in others if rounds < finished][: _GENERATIONS - 1]
        for path in [path for rounds, path in others.items() if rounds not in kept]:
            path.unlink(missing_ok=True)

    def close(self, summary: Mapping[str, Any] | None = None, model: dict[str, Tensor] | None = None) -> None:
        """Close the folder; a run that came to its end has a summary, and a model if one was trained."""
        self._rounds.close()
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
        """The rounds that were finished; a last line that was cut off does not count."""
        if self.folder is None:
            yield from self.held_records
            return
        with (self.folder / _ROUNDS).open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield RoundRecord.from_json(line)

    def model(self) -> dict[str, Tensor]:
        """The last global model, as a module's state."""
        if self.held_model is not None:
            return self.held_model
        if self.folder is None or not (self.folder / _MODEL).is_file():
            raise SafaError("no model was trained in this run, or it did not come to its end")
        from safetensors.torch import load_file

        return load_file(self.folder / _MODEL)

    def roster(self) -> list[dict[str, Any]] | None:
        """The clients of a deployment by number, each with name, size and details; None for a simulation."""
        path = self.folder / ROSTER if self.folder else None
        if path is None or not path.is_file():
            return None
        members: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return members

    def load_checkpoint(self, most: int | None = None) -> Checkpoint:
        """The newest checkpoint that is sound, and made after at most `most` rounds where that is given."""
        problems: list[str] = []
        for rounds, path in (_generations(self.folder) if self.folder else {}).items():
            if most is not None and rounds > most:
                problems.append(f"{path} is passed over: there are only {most} finished rounds in {_ROUNDS}")
                continue
            try:
                return self._checkpoint_in(path, rounds, tuple(problems))
            except SafaError as problem:
                problems.append(str(problem))
        return Checkpoint(problems=tuple(problems))

    def _checkpoint_in(self, path: Path, rounds: int, problems: tuple[str, ...]) -> Checkpoint:
        notes, state = read_sealed(path)
        found, made_after, settings = (notes.pop(name, "") for name in _HEAD)
        if found != _CHECKPOINT_FORMAT:
            raise SafaError(f"{path} is of another format: {found!r} instead of {_CHECKPOINT_FORMAT!r}")
        if made_after != str(rounds):
            raise SafaError(f"{path} has been renamed: it was made after round {made_after}")
        if settings != _fingerprint(self.settings):
            raise SafaError(f"{path} was made for other settings than those in {_CONFIG}")
        return Checkpoint(rounds=rounds, notes=notes, state=state, problems=problems)


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


def _remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a run, and their folder unless there is something else in it."""
    with suppress(OSError):
        for path in (folder / _CHECKPOINTS).iterdir():
            if _GENERATION.fullmatch(path.name.removesuffix(PART)):
                path.unlink()
        (folder / _CHECKPOINTS).rmdir()


def _fingerprint(settings: Settings) -> str:
    """A checksum of all settings of a run."""
    return hashlib.sha256(settings.to_toml().encode()).hexdigest()


def load_run(folder: str | Path) -> Run:
    """Read the folder of a run, finished or not."""
    path = Path(folder)
    if not (path / _CONFIG).is_file():
        raise SafaError(f"{path} holds no run: there is no {_CONFIG} in it")
    try:
        settings = Settings(**Settings.read_toml(path / _CONFIG))
    except TypeError:
        raise SafaError(f"{path / _CONFIG} does not hold the settings of a run") from None
    summary = path / _SUMMARY
    return Run(
        folder=path,
        settings=settings,
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
    )
