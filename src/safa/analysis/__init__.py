"""Metrics and theory, from records alone."""

from safa.analysis.client_map import ClientMap, State
from safa.analysis.metrics import CLIENT_METRICS, METRICS, Metrics, jain_index, measure

__all__ = ["CLIENT_METRICS", "METRICS", "ClientMap", "Metrics", "State", "jain_index", "measure"]
