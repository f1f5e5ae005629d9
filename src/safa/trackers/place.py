"""Which run is tracked, and where its trackers put their files.

A run that is tracked has a key, drawn when it is first tracked and kept in its folder (`tracking.json`), so that a
resumed run is found again. A run of a sweep has the key of the sweep and its number.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from safa.errors import SafaError
from safa.runs.folder import TRACKING
from safa.runs.storage import read_json, write_atomically

__all__ = ["Place"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which run it is, and where files about it go."""

    key: str
    """Tells it from all other runs: letters, digits and dashes."""
    name: str
    """The name of its folder, behind that of its sweep if it has one: `sweep-digits-1/0001`."""
    beside: Path
    """The folder in which that of the run, or of its sweep, is: where trackers put their files by default."""
    sweep: str = ""
    """The name of its sweep, if it has one."""

    @classmethod
    def of(cls, folder: Path) -> Place:
        """The run, or the sweep, in a folder."""
        path = folder.resolve()
        return cls(key=_key(path / TRACKING), name=path.name, beside=path.parent)

    def within(self, run: str) -> Place:
        """A run of the sweep that this is."""
        return replace(self, key=f"{self.key}-{run}", name=f"{self.name}/{run}", sweep=self.name)


def _key(file: Path) -> str:
    """The key in a file, which is written if it is not there."""
    if not file.exists():
        write_atomically(file, (json.dumps({"key": secrets.token_hex(8)}) + "\n").encode())
    found = read_json(file)
    if not isinstance(found, dict) or not str(found.get("key", "")).isalnum():
        raise SafaError(f"{file} is damaged: it does not hold the key of a tracked run")
    return str(found["key"])
