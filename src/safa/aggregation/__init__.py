"""Aggregation: what the updates of a step make of the global model. Knows no protocol, no fleet and no network.

Read `aggregator` (what every aggregator is) first, then `mean` and `model_cache`. Classes are found by name
(`registry`) and loaded when they are asked for; no tensor library is loaded before.
"""

from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.aggregation.registry import (
    available,
    build,
    build_optimiser,
    check,
    find,
    find_optimiser,
    optimisers,
    parameters,
)

__all__ = [
    "Aggregator",
    "Step",
    "Updates",
    "available",
    "build",
    "build_optimiser",
    "check",
    "find",
    "find_optimiser",
    "optimisers",
    "parameters",
]
