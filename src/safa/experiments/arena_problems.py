"""Problems of the arena that are no tasks: small networks on digits, and MNIST with pixels in [0, 1]."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn
from torch.nn.functional import cross_entropy

from safa.tasks import Problem, digits, mnist

__all__ = ["digits_mlp", "mnist_cnn", "mnist_mlp"]

_TRAIN, _TEST = 6_000, 2_000
_BRIGHTEST = 255


def digits_mlp() -> Problem:
    """A hidden layer of 32 on the digits of 8x8 pixels."""
    return replace(digits.load(), model=partial(_mlp, 64))


def mnist_cnn() -> Problem:
    """The paper's network on all of MNIST."""
    problem = mnist.load()
    (train, labels), (test, test_labels) = problem.train, problem.test
    return replace(problem, train=(train / _BRIGHTEST, labels), test=(test / _BRIGHTEST, test_labels))


def mnist_mlp() -> Problem:
    """A hidden layer of 32 on the first tenth of MNIST's training images, and the first fifth of its test images."""
    problem = mnist_cnn()
    (train, labels), (test, test_labels) = problem.train, problem.test
    return replace(
        problem,
        model=partial(_mlp, 784),
        loss=cross_entropy,
        train=(train[:_TRAIN].clone(), labels[:_TRAIN].clone()),
        test=(test[:_TEST].clone(), test_labels[:_TEST].clone()),
    )


def _mlp(pixels: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 32), nn.ReLU(), nn.Linear(32, 10))
