"""Gradients of many clients' losses at once, each client with a model of its own.

A kernel takes the clients' models as rows, one mini-batch per client and the weight of every sample in its client's
mean (0 for padding), and returns the gradients as rows. `General` works for any module through `torch.func`; the others
are written out for one model and loss each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from safa.learning.cnn import BYTES_PER_IMAGE, cnn_gradients
from safa.learning.cnn_windows import WINDOWS_BYTES_PER_IMAGE, windows_gradients
from safa.learning.layout import Layout
from safa.tasks.problem import Problem

__all__ = ["Kernel", "find_kernel"]


class Kernel(Protocol):
    """How the gradients of many clients are computed."""

    needs_whole_batches: bool
    """Whether clients whose batches differ in size must be kept apart, because samples of a batch see each other."""

    def prepare(self, inputs: Tensor) -> Tensor:
        """The inputs of all samples in the form that `gradients` wants, made once."""

    def bytes_per_sample(self, inputs: Tensor) -> int:
        """About how much memory a sample takes while `gradients` is at work."""

    def gradients(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Gradients [K, d] of the losses of K clients at `rows` [K, d]; buffers in `rows` are brought up to date."""


class Linear:
    """One linear output with bias: the row is (weights, bias), and every input gets a 1 at its end."""

    needs_whole_batches = False

    def __init__(self, slope: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._slope = slope  # derivative of a sample's loss with respect to the output

    def prepare(self, inputs: Tensor) -> Tensor:
        """Inputs with a 1 at their end."""
        return torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1)

    def bytes_per_sample(self, inputs: Tensor) -> int:
        """The sample itself, and little else."""
        return 2 * inputs.element_size() * inputs[0].numel()

    def gradients(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Two batched matrix products."""
        output = torch.bmm(x, rows.unsqueeze(2)).squeeze(2)
        slope = self._slope(output, y).mul_(weight)
        return torch.bmm(slope.unsqueeze(1), x).squeeze(1)


def _squared_error_slope(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).mul_(2)


def _squared_hinge_slope(output: Tensor, y: Tensor) -> Tensor:
    return (1 - y * output).clamp_(min=0).mul_(y).mul_(-2)


class PaperCnn:
    """The paper's convolutional network, written out: `safa.learning.cnn`, on a GPU `safa.learning.cnn_windows`."""

    needs_whole_batches = False

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def prepare(self, inputs: Tensor) -> Tensor:
        """As they are."""
        return inputs

    def bytes_per_sample(self, inputs: Tensor) -> int:
        """As measured."""
        most = WINDOWS_BYTES_PER_IMAGE if inputs.is_cuda else BYTES_PER_IMAGE
        return int(most * inputs.element_size() / 4)

    def gradients(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Hand-written forward and backward."""
        gradients = torch.empty_like(rows)
        work = windows_gradients if rows.is_cuda else cnn_gradients
        work(self._layout.views(rows), x, y, weight, out=self._layout.views(gradients))
        return gradients


class General:
    """Any module and loss, through `torch.func`."""

    def __init__(self, problem: Problem, module: nn.Module, layout: Layout) -> None:
        self._loss = problem.loss
        self._module = module
        self._layout = layout
        self.needs_whole_batches = bool(layout.buffers)

    def prepare(self, inputs: Tensor) -> Tensor:
        """As they are."""
        return inputs

    def bytes_per_sample(self, inputs: Tensor) -> int:
        """A guess: the activations of a small network take some tens of times the input."""
        return 100 * inputs.element_size() * inputs[0].numel()

    def gradients(self, rows: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """One `vmap` over the clients of the gradient of each one's loss."""
        views = self._layout.views(rows)
        parameters = {name: views[name] for name in self._layout.parameters}
        buffers = {name: views[name].clone() for name in self._layout.buffers}
        one = self._whole_batch_loss if self.needs_whole_batches else self._weighted_loss
        found, (_, after) = vmap(grad_and_value(one, has_aux=True), randomness="different")(
            parameters, buffers, x, y, weight
        )
        gradients = torch.zeros_like(rows)
        places = self._layout.views(gradients)
        for name, value in found.items():
            places[name].copy_(value)
        for name, value in after.items():
            views[name].copy_(value)
        return gradients

    def _whole_batch_loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        output = functional_call(self._module, (parameters, buffers), (x,))
        return self._loss(output, y), buffers

    def _weighted_loss(
        self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        output = functional_call(self._module, parameters, (x,))
        per_sample = vmap(lambda o, t: self._loss(o.unsqueeze(0), t.unsqueeze(0)))(output, y)
        return (per_sample * weight).sum(), buffers


def find_kernel(problem: Problem, module: nn.Module, layout: Layout) -> Kernel:
    """The fastest kernel for a problem."""
    if problem.kernel == "linear_mse":
        return Linear(_squared_error_slope)
    if problem.kernel == "linear_squared_hinge":
        return Linear(_squared_hinge_slope)
    if problem.kernel == "paper_cnn":
        return PaperCnn(layout)
    return General(problem, module, layout)
