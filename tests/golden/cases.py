"""The runs whose results are frozen: for each a task and settings, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safa

__all__ = ["CASES", "RESUMED", "needs_file", "simulate"]

_TASKS: dict[str, dict[str, Any]] = {
    "boston": {"clients": 12, "mean_size": 40.0, "rounds": 16, "lr": 0.01},
    "digits": {"clients": 10, "mean_size": 120.0, "rounds": 7, "epochs": 1},
    "kdd99": {"clients": 20, "rounds": 4, "epochs": 2},
}
"""What all runs of a task have in common: few clients and rounds."""
_SHARED = {"trainer": "batched", "threads": 1, "seed": 11, "fraction": 0.3, "crash_rate": 0.3, "checkpoint_every": 2}
_PAPER, _ROUND, _RESTARTS = {"clock": "paper"}, {"fault_model": "round"}, {"keep_progress": False}
_PRESET = {"preset": "paper", "lag_tolerance": 2}
_POPULATION = {"averaging": "population"}
_HINGE = {"staleness": "hinge", "hinge_slope": 2.0, "hinge_lag": 1.0}
_PARTIAL = {"buffer_size": 3, "server_lr": 0.7}  # buffers that are not full when a round closes
_SMALL = {"clients": 30, "fraction": 0.5, "memory_mb": 0.001}  # 52 bytes a model: three updates at a time
_SMALL_DIGITS = {"memory_mb": 0.15}  # 11 kB a model: two updates at a time
_DIVERGING = {"lr": 0.25, "epochs": 100, "round_limit_s": 5000.0, "fraction": 0.8}  # one client diverges
_ADAM = {"optimiser": "adam", "lr": 0.003}
_MOMENTUM = {"momentum": 0.9}

_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "boston-safa": {
        "causal": {"lag_tolerance": 2, "rounds": 45},
        "strict": {"lag_tolerance": 1, "round_limit_s": 140.0},
        "restarts": {"lag_tolerance": 2, **_ROUND, **_RESTARTS, **_MOMENTUM},
        "serial": {"rounds": 4, "trainer": "serial", "eval_every": 2, "weight_decay": 0.01},
        "diverging": {"lag_tolerance": 2, **_DIVERGING},
        "memory": {"lag_tolerance": 1, **_SMALL},
        "paper-clock": {"lag_tolerance": 2, **_PAPER},
        "paper-preset": {"rounds": 30, **_PRESET},
        "paper-preset-memory": {"rounds": 8, **_SMALL, **_PRESET},
        "everyone": {"fraction": 1.0, "crash_rate": 0.0},
    },
    "boston-fedavg": {
        "causal": {},
        "population": {**_POPULATION, **_ROUND, "eval_every": 3},
        "short": {"fraction": 0.6, "round_limit_s": 140.0, **_ADAM},
        "diverging": _DIVERGING,
        "diverging-memory": {**_DIVERGING, "memory_mb": 0.001},
        "memory": {**_SMALL, **_POPULATION},
        "paper-clock": _PAPER,
        "paper-preset": {"rounds": 30, "preset": "paper"},
    },
    "boston-fedcs": {
        "causal": {"estimate_error": 0.3, "round_limit_s": 150.0, "fraction": 0.6},
        "population": {**_POPULATION, "round_limit_s": 140.0, **_MOMENTUM},
        "paper-clock": {**_PAPER, "round_limit_s": 140.0, "fraction": 0.6},
    },
    "boston-local": {
        "causal": {},
        "restarts": {**_RESTARTS, "round_limit_s": 135.0, "fraction": 0.6, "eval_every": 2},
        "memory": {**_SMALL, "proximal": 0.1},
        "paper-clock": _PAPER,
        "paper-preset": {"rounds": 30, "preset": "paper"},
    },
    "boston-fedasync": {
        "causal": {},
        "hinge": {**_HINGE, **_ROUND, **_RESTARTS},
        "memory": {**_SMALL, "mixing": 0.9, "eval_every": 2},
        "diverging": _DIVERGING,
    },
    "boston-fedbuff": {
        "causal": {},
        "partial": {**_PARTIAL, "rounds": 24},
        "memory": {**_SMALL, "buffer_size": 7, **_RESTARTS},
        "diverging": {**_PARTIAL, **_DIVERGING},
        "one": {"buffer_size": 1, **_ADAM, **_ROUND},
    },
    "digits-safa": {
        "causal": {"lag_tolerance": 1, **_SMALL_DIGITS},
        "paper-clock": {"lag_tolerance": 2, **_PAPER, "partition": "dirichlet:0.5"},
    },
    "digits-fedavg": {"causal": _ADAM, "paper-clock": {**_PAPER, **_POPULATION, "eval_every": 2}},
    "digits-fedcs": {"causal": {"round_limit_s": 125.0, **_SMALL_DIGITS}, "paper-clock": _PAPER},
    "digits-local": {"causal": {**_SMALL_DIGITS, "partition": "iid"}, "paper-clock": _PAPER},
    "digits-fedasync": {"causal": {**_HINGE, "proximal": 0.1, **_SMALL_DIGITS}},
    "digits-fedbuff": {"causal": {**_PARTIAL, **_MOMENTUM, "lr": 0.05}},
    "kdd99-safa": {"causal": {"lag_tolerance": 1}, "paper-clock": {**_PAPER, **_MOMENTUM}},
    "kdd99-fedavg": {"causal": {}, "paper-clock": {**_PAPER, **_POPULATION}},
    "kdd99-fedcs": {"causal": {"estimate_error": 0.5, "round_limit_s": 124.0}, "paper-clock": _PAPER},
    "kdd99-local": {"causal": _ADAM, "paper-clock": _PAPER},
    "kdd99-fedasync": {"causal": {"staleness": "constant"}},
    "kdd99-fedbuff": {"causal": _PARTIAL},
}


def _settings(group: str, variant: dict[str, Any]) -> dict[str, Any]:
    task, protocol = group.split("-")
    return {"task": task, "protocol": protocol} | _SHARED | _TASKS[task] | variant


CASES: dict[str, dict[str, Any]] = {
    f"{group}-{name}": _settings(group, variant)
    for group, variants in _VARIANTS.items()
    for name, variant in variants.items()
}
"""The arguments of `safa.simulate`, by the name of the case."""

RESUMED = [
    "boston-safa-causal",
    "boston-safa-restarts",
    "boston-safa-memory",
    "boston-safa-paper-clock",
    "boston-safa-paper-preset",
    "boston-fedavg-population",
    "boston-fedcs-causal",
    "boston-local-causal",
    "boston-fedasync-memory",
    "boston-fedbuff-partial",
    "digits-safa-causal",
]
"""Cases that are also stopped in the middle and resumed."""


def needs_file(name: str) -> bool:
    """Whether the data of a case are not part of the package."""
    return name.startswith("kdd99")


def simulate(name: str, folder: Path) -> safa.Run:
    """Run a case into a new folder."""
    settings = dict(CASES[name])
    return safa.simulate(settings.pop("task"), out=folder, **settings)
