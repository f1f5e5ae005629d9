"""Robust means: in place of the mean of a step's updates, something that a few hostile clients cannot move far.

w := w + length * robust(moves), over the picked updates. A move is u - w, as in a mean of models, and for `Rule.DELTA`
what the training changed, u - its base. `length` is the sum of the weights that the record gives to the updates (1 for
FedAvg over its participants), and 1 for `Rule.CACHE`, whose weights are shares of a cache; an update that diverged is
part of the sum, as the others replace it. They hold no state, and need all updates of a step at once.

With less than three updates there is nothing to compare, and their mean is taken.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.errors import SafaError
from safa.protocol.records import Rule

__all__ = ["CoordinateMedian", "GeometricMedian", "MultiKrum", "RobustMean", "TrimmedMean"]

_BLOCK_BYTES = 2**25  # what is computed on at a time, in double precision
_SMOOTHING = 1e-6  # nu of the smoothed Weiszfeld algorithm: the least distance that is divided by
_TOLERANCE = 1e-7  # it ends when a pass moves the point by less than this part of the mean distance
_PASSES = 100  # and after so many at the latest
_TRY_EVERY = 8  # passes from one trial of the nearest move to the next


class RobustMean(Aggregator):
    """What the robust means share: they gather the moves of a step, in order of client, and move the model."""

    rules = frozenset({Rule.AVERAGE, Rule.DELTA, Rule.CACHE})
    compares = True

    def step(self, step: Step) -> Tensor:
        """The model moved by a robust mean of the moves; without any it stays as it is."""
        model = self.versions.model
        moves, weights = _gather(step.updates, None if step.rule is Rule.DELTA else model)
        if moves is None:
            return model.clone()
        length = 1.0 if step.rule is Rule.CACHE else step.weight
        return model + length * self.mean(moves, weights).to(model.dtype)

    @abstractmethod
    def mean(self, moves: Tensor, weights: Tensor) -> Tensor:
        """A robust mean of the rows of `moves` [K, d], K > 0; `weights` [K] are those of the record."""


class CoordinateMedian(RobustMean):
    """The median of every coordinate (Yin et al. 2018). Unweighted, as in the paper."""

    name = "median"

    def mean(self, moves: Tensor, weights: Tensor) -> Tensor:
        """The middle, or the mean of the two in the middle, in every coordinate."""
        return _trimmed(moves, (len(moves) - 1) // 2)


class TrimmedMean(RobustMean):
    """The mean of what is left in every coordinate without its extremes (Yin et al. 2018). Unweighted, as in the paper.

    A share `trim` (beta) is cut at each end, rounded up to whole updates: of three, one at each end.
    """

    name = "trimmed_mean"

    def __init__(self, *, trim: float = 0.2) -> None:
        """`trim` must be at least the share of hostile clients, and below one half."""
        self.trim = _checked_share("trim", trim)

    def mean(self, moves: Tensor, weights: Tensor) -> Tensor:
        """The trimmed mean of every coordinate."""
        return _trimmed(moves, min(_rounded_up(self.trim, len(moves)), (len(moves) - 1) // 2))


class MultiKrum(RobustMean):
    """Multi-Krum (Blanchard et al. 2017): the mean of the K - f updates that are nearest to their neighbours.

    f is the share `hostile` of the K updates, rounded up. The score of an update is the sum of its squared distances to
    its K - f - 2 nearest others. What the paper proves holds for K >= 2f + 3, so f is at most (K - 3) / 2; of three or
    four updates one is left out all the same, by the distance to the nearest other, without that guarantee. Unweighted,
    as in the paper. Of two with equal scores the client with the lower number goes first.
    """

    name = "krum"

    def __init__(self, *, hostile: float = 0.2) -> None:
        """`hostile` is the share of hostile clients among those picked that is assumed, below one half."""
        self.hostile = _checked_share("hostile", hostile)

    def mean(self, moves: Tensor, weights: Tensor) -> Tensor:
        """The mean of the selected updates."""
        count = len(moves)
        if count < 3:
            return moves.mean(dim=0)
        outside = min(_rounded_up(self.hostile, count), max(1, (count - 3) // 2))
        nearest = _squared_distances(moves).sort(dim=1).values[:, 1:]  # the first is that to itself
        scores = nearest[:, : max(1, count - outside - 2)].sum(dim=1)
        selected = scores.argsort(stable=True)[: count - outside].sort().values
        return moves[selected].mean(dim=0)


class GeometricMedian(RobustMean):
    """RFA (Pillutla et al. 2022): the point with the least weighted sum of distances to the moves.

    It is found by the smoothed Weiszfeld algorithm, with the weights of the record and from the coordinate-wise median,
    which is near it even where a few moves are enormous. The algorithm is slow where the point is one of the moves;
    so the nearest one is tried now and then.
    """

    name = "geometric_median"

    def mean(self, moves: Tensor, weights: Tensor) -> Tensor:
        """The smoothed geometric median, in double precision."""
        share = weights / weights.sum() if weights.sum() > 0 else torch.full_like(weights, 1 / len(weights))
        if len(moves) < 3:
            return _combined(moves, share)
        point = _trimmed(moves, (len(moves) - 1) // 2)
        for number in range(1, _PASSES + 1):
            distance = _distances(moves, point)
            nearest = moves[int(distance.argmin())].double()
            if number % _TRY_EVERY == 0 and _is_geometric_median(nearest, moves, share):
                return nearest
            pull = share / distance.clamp(min=_SMOOTHING)
            before, point = point, _combined(moves, pull / pull.sum())
            if float((point - before).norm()) <= _TOLERANCE * float(share @ distance):
                break
        return point


# -- helpers ---------------------------------------------------------------------------------------------------------


def _gather(parts: Iterator[Updates], model: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """The moves of the picked updates from a model, or without one from their bases, and their weights.

    They are in order of client, so that the order of arrival changes nothing.
    """
    found, weights, clients, bases = [], [np.empty(0)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for part in parts:
        if part.picked.any():
            part = part.part(part.picked)
            found.append(part.deltas if model is None else part.rows - model)
            weights.append(part.weight)
            clients.append(part.client)
            bases.append(part.base)
    if not found:
        return None, torch.empty(0)
    order = np.lexsort((np.concatenate(bases), np.concatenate(clients)))
    moves = torch.cat(found) if len(found) > 1 else found[0]
    index = torch.from_numpy(order).to(moves.device)
    return moves[index], torch.from_numpy(np.concatenate(weights)[order]).to(moves.device)


def _blocks(moves: Tensor) -> Iterator[slice]:
    """All columns, in blocks that bound what is computed on at a time."""
    width = max(1, _BLOCK_BYTES // (8 * len(moves)))
    for first in range(0, moves.shape[1], width):
        yield slice(first, first + width)


def _trimmed(moves: Tensor, cut: int) -> Tensor:
    """The mean of every column without its `cut` least and greatest numbers."""
    kept = slice(cut, len(moves) - cut)
    return torch.cat([moves[:, block].sort(dim=0).values[kept].double().mean(dim=0) for block in _blocks(moves)])


def _squared_distances(moves: Tensor) -> Tensor:
    """Those of all pairs of rows [K, K], from differences and in double precision."""
    total = torch.zeros(len(moves), len(moves), dtype=torch.float64, device=moves.device)
    for block in _blocks(moves):
        rows = moves[:, block].double()
        total += torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    return total


def _distances(moves: Tensor, point: Tensor) -> Tensor:
    """Of every row to a point, in double precision."""
    total = torch.zeros(len(moves), dtype=torch.float64, device=moves.device)
    for block in _blocks(moves):
        total += ((moves[:, block].double() - point[block]) ** 2).sum(dim=1)
    return total.sqrt()


def _is_geometric_median(point: Tensor, moves: Tensor, share: Tensor) -> bool:
    """Whether one of the moves is the point sought: all others together do not pull it away from its own weight."""
    distance = _distances(moves, point)
    pull = torch.where(distance > 0, share / distance, 0.0)
    force = _combined(moves, pull) - pull.sum() * point
    return bool(force.norm() <= share[distance == 0].sum())


def _combined(moves: Tensor, share: Tensor) -> Tensor:
    """The weighted sum of the rows, in double precision."""
    return torch.cat([share @ moves[:, block].double() for block in _blocks(moves)])


def _rounded_up(share: float, count: int) -> int:
    return math.ceil(share * count - 1e-9)


def _checked_share(name: str, value: float) -> float:
    if not 0 <= value < 0.5:
        raise SafaError(f"{name} must be at least 0 and below 0.5, not {value!r}")
    return value
