"""The Pareto front: of several choices, those that no other one beats in everything."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["pareto_front"]


def pareto_front(costs: Sequence[Sequence[float]]) -> list[int]:
    """The places of the choices for which no other is as good in every cost and better in one; less is better."""
    return [place for place, own in enumerate(costs) if not any(_beats(other, own) for other in costs)]


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)
