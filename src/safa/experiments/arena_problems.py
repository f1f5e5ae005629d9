"""Problems of the arena that are no tasks.

They are small networks on digits, MNIST with pixels in [0, 1], and the paper's linear tasks with a test set of the same
kind as what the clients hold: as the paper has them, the last rows of the file are tested, and these are others.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from safa.tasks import Problem, boston, digits, kdd99, mnist

__all__ = ["boston_every_third", "digits_mlp", "kdd99_every_third", "mnist_cnn", "mnist_mlp"]

_TRAIN, _TEST = 6_000, 2_000
_BRIGHTEST = 255


def boston_every_third() -> Problem:
    """The task `boston`, with every third row of the file in the test set."""
    return _every_third(boston.load())


def kdd99_every_third() -> Problem:
    """The task `kdd99`, likewise."""
    return _every_third(kdd99.load())


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


def _every_third(problem: Problem) -> Problem:
    """With every third row tested and the others trained on, in the order of the file."""
    inputs, targets = (torch.cat(parts) for parts in zip(problem.train, problem.test, strict=True))
    tested = torch.arange(len(inputs)) % 3 == 2
    return replace(problem, train=(inputs[~tested], targets[~tested]), test=(inputs[tested], targets[tested]))
