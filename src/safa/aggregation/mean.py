"""Means of the updates of a step, weighted by the record: over the participants, or over the population."""

from __future__ import annotations

from safa.aggregation.aggregator import Step
from safa.aggregation.sums import Averaging
from safa.protocol.records import Rule

__all__ = ["Mean", "PopulationMean"]

_ROUNDING = 1e-12  # what sums of the same weights may differ by, relative to them


class Mean(Averaging):
    """The mean over the participants (McMahan et al., AISTATS 2017); they replace those that diverged.

    Where the weights are shares of a cache of all clients, which sum to less than 1, they are scaled to sum to 1.
    """

    name = "mean"
    rules = frozenset({Rule.AVERAGE, Rule.CACHE})

    def _factor(self, step: Step, found: float) -> float:
        wanted = 1.0 if step.rule is Rule.CACHE else step.weight
        same = abs(wanted - found) <= _ROUNDING * wanted
        return 1.0 if same or not found else wanted / found


class PopulationMean(Averaging):
    """The mean over the whole population, as in the SAFA paper: the old model replaces the update of everybody else."""

    name = "population"
    rules = frozenset({Rule.AVERAGE, Rule.CACHE})
