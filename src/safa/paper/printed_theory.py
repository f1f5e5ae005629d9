"""The theory of bias as the paper prints it (Eq. 13 to 15, 26, 27), errors included; `safa.analysis.theory` is right.

The appendix solves its recurrence with the denominator cr - 2 in place of 2 - cr, so that what should be a probability
is negative or above 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from safa.analysis.theory import Case, Chances, Pair, chances_in_closed_form
from safa.errors import SafaError

__all__ = ["chances", "direct", "improper", "sigma"]

Numbers = NDArray[np.float64]

_ROUNDING = 1e-9


def direct(crash: float, turn: NDArray[np.int64]) -> Numbers:
    """P_D as the appendix solves it (Eq. 26, 27), with the denominator cr - 2: minus the right value."""
    return np.asarray(((crash - 1.0) ** (turn + 1) + 1 - crash) / (crash - 2))


def sigma(crash: float, turn: NDArray[np.int64]) -> Numbers:
    """sigma = 1 - P_D as printed (Eq. 15). It tends to (3 - 2cr) / (2 - cr), which is above 1."""
    return np.asarray((2 * crash - (crash - 1.0) ** (turn + 1) - 3) / (crash - 2))


def chances(case: Case, crash_a: float, crash_b: float, rounds: int) -> Pair:
    """Eq. 13 to 15 as they are printed. They are said to hold from round 2 on; round 1 is given by the same formula."""
    right = chances_in_closed_form(case, crash_a, crash_b, rounds)
    a = _of_one(crash_a, rounds) if case == Case.PRIORITY else right.a
    b = _of_one(crash_b, rounds) if case == Case.MIXED else right.b
    return Pair(a, b)


def _of_one(crash: float, rounds: int) -> Chances:
    found = sigma(crash, np.arange(rounds))
    return Chances((1 - crash) * found, crash * (found - crash))


def improper(crash: float, rounds: int) -> dict[str, list[int]]:
    """In which of the rounds 2 to `rounds` a printed value is no probability, by its name.

    `P_D` is the appendix's solution, `sigma` Eq. 15 of the round before, `P` Eq. 13 and 14 where sigma occurs in them.
    """
    if not 0 <= crash <= 1:
        raise SafaError(f"crash must be from 0 to 1, not {crash}")
    numbers = np.arange(2, rounds + 1)
    values = {
        "P_D": direct(crash, numbers),
        "sigma": sigma(crash, numbers - 1),
        "P": _of_one(crash, rounds).total[1:],
    }
    return {name: numbers[(value < -_ROUNDING) | (value > 1 + _ROUNDING)].tolist() for name, value in values.items()}
