"""The folder of a run: `config.toml`, `rounds.jsonl` (one record a line), `summary.json`, `model.safetensors`.

While a run goes on there is `checkpoint/`, too. A run that was stopped at any instant can be read, and taken up again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safa.errors import SafaError
from safa.records import RoundRecord
from safa.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ROSTER", "Run", "RunWriter", "load_run", "new_folder", "next_folder", "plain", "write_atomically"]

_MARKS = ("config.toml", "results.csv")
_CONFIG, _ROUNDS, _SUMMARY, _MODEL = "config.toml", "rounds.jsonl", "summary.json", "model.safetensors"
ROSTER = "roster.json"
"""In a deployment: who its clients are, by number, with name, size and details."""
_CHECKPOINT = Path("checkpoint") / "state.safetensors"


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


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, also if the machine stops in between."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: an infinite number is a string, since JSON has none."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class RunWriter:
    """Writes the folder of a run while it goes on. What is in it can be read at any moment."""

    def __init__(self, folder: Path, rounds: BinaryIO) -> None:
        self.folder = folder
        self._rounds = rounds

    @classmethod
    def begin(cls, folder: Path, settings: Settings, *, force: bool = False) -> RunWriter:
        """Begin a new folder."""
        new_folder(folder, force=force)
        write_atomically(folder / _CONFIG, settings.to_toml().encode())
        return cls(folder, (folder / _ROUNDS).open("ab", buffering=0))

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
        return cls(run.folder, rounds.open("ab", buffering=0))

    def add(self, record: RoundRecord) -> None:
        """Append a round, as one line in one write."""
        self._rounds.write(record.to_json().encode() + b"\n")

    def checkpoint(self, finished: int, state: dict[str, Tensor], notes: Mapping[str, str] | None = None) -> None:
        """Keep what has been learnt after so many rounds; the rounds themselves are on the disk before it.

        `notes` is what else is to be kept with it, as text by name.
        """
        from safetensors.torch import save

        os.fsync(self._rounds.fileno())
        path = self.folder / _CHECKPOINT
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, save(state, metadata={**(notes or {}), "rounds": str(finished)}))

    def close(self, summary: Mapping[str, Any] | None = None, model: dict[str, Tensor] | None = None) -> None:
        """Close the folder; a run that came to its end has a summary, and a model if one was trained."""
        self._rounds.close()
        if model is not None:
            from safetensors.torch import save

            write_atomically(self.folder / _MODEL, save(model))
        if summary is not None:
            write_atomically(self.folder / _SUMMARY, (json.dumps(plain(summary), indent=2) + "\n").encode())
            shutil.rmtree((self.folder / _CHECKPOINT).parent, ignore_errors=True)


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

    def checkpoint(self) -> tuple[int, dict[str, Tensor]]:
        """After how many rounds the last checkpoint was written, and what had been learnt by then."""
        notes, state = self.checkpoint_with_notes()
        return int(notes.get("rounds", 0)), state

    def checkpoint_with_notes(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """The notes of the last checkpoint, `rounds` among them, and what had been learnt; both empty if none is."""
        from safetensors import safe_open

        path = self.folder / _CHECKPOINT if self.folder else None
        if path is None or not path.is_file():
            return {}, {}
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


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
