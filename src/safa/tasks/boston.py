"""Task 1 of the paper: linear regression on the Boston housing data.

The data are those of D. Harrison and D. L. Rubinfeld, "Hedonic housing prices and the demand for clean air", Journal of
Environmental Economics and Management 5 (1978), in the copy that mlxtend ships (BSD-3-Clause). The data set has been
criticised, and scikit-learn removed it, because its column B encodes the racist assumption that segregation raises the
price of houses; it is here only because the paper used it.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
from torch import Tensor
from torch.nn.functional import mse_loss

from safa.tasks.measures import closeness
from safa.tasks.problem import Problem
from safa.tasks.tables import as_floats, first_part, min_max, zero_linear

__all__ = ["load", "loss"]

_FEATURES = 12  # as in the paper's experiments, which left the 13th, LSTAT, out


def load() -> Problem:
    """The problem, from the table in this package: features and target are scaled over the whole of it."""
    text = (files("safa.tasks") / "data" / "boston.csv").read_text(encoding="utf-8")
    table = min_max(np.loadtxt(text.splitlines(), delimiter=",", skiprows=1))
    train, test = first_part(as_floats(table[:, :_FEATURES]), as_floats(table[:, -1]))
    return Problem(
        model=lambda: zero_linear(_FEATURES),
        loss=loss,
        metrics={"accuracy": closeness},
        train=train,
        test=test,
        kernel="linear_mse",
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error; the output, of shape [n, 1], is brought into the shape of the target, [n]."""
    return mse_loss(output.reshape(target.shape), target)
