"""Whole experiments: simulate a run, resume one, replay one from its records, and sweep over many."""

from safa.experiments.replay import replay
from safa.experiments.simulate import Experiment, resume, simulate

__all__ = ["Experiment", "replay", "resume", "simulate"]
