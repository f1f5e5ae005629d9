"""Metrics and theory, from records alone."""

from safa.analysis.metrics import METRICS, Metrics, jain_index, measure

__all__ = ["METRICS", "Metrics", "jain_index", "measure"]
