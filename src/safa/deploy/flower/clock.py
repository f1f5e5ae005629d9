"""A clock for Flower's programs on the server that nobody can set.

Flower lives by the wall clock: whether a node is online, whether the server app still is, when a message expires. A
clock that is set forward by some minutes ends the server app and takes every device offline; one that is set back keeps
the dead alive. So the SuperLink and the server app read the wall clock once, when the SuperLink starts, and count the
seconds from there. Both count from the same instant: it is handed down in the environment.

Signatures of devices are judged by the wall clock or by this one, whichever suits: a device whose clock is right must
not be refused because the server's was set, be it wrongly or at last.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

# The SuperLink imports this before Flower, so it imports nothing but the standard library.

__all__ = ["OFFSET", "Steps", "steady_flower"]

OFFSET = "SAFA_CLOCK_OFFSET_S"
"""The variable of the environment by which a SuperLink hands its clock down to the server app."""


_TOLERANCE = timedelta(seconds=5)  # Flower's own, for signatures from the future
_WORTH_TELLING_S = 5.0
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


def _running_s() -> float:
    """Seconds that nobody can set; where the system knows, those count in which it was suspended."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


def _steady() -> datetime:
    """The time by the clock that nobody can set."""
    offset = float(os.environ.setdefault(OFFSET, repr(time.time() - _running_s())))
    return datetime.fromtimestamp(offset + _running_s(), UTC)


class _Either:
    """Now, by two clocks; what is subtracted from it gets the age that suits it better."""

    def __init__(self, *clocks: Callable[[], datetime]) -> None:
        self._now = [clock() for clock in clocks]

    def __sub__(self, signed_at: datetime) -> timedelta:
        return min((now - signed_at for now in self._now), key=lambda age: (age < -_TOLERANCE, abs(age)))


def steady_flower(*, begins: bool = False) -> None:
    """Make the clock of Flower's modules in this process a steady one: the parent's, or where it `begins` one's own."""
    if begins:
        os.environ.pop(OFFSET, None)
    with contextlib.suppress(ImportError):  # another version of Flower, which tells the time elsewhere
        date: Any = importlib.import_module("flwr.supercore.date")
        wall = date.now
        for module in [module for name, module in sys.modules.items() if name.startswith("flwr.")]:
            if getattr(module, "now", None) is wall:
                module.now = _steady  # type: ignore[attr-defined]
        for name, clock in (
            ("flwr.supercore.auth.superexec", wall),  # between processes of one machine, which share that clock
            ("flwr.superlink.routers.fleet.node_auth", lambda: _Either(wall, _steady)),
        ):
            if name in sys.modules:
                sys.modules[name].now = clock  # type: ignore[attr-defined]
        _steady()


class Steps:
    """Notices that the wall clock of this machine was set."""

    def __init__(self, wall: Callable[[], float] = time.time, running_s: Callable[[], float] = _running_s) -> None:
        self._wall, self._running_s = wall, running_s
        self._offset = wall() - running_s()

    def look(self) -> str:
        """What there is to tell since the last look, or ""."""
        step = self._wall() - self._running_s() - self._offset
        if abs(step) < _WORTH_TELLING_S:
            return ""
        self._offset += step
        way = "forward" if step > 0 else "back"
        return (
            f"the clock of this machine was set {way} by {abs(step):.0f} s; the run goes on, it counts its own seconds "
            "(after a step of more than an hour, start the server again)"
        )
