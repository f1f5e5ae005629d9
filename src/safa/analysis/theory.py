"""The theory of effective updates and bias (Eq. 5 and 11 to 16, Appendix A), with its errors put right.

A is the fastest client, B the slowest; each crashes in a round with its own chance (cr_A, cr_B), all others with the
`crash_rate` R. An update of a client reaches the global model of round r *directly* when it is picked (P_D), or through
the *bypass* when it was undrafted in round r-1 and its client is not picked in round r (P_S); P = P_D + P_S. The bias
is P(A) / P(B).

Where the fleet is large, everything hangs on three chances of a client that commits: to be picked in round 1, later
after a round in which it was missed (undrafted or crashed), and later after a round in which it was picked.
Algorithm 1 with updates in order of speed gives, in each of the three cases, one or zero:

    ======  ===================  ===================  =====================================================
    case    A                    B                    because of those that commit
    ======  ===================  ===================  =====================================================
    1       first missed picked  first missed picked  all are wanted
    2       first missed picked  -     missed -       all missed ones are wanted, and the fastest of the rest
    3       first missed -       -     -      -       the fastest missed ones fill the quota
    ======  ===================  ===================  =====================================================

The first column is where the paper's recurrence starts wrongly: in round 1 nobody was picked before, all m clients are
priority clients, and the slowest of them finds the quota full in cases 2 and 3. The paper's P_D = 1 - cr_B in round 1
of case 2 belongs to round 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError

__all__ = [
    "Case",
    "Chances",
    "Pair",
    "bias_fedavg",
    "case_as_in_appendix",
    "case_of",
    "chances_by_recurrence",
    "chances_fedavg",
    "chances_in_closed_form",
    "eur_fedavg",
    "eur_safa",
    "near_boundaries",
]

Numbers = NDArray[np.float64]

_ROUNDING = 1e-9  # 0.3 is 1 - 0.7, whatever the last binary digit says


class Case(IntEnum):
    """How the quota is filled once the first round is over."""

    DEFICIT = 1
    """Too few commit: all of them are picked."""
    MIXED = 2
    """By all priority clients that commit, and by the fastest of those that were picked last time."""
    PRIORITY = 3
    """By priority clients alone."""


_CHANCES: dict[Case, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    Case.DEFICIT: ((1, 1, 1), (1, 1, 1)),
    Case.MIXED: ((1, 1, 1), (0, 1, 0)),
    Case.PRIORITY: ((1, 1, 0), (0, 0, 0)),
}
"""Case -> for A and for B, whether one that commits is picked: in round 1, after being missed, after being picked."""


@dataclass(frozen=True, eq=False)
class Chances:
    """Of one client, for rounds 1, 2, ...: the chance that an update of it goes into the global model."""

    direct: Numbers
    """P_D: picked."""
    bypass: Numbers
    """P_S: undrafted in the round before, and not overwritten since."""

    @property
    def total(self) -> Numbers:
        """P = P_D + P_S: the two exclude each other."""
        return self.direct + self.bypass


@dataclass(frozen=True, eq=False)
class Pair:
    """The chances of A and of B."""

    a: Chances
    b: Chances

    @property
    def bias(self) -> Numbers:
        """P(A) / P(B), round by round (Eq. 11): infinite where B has no chance and A has one."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.a.total / self.b.total


# -- shares and cases --------------------------------------------------------------------------------------------------


def eur_fedavg(fraction: float, crash_rate: float) -> float:
    """EUR of FedAvg: C(1-R), since it selects before it knows who crashes."""
    _check(fraction=fraction, crash_rate=crash_rate)
    return fraction * (1 - crash_rate)


def eur_safa(fraction: float, crash_rate: float) -> float:
    """EUR of SAFA: min(C, 1-R) (Eq. 5). The bypass comes on top of it."""
    _check(fraction=fraction, crash_rate=crash_rate)
    return min(fraction, 1 - crash_rate)


def case_of(fraction: float, crash_rate: float) -> Case:
    """The case by the text's conditions: 1 if C >= 1-R, 2 if (1-C)(1-R) <= C < 1-R, 3 otherwise.

    They are those of Algorithm 1. Its priority clients are all that were not picked in the last round, a share of 1-C,
    crashed ones included; who crashed then may well commit now. So (1-C)(1-R) of the fleet are priority clients that
    commit. The appendix counts the undrafted ones only; see `case_as_in_appendix`.
    """
    return _case(fraction, crash_rate, missed=1 - fraction)


def case_as_in_appendix(fraction: float, crash_rate: float) -> Case:
    """The case by Appendix A's condition for case 3, C < (1-R-C)(1-R), which leaves out who crashed last round.

    It differs from `case_of` for (1-R)^2 / (2-R) <= C < (1-R) / (2-R), where it says 2 and Algorithm 1 does 3.
    """
    return _case(fraction, crash_rate, missed=1 - crash_rate - fraction)


