"""Metrics of a run, from its records and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safa.protocol.records import RoundRecord, Verdict

__all__ = ["CLIENT_METRICS", "METRICS", "Metrics", "jain_index", "measure"]

METRICS: dict[str, str] = {
    "round_length_s": "mean length of a round (Eq. 17)",
    "t_dist_s": "mean time to send the model out, T_dist (Eq. 19)",
    "sync_ratio": "SR: copies sent per client and round (Eq. 9)",
    "effective_update_ratio": "EUR: share of clients picked per round (Eq. 4)",
    "version_variance": "VV: variance of the versions trained from (Eq. 10)",
    "futility": "share of the local work that was thrown away",
    "starved": "share of clients that never reached the model",
    "fairness": "Jain's index of updates merged per client (1: even)",
    "refused": "updates that were refused",
    "bytes_down": "bytes sent to clients",
    "bytes_up": "bytes sent by clients",
    "virtual_time_s": "when the last round closed",
    "diverged": "updates dropped for a NaN or an infinite number",
    "best_accuracy": "best accuracy on the test set",
    "best_loss": "lowest loss on the test set",
    "last_accuracy": "accuracy of the last model",
    "last_loss": "loss of the last model",
}
"""The metrics by name, with what each one says."""

CLIENT_METRICS: dict[str, str] = {
    "client_accuracy_mean": "mean accuracy on the clients' own data",
    "client_accuracy_spread": "its standard deviation over the clients",
    "client_accuracy_worst_decile": "its mean over the worst-served tenth",
}
"""What `eval_clients` adds to the metrics, with what each one says."""


class Metrics:
    """Gathers the metrics of a run from its records, one after the other; needs no more memory than one round."""

    def __init__(self) -> None:
        self._rounds = 0
        self._length_s = self._dist_s = 0.0
        self._sent = self._client_rounds = self._refused = 0
        self._picked_share = self._variance = 0.0
        self._work_done = self._work_lost = self._bytes_down = self._bytes_up = 0.0
        self._closed_s = 0.0
        self._version = 0
        self._clients = 0
        self._diverged = 0
        self._scores: list[tuple[float, float]] = []  # (loss, accuracy)
        self._merged = np.zeros(0, dtype=np.int64)
        self._kept = np.zeros(0, dtype=np.bool_)  # has an undrafted update that waits for the next aggregation
        self._buffered: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []  # (client, version) not made yet

    def add(self, record: RoundRecord) -> None:
        """Add the next round."""
        self._rounds += 1
        self._length_s += record.length_s
        self._dist_s += record.distribution_s
        self._sent += len(record.sent)
        self._client_rounds += record.clients
        self._refused += len(record.refused)
        self._picked_share += len(record.picked) / max(1, record.clients)
        self._variance += record.version_variance
        self._work_done += record.work_done
        self._work_lost += record.work_lost
        self._bytes_down += record.bytes_down
        self._bytes_up += record.bytes_up
        self._closed_s = record.closed_s
        self._diverged += record.diverged
        if record.loss is not None and record.accuracy is not None:
            self._scores.append((record.loss, record.accuracy))
        self._count_merged(record)

    def _count_merged(self, record: RoundRecord) -> None:
        """Count an update when a global version is made of it: at once if picked, one version later if undrafted.

        An undrafted update never counts if its client is picked, or has to start over, before that version is made.
        """
        self._grow(record)
        picked = record.verdict == Verdict.PICKED
        self._kept[record.client[picked]] = False
        self._kept[record.deprecated] = False
        if record.version > self._version:
            self._merged[self._kept] += 1
            self._kept[:] = False
        self._version = record.version
        self._buffered.append((record.client[picked], record.into[picked]))
        waiting = []
        for client, into in self._buffered:
            made = into <= record.version
            np.add.at(self._merged, client[made], 1)
            if not made.all():
                waiting.append((client[~made], into[~made]))
        self._buffered = waiting
        self._kept[record.undrafted] = True

    def _grow(self, record: RoundRecord) -> None:
        self._clients = max(self._clients, record.clients, *(int(a.max()) + 1 for a in _known(record) if len(a)))
        missing = self._clients - len(self._merged)
        if missing > 0:
            self._merged = np.concatenate([self._merged, np.zeros(missing, dtype=np.int64)])
            self._kept = np.concatenate([self._kept, np.zeros(missing, dtype=np.bool_)])

    @property
    def merged(self) -> NDArray[np.int64]:
        """How many updates of each client reached the global model."""
        return self._merged.copy()

    def values(self) -> dict[str, Any]:
        """The metrics so far, under the names in `METRICS`; None for what no model was evaluated for."""
        rounds = max(1, self._rounds)
        return {
            "round_length_s": self._length_s / rounds,
            "t_dist_s": self._dist_s / rounds,
            "sync_ratio": self._sent / max(1, self._client_rounds),
            "effective_update_ratio": self._picked_share / rounds,
            "version_variance": self._variance / rounds,
            "futility": self._work_lost / self._work_done if self._work_done else 0.0,
            "starved": float(np.mean(self._merged == 0)) if len(self._merged) else 0.0,
            "fairness": jain_index(self._merged),
            "refused": self._refused,
            "bytes_down": self._bytes_down,
            "bytes_up": self._bytes_up,
            "virtual_time_s": self._closed_s,
            "diverged": self._diverged,
            "best_accuracy": max((accuracy for _, accuracy in self._scores), default=None),
            "best_loss": min((loss for loss, _ in self._scores), default=None),
            "last_accuracy": self._scores[-1][1] if self._scores else None,
            "last_loss": self._scores[-1][0] if self._scores else None,
        }


def _known(record: RoundRecord) -> tuple[NDArray[np.int64], ...]:
    """The arrays of a record that name clients which exist."""
    return record.sent, record.client[record.verdict != Verdict.REFUSED], record.joined


def measure(records: Iterable[RoundRecord]) -> dict[str, Any]:
    """The metrics of a whole run."""
    metrics = Metrics()
    for record in records:
        metrics.add(record)
    return metrics.values()


def jain_index(counts: NDArray[np.int64]) -> float:
    """Jain's fairness index, (sum x)^2 / (m * sum x^2); 0 where nobody has anything."""
    squares = float(np.sum(counts.astype(np.float64) ** 2))
    return float(np.sum(counts)) ** 2 / (len(counts) * squares) if squares else 0.0
