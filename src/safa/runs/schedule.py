"""How the learning rate changes from round to round.

A schedule is text: `constant`, `cosine`, `step:EVERY:FACTOR`, `warmup:ROUNDS`, or a function of one's own as
`package.module:function`, several joined by `+`. Each gives a factor for every round, and factors multiply. A round is
counted from 1; that of an update is the one after the round that made the version it was trained from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.tasks.references import is_reference, reference_of

__all__ = ["Schedule", "check_given"]

Factor = Callable[[int, int], float]
"""The factor of a round, counted from 1, of a run of so many rounds."""

_FORMS = "constant, cosine, step:EVERY:FACTOR, warmup:ROUNDS, package.module:function, or several joined by +"


@dataclass(frozen=True)
class Schedule:
    """What the learning rate is multiplied by in every round."""

    text: str
    parts: tuple[Factor | str, ...]
    """What is multiplied; functions of one's own by name until they are found."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """A schedule from its text; what is no schedule is an error that says what one is."""
        return cls(text, tuple(_part(part, text) for part in text.split("+") if part != "constant"))

    @property
    def is_constant(self) -> bool:
        """Whether the learning rate never changes."""
        return not self.parts

    @property
    def functions(self) -> list[str]:
        """The functions of one's own that it names, as `package.module:function`."""
        return [part for part in self.parts if isinstance(part, str)]

    def with_functions(self, find: Callable[[str], Any]) -> Self:
        """The same with its functions found by their names."""
        return replace(self, parts=tuple(_own(p, find(p)) if isinstance(p, str) else p for p in self.parts))

    def factor(self, rounds: NDArray[np.int64], last: int) -> NDArray[np.float64]:
        """The factor of each of these rounds, in a run of `last` rounds; beyond the last one it stays as it is."""
        different, place = np.unique(np.clip(rounds, 1, last), return_inverse=True)
        found = [math.prod(self._factors(int(number), last)) for number in different]
        return np.array(found, dtype=np.float64)[place]

    def _factors(self, number: int, last: int) -> list[float]:
        return [part(number, last) for part in self.parts if not isinstance(part, str)]


def check_given(text: str, given: str | Callable[[int], float] | None) -> None:
    """Refuse to continue a run whose schedule, `text`, names a function, unless it is given again.

    Nothing is imported because a run's folder names it.
    """
    functions = Schedule.parse(text).functions
    named = given if given is None or isinstance(given, str) else reference_of(given)
    if named is not None and named != text and [named] != functions:
        raise SafaError(f"the schedule of this run is {text!r}, not {named!r}")
    if functions and named is None:
        again = f"schedule={text!r} in Python, --schedule {text} on the command line"
        raise SafaError(f"the schedule of this run, {text}, is not built in; if you trust it, give it again: {again}")


def _part(part: str, text: str) -> Factor | str:
    try:
        match part.split(":"):
            case ["cosine"]:
                return _cosine
            case ["step", every, factor] if int(every) >= 1 and 0 <= float(factor) <= 1:
                return _step(int(every), float(factor))
            case ["warmup", rounds] if int(rounds) >= 1:
                return _warmup(int(rounds))
            case [name, *_] if name not in ("step", "warmup") and is_reference(part):
                return part
    except ValueError:
        pass
    raise SafaError(f"a schedule must be {_FORMS}, not {text!r}{_hint(part)}")


def _hint(part: str) -> str:
    """What is wrong with a part that begins well."""
    if part.startswith("step"):
        return ": EVERY is a whole number of at least 1 and FACTOR a number from 0 to 1, as in step:10:0.5"
    return ": ROUNDS is a whole number of at least 1, as in warmup:5" if part.startswith("warmup") else ""


def _cosine(number: int, last: int) -> float:
    """From 1 in the first round towards 0, which the round after the last would have."""
    return 0.5 * (1 + math.cos(math.pi * (number - 1) / last))


def _step(every: int, factor: float) -> Factor:
    return lambda number, last: factor ** ((number - 1) // every)


def _warmup(rounds: int) -> Factor:
    return lambda number, last: min(1.0, number / rounds)


def _own(name: str, function: Any) -> Factor:
    """A function that somebody brought, which is given the round and must return a factor."""
    if not callable(function):
        raise SafaError(f"the schedule {name} must be a function of the round, not a {type(function).__name__}")

    def factor(number: int, last: int) -> float:
        try:
            found = float(function(number))
        except Exception as error:
            raise SafaError(f"the schedule {name} failed in round {number}: {type(error).__name__}: {error}") from error
        if not 0 <= found < math.inf:
            raise SafaError(f"the schedule {name} must return a number of at least 0, not {found} (round {number})")
        return found

    return factor
