"""A clock for Flower's programs on the server that cannot be set.

Flower uses the wall clock to decide whether a node is online, whether the server app still is, and when a message
expires. A clock that is set forward by some minutes ends the server app and takes every device offline; one that is set
back keeps dead ones online. So the SuperLink and the server app read the wall clock once, when the SuperLink starts,
and count the seconds from there. Both count from the same instant, which is passed on in the environment.

Signatures of devices are accepted by the wall clock or by this one, whichever fits: a device whose clock is right must
not be rejected because the server's was set.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from safa.deploy.flower.internals import replace_clock

__all__ = ["OFFSET", "Steps", "steady_flower"]

OFFSET = "SAFA_CLOCK_OFFSET_S"
"""The environment variable by which a SuperLink passes its clock on to the server app."""


_TOLERANCE = timedelta(seconds=5)  # Flower's own, for signatures from the future
_SMALLEST_STEP_S = 5.0
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


def _running_s() -> float:
    """Seconds of a clock that cannot be set, which includes those of suspension where the system counts them."""
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)


def _steady() -> datetime:
    """The time by the clock that cannot be set."""
    offset = float(os.environ.setdefault(OFFSET, repr(time.time() - _running_s())))
    return datetime.fromtimestamp(offset + _running_s(), UTC)


class _Either:
    """Now, by two clocks; what is subtracted from it gets the age that suits it better."""

    def __init__(self, *clocks: Callable[[], datetime]) -> None:
        self._now = [clock() for clock in clocks]

    def __sub__(self, signed_at: datetime) -> timedelta:
        return min((now - signed_at for now in self._now), key=lambda age: (age < -_TOLERANCE, abs(age)))


def steady_flower(*, link: bool = False) -> None:
    """Let Flower in this process use the clock that cannot be set: a SuperLink (`link`) starts it, others inherit."""
    if link:
        os.environ.pop(OFFSET, None)
    replace_clock(_steady, lambda wall: _Either(wall, _steady), link=link)
    _steady()


class Steps:
    """Notices that the wall clock of this machine was set."""

    def __init__(self, wall: Callable[[], float] = time.time, running_s: Callable[[], float] = _running_s) -> None:
        self._wall, self._running_s = wall, running_s
        self._offset = wall() - running_s()

    def look(self) -> str:
        """A sentence about the step since the last call, or ""."""
        step = self._wall() - self._running_s() - self._offset
        if abs(step) < _SMALLEST_STEP_S:
            return ""
        self._offset += step
        way = "forward" if step > 0 else "back"
        return (
            f"the clock of this machine was set {way} by {abs(step):.0f} s; the run is not affected "
            "(after a step of more than an hour, restart the server)"
        )
