"""What became of the updates of each client over a whole run, from records alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from safa.analysis.client_map import lag
from safa.protocol.records import Ids, Refusal, RoundRecord, Verdict

__all__ = ["ClientTotals"]


class ClientTotals:
    """Counts for every client, gathered from the records one after the other."""

    def __init__(self) -> None:
        self.came_in = np.zeros(0)
        """Updates that came in."""
        self.refused = np.zeros(0)
        """Those of them that were thrown away."""
        self.crashed = np.zeros(0)
        """Rounds in which its work was cut short."""
        self.started_over = np.zeros(0)
        """Rounds in which it was forced to start over."""
        self.lag = np.zeros(0)
        """By how many versions the updates that were taken are behind, all together."""

    def add(self, record: RoundRecord) -> None:
        """Take in the next round."""
        known = record.refusal != Refusal.UNKNOWN_CLIENT.value
        refused, taken = known & (record.verdict == Verdict.REFUSED.value), record.verdict != Verdict.REFUSED.value
        self.came_in = _plus(self.came_in, record.client[known])
        self.refused = _plus(self.refused, record.client[refused])
        self.crashed = _plus(self.crashed, record.crashed)
        self.started_over = _plus(self.started_over, record.deprecated)
        self.lag = _plus(self.lag, record.client[taken], lag(record)[taken])

    def mean_lag(self, clients: int) -> NDArray[np.float64]:
        """By how many versions the updates of the first so many clients are behind on average; NaN where none is."""
        lags, taken = of_all(self.lag, clients), of_all(self.came_in, clients) - of_all(self.refused, clients)
        return np.where(taken > 0, lags / np.maximum(taken, 1), np.nan)


def of_all(totals: NDArray[np.float64], clients: int) -> NDArray[np.float64]:
    """The totals of the first so many clients, 0 for those that were never named."""
    return np.pad(totals, (0, max(0, clients - len(totals))))[:clients]


def _plus(totals: NDArray[np.float64], clients: Ids, weights: NDArray[np.int64] | None = None) -> NDArray[np.float64]:
    """The totals with one more, or with their weights, for each of these clients."""
    counts = np.bincount(clients, weights, minlength=len(totals)).astype(np.float64)
    counts[: len(totals)] += totals
    return counts
