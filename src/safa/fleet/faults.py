"""When clients fail: at random, or by an availability trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError
from safa.protocol.records import Ids
from safa.streams import stream
from safa.vocabulary import FAULT_MODELS

__all__ = ["Faults"]


class Faults:
    """Decides whether and when a stretch of work is cut short.

    A stretch is work without a break: from the start of an attempt, or from a client's return, to its end. With the
    model `attempt` every stretch crashes with probability `crash_rate` when it begins; with `round`, as in the paper,
    every client at work is, once in every round. The point is uniform over the work that is left. A trace cuts a
    stretch when the client goes offline, on top of that; with `period_s`, a number for each client, its times online
    repeat after so many seconds. A `crash_rate` is one number for all clients, or one for each.
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
    ) -> None:
        if model not in FAULT_MODELS:
            raise SafaError(f"fault_model must be one of {', '.join(FAULT_MODELS)}, not {model!r}")
        self.crash_rate = _checked_rates(crash_rate, clients)
        self.every_round = model == "round"
        self.has_trace = trace is not None
        self._clients = clients
        self._seed = seed
        self._trace = trace if trace is not None else np.empty((0, 3))
        self._span = float(self._trace[:, 2].max()) + 1.0 if len(self._trace) else 1.0
        self._starts = self._trace[:, 0] * self._span + self._trace[:, 1]
        self._period_s = period_s
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
        if self.has_trace:
            cut_s = _inside(np.minimum(cut_s, self._offline_s(clients, begin_s)), begin_s, left_s)
        return cut_s

    def _offline_s(self, clients: Ids, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """When each client, online or not at that time, is next offline: at once if it is not online."""
        if not len(self._trace):
            return at_s
        if self._period_s is None:
            return np.maximum(self._until_s(clients, at_s), at_s)
        period_s = self._period_s[clients]
        past_s = np.mod(at_s, period_s)
        until_s = self._until_s(clients, past_s)
        # Online to the end of a period and from the start of the next one, a client is not offline in between.
        first_s = np.maximum(self._until_s(clients, np.zeros(len(clients))), 0.0)
        until_s = np.where(until_s >= period_s, period_s + first_s, until_s)
        until_s = np.where(first_s >= period_s, np.inf, until_s)
        return np.maximum(at_s - past_s + until_s, at_s)

    def _until_s(self, clients: Ids, at_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The end of the time online that each client has begun last (-inf: none)."""
        place = np.searchsorted(self._starts, clients * self._span + np.minimum(at_s, self._span), side="right") - 1
        own = (place >= 0) & (self._trace[place, 0] == clients)
        return np.where(own, self._trace[place, 2], -np.inf)


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
