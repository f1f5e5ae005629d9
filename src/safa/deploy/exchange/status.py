"""The file in which a deployment says what it is doing, for people who watch it (`safa serve`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from safa.runs.folder import STATUS
from safa.runs.storage import PART

__all__ = ["StatusFile"]

_EVERY_S = 1.0


class StatusFile:
    """`status.json`, written anew once a second. It is for watching only: where it cannot be written, nothing happens.

    It is there whole or not at all, but need not survive the machine, so that no disk is waited for.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._part = folder / STATUS, folder / f"{STATUS}{PART}"
        self._due = -math.inf

    def write(self, status: Callable[[], dict[str, Any]], *, now: float) -> None:
        """Write the status, if the last one is a second old."""
        if now < self._due:
            return
        self._due = now + _EVERY_S
        with suppress(OSError):
            self._part.write_text(json.dumps(status(), separators=(",", ":")), encoding="utf-8")
            self._part.replace(self._path)
