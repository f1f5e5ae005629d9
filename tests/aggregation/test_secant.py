"""The aggregator secant against its rule, and what it makes of simple worlds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.buffer import Buffer
from safa.aggregation.rows import Versions
from safa.aggregation.secant import Secant
from safa.errors import SafaError
from safa.protocol.records import Rule
from safa.testing import TakenStep, check_aggregator
from safa.testing.aggregators import check_formula
from tests.aggregation.steps import begun, step_of, updates

Row = NDArray[np.float64]


class Literal:
    """The rule in the docstring of the module, step by step."""

    def __init__(self, gamma: float | None = None, theta: float | None = None) -> None:
        self.fixed = gamma, theta
        self.gamma, self.theta = 0.5 if gamma is None else gamma, theta or 0.0
        self.entry: dict[int, tuple[Row, Row, int]] = {}  # delta, base and its version
        self.slope, self.fit = np.zeros(2), np.zeros(2)

    def __call__(self, steps: Sequence[TakenStep]) -> Row:
        fresh = Literal(*self.fixed)
        return [fresh.step(step) for step in steps][-1]

    def step(self, step: TakenStep) -> Row:
        """The model after a step."""
        whole = sum(step.present.values())
        share = {k: n / whole for k, n in step.present.items()}
        there = [k for k in share if k in self.entry]
        mean = sum(share[k] * self.old(k, step.before) for k in there) / sum(share[k] for k in there) if there else 0.0
        model, pairs, slope = step.before.copy(), 0, np.zeros(2)
        us, es = [], []
        for k, version, a, picked, x, b in zip(
            step.client.tolist(), step.base.tolist(), step.weight, step.picked, step.rows, step.start, strict=True
        ):
            u = x - b - self.gamma * (step.before - b)
            model += a * u
            if picked and k in self.entry:
                e, (h, other, made) = self.old(k, step.before), self.entry[k]
                model += self.theta * a * (mean - e)
                slope += share[k] * np.array([-(x - b - h) @ (b - other), (b - other) @ (b - other)])
                pairs += version != made
                us.append(u)
                es.append(e)
        self.entry |= {
            k: (x - b, b, version)
            for k, version, x, b in zip(step.client.tolist(), step.base.tolist(), step.rows, step.start, strict=True)
        }
        self.estimate(slope, pairs, us, es, len(step.present))
        return model

    def old(self, client: int, model: Row) -> Row:
        delta, base, _ = self.entry[client]
        return np.asarray(delta - self.gamma * (model - base))

    def estimate(self, slope: Row, pairs: int, us: list[Row], es: list[Row], clients: int) -> None:
        if pairs and self.fixed[0] is None:
            self.slope = (1 - 1 / max(clients, 10)) ** pairs * self.slope + slope
            self.gamma = float(np.clip(self.slope[0] / self.slope[1], 0, 1))
        if len(us) > 1 and self.fixed[1] is None:
            u, e = np.array(us) - np.mean(us, 0), np.array(es) - np.mean(es, 0)
            self.fit = 0.9 * self.fit + np.array([(u * e).sum(), (e * e).sum()])
            self.theta = float(np.clip(self.fit[0] / self.fit[1], 0, 1))


@pytest.mark.slow
def test_secant_keeps_the_contract_and_its_rule() -> None:
    wrong = [partial(Secant, **{name: value}) for name in ("gamma", "theta") for value in (-0.1, 1.1, float("nan"))]
    check_aggregator(Secant, naive=Literal(), refused=wrong, scripts=4)


@pytest.mark.parametrize(("gamma", "theta"), [(0.3, None), (None, 1.0), (0.7, 0.0)])
def test_either_estimate_can_be_replaced_by_a_number(gamma: float | None, theta: float | None) -> None:
    for seed in range(2):
        check_formula(lambda: Secant(gamma=gamma, theta=theta), Literal(gamma, theta), seed=seed)
