"""Gradients of many clients' losses at once, each client with a model of its own.

A kernel takes the clients' models as rows, one mini-batch per client and the weight of every sample in its client's
mean (0 for padding), and returns the gradients as rows. `General` works for most modules through `torch.func`, and
`OneByOne` for any, one client after the other; the others are written out for one model and loss each. Which one is
used is decided in `safa.training.choice`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from safa.tasks.problem import Problem
from safa.training.layout import Layout
from safa.training.lowering import lowered

__all__ = ["General", "Kernel", "OneByOne", "SquaredError", "SquaredHinge", "Step"]


Tensors = dict[str, Tensor]
Step = tuple[Tensor, Tensor, Tensor]
"""One mini-batch of each of K clients: inputs, targets and weights, or what a kernel makes of them."""


class Kernel(ABC):
    """How the gradients of many clients are computed."""

    needs_whole_batches = False
    """Whether clients whose batches differ in size must be kept apart, because samples of a batch see each other."""

    def prepare(self, inputs: Tensor) -> Tensor:
        """The inputs of all samples in the form that the kernel wants, made once."""
        return inputs

    def pack(self, step: Step) -> Step:
        """A step in the form that `gradients` wants, made once; clients stay along the first dimension."""
        return step

    def epoch(self, steps: Sequence[Step], lr: float) -> tuple[Tensor, Tensor] | None:
        """For every client the matrix and the vector that an epoch of plain SGD amounts to, where it is affine."""
        return None

    def bytes_per_sample(self, inputs: Tensor) -> int:
        """About how much memory a sample takes while `gradients` is at work."""
        return 2 * inputs.element_size() * inputs[0].numel()

    def hold(self, rows: Tensor) -> Tensor:
        """The rows where they are best trained: the same, or a copy that lasts until the next call."""
        return rows

    @abstractmethod
    def gradients(self, rows: Tensor, step: Step) -> Tensor:
        """Gradients [K, d] of the losses of K clients at `rows` [K, d]; buffers in `rows` are brought up to date."""


class Linear(Kernel):
    """One linear output with bias: the row is (weights, bias), and every input gets a 1 at its end."""

    def prepare(self, inputs: Tensor) -> Tensor:
        """Inputs with a 1 at their end."""
        return torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1)


class SquaredError(Linear):
    """Linear regression. A batch X, y has the gradient Gw - h, with G = 2 X'X/B and h = 2 X'y/B made once."""

    def pack(self, step: Step) -> Step:
        """G and h in place of the samples."""
        x, y, weight = step
        scaled = (x * (2 * weight).unsqueeze(2)).mT
        return torch.bmm(scaled, x), torch.bmm(scaled, y.unsqueeze(2)), weight

    def epoch(self, steps: Sequence[Step], lr: float) -> tuple[Tensor, Tensor] | None:
        """Every step w - lr (Gw - h) is an affine map, and so is one after the other."""
        count, size = steps[0][1].shape[:2]
        matrix = torch.eye(size, dtype=torch.float64, device=steps[0][0].device).repeat(count, 1, 1)
        vector = matrix.new_zeros(count, size, 1)
        for g, h, _ in steps:
            at_work = slice(len(g))
            matrix[at_work] -= lr * torch.bmm(g.double(), matrix[at_work])
            vector[at_work] -= lr * (torch.bmm(g.double(), vector[at_work]) - h.double())
        return matrix.to(steps[0][0].dtype), vector.to(steps[0][0].dtype)

    def gradients(self, rows: Tensor, step: Step) -> Tensor:
        """One batched matrix product."""
        return torch.baddbmm(step[1], step[0], rows.unsqueeze(2), beta=-1).squeeze(2)


class SquaredHinge(Linear):
    """The linear support vector machine."""

    def gradients(self, rows: Tensor, step: Step) -> Tensor:
        """Two batched matrix products."""
        x, y, weight = step
        output = torch.bmm(x, rows.unsqueeze(2)).squeeze(2)
        slope = (1 - y * output).clamp_(min=0).mul_(y).mul_(weight).mul_(-2)
        return torch.bmm(slope.unsqueeze(1), x).squeeze(1)


class General(Kernel):
    """A module and a loss that `torch.vmap` can compute for many clients at once."""

    def __init__(
        self, problem: Problem, module: nn.Module, layout: Layout, *, whole_batches: bool, sample_bytes: int
    ) -> None:
        """Without `whole_batches`, the loss must be the mean of the losses of single samples."""
        self._loss = problem.loss
        self._module = module
        self.layout = layout
        self._frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
        self._sample_bytes = sample_bytes
        self.needs_whole_batches = whole_batches
        self.is_compiled = False
        """Whether a compiler puts its operations together."""

    def bytes_per_sample(self, inputs: Tensor) -> int:
        """As measured on a batch: what the backward pass needs of the forward pass, and as much again."""
        return super().bytes_per_sample(inputs) + 2 * self._sample_bytes

    def gradients(self, rows: Tensor, step: Step) -> Tensor:
        """The gradient of the sum of the clients' losses, each of which depends on the client's own row alone."""
        gradients = torch.zeros_like(rows)
        self.write_gradients(rows, *step, gradients)
        return gradients

    def write_gradients(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor, gradients: Tensor) -> None:
        """The same into rows that are given."""
        views, places = self.layout.views(rows), self.layout.views(gradients)
        moved = {
            name: views[name].detach().requires_grad_() for name in self.layout.parameters if name not in self._frozen
        }
        frozen = {name: views[name] for name in self._frozen}
        one = self._whole_batch_loss if self.needs_whole_batches else self._weighted_loss
        with warnings.catch_warnings(), torch.enable_grad(), lowered(pooling=not self.is_compiled):
            # Where torch has no rule for an operation, it goes through the clients itself, and says so every time.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            losses, after = vmap(one, randomness="different")(
                moved, frozen, self.layout.copied_buffers(rows), x, y, weight
            )
            found = torch.autograd.grad(losses.sum(), list(moved.values()), allow_unused=True)
        by_name = dict(zip(moved, found, strict=True))
        for name in self.layout.parameters:
            value = by_name.get(name)
            places[name].copy_(value) if value is not None else places[name].zero_()
        for name, value in after.items():
            views[name].copy_(value)

    def _whole_batch_loss(
        self, parameters: Tensors, frozen: Tensors, buffers: Tensors, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensors]:
        output = functional_call(self._module, (parameters, frozen, buffers), (x,))
        return self._loss(output, y), buffers

    def _weighted_loss(
        self, parameters: Tensors, frozen: Tensors, buffers: Tensors, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensors]:
        output = functional_call(self._module, (parameters, frozen, buffers), (x,))
        per_sample = vmap(lambda o, t: self._loss(o.unsqueeze(0), t.unsqueeze(0)))(output, y)
        return (per_sample * weight).sum(), buffers


class OneByOne(Kernel):
    """Any module and loss, one client after the other: slow, literal, and what the others must equal."""

    def __init__(self, problem: Problem, module: nn.Module, layout: Layout) -> None:
        self._loss = problem.loss
        self._module = module
        self._layout = layout
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.without_gradient: set[str] = set()
        """Parameters on which the loss did not depend when gradients were computed last."""

    def gradients(self, rows: Tensor, step: Step) -> Tensor:
        """Client by client; samples of weight 0 are left out, so that batches of any size can be computed together."""
        gradients = torch.zeros_like(rows)
        for row, gradient, x, y, weight in zip(rows, gradients, *step, strict=True):
            count = int(torch.count_nonzero(weight))
            self._one(row, gradient, x[:count], y[:count])
        return gradients

    def _one(self, row: Tensor, gradient: Tensor, x: Tensor, y: Tensor) -> None:
        self._layout.load(self._module, row)
        loss = self._loss(self._module(x), y)
        found = torch.autograd.grad(loss, list(self._parameters.values()), allow_unused=True)
        by_name = dict(zip(self._parameters, found, strict=True))
        self.without_gradient = {name for name in self._layout.parameters if by_name.get(name) is None}
        places = self._layout.views(gradient.unsqueeze(0))
        for name, value in by_name.items():
            if value is not None:
                places[name][0].copy_(value)
        mine = self._layout.views(row.unsqueeze(0))
        for name, buffer in self._module.named_buffers():
            mine[name][0].copy_(buffer)
