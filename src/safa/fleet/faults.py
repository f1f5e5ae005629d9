"""When clients fail, at random or by going offline, and when they are back."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.fleet.availability import Availability
from safa.protocol.records import Ids
from safa.streams import stream, uniform_at
from safa.vocabulary import FAULT_MODELS

__all__ = ["Faults"]


class Faults:
    """Decides whether and when a stretch of work is cut short.

    A stretch is work without a break: from the start of an attempt, or from a client's return, to its end. With the
    model `attempt` every stretch crashes with probability `crash_rate` when it begins; with `round`, as in the paper,
    every client at work is, once in every round. The point is uniform over the work that is left. A trace cuts a
    stretch when the client goes offline, on top of that; with `period_s`, a number for each client, its times online
    repeat after so many seconds. A `crash_rate` is one number for all clients, or one for each.

    A client that crashed is back when the next round opens, or, with `return_delay_s`, after an exponential delay with
    that mean (`stretch`). Crashes are then drawn by client and stretch, so that nothing depends on rounds.
    """

    def __init__(
        self,
        clients: int,
        *,
        seed: int,
        crash_rate: ArrayLike,
        model: str = "attempt",
        trace: NDArray[np.float64] | None = None,
        period_s: NDArray[np.float64] | None = None,
        return_delay_s: float = 0.0,
    ) -> None:
        if model not in FAULT_MODELS:
            raise SafaError(f"fault_model must be one of {', '.join(FAULT_MODELS)}, not {model!r}")
        self.crash_rate = _checked_rates(crash_rate, clients)
        if return_delay_s and (model == "round" or np.any(self.crash_rate == 1)):
            raise SafaError("return_delay_s needs fault_model = attempt, and a crash_rate below 1")
        self.every_round = model == "round"
        self.availability = None if trace is None else Availability(trace, period_s)
        self.return_delay_s = return_delay_s
        self._clients = clients
        self._seed = seed
        self._draws: dict[tuple[int, int], tuple[NDArray[np.bool_], NDArray[np.float64]]] = {}

    def draw(self, round_number: int, ordinal: int = 0) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """For every client, whether it crashes and at which share of its work, in its nth stretch of a round."""
        key = round_number, ordinal
        if key not in self._draws:
            if ordinal == 0:
                self._draws.clear()
            drawn = stream(self._seed, "crash", round_number, ordinal).random(self._clients)
            points = stream(self._seed, "crash point", round_number, ordinal).random(self._clients)
            self._draws[key] = drawn < self.crash_rate, points
        return self._draws[key]

    def crash_times(
        self,
        clients: Ids,
        begin_s: NDArray[np.float64],
        left_s: NDArray[np.float64],
        *,
        round_number: int,
        ordinal: NDArray[np.int32],
    ) -> NDArray[np.float64]:
        """When these stretches are cut short (inf: not at all), given when they begin and how long they are."""
        cut_s = np.full(len(clients), np.inf)
        for nth in _distinct(ordinal):
            crashed, point = self.draw(round_number, nth)
            hit = np.flatnonzero((ordinal == nth) & crashed[clients])
            cut_s[hit] = _inside(begin_s[hit] + point[clients[hit]] * left_s[hit], begin_s[hit], left_s[hit])
        if self.availability is not None:
            cut_s = _inside(np.minimum(cut_s, self.availability.offline_s(clients, begin_s)), begin_s, left_s)
        return cut_s

    def stretch(
        self,
        clients: Ids,
        begin_s: NDArray[np.float64],
        left_s: NDArray[np.float64],
        number: NDArray[np.int32],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """With return delays: when these stretches are cut short, and when their clients are back (inf: neither).

        Each is the client's nth since the start, counted from 0. Nothing else decides what becomes of it.
        """
        crashes, point, delay_s = self.lots(clients, number)
        cut_s = _inside(np.where(crashes, begin_s + point * left_s, np.inf), begin_s, left_s)
        back_s = cut_s + delay_s
        if self.availability is not None:
            until_s = self.availability.online(clients, begin_s)[1]
            gone = until_s < np.minimum(cut_s, begin_s + left_s)
            cut_s[gone] = back_s[gone] = until_s[gone]
            cut = np.flatnonzero(cut_s < np.inf)
            back_s[cut] = self.online_s(clients[cut], back_s[cut])
        return cut_s, back_s

    def lots(
        self, clients: Ids, number: NDArray[np.int32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
        """Whether a client's nth stretch crashes, at which share of its work, and how long the client is away then."""
        rate = self.crash_rate[clients] if self.crash_rate.ndim else self.crash_rate
        drawn, point, delay = (
            uniform_at(self._seed, f"{what} of stretch", clients, number) for what in ("crash", "crash point", "return")
        )
        return drawn < rate, point, -self.return_delay_s * np.log1p(-delay)

    def online_s(self, clients: Ids, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """When each client is online, from that time on (inf: never)."""
        if self.availability is None:
            return at_s
        there_s, ever = at_s.copy(), np.flatnonzero(at_s < np.inf)
        there_s[ever] = self.availability.online(clients[ever], at_s[ever])[0]
        return there_s


def _inside(
    cut_s: NDArray[np.float64], begin_s: NDArray[np.float64], left_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """These times, inf for one that is not before the end of its stretch."""
    return np.where(cut_s < begin_s + left_s, cut_s, np.inf)


def _distinct(numbers: NDArray[np.int32]) -> list[int]:
    """The different ones of these numbers, which are all the same as a rule."""
    same = len(numbers) > 0 and bool(np.all(numbers == numbers[0]))
    return [int(numbers[0])] if same else np.unique(numbers).tolist()


def _checked_rates(crash_rate: ArrayLike, clients: int) -> NDArray[np.float64]:
    rates = np.asarray(crash_rate, dtype=np.float64)
    if rates.shape not in ((), (clients,)):
        raise SafaError(
            f"crash_rate must be one number, or one for each of {clients} clients, not an array of shape {rates.shape}"
        )
    wrong = rates[~((rates >= 0) & (rates <= 1))]
    if len(wrong):
        raise SafaError(f"crash_rate must be from 0 to 1, not {wrong[0]:g}")
    return rates
