"""Fully local training: every client continues from its own last model; their sum is taken where it is asked for."""

from __future__ import annotations

from safa.aggregation.model_cache import ModelCache
from safa.protocol.records import Rule

__all__ = ["OwnModels"]


class OwnModels(ModelCache):
    """The cache of the clients' own models, which are what they start from."""

    name = "own"
    rules = frozenset({Rule.OWN})
    trains_own_models = True
