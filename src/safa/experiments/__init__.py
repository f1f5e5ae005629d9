"""Whole experiments: simulate a run, resume one, replay one from its records, and sweep over many."""

from safa.experiments.replay import replay
from safa.experiments.results import Sweep, best, load_sweep
from safa.experiments.simulate import Experiment, resume, simulate
from safa.experiments.sweep import sweep

__all__ = ["Experiment", "Sweep", "best", "load_sweep", "replay", "resume", "simulate", "sweep"]
