"""Callbacks: what a program of a user does after the rounds of a run, and at its end.

A callback is a function of (record, server), or an object with a method `on_round(record, server)`, `on_end(run)`, or
both. `on_round` is called when a round is finished and its record is written; if it returns true, the run ends there
as if it had been its last round. `on_end` is called with the finished run. An exception in a callback stops the run
like Ctrl-C: what is finished can be read, and the run can be resumed.

A resumed run begins with the last checkpoint. Callbacks see the round of that checkpoint once more, and then those that
follow, so that a run that was stopped before a callback could end it is ended at the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from safa.analysis import Target
from safa.errors import SafaError
from safa.protocol.records import RoundRecord
from safa.runs import Run, Settings
from safa.server import Server

__all__ = ["NO_CALLBACKS", "Callback", "Callbacks", "Every", "StopAt"]


class _OnRound(Protocol):
    def on_round(self, record: RoundRecord, server: Server, /) -> bool | None: ...


class _OnEnd(Protocol):
    def on_end(self, run: Run, /) -> None: ...


RoundFunction = Callable[[RoundRecord, Server], bool | None]
Callback = _OnRound | _OnEnd | RoundFunction


class StopAt:
    """Ends a run when a metric or the loss has reached a value, and held it for so many evaluations in a row.

    `StopAt(accuracy=0.9)`, `StopAt(loss=0.2, held=3)`. The setting `until` does the same and is kept with the run.
    """

    def __init__(self, *, held: int = 1, **target: float) -> None:
        if len(target) != 1:
            raise SafaError(f"StopAt takes one metric with its value, such as accuracy=0.9, not {len(target)}")
        ((self.metric, self.value),) = target.items()
        self.held = held

    def on_round(self, record: RoundRecord, server: Server) -> bool:
        """Whether the model of this round, and of those before it, is at the target."""
        if record.loss is None:
            return False
        target = self.target(server.metrics.directions)
        latest = server.metrics.scores[-target.held :]
        return len(latest) == target.held and all(target.is_met_by(score) for score in latest)

    def target(self, directions: Any) -> Target:
        """The target, of a run whose metrics are these; an error if it is none of them."""
        return Target.parse(f"{self.metric}={self.value},held={self.held}", directions)


class Every:
    """Calls a function of (record, server) after every n-th round; if it returns true, the run ends."""

    def __init__(self, n: int, function: RoundFunction) -> None:
        if type(n) is not int or n < 1:
            raise SafaError(f"Every needs a number of rounds of at least 1, not {n!r}")
        if not callable(function):
            raise SafaError(f"Every needs a function of (record, server), not {function!r}")
        self.n, self.function = n, function

    def on_round(self, record: RoundRecord, server: Server) -> bool | None:
        """Call the function in every n-th round."""
        return self.function(record, server) if record.round % self.n == 0 else None


class Callbacks:
    """All callbacks of a run, checked before it begins."""

    def __init__(self, given: Sequence[Callback] = (), settings: Settings | None = None) -> None:
        if not isinstance(given, Sequence):
            raise SafaError(f"callbacks must be a list, not {given!r}")
        self.given = list(given)
        for callback in self.given:
            if isinstance(callback, type) or not (_methods(callback) or callable(callback)):
                what = "a function of (record, server), or an object with on_round or on_end"
                raise SafaError(f"a callback must be {what}, not {callback!r}")
            if isinstance(callback, StopAt) and settings is not None:
                _check_target(callback, settings)

    def on_round(self, record: RoundRecord, server: Server) -> bool:
        """Call all of them after a round; whether one of them ends the run."""
        answers = [call(record, server) for call in map(_on_round, self.given) if call is not None]
        return any(answers)

    def also(self, callback: Callback) -> Callbacks:
        """These, and one more, which is called last."""
        return Callbacks([*self.given, callback])

    def on_end(self, run: Run) -> None:
        """Call all of them at the end of a run."""
        for callback in self.given:
            if hasattr(callback, "on_end"):
                callback.on_end(run)


NO_CALLBACKS = Callbacks()


def _methods(callback: object) -> bool:
    return any(callable(getattr(callback, name, None)) for name in ("on_round", "on_end"))


def _on_round(callback: Any) -> RoundFunction | None:
    """What to call after a round, if anything."""
    found: RoundFunction | None = getattr(callback, "on_round", None if _methods(callback) else callback)
    return found


def _check_target(stop: StopAt, settings: Settings) -> None:
    """Refuse a target that cannot be reached in a run."""
    if not settings.train:
        raise SafaError("StopAt has no effect where nothing is trained")
    stop.target(settings.metrics)
