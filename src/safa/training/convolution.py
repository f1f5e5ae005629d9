"""Convolutions of many clients, each with filters of its own, as one operation with the clients as first dimension.

`torch.vmap` makes a convolution with groups of it, which GPUs compute slowly. Where Triton is there, the products of
windows and filters are computed without laying the windows out (`safa.training.triton_kernels`); elsewhere, and in double
precision, it is the convolution with groups.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["by_triton", "channels_innermost", "convolution", "merged"]


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """[K, B, C, H, W] with filters [K, O, C, h, w] and biases [K, O] gives [K, B, O, H', W']."""
    found: Tensor = _forward(x, weight, bias, stride, padding, dilation)
    return found


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def by_triton(x: Tensor) -> bool:
    """Whether there are kernels in Triton for tensors like this one."""
    return x.is_cuda and x.dtype == torch.float32 and _has_triton()


def channels_innermost(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor [K, B, C, H, W] like x, with the channels innermost in memory."""
    clients, images, channels, height, width = shape
    return x.new_empty(clients, images, height, width, channels).movedim(4, 2)


def _empty(x: Tensor, shape: tuple[int, ...], dilation: list[int]) -> Tensor:
    """A tensor like those that are returned."""
    return channels_innermost(x, shape) if by_triton(x) and dilation == [1, 1] else x.new_empty(shape)


def _as_groups(x: Tensor) -> Tensor:
    """Clients side by side as channels: [K, B, C, H, W] as [B, K * C, H, W]."""
    return x.transpose(0, 1).flatten(1, 2)


def _from_groups(x: Tensor, clients: int) -> Tensor:
    found: Tensor = x.unflatten(1, (clients, -1)).transpose(0, 1).contiguous()
    return found


def output_shape(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]
) -> tuple[int, int, int, int, int]:
    """The shape [K, B, O, H', W'] of a convolution."""
    height, width = (
        (x.shape[3 + i] + 2 * padding[i] - dilation[i] * (weight.shape[3 + i] - 1) - 1) // stride[i] + 1
        for i in range(2)
    )
    return x.shape[0], x.shape[1], weight.shape[1], height, width


@torch.library.custom_op("safa::convolution", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    if by_triton(x) and dilation == [1, 1]:
        from safa.training.triton_kernels import forward

        return forward(x, weight, bias, output_shape(x, weight, stride, padding, dilation), stride, padding)
    flat = None if bias is None else bias.flatten()
    found = torch.conv2d(_as_groups(x), weight.flatten(0, 1), flat, stride, padding, dilation, len(x))
    return _from_groups(found, len(x))


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    return _empty(x, output_shape(x, weight, stride, padding, dilation), dilation)


@torch.library.custom_op("safa::convolution_backward", mutates_args=())
def _backward(
    slope: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients for x (nothing unless it is needed), the filters and the biases."""
    if by_triton(x) and dilation == [1, 1]:
        from safa.training.triton_kernels import backward

        return backward(slope, x, weight, stride, padding, needs_x=needs_x)
    for_x, for_weight, _ = torch.ops.aten.convolution_backward(
        _as_groups(slope), _as_groups(x), weight.flatten(0, 1), None, stride, padding, dilation, False, [0, 0], len(x),
        [needs_x, True, False],
    )  # fmt: skip
    back = _from_groups(for_x, len(x)) if needs_x else x.new_empty(0)
    return back, for_weight.unflatten(0, weight.shape[:2]), slope.sum((1, 3, 4))


@_backward.register_fake
def _(
    slope: Tensor, x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    for_x = _empty(x, tuple(x.shape), dilation) if needs_x else x.new_empty(0)
    return for_x, weight.new_empty(weight.shape), weight.new_empty(weight.shape[:2])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *ctx.how = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x = ctx.needs_input_grad[0]
    for_x, for_weight, for_bias = _backward(slope, x, weight, *ctx.how, needs_x)
    return for_x if needs_x else None, for_weight, for_bias if ctx.has_bias else None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


@_forward.register_vmap
def _(info: Any, dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> tuple[Tensor, int]:
    """More clients: the new dimension is put together with that of the clients."""
    count = info.batch_size
    x, weight = merged(x, dims[0], count), merged(weight, dims[1], count)
    bias = None if bias is None else merged(bias, dims[2], count)
    return _forward(x, weight, bias, *how).unflatten(0, (count, -1)), 0


def merged(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    """A tensor with a new dimension of clients, put together with the one that it has."""
    moved = tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return moved.flatten(0, 1)
