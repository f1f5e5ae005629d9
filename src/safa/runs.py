"""The folder of a run: `config.toml`, `rounds.jsonl` (one record a line) and `summary.json`."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safa.errors import SafaError
from safa.records import RoundRecord
from safa.settings import Settings

__all__ = ["Run", "RunWriter", "load_run", "new_folder", "plain", "write_atomically"]

_MARKS = ("config.toml", "results.csv")
_CONFIG, _ROUNDS, _SUMMARY = "config.toml", "rounds.jsonl", "summary.json"


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


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also if the machine stops in between."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them: an infinite number is a string, since JSON has none."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class RunWriter:
    """Writes the folder of a run while it goes on. What is in it can be read at any moment."""

    def __init__(self, folder: Path, settings: Settings, *, force: bool = False) -> None:
        self.folder = new_folder(folder, force=force)
        write_atomically(folder / _CONFIG, settings.to_toml())
        self._rounds: BinaryIO = (folder / _ROUNDS).open("wb", buffering=0)

    def add(self, record: RoundRecord) -> None:
        """Append a round, as one line in one write."""
        self._rounds.write(record.to_json().encode() + b"\n")

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Close the folder; a run that came to its end has a summary."""
        self._rounds.close()
        if summary is not None:
            write_atomically(self.folder / _SUMMARY, json.dumps(summary, indent=2) + "\n")


@dataclass(frozen=True)
class Run:
    """A run read back from its folder."""

    folder: Path
    settings: Settings
    summary: dict[str, Any] | None
    """The metrics, or None where the run did not come to its end."""

    def records(self) -> Iterator[RoundRecord]:
        """The rounds that were finished; a last line that was cut off does not count."""
        with (self.folder / _ROUNDS).open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    yield RoundRecord.from_json(line)


def load_run(folder: str | Path) -> Run:
    """Read the folder of a run, finished or not."""
    path = Path(folder)
    if not (path / _CONFIG).is_file():
        raise SafaError(f"{path} holds no run: there is no {_CONFIG} in it")
    values = Settings.read_toml(path / _CONFIG)
    summary = path / _SUMMARY
    return Run(
        folder=path,
        settings=Settings.of(values.pop("task"), **values),
        summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else None,
    )
