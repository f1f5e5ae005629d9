"""Task 3 of the paper: a linear support vector machine that tells attacks from normal connections.

The data are the 10% file of the KDD Cup 1999 (UCI KDD Archive), cut down as in the paper's experiments: TCP connections
of at most 30,000 bytes either way, without the columns that are words and those that are constant. 186,479 rows of 35
features remain (the paper says 186,480).
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.cache import cached_arrays
from safa.tasks.files import FILES, data_file
from safa.tasks.measures import share_right_side
from safa.tasks.problem import Problem
from safa.tasks.tables import as_floats, first_part, min_max, zero_linear

__all__ = ["load", "loss"]

_NUMBERS = (0, *range(4, 41))  # all columns but protocol_type, service and flag, and the label at the end
_SRC_BYTES, _DST_BYTES = 1, 2  # among the numbers
_MOST_BYTES = 30_000
_FILE = "kddcup.data_10_percent.gz"
_PARSER = 1  # to be counted up when other arrays are made of the file


def load() -> Problem:
    """The problem: features in [0, 1], label +1 for an attack and -1 for a normal connection."""
    path = data_file(_FILE)
    parsed = cached_arrays(f"kdd99-{FILES[_FILE].sha256[:16]}-{_PARSER}", lambda: _parsed(path))
    features, labels = (torch.from_numpy(parsed[name]) for name in ("features", "labels"))
    train, test = first_part(features, labels)
    return Problem(
        model=lambda: zero_linear(features.shape[1]),
        loss=loss,
        metrics={"accuracy": share_right_side},
        train=train,
        test=test,
        kernel="linear_squared_hinge",
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared hinge loss, max(0, 1 - y y')^2; the output, [n, 1], is brought into the target's shape, [n]."""
    return (1 - target * output.reshape(target.shape)).clamp(min=0).square().mean()


def _parsed(path: Path) -> dict[str, NDArray[np.float32]]:
    """The features, scaled, and the labels, in the precision that models are trained in."""
    features, labels = _read(path)
    return {"features": as_floats(min_max(features)).numpy(), "labels": as_floats(labels).numpy()}


def _read(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The features that are kept, not scaled yet, and the labels."""
    lines = [line for line in gzip.decompress(path.read_bytes()).splitlines() if b",tcp," in line]
    numbers = np.loadtxt(lines, delimiter=",", usecols=_NUMBERS)
    attack = np.fromiter((not line.endswith(b",normal.") for line in lines), bool, len(lines))
    sent = numbers[:, [_SRC_BYTES, _DST_BYTES]]
    kept = ((sent >= 0) & (sent <= _MOST_BYTES)).all(axis=1)
    numbers = numbers[kept]
    varied = numbers.min(axis=0) < numbers.max(axis=0)
    return numbers[:, varied], np.where(attack[kept], 1.0, -1.0)
