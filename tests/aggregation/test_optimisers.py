"""Server optimisers, against Algorithm 2 of Reddi et al. 2021 and FedAvgM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from safa.aggregation.aggregator import Aggregator
from safa.aggregation.optimisers import Adagrad, Adam, Momentum, ServerOptimiser, Yogi
from safa.aggregation.robust import TrimmedMean
from safa.aggregation.rows import Versions
from safa.aggregation.update_cache import Mifa
from safa.errors import SafaError
from safa.protocol.records import Rule
from safa.testing import TakenStep, check_aggregator
from tests.aggregation.test_update_cache import mifa

Row = NDArray[np.float64]
Gradients = Callable[[Sequence[TakenStep]], list[Row]]


def plain_mean() -> Aggregator:
    return TrimmedMean(trim=0.0)


def gradients_of_mean(steps: Sequence[TakenStep]) -> list[Row]:
    lengths = [1.0 if step.rule is Rule.CACHE else step.weight.sum() for step in steps]
    origins = [step.start if step.rule is Rule.DELTA else step.before for step in steps]
    deltas = [(step.rows - origin)[step.picked] for step, origin in zip(steps, origins, strict=True)]
    return [
        length * delta.mean(axis=0) if len(delta) else np.zeros_like(steps[0].before)
        for length, delta in zip(lengths, deltas, strict=True)
    ]


def gradients_of_mifa(steps: Sequence[TakenStep]) -> list[Row]:
    return [mifa(steps[: end + 1]) - step.before for end, step in enumerate(steps)]


def momentum(gradients: list[Row], *, lr: float = 0.1, beta: float = 0.9) -> Row:
    m = np.zeros_like(gradients[0])
    for delta in gradients:
        m = beta * m + delta
    return lr * m


def adaptive(
    gradients: list[Row], method: str, *, lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Row:
    """The last change of the model by Algorithm 2."""
    m, v = np.zeros_like(gradients[0]), np.full_like(gradients[0], tau**2)
    for delta in gradients:
        m = beta1 * m + (1 - beta1) * delta
        if method == "adagrad":
            v = v + delta**2
        elif method == "yogi":
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        else:
            v = beta2 * v + (1 - beta2) * delta**2
    return np.asarray(lr * m / (np.sqrt(v) + tau))


FORMULAS: dict[type[ServerOptimiser], Callable[[list[Row]], Row]] = {
    Momentum: momentum,
    Adagrad: lambda gradients: adaptive(gradients, "adagrad"),
    Adam: lambda gradients: adaptive(gradients, "adam"),
    Yogi: lambda gradients: adaptive(gradients, "yogi"),
}
INNER: dict[Callable[[], Aggregator], Gradients] = {plain_mean: gradients_of_mean, Mifa: gradients_of_mifa}


@pytest.mark.slow
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", FORMULAS)
def test_an_optimiser_keeps_the_contract_and_its_formula(
    kind: Callable[[Aggregator], Aggregator], inner: Callable[[], Aggregator]
) -> None:
    formula = FORMULAS[kind]  # type: ignore[index]
    check_aggregator(
        lambda: kind(inner()), naive=lambda steps: steps[-1].before + formula(INNER[inner](steps)), scripts=1
    )


def test_its_parameters_are_those_of_the_formula() -> None:
    check_aggregator(
        lambda: Yogi(plain_mean(), server_optimiser_lr=0.02, server_momentum=0.5, server_beta2=0.8, server_epsilon=0.1),
        naive=lambda steps: (
            steps[-1].before + adaptive(gradients_of_mean(steps), "yogi", lr=0.02, beta1=0.5, beta2=0.8, tau=0.1)
        ),
        scripts=2,
    )


def test_momentum_of_0_and_a_rate_of_1_change_nothing() -> None:
    check_aggregator(
        lambda: Momentum(plain_mean(), server_optimiser_lr=1.0, server_momentum=0.0),
        naive=lambda steps: steps[-1].before + gradients_of_mean(steps)[-1],
        scripts=2,
    )


def test_it_is_to_others_what_the_aggregator_inside_is() -> None:
    around_mean, around_cache = Adam(plain_mean()), Adam(Mifa())
    assert (around_mean.compares, around_mean.keeps_entries) == (True, False)
    assert (around_cache.compares, around_cache.keeps_entries) == (False, True)
    assert around_cache.rules == Mifa.rules != around_mean.rules
    around_cache.begin(Versions(torch.zeros(2)), np.ones(3), memory_mb=1.0)
    assert around_cache.tables().keys() == {"updates"}
    assert around_cache.state().keys() == {"m", "v", "inside.size", "inside.active", "inside.sum", "inside.age"}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("server_optimiser_lr", (0.0, -1.0, float("inf"), float("nan"))),
        ("server_momentum", (-0.1, 1.0, float("nan"))),
        ("server_beta2", (-0.1, 1.0, float("nan"))),
        ("server_epsilon", (0.0, float("inf"), float("nan"))),
    ],
)
def test_parameters_out_of_range_are_refused(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(SafaError, match=f"^{name} must be .*, not {value}$"):
            Adam(plain_mean(), **{name: value})


def test_it_refuses_an_aggregator_whose_clients_go_on_alone() -> None:
    class Alone(Mifa):
        trains_own_models = True

    with pytest.raises(SafaError, match="no effect around mifa"):
        Momentum(Alone())
