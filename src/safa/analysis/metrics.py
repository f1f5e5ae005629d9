"""Metrics of a run, from its records and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safa.analysis.curve import Curve
from safa.analysis.targets import TARGET_METRICS, Reached, Target, higher_is_better
from safa.protocol.records import RoundRecord, Verdict

__all__ = ["METRICS", "Metrics", "all_metrics", "client_metrics", "jain_index", "measure", "score_metrics"]

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
}
"""The metrics of every run by name, with what each one says."""


def score_metrics(directions: Mapping[str, str]) -> dict[str, str]:
    """The best and the last of each metric of a problem and of the loss, by name, with what each one says."""
    names = {name: "highest" if higher_is_better(name, directions) else "lowest" for name in (*directions, "loss")}
    best = {f"best_{name}": f"{extreme} {name} on the test set" for name, extreme in names.items()}
    return best | {f"last_{name}": f"{name} of the last model" for name in names}


def client_metrics(directions: Mapping[str, str]) -> dict[str, str]:
    """What `eval_clients` adds: how the last model serves the clients, by the main metric or the loss."""
    main = next(iter(directions), "loss")
    return {
        f"client_{main}_mean": f"mean {main} on the clients' own data",
        f"client_{main}_spread": "its standard deviation over the clients",
        f"client_{main}_worst_decile": "its mean over the worst-served tenth",
    }


def all_metrics(directions: Mapping[str, str]) -> dict[str, str]:
    """Every metric that a run of a problem with these metrics can have, by name, with what each one says."""
    return METRICS | score_metrics(directions) | TARGET_METRICS | client_metrics(directions)


class Metrics:
    """Gathers the metrics of a run from its records, one after the other; needs no more memory than one round."""

    def __init__(self, directions: Mapping[str, str] | None = None, target: Target | None = None) -> None:
        """`directions` says of the problem's metrics whether higher or lower is better (see `Settings.metrics`)."""
        self.directions = dict(directions or {})
        """The problem's metrics, the main one first: "higher" or "lower", whichever is better."""
        self.reached = Reached(target) if target is not None else None
        """How far the run is from its target, if it has one."""
        self._rounds = 0
        self._length_s = self._dist_s = 0.0
        self._sent = self._client_rounds = self._refused = 0
        self._picked_share = self._variance = 0.0
        self._work_done = self._work_lost = self._bytes_down = self._bytes_up = 0.0
        self._closed_s = 0.0
        self._version = 0
        self._clients = 0
        self._diverged = 0
        self.scores: list[dict[str, float]] = []
        """Loss and metrics, by name, of every round that was evaluated."""
        self._scored_s: list[float] = []
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
        if record.loss is not None:
            self.scores.append({"loss": record.loss, **record.metrics})
            self._scored_s.append(record.closed_s)
        if self.reached is not None:
            self.reached.add(record)
        self._count_merged(record)

    def _count_merged(self, record: RoundRecord) -> None:
        """Count an update when a global version is made of it: at once if picked, one version later if undrafted.

        An undrafted update never counts if its client is picked, or has to start over, before that version is made.
        """
        self._grow(record)
        picked = record.verdict == Verdict.PICKED.value
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
    def target_held(self) -> bool:
        """Whether the target has been reached and held."""
        return self.reached is not None and self.reached.held

    @property
    def curve(self) -> Curve:
        """The main metric, or the loss where there is none, over time."""
        main = next(iter(self.directions), "loss")
        values = [score.get(main, math.nan) for score in self.scores]
        return Curve(self._scored_s, values, higher_is_better(main, self.directions))

    @property
    def merged(self) -> NDArray[np.int64]:
        """How many updates of each client reached the global model."""
        return self._merged.copy()

    def values(self) -> dict[str, Any]:
        """The metrics so far, under the names in `METRICS` and `score_metrics`; None where no model was evaluated."""
        rounds = max(1, self._rounds)
        values = {
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
        }
        return values | self._score_values() | (self.reached.values() if self.reached else {})

    def _score_values(self) -> dict[str, float | None]:
        """The best and the last of the loss and of each metric."""
        names = (*self.directions, "loss")
        found = {name: [score[name] for score in self.scores if name in score] for name in names}
        values = {f"best_{name}": self._best(name, scores) for name, scores in found.items()}
        return values | {f"last_{name}": scores[-1] if scores else None for name, scores in found.items()}

    def _best(self, name: str, scores: Sequence[float]) -> float | None:
        """The best of these; NaN only where there is nothing else."""
        best = max if higher_is_better(name, self.directions) else min
        return best([score for score in scores if not math.isnan(score)] or scores, default=None)


def _known(record: RoundRecord) -> tuple[NDArray[np.int64], ...]:
    """The arrays of a record that name clients which exist."""
    return record.sent, record.client[record.verdict != Verdict.REFUSED.value], record.joined


def measure(records: Iterable[RoundRecord], directions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The metrics of a whole run; `directions` says of the problem's metrics whether higher or lower is better."""
    metrics = Metrics(directions)
    for record in records:
        metrics.add(record)
    return metrics.values()


def jain_index(counts: NDArray[np.int64]) -> float:
    """Jain's fairness index, (sum x)^2 / (m * sum x^2); 0 where nobody has anything."""
    squares = float(np.sum(counts.astype(np.float64) ** 2))
    return float(np.sum(counts)) ** 2 / (len(counts) * squares) if squares else 0.0
