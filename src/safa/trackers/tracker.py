"""What a tracker is. Another package derives its own from `Tracker`, and names it in an entry point.

    [project.entry-points."safa.trackers"]
    mine = "my_package:MyTracker"

It is made without arguments, once for every run. What its methods raise ends the tracking, and never the run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from safa.errors import SafaError
from safa.trackers.place import Place

__all__ = ["TrackedRun", "Tracker", "library"]


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker is told of a run before its first round."""

    place: Place
    """Which run it is: the same for a run that is resumed."""
    settings: Mapping[str, bool | int | float | str]
    """All settings by name; of one that has a number for every client, how many there are."""


class Tracker(ABC):
    """Writes down one run. `begin` is called first, then `log` for every round in order, then `end` or `stop`."""

    name: ClassVar[str]

    @abstractmethod
    def begin(self, run: TrackedRun) -> int:
        """Begin to track a run, or continue to; return the last round that was logged before, or 0."""

    @abstractmethod
    def log(self, round_number: int, time_s: float, values: Mapping[str, float]) -> None:
        """Log the values of a round, which was closed at this virtual time; `virtual_time_s` is among them."""

    @abstractmethod
    def end(self, summary: Mapping[str, float], page: Path | None) -> None:
        """The run is finished: log its metrics, and keep a copy of its page, a file that is removed afterwards."""

    def stop(self) -> None:  # noqa: B027 - not every tracker has something to do then
        """The run was stopped; it may be resumed later, in another process."""


def library(module: str, *, needs: str, extra: str) -> Any:
    """A module of the library of a tracker; where that is not installed, one sentence says how to install it."""
    missing = SafaError(f"the tracker {extra} needs {needs}, which is not installed: pip install 'safa[{extra}]'")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise missing from None
    if found.__file__ is None:  # a folder of that name, such as a tracker makes, is no library
        raise missing
    return found
