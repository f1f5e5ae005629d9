"""How good a global model is: on the test set, and on the data of each client."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from safa.errors import SafaError
from safa.tasks.problem import Data, Problem
from safa.training.channels_last import channels_innermost, filter_names, takes_channels_last
from safa.training.layout import Layout

__all__ = ["Evaluator", "Score"]


@dataclass(frozen=True)
class Score:
    """How good a model is on a set."""

    loss: float
    metrics: dict[str, float]

    @property
    def main(self) -> float:
        """The first metric; the loss where there is none."""
        return next(iter(self.metrics.values()), self.loss)


_SAMPLES = 2000  # that go through the model at a time
_IMAGES = 100  # the same of a model with convolutions on a CPU: what a layer makes of more does not stay in the cache
_FEW = 10  # samples that tell whether metrics work


class Evaluator:
    """Evaluates models, given as rows, on a problem's test set."""

    def __init__(self, problem: Problem, *, device: torch.device) -> None:
        self._problem = problem
        self._module = problem.start_model(0).to(device).eval()
        self._layout = Layout(self._module)
        channels_last = device.type == "cpu" and takes_channels_last(problem)
        self._innermost = filter_names(self._module) if channels_last else []
        self._samples = _IMAGES if channels_last else _SAMPLES
        self._state: dict[str, Tensor] = {}
        self._test = problem.test[0].to(device), problem.test[1].to(device)
        self._device = device
        self._check_metrics()

    @torch.no_grad()
    def _check_metrics(self) -> None:
        """Refuse metrics that fail, before anything is trained: on a few samples, and if they do there, on all."""
        inputs, targets = self._test
        with suppress(SafaError):
            self._problem.measure(self._output(inputs[:_FEW]), targets[:_FEW])
            return
        self._problem.measure(self._output(inputs), targets)

    def evaluate(self, row: Tensor) -> Score:
        """Loss and metrics on the test set."""
        self._load(row)
        return self._score(self._test)

    def per_client(self, row: Tensor, shards: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
        """The main metric on the training data of every client, or the loss: who is served well, and who is not."""
        self._load(row)
        inputs, targets = self._problem.train
        parts = (torch.from_numpy(shard) for shard in shards)
        scores = (self._score((inputs[part].to(self._device), targets[part].to(self._device))) for part in parts)
        return np.array([score.main for score in scores])

    def _load(self, row: Tensor) -> None:
        state = self._layout.state(row)
        self._state = state | {name: channels_innermost(state[name]) for name in self._innermost}

    @torch.no_grad()
    def _score(self, data: Data) -> Score:
        inputs, targets = data
        output = self._output(inputs)
        return Score(float(self._problem.loss(output, targets)), self._problem.measure(output, targets))

    def _output(self, inputs: Tensor) -> Tensor:
        parts = inputs.split(self._samples)
        return torch.cat([functional_call(self._module, self._state, (part,)) for part in parts])
