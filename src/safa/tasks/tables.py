"""What the data sets that come as a table share: the scaling, and the cut into training and test part."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from safa.tasks.problem import Data

__all__ = ["as_floats", "first_part", "min_max", "zero_linear"]


def min_max(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Every column scaled to [0, 1]; no column may be constant."""
    low, high = columns.min(axis=0), columns.max(axis=0)
    return np.asarray((columns - low) / (high - low))


def as_floats(values: NDArray[np.float64]) -> Tensor:
    """The values in the precision that models are trained in."""
    return torch.from_numpy(values.astype(np.float32))


def first_part(inputs: Tensor, targets: Tensor) -> tuple[Data, Data]:
    """The first 70% of the rows, in the order of the file, to train on, and the rest to test on."""
    cut = len(inputs) * 7 // 10
    return (inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:])


def zero_linear(features: int) -> nn.Linear:
    """A linear model with one output that starts from zeros."""
    model = nn.Linear(features, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model
