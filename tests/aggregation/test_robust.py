"""Robust means, against the formulas of their papers, and against hostile clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from safa.aggregation import robust
from safa.aggregation.robust import CoordinateMedian, GeometricMedian, MultiKrum, RobustMean, TrimmedMean
from safa.protocol.records import Rule
from safa.testing import TakenStep, check_aggregator
from safa.testing.aggregators import check_refused

Rows = NDArray[np.float64]


def median(deltas: Rows, weight: Rows) -> Rows:
    return np.asarray(np.median(deltas, axis=0))


def trimmed_mean(deltas: Rows, weight: Rows, beta: float = 0.2) -> Rows:
    cut = min(int(np.ceil(beta * len(deltas))), (len(deltas) - 1) // 2)
    return np.asarray(np.sort(deltas, axis=0)[cut : len(deltas) - cut].mean(axis=0))


def krum(deltas: Rows, weight: Rows, share: float = 0.2) -> Rows:
    """Blanchard et al. 2017, with f as large as n >= 2f + 3 allows, but one of three and of four."""
    n = len(deltas)
    if n < 3:
        return np.asarray(deltas.mean(axis=0))
    f = min(int(np.ceil(share * n)), max(1, (n - 3) // 2))
    scores = []
    for i in range(n):
        distances = sorted(float(np.sum((deltas[i] - deltas[j]) ** 2)) for j in range(n) if j != i)
        scores.append(sum(distances[: max(1, n - f - 2)]))
    return np.asarray(deltas[np.argsort(scores, kind="stable")[: n - f]].mean(axis=0))


def geometric_median(deltas: Rows, weight: Rows) -> Rows:
    """Smoothed Weiszfeld, from the mean, until it stands still."""
    point = weight @ deltas / weight.sum()
    for _ in range(100_000 if len(deltas) > 2 else 0):
        pull = weight / np.maximum(1e-6, np.linalg.norm(deltas - point, axis=1))
        before, point = point, pull @ deltas / pull.sum()
        if np.linalg.norm(point - before) < 1e-13:
            break
    return np.asarray(point)


Formula = Callable[[Rows, Rows], Rows]
FORMULAS: dict[Callable[[], RobustMean], Formula] = {
    CoordinateMedian: median,
    TrimmedMean: trimmed_mean,
    MultiKrum: krum,
}
KINDS = (CoordinateMedian, TrimmedMean, MultiKrum, GeometricMedian)


def model_by(formula: Formula, steps: Sequence[TakenStep]) -> Rows:
    step = steps[-1]
    order = np.argsort(step.client[step.picked])
    moves = step.rows - (step.start if step.rule is Rule.DELTA else step.before)
    deltas, weight = moves[step.picked][order], step.weight[step.picked][order]
    length = 1.0 if step.rule is Rule.CACHE else weight.sum()
    return step.before + length * formula(deltas, weight) if len(deltas) else step.before


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMULAS)
def test_a_robust_mean_keeps_the_contract_and_its_formula(kind: Callable[[], RobustMean]) -> None:
    check_aggregator(kind, naive=lambda steps: model_by(FORMULAS[kind], steps), scripts=3)


def some_deltas(count: int, length: int = 7, seed: int = 0) -> tuple[Rows, Rows]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, length)), rng.uniform(0.1, 1.0, size=count)


def mean_by(kind: RobustMean, deltas: Rows, weight: Rows) -> Rows:
    return np.asarray(kind.mean(torch.from_numpy(deltas), torch.from_numpy(weight)).numpy())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 30])
def test_the_geometric_median_is_that_of_the_paper(count: int) -> None:
    deltas, weight = some_deltas(count, seed=count)
    assert mean_by(GeometricMedian(), deltas, weight) == pytest.approx(geometric_median(deltas, weight), abs=1e-5)


def test_the_geometric_median_of_equal_deltas_is_theirs() -> None:
    deltas = np.ones((5, 3))
    assert mean_by(GeometricMedian(), deltas, np.full(5, 0.2)) == pytest.approx(deltas[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e2, 1e30])
@pytest.mark.parametrize(("count", "hostile"), [(3, 1), (4, 1), (5, 1), (9, 2), (30, 6)])
def test_the_hostile_do_not_move_it_far(kind: type[RobustMean], size: float, count: int, hostile: int) -> None:
    """Not out of the region in which the honest are, in single precision, whoever the hostile are."""
    deltas, _ = some_deltas(count, seed=count)
    attacked = deltas.copy()
    attacked[:hostile] = -size * (1 + np.arange(hostile))[:, None]
    rows = torch.from_numpy(attacked).float()
    found = kind().mean(rows, torch.full((count,), 1 / count, dtype=torch.float64)).double().numpy()
    assert np.linalg.norm(found) <= 1.5 * np.linalg.norm(deltas[hostile:], axis=1).max()


@pytest.mark.parametrize("kind", KINDS)
def test_of_one_it_is_the_delta_and_of_two_their_mean(kind: type[RobustMean]) -> None:
    deltas, _ = some_deltas(2)
    assert mean_by(kind(), deltas[:1], np.ones(1)) == pytest.approx(deltas[0])
    assert mean_by(kind(), deltas, np.full(2, 0.5)) == pytest.approx(deltas.mean(axis=0))


@pytest.mark.parametrize("kind", KINDS)
def test_working_on_few_columns_at_a_time_makes_no_difference(
    kind: type[RobustMean], monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas, weight = some_deltas(9, length=50)
    at_once = mean_by(kind(), deltas, weight)
    monkeypatch.setattr(robust, "_BLOCK_BYTES", 9 * 8 * 3)
    assert mean_by(kind(), deltas, weight) == pytest.approx(at_once, abs=1e-6)


def test_parameters_out_of_range_are_refused() -> None:
    shares = (-0.1, 0.5, float("nan"))
    check_refused([partial(TrimmedMean, trim=share) for share in shares])
    check_refused([partial(MultiKrum, hostile=share) for share in shares])


def test_without_a_share_trimmed_and_krum_are_the_mean() -> None:
    deltas, weight = some_deltas(6)
    for kind in (TrimmedMean(trim=0.0), MultiKrum(hostile=0.0)):
        assert mean_by(kind, deltas, weight) == pytest.approx(deltas.mean(axis=0))
