"""SAFA, a semi-asynchronous protocol for federated learning: simulate it, measure it, deploy it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "RoundRecord",
    "Run",
    "SafaError",
    "Settings",
    "load_run",
    "measure",
    "replay",
    "resume",
    "run_rounds",
    "simulate",
]

_WHERE = {
    "RoundRecord": "safa.protocol.records",
    "Run": "safa.runs",
    "SafaError": "safa.errors",
    "Settings": "safa.runs.settings",
    "load_run": "safa.runs",
    "measure": "safa.analysis",
    "replay": "safa.experiments.replay",
    "resume": "safa.experiments.simulate",
    "run_rounds": "safa.simulation",
    "simulate": "safa.experiments.simulate",
}
"""The public names and their modules, loaded on first use: a device imports `safa.deploy` and loads no simulator."""

if TYPE_CHECKING:
    from safa.analysis import measure
    from safa.errors import SafaError
    from safa.experiments.replay import replay
    from safa.experiments.simulate import resume, simulate
    from safa.protocol.records import RoundRecord
    from safa.runs import Run, load_run
    from safa.runs.settings import Settings
    from safa.simulation import run_rounds
else:

    def __getattr__(name: str) -> object:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_WHERE[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
