"""Mixing (FedAsync; Xie, Koyejo, Gupta, 2019): every update is mixed into the global model as it comes."""

from __future__ import annotations

from safa.aggregation.sums import Averaging
from safa.protocol.records import Rule

__all__ = ["Mixing"]


class Mixing(Averaging):
    """w := (1 - a) w + a u; the weight a of a stale update is smaller, and the old model has the rest."""

    name = "mixing"
    rules = frozenset({Rule.AVERAGE})
