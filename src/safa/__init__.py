"""SAFA, a semi-asynchronous protocol for federated learning: simulate it, measure it, deploy it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "Every",
    "Metric",
    "Problem",
    "RoundRecord",
    "Run",
    "SafaError",
    "Settings",
    "StopAt",
    "load_run",
    "measure",
    "replay",
    "resume",
    "run_rounds",
    "simulate",
    "sweep",
    "write_report",
]

_WHERE = {
    "Every": "safa.experiments.callbacks",
    "Metric": "safa.tasks.problem",
    "Problem": "safa.tasks.problem",
    "RoundRecord": "safa.protocol.records",
    "Run": "safa.runs",
    "SafaError": "safa.errors",
    "Settings": "safa.runs.settings",
    "StopAt": "safa.experiments.callbacks",
    "load_run": "safa.runs",
    "measure": "safa.analysis",
    "replay": "safa.experiments.replay",
    "resume": "safa.experiments.simulate",
    "run_rounds": "safa.simulation",
    "simulate": "safa.experiments.simulate",
    "sweep": "safa.experiments.sweep",
    "write_report": "safa.report",
}
"""The public names and their modules, loaded on first use: a device imports `safa.deploy` and loads no simulator."""

if TYPE_CHECKING:
    from safa.analysis import measure
    from safa.errors import SafaError
    from safa.experiments.callbacks import Every, StopAt
    from safa.experiments.replay import replay
    from safa.experiments.simulate import resume, simulate
    from safa.experiments.sweep import sweep
    from safa.protocol.records import RoundRecord
    from safa.report import write_report
    from safa.runs import Run, load_run
    from safa.runs.settings import Settings
    from safa.simulation import run_rounds
    from safa.tasks.problem import Metric, Problem
else:

    def __getattr__(name: str) -> object:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_WHERE[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
