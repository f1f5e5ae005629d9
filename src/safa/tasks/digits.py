"""Handwritten digits of 8x8 pixels: small enough to ship, so that training can be tried without a download.

The data are the test part of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository (1998), doi 10.24432/C50P49 (CC BY 4.0): 1,797 images in 17 shades, as scikit-learn ships them
(BSD-3-Clause).
"""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from safa.tasks.measures import accuracy
from safa.tasks.problem import Problem
from safa.tasks.tables import first_part

__all__ = ["load", "network"]

_BRIGHTEST = 16


def load() -> Problem:
    """The problem, from the images in this package, with pixels in [0, 1]."""
    with as_file(files("safa.tasks") / "data" / "digits.npz") as path, np.load(path) as arrays:
        images = torch.from_numpy(arrays["images"]).float().unsqueeze(1) / _BRIGHTEST
        labels = torch.from_numpy(arrays["labels"]).long()
    train, test = first_part(images, labels)
    return Problem(model=network, loss=cross_entropy, metrics={"accuracy": accuracy}, train=train, test=test)


def network() -> nn.Sequential:
    """One convolution of 16 kernels of 3x3, and one linear layer on its pooled output; the output is logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
    )
