"""Metrics and theory, from records alone."""

from safa.analysis.client_map import ClientMap, State
from safa.analysis.curve import Curve
from safa.analysis.metrics import METRICS, Metrics, all_metrics, client_metrics, jain_index, measure, score_metrics
from safa.analysis.targets import TARGET_METRICS, Reached, Target, higher_is_better, reached, target_words

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
    "measure",
    "reached",
    "score_metrics",
    "target_words",
]
