"""Task 2 of the paper: a convolutional network on MNIST (LeCun, Cortes and Burges, 1998).

Pixels are 0 to 255 and not scaled, as in the paper's experiments: with pixels in [0, 1] and its learning rate of 0.001
next to nothing is learnt in the rounds it ran.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import log_softmax, max_pool2d, nll_loss, relu

from safa.cache import cached_arrays
from safa.tasks.files import FILES, data_file
from safa.tasks.measures import accuracy
from safa.tasks.problem import Data, Problem

__all__ = ["PaperCNN", "load"]

_PARSER = 1  # to be counted up when another array is made of a file


class PaperCNN(nn.Module):
    """Two convolutions of 5x5 (20 and 50 kernels), each pooled, then 800-500-10; the output is log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, 10)
        nn.init.xavier_uniform_(self.conv1.weight)
        nn.init.xavier_uniform_(self.conv2.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Log-probabilities of the ten digits, from images of shape [n, 1, 28, 28]."""
        hidden = max_pool2d(relu(self.conv1(images)), 2)
        hidden = max_pool2d(relu(self.conv2(hidden)), 2)
        hidden = relu(self.fc1(hidden.flatten(start_dim=1)))
        return log_softmax(self.fc2(hidden), dim=-1)


def load() -> Problem:
    """The problem, with MNIST's own 60,000 images to train on and 10,000 to test on."""
    return Problem(
        model=PaperCNN,
        loss=nll_loss,
        metrics={"accuracy": accuracy},
        train=_part("train"),
        test=_part("t10k"),
    )


def _part(name: str) -> Data:
    images = _unpacked(f"{name}-images-idx3-ubyte.gz")
    labels = _unpacked(f"{name}-labels-idx1-ubyte.gz")
    return torch.from_numpy(images.astype(np.float32)).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))


def _unpacked(name: str) -> NDArray[np.uint8]:
    path = data_file(name)
    key = f"{name.removesuffix('.gz')}-{FILES[name].sha256[:16]}-{_PARSER}"
    return cached_arrays(key, lambda: {"values": _read_idx(path)})["values"]


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """The array in an IDX file: the fourth byte counts the dimensions, which follow as big-endian 32-bit numbers."""
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", count=dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
