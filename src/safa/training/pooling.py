"""The largest values of windows that lie side by side, for many clients.

On a GPU it takes less time than torch's own, which is used where Triton is not there, and in double precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from safa.training.convolution import channels_innermost, merged

__all__ = ["max_pool"]


def max_pool(x: Tensor, kernel: list[int]) -> Tensor:
    """[B, C, H, W] gives [B, C, H', W'], where x is on a GPU and Triton is there."""
    found: Tensor = _forward(x.unsqueeze(0), kernel)[0].squeeze(0)
    return found


@torch.library.custom_op("safa::max_pool", mutates_args=())
def _forward(x: Tensor, kernel: list[int]) -> tuple[Tensor, Tensor]:
    """The largest values, and where in its window each is."""
    from safa.training.triton_kernels import pool

    return pool(x, kernel)


@_forward.register_fake
def _(x: Tensor, kernel: list[int]) -> tuple[Tensor, Tensor]:
    shape = *x.shape[:3], x.shape[3] // kernel[0], x.shape[4] // kernel[1]
    return channels_innermost(x, shape), channels_innermost(x, shape).to(torch.uint8)


@torch.library.custom_op("safa::max_pool_backward", mutates_args=())
def _backward(slope: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    from safa.training.triton_kernels import unpool

    return unpool(slope, places, size, kernel)


@_backward.register_fake
def _(slope: Tensor, places: Tensor, size: list[int], kernel: list[int]) -> Tensor:
    return channels_innermost(slope, (*slope.shape[:3], *size))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.size, ctx.kernel = list(inputs[0].shape[3:]), inputs[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, slope: Tensor, _: Any) -> tuple[Tensor, None]:
    return _backward(slope, *ctx.saved_tensors, ctx.size, ctx.kernel), None


_forward.register_autograd(_differentiate, setup_context=_keep)


@_forward.register_vmap
def _(info: Any, dims: Any, x: Tensor, kernel: list[int]) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    values, places = _forward(merged(x, dims[0], info.batch_size), kernel)
    return (values.unflatten(0, (info.batch_size, -1)), places.unflatten(0, (info.batch_size, -1))), (0, 0)
