"""Metrics and theory, from records alone."""

from safa.analysis.client_map import ClientMap, State
from safa.analysis.metrics import METRICS, Metrics, jain_index, measure

__all__ = ["METRICS", "ClientMap", "Metrics", "State", "jain_index", "measure"]
