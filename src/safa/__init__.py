"""SAFA, a semi-asynchronous protocol for federated learning: simulate it, measure it, deploy it."""

__version__ = "0.1.0"

from safa.analysis import measure
from safa.errors import SafaError
from safa.experiment import resume, simulate
from safa.records import RoundRecord
from safa.replay import replay
from safa.runs import Run, load_run
from safa.settings import Settings
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
