"""How good a global model is: on the test set, and on the data of each client."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from safa.tasks.problem import Data, Problem
from safa.training.layout import Layout

__all__ = ["Evaluator"]

_SAMPLES = 2000  # that go through the model at a time


class Evaluator:
    """Evaluates models, given as rows, on a problem's test set."""

    def __init__(self, problem: Problem, *, device: torch.device) -> None:
        self._problem = problem
        self._module = problem.start_model(0).to(device).eval()
        self._layout = Layout(self._module)
        self._state: dict[str, Tensor] = {}
        self._test = problem.test[0].to(device), problem.test[1].to(device)
        self._device = device

    def evaluate(self, row: Tensor) -> tuple[float, float]:
        """Loss and accuracy on the test set."""
        self._load(row)
        return self._score(self._test)

    def per_client(self, row: Tensor, shards: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """Accuracy on the training data of every client: who is served well, and who is not."""
        self._load(row)
        inputs, targets = self._problem.train
        parts = (torch.from_numpy(shard) for shard in shards)
        return np.array(
            [self._score((inputs[part].to(self._device), targets[part].to(self._device)))[1] for part in parts]
        )

    def _load(self, row: Tensor) -> None:
        self._state = self._layout.state(row)

    @torch.no_grad()
    def _score(self, data: Data) -> tuple[float, float]:
        inputs, targets = data
        parts = inputs.split(_SAMPLES)
        output = torch.cat([functional_call(self._module, self._state, (part,)) for part in parts])
        return float(self._problem.loss(output, targets)), float(self._problem.accuracy(output, targets))
