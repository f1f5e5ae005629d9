"""Which runs the reproduction consists of.

Every cell of the tables is run under two accountings: *as printed* (the preset `paper`: its idealised clock, its
average over the whole population, the best model by test loss sent out), and *corrected* (the defaults of `safa`: an
update counts when it arrives, T_dist of Eq. 19, McMahan's average, no look at the test set, losses noticed after the
same delay whatever the protocol).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from safa.runs.settings import Settings

__all__ = [
    "ACCOUNTINGS",
    "CRASH_RATES",
    "FRACTIONS",
    "LAGS",
    "LAG_CRASH_RATES",
    "LAG_FRACTIONS",
    "PARTS",
    "PROTOCOLS",
    "TARGETS",
    "TASKS",
    "TRACED_FRACTION",
    "Job",
    "job",
    "lag_job",
    "plan",
]

TASKS = ("boston", "mnist", "kdd99")
PROTOCOLS = ("safa", "fedavg", "fedcs", "local")
CRASH_RATES = (0.1, 0.3, 0.5, 0.7)
FRACTIONS = (0.1, 0.3, 0.5, 0.7, 1.0)
LAGS = tuple(range(1, 11))
LAG_FRACTIONS = (0.1, 0.5, 1.0)
LAG_CRASH_RATES = (0.3, 0.7)
TRACED_FRACTION = 0.3
"""Figures 6 to 8 show the loss, round by round, at this fraction."""
ACCOUNTINGS = ("as printed", "corrected")
PARTS = ("timing", "accuracy", "lag", "bias")

TARGETS = {"boston": 0.6, "mnist": 0.95, "kdd99": 0.99}
"""The accuracy to be reached, a little below what the paper prints for a good run."""
_PATIENCE = 4
"""How many times the paper's number of rounds a protocol may take to the target."""
_WHERE = ("device", "compile", "tf32", "memory_mb", "checkpoint_every", "threads", "trainer")
"""Settings that say where and how a run is computed, not what it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A run, and what to read from it."""

    settings: Settings
    rounds: int
    """The metrics are those of so many rounds."""
    target: float | None = None
    """Continue behind `rounds` until the accuracy has reached this, or the rounds of the settings are over."""

    @cached_property
    def key(self) -> str:
        """What the job is, apart from where it is run: jobs with the same key have the same result."""
        values: dict[str, Any] = {k: v for k, v in self.settings.values().items() if k not in _WHERE}
        return json.dumps(values | {"measured": self.rounds, "target": self.target}, sort_keys=True)

    @property
    def weight(self) -> float:
        """About how much longer than a short simulation it takes."""
        return 15.0 if self.settings.train else 1.0

    @property
    def traced(self) -> bool:
        """Whether its loss and accuracy are kept round by round."""
        return self.settings.train and self.settings.fraction == TRACED_FRACTION


def job(
    accounting: str,
    task: str,
    protocol: str,
    *,
    crash_rate: float,
    fraction: float,
    seed: int,
    train: bool,
    device: str = "cpu",
    **more: Any,
) -> Job:
    """The run of one cell of a table, under one accounting, in one world."""
    printed = accounting == ACCOUNTINGS[0]
    settings = Settings.of(
        task, preset="paper" if printed else None, protocol=protocol, crash_rate=crash_rate, fraction=fraction,
        seed=seed, train=train, device=device, trainer=_trainer(task, device), **more,
    )  # fmt: skip
    if printed or not train or protocol == "local":
        return Job(settings=settings, rounds=settings.rounds)
    longer = replace(settings, rounds=_PATIENCE * settings.rounds)
    return Job(settings=longer, rounds=settings.rounds, target=TARGETS[task])


def _trainer(task: str, device: str) -> Literal["threads", "batched"]:
    """The one that is fastest, not measured, so that every machine comes to the same figures."""
    return "threads" if task == "mnist" and device == "cpu" else "batched"


def lag_job(accounting: str, task: str, lag: int, *, crash_rate: float, fraction: float, seed: int) -> Job:
    """A run for Figures 3 and 4: SAFA with a lag tolerance. Models are trained in Task 1, as in the paper.

    What the paper calls tau is one less than in its Eq. 3 wherever it printed results.
    """
    tau = lag + 1 if accounting == ACCOUNTINGS[0] else lag
    return job(
        accounting, task, "safa", crash_rate=crash_rate, fraction=fraction, seed=seed, train=task == "boston",
        lag_tolerance=tau,
    )  # fmt: skip


def plan(tasks: Sequence[str], parts: Sequence[str], *, seeds: int, worlds: int, device: str = "cpu") -> list[Job]:
    """All runs that are needed for parts of the reproduction, each once."""
    jobs = itertools.chain.from_iterable(_jobs(task, parts, seeds, worlds, device) for task in tasks)
    return list({item.key: item for item in jobs}.values())


def _jobs(task: str, parts: Sequence[str], seeds: int, worlds: int, device: str) -> Iterator[Job]:
    cells = list(itertools.product(CRASH_RATES, FRACTIONS))
    if "timing" in parts:
        for protocol, (crash_rate, fraction), seed in itertools.product(PROTOCOLS[:3], cells, range(worlds)):
            yield job("as printed", task, protocol, crash_rate=crash_rate, fraction=fraction, seed=seed, train=False)
        if "accuracy" not in parts:
            for protocol, (crash_rate, fraction), seed in itertools.product(PROTOCOLS[:3], cells, range(seeds)):
                yield job("corrected", task, protocol, crash_rate=crash_rate, fraction=fraction, seed=seed, train=False)
    if "lag" in parts:
        lags = itertools.product(ACCOUNTINGS, LAGS, LAG_CRASH_RATES, LAG_FRACTIONS, range(seeds))
        for accounting, lag, crash_rate, fraction, seed in lags:
            yield lag_job(accounting, task, lag, crash_rate=crash_rate, fraction=fraction, seed=seed)
    if "accuracy" in parts:
        for accounting, seed, protocol, (crash_rate, fraction) in itertools.product(
            ACCOUNTINGS, range(seeds), PROTOCOLS, cells
        ):
            yield job(
                accounting, task, protocol, crash_rate=crash_rate, fraction=fraction, seed=seed, train=True,
                device=device,
            )  # fmt: skip