def _case(fraction: float, crash_rate: float, *, missed: float) -> Case:
    _check(fraction=fraction, crash_rate=crash_rate)
    if fraction >= 1 - crash_rate - _ROUNDING:
        return Case.DEFICIT
    return Case.MIXED if fraction >= missed * (1 - crash_rate) - _ROUNDING else Case.PRIORITY


def near_boundaries(fraction: float, crash_rate: float, clients: int, *, apart: int = 1) -> list[str]:
    """A sentence for each boundary between two cases that is so near that chance may decide the case of a round.

    Near is less than three standard deviations of the number of clients that commit. In cases 2 and 3 it is `apart`
    clients more, the number of those that stand for A or for B: in a large fleet they would not count.
    """
    _check(fraction=fraction, crash_rate=crash_rate)
    quota = float(np.ceil(fraction * clients - _ROUNDING))
    found = []
    for lower, upper, pool, who in ((1, 2, clients, "clients"), (2, 3, clients - quota, "priority clients")):
        expected = pool * (1 - crash_rate)
        spread = float(np.sqrt(expected * crash_rate))
        room = 0 if lower == Case.DEFICIT and expected <= quota else apart
        if quota < clients and abs(expected - quota) < 3 * spread + room:
            found.append(
                f"near the boundary of cases {lower} and {upper}: {expected:.1f} ± {spread:.1f} {who} commit "
                f"for {quota:g} places, so a round may be of the other case by chance"
            )
    return found


# -- chances -----------------------------------------------------------------------------------------------------------


def bias_fedavg(crash_a: float, crash_b: float) -> float:
    """The bias of FedAvg in every round: (1 - cr_A) / (1 - cr_B) (Eq. 12)."""
    _check(crash_a=crash_a, crash_b=crash_b)
    return (1 - crash_a) / (1 - crash_b) if crash_b < 1 else float("inf") if crash_a < 1 else float("nan")


def chances_fedavg(fraction: float, crash_a: float, crash_b: float, rounds: int) -> Pair:
    """FedAvg: selected with chance C, then not crashed."""
    _check(fraction=fraction, crash_a=crash_a, crash_b=crash_b)
    shares = (fraction * (1 - crash) * np.ones(rounds) for crash in (crash_a, crash_b))
    return Pair(*(Chances(share, np.zeros(rounds)) for share in shares))


def chances_by_recurrence(case: Case, crash_a: float, crash_b: float, rounds: int) -> Pair:
    """P_D and P_S of A and B in rounds 1 to `rounds` (Eq. 22 to 25, Appendix A), right from round 1 on."""
    _check(crash_a=crash_a, crash_b=crash_b)
    for_a, for_b = _CHANCES[case]
    return Pair(_recur(crash_a, *for_a, rounds), _recur(crash_b, *for_b, rounds))


def _recur(crash: float, first: int, after_missed: int, after_picked: int, rounds: int) -> Chances:
    """The recurrence for one client that is picked, if it commits, as the three chances say."""
    direct, bypass = np.zeros(rounds), np.zeros(rounds)
    direct[:1] = (1 - crash) * first
    for now in range(1, rounds):
        picked = direct[now - 1]
        direct[now] = (1 - crash) * (picked * after_picked + (1 - picked) * after_missed)
        bypass[now] = (1 - crash - picked) * (1 - (1 - crash) * after_missed)
    return Chances(direct, bypass)


def chances_in_closed_form(case: Case, crash_a: float, crash_b: float, rounds: int) -> Pair:
    """The recurrence solved: Eq. 13 to 15 with the denominator 2 - cr, and for B of case 2 a round later."""
    _check(crash_a=crash_a, crash_b=crash_b)
    a = _taking_turns(crash_a, 0, rounds) if case == Case.PRIORITY else _always_picked(crash_a, rounds)
    if case == Case.MIXED:
        return Pair(a, _taking_turns(crash_b, 1, rounds))
    return Pair(a, _always_picked(crash_b, rounds) if case == Case.DEFICIT else _never_picked(crash_b, rounds))


def _always_picked(crash: float, rounds: int) -> Chances:
    return Chances(np.full(rounds, 1 - crash), np.zeros(rounds))


def _never_picked(crash: float, rounds: int) -> Chances:
    return Chances(np.zeros(rounds), np.where(np.arange(rounds) > 0, 1 - crash, 0.0))


def _taking_turns(crash: float, late: int, rounds: int) -> Chances:
    """One that is picked, if it commits, in every round after one in which it was not."""
    turn = np.arange(1 - late, rounds + 1 - late)
    before = _direct(crash, np.maximum(turn - 1, 0))
    return Chances(_direct(crash, turn), np.where(np.arange(rounds) > 0, crash * (1 - crash - before), 0.0))


def _direct(crash: float, turn: NDArray[np.int64]) -> Numbers:
    """P_D after so many turns: ((cr-1)^(k+1) + 1 - cr) / (2 - cr)."""
    return np.asarray(((crash - 1.0) ** (turn + 1) + 1 - crash) / (2 - crash))


def _check(**shares: float) -> None:
    """Everything here is a share."""
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise SafaError(f"{name} must be from 0 to 1, not {share}")
