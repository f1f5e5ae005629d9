"""Metrics and theory, from records alone."""

from safa.analysis.client_map import ClientMap, State
from safa.analysis.curve import Curve, mean_curve
from safa.analysis.metrics import METRICS, Metrics, all_metrics, client_metrics, jain_index, measure, score_metrics
from safa.analysis.pareto import pareto_front
from safa.analysis.targets import (
    TARGET_METRICS,
    Reached,
    Target,
    higher_is_better,
    reached,
    target_words,
    time_to_target,
)

__all__ = [
    "METRICS",
    "TARGET_METRICS",
    "ClientMap",
    "Curve",
    "Metrics",
    "Reached",
    "State",
    "Target",
    "all_metrics",
    "client_metrics",
    "higher_is_better",
    "jain_index",
    "mean_curve",
    "measure",
    "pareto_front",
    "reached",
    "score_metrics",
    "target_words",
    "time_to_target",
]
