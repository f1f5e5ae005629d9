"""The gradients of `safa.training.cnn` once more, for GPUs: few large operations instead of many small ones.

All windows of a convolution are laid out beside each other, (client, channel and place in the window, image, row,
column), so that one layer of all clients is a single batched matrix product.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

__all__ = ["WINDOWS_BYTES_PER_IMAGE", "windows_gradients"]

Params = dict[str, Tensor]

WINDOWS_BYTES_PER_IMAGE = 450_000
"""About how much memory an image takes, in single precision."""

_MOST_PARTS = 8


def windows_gradients(params: Params, x: Tensor, y: Tensor, weight: Tensor, out: Params) -> None:
    """Gradients of the losses of K clients, written to `out`; the arguments are those of `cnn_gradients`."""
    clients, batch = y.shape
    parts = _parts(batch)
    images = batch // parts
    # In the convolutions every client stands for several, each with a part of its images: products of a handier shape.
    filters1, bias1, filters2, bias2 = (
        params[name].flatten(min(2, params[name].dim() - 1)).repeat_interleave(parts, 0)
        for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias")
    )
    windows1 = _windows(x.reshape(clients * parts, 1, images, 28, 28), 24)
    active1, from1 = _pooled(torch.bmm(filters1, windows1), bias1, images, 24)
    windows2 = _windows(active1, 8)
    active2, from2 = _pooled(torch.bmm(filters2, windows2), bias2, images, 8)
    flat = active2.transpose(1, 2).reshape(clients, batch, 800)
    hidden = torch.baddbmm(params["fc1.bias"].unsqueeze(1), flat, params["fc1.weight"].mT).relu_()
    output = torch.baddbmm(params["fc2.bias"].unsqueeze(1), hidden, params["fc2.weight"].mT)

    slope = output.softmax(dim=2)
    slope.scatter_add_(2, y.unsqueeze(2), -torch.ones_like(slope[:, :, :1]))
    slope.mul_(weight.unsqueeze(2))
    torch.bmm(slope.mT, hidden, out=out["fc2.weight"])
    torch.sum(slope, 1, out=out["fc2.bias"])
    slope = torch.bmm(slope, params["fc2.weight"]).mul_(hidden > 0)
    torch.bmm(slope.mT, flat, out=out["fc1.weight"])
    torch.sum(slope, 1, out=out["fc1.bias"])
    slope = torch.bmm(slope, params["fc1.weight"]).view(clients * parts, images, 50, 4, 4).transpose(1, 2)

    slope = _unpooled(slope * (active2 > 0), from2, 8)
    _sum_parts(slope.sum(dim=2), out["conv2.bias"])
    _sum_parts(torch.bmm(slope, windows2.mT), out["conv2.weight"])
    slope = _folded(torch.bmm(filters2.mT, slope).view(clients * parts, 20, 5, 5, images, 8, 8))
    slope = _unpooled(slope.mul_(active1 > 0), from1, 24)
    _sum_parts(slope.sum(dim=2), out["conv1.bias"])
    _sum_parts(torch.bmm(slope, windows1.mT), out["conv1.weight"])


def _parts(batch: int) -> int:
    """Into how many equal parts the images of a client are split."""
    return next(parts for parts in range(_MOST_PARTS, 0, -1) if batch % parts == 0)


def _sum_parts(gradients: Tensor, out: Tensor) -> None:
    """Sum what the parts of a client give, [K * parts, ...], into [K, ...]."""
    out.copy_(gradients.view(len(out), -1, *gradients.shape[1:]).sum(dim=1).view_as(out))


def _windows(images: Tensor, size: int) -> Tensor:
    """All 5x5 windows on images [K, channels, B, rows, columns], as [K, channels * 25, B * size * size]."""
    clients, channels, batch = images.shape[:3]
    views = images.unfold(3, 5, 1).unfold(4, 5, 1).permute(0, 1, 5, 6, 2, 3, 4)
    return views.reshape(clients, channels * 25, batch * size * size)


def _folded(windows: Tensor) -> Tensor:
    """What windows [K, channels, 5, 5, B, 8, 8] add up to on images [K, channels, B, 12, 12], columns first."""
    clients, channels, _, _, batch, _, _ = windows.shape
    wide = windows.new_zeros(clients, channels, 5, batch, 8, 12)
    for column in range(5):
        wide[..., column : column + 8] += windows[:, :, :, column]
    images = windows.new_zeros(clients, channels, batch, 12, 12)
    for row in range(5):
        images[:, :, :, row : row + 8] += wide[:, :, row]
    return images


def _pooled(values: Tensor, bias: Tensor, batch: int, size: int) -> tuple[Tensor, Tensor]:
    """2x2 max pooling, bias and relu of [K, channels, B * size * size], and where the maxima came from."""
    clients, channels = values.shape[:2]
    pooled, places = max_pool2d(values.view(clients * channels, batch, size, size), 2, return_indices=True)
    shape = clients, channels, batch, size // 2, size // 2
    return pooled.view(shape).add_(bias[:, :, None, None, None]).relu_(), places.view(shape)


def _unpooled(slope: Tensor, places: Tensor, size: int) -> Tensor:
    """Slopes sent back to where the maxima came from, as [K, channels, B * size * size]."""
    clients, channels, batch = slope.shape[:3]
    whole = slope.new_zeros(clients, channels, batch, size * size)
    whole.scatter_(3, places.flatten(3), slope.flatten(3))
    return whole.view(clients, channels, batch * size * size)
