"""Records made by hand, and small runs, for the tests of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from safa.analysis import measure
from safa.protocol.records import EndedBy, RoundRecord, Rule, Verdict
from safa.runs import Run
from safa.runs.settings import Settings
from safa.simulation import run_rounds

Arrival = tuple[int, int, Verdict, float]
"""Client, base version, verdict, time."""


def ids(*clients: int) -> np.ndarray[Any, Any]:
    return np.array(clients, dtype=np.int64)


def record(number: int, arrivals: Sequence[Arrival] = (), **given: Any) -> RoundRecord:
    """A round of 10 s of three clients that are all at work, with the updates that came in."""
    client, base, verdict, at_s = zip(*arrivals, strict=True) if arrivals else ((), (), (), ())
    sent = given.pop("sent", ids())
    values: dict[str, Any] = {
        "round": number,
        "rule": Rule.CACHE,
        "opened_s": 10.0 * (number - 1),
        "closed_s": 10.0 * number,
        "ended_by": EndedBy.QUOTA,
        "version": number,
        "clients": 3,
        "quota": 1,
        "trained": 3,
        "version_variance": 0.0,
        "uploads": len(arrivals),
        "sent": sent,
        "sent_version": np.full(len(sent), number - 1),
        "deprecated": ids(),
        "client": np.array(client, dtype=np.int64),
        "base": np.array(base, dtype=np.int64),
        "verdict": np.array(verdict, dtype=np.int8),
        "refusal": np.zeros(len(arrivals), dtype=np.int8),
        "arrival_s": np.array(at_s, dtype=np.float64),
        "weight": np.zeros(len(arrivals)),
        "into": np.where(np.array(verdict, dtype=np.int8) == Verdict.PICKED, number, -1).astype(np.int64),
        "work": np.ones(len(arrivals)),
        "crashed": ids(),
        "joined": ids(),
        "joined_size": np.empty(0),
        "left": ids(),
    }
    return RoundRecord(**values | given)


def simulated(task: str = "digits", **given: Any) -> Run:
    """A run without training, held in memory; it counts as finished."""
    settings = Settings.of(task, **{"train": False, "rounds": 12} | given)
    records = list(run_rounds(settings))
    return Run(settings=settings, summary=measure(records), held_records=records)


def learnt(run: Run) -> Run:
    """The run as if a model had been trained in it."""
    records = [replace(r, loss=1 / r.round, metrics={"accuracy": 1 - 0.5 / r.round}) for r in run.held_records]
    return replace(run, held_records=records, settings=replace(run.settings, train=True))
