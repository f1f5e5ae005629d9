"""Small problems in double precision, one for every kind of kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from safa.tasks.problem import Problem

SAMPLES, FEATURES = 200, 7


class FlatLinear(nn.Linear):
    """A linear model with one output per sample and no dimension for it."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input).squeeze(-1)


def squared_hinge(output: Tensor, target: Tensor) -> Tensor:
    return (1 - output * target).clamp(min=0).pow(2).mean()


def mean_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


def hits(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(dim=1) == target).double().mean()


def make(kind: str) -> Problem:
    """One of the problems, with random data that are the same every time."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, FEATURES, dtype=torch.float64, generator=generator)
    numbers = torch.randn(SAMPLES, dtype=torch.float64, generator=generator)
    classes = torch.randint(0, 3, (SAMPLES,), generator=generator)
    layers: dict[str, list[Callable[[], nn.Module]]] = {
        "network": [lambda: nn.Linear(FEATURES, 9), nn.Tanh, lambda: nn.Linear(9, 3)],
        "batch norm": [
            lambda: nn.Linear(FEATURES, 9, bias=False),  # a bias would have no gradient but noise, which Adam enlarges
            lambda: nn.BatchNorm1d(9),
            nn.ReLU,
            lambda: nn.Linear(9, 3),
        ],
    }
    if kind in layers:
        return Problem(
            model=lambda: nn.Sequential(*(layer() for layer in layers[kind])).double(),
            loss=functional.cross_entropy,
            metrics={"accuracy": hits},
            train=(inputs, classes),
            test=(inputs[:50], classes[:50]),
        )
    targets = numbers if kind == "regression" else torch.sign(numbers)
    return Problem(
        model=lambda: FlatLinear(FEATURES, 1).double(),
        loss=functional.mse_loss if kind == "regression" else squared_hinge,
        metrics={"accuracy": mean_error},
        train=(inputs, targets),
        test=(inputs[:50], targets[:50]),
        kernel="linear_mse" if kind == "regression" else "linear_squared_hinge",
    )


def ragged_shards(batch_size: int) -> list[NDArray[np.int64]]:
    """Ten shards of very different sizes, none with a last batch of one sample (batch norm has no use for that)."""
    sizes = np.array([3, 40, 16, 5, 24, 31, 8, 34, 10, 29])
    assert sizes.sum() == SAMPLES
    assert not np.any(sizes % batch_size == 1)
    return np.split(np.arange(SAMPLES), np.cumsum(sizes)[:-1])
