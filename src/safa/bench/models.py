"""Seven models on which trainers are compared, with random data of the shapes that they are meant for.

They are small enough for a device and differ in what they are made of: dense layers, convolutions in one and two
dimensions, residual blocks with group norm, recurrence, attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from safa.tasks.measures import accuracy
from safa.tasks.mnist import PaperCNN
from safa.tasks.problem import Problem

__all__ = ["MODELS", "Model", "pfl_cnn"]


def mlp() -> nn.Module:
    """Two hidden layers of 200 on 28x28 pixels (McMahan et al. 2017)."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


def cifar_cnn() -> nn.Module:
    """Three convolutions of 3x3 on 32x32 pixels in three colours, then 128 hidden units."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two convolutions with group norm, around which the input is led."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, outer), nn.GroupNorm(4, outer)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 or inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        hidden = relu(self.norm1(self.first(x)))
        return relu(self.norm2(self.second(hidden)) + self.short(x))


def resnet() -> nn.Module:
    """A residual network of seven convolutions in three stages on 32x32 pixels, with group norm."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU(),
        ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def cnn_1d() -> nn.Module:
    """Two convolutions along 128 readings of nine sensors."""
    return nn.Sequential(
        nn.Conv1d(9, 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
        nn.Flatten(), nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 6),
    )  # fmt: skip


class Lstm(nn.Module):
    """The next of 80 characters from 40 before it."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, 128, batch_first=True)
        self.head = nn.Linear(128, 80)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the characters."""
        hidden, _ = self.lstm(self.characters(x))
        scores: Tensor = self.head(hidden[:, -1])
        return scores


class Transformer(nn.Module):
    """Two layers of attention with four heads on 32 words; their mean is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.places = nn.Parameter(0.02 * torch.randn(32, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.layers(self.words(x) + self.places).mean(dim=1))
        return scores


def pfl_cnn() -> nn.Module:
    """The network of pfl's CIFAR-10 benchmark (Granqvist et al. 2024): 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(12_544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def _numbers(*shape: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randn(count, *shape, dtype=torch.get_default_dtype())


def _words(kinds: int, length: int) -> Callable[[int], Tensor]:
    return lambda count: torch.randint(kinds, (count, length))


@dataclass(frozen=True)
class Model:
    """A model, and the data that it is compared on."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    classes: int
    batch_size: int
    """As its users would have it."""

    def problem(self, clients: int, samples: int) -> tuple[Problem, list[NDArray[np.int64]]]:
        """A problem with so many samples per client, and who holds which; in torch's default precision."""
        count = clients * samples
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            data = self.inputs(count), torch.randint(self.classes, (count,))
        shards = list(np.arange(count).reshape(clients, samples))
        test = data[0][:samples], data[1][:samples]
        metrics = {"accuracy": accuracy}
        return Problem(model=self.make, loss=cross_entropy, metrics=metrics, train=data, test=test), shards


MODELS: dict[str, Model] = {
    "mlp": Model(mlp, _numbers(1, 28, 28), 10, 20),
    "paper_cnn": Model(PaperCNN, _numbers(1, 28, 28), 10, 40),
    "cifar_cnn": Model(cifar_cnn, _numbers(3, 32, 32), 10, 20),
    "resnet": Model(resnet, _numbers(3, 32, 32), 10, 20),
    "cnn_1d": Model(cnn_1d, _numbers(9, 128), 6, 20),
    "lstm": Model(Lstm, _words(80, 40), 80, 20),
    "transformer": Model(Transformer, _words(1000, 32), 10, 20),
}
"""The seven by name."""
