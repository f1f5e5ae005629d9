"""SAFA, a semi-asynchronous protocol for federated learning: simulate it, measure it, deploy it."""

__version__ = "0.1.0"

from safa.analysis import measure
from safa.errors import SafaError
from safa.experiments.replay import replay
from safa.experiments.simulate import resume, simulate
from safa.protocol.records import RoundRecord
from safa.runs import Run, load_run
from safa.runs.settings import Settings
from safa.simulation import run_rounds

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
