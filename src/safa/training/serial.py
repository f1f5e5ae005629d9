"""One client after the other: the oracle that the other trainers are held against."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from safa.tasks.problem import Problem
from safa.training.batches import Batches, Ids, Shards
from safa.training.layout import Layout
from safa.training.optimiser import Optimiser
from safa.training.trainer import LocalTrainer, Work

__all__ = ["SerialTrainer"]


class SerialTrainer(LocalTrainer):
    """One client after the other, by torch's own modules and optimisers: slow, literal, the oracle."""

    def __init__(
        self,
        problem: Problem,
        shards: Shards,
        *,
        batch_size: int,
        optimiser: Optimiser,
        device: torch.device,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        self._module = problem.start_model(0).to(device)
        self.layout = Layout(self._module)
        self._problem, self._optimiser = problem, optimiser
        self._batches = Batches(shards, batch_size, shuffle=shuffle, seed=seed)
        self._inputs, self._targets = (part.to(device) for part in problem.train)

    def _train(self, work: Work, start: Tensor) -> Tensor:
        """As the paper's Algorithm 2 has it."""
        updates = torch.empty_like(start)
        for k, row in enumerate(start):
            updates[k] = self.train_one(row, work[k : k + 1])
        return updates

    def train_one(self, row: Tensor, work: Work) -> Tensor:
        """The update of one client."""
        module = self._module
        self.layout.load(module, row)
        anchor = [p.detach().clone() for p in module.parameters()]
        optimiser = self._optimiser.of(module, None if work.lr is None else float(work.lr))
        for samples in self._batches.of(int(work.clients[0]), int(work.bases[0]), int(work.steps[0])):
            optimiser.zero_grad()
            loss = self._loss(samples)
            if self._optimiser.proximal:
                distance = sum(((p - a) ** 2).sum() for p, a in zip(module.parameters(), anchor, strict=True))
                loss = loss + self._optimiser.proximal / 2 * distance
            loss.backward()
            self._change_gradients(work.correction)
            optimiser.step()
        return self._state()

    def _loss(self, samples: Ids) -> Tensor:
        """The loss of the module on these samples."""
        index = torch.from_numpy(samples).to(self._targets.device)
        return self._problem.loss(self._module(self._inputs[index]), self._targets[index])

    def _state(self) -> Tensor:
        """The module as a row."""
        return self.layout.row(dict(self._module.named_parameters()) | dict(self._module.named_buffers()))

    def _change_gradients(self, correction: Tensor | None) -> None:
        """Add the correction of a client, and clip."""
        parameters = list(self._module.parameters())
        if correction is not None:
            parts = correction[0].split([p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                if parameter.grad is not None:
                    parameter.grad += part.view_as(parameter)
        if self._optimiser.clip:
            nn.utils.clip_grad_norm_(parameters, self._optimiser.clip)
