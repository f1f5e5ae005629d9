"""Gradients of the paper's convolutional network for many clients at once, written out by hand.

The network: 20 filters of 5x5 on 28x28 pixels, relu, 2x2 max pooling; 50 filters of 5x5, relu, 2x2 max pooling; 500
hidden units, relu; 10 classes. Every client has parameters of its own, so a layer of all clients is a batched matrix
product with the clients as the batch.

Two choices make it fast. Images lie innermost in memory, so that a step in a picture is a step over a run of numbers.
And a convolution goes row by row: of each window only the columns are laid out (5 or 6 times the data, not 25), one row
of pixels after the other, so that the rows that a window covers are neighbours and the windows of a row of results are
a plain slice of a matrix. What is made of a row is small enough to stay in the cache until the next step needs it.

Pooling comes before bias and relu, which gives the same numbers on a quarter of the data.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["BYTES_PER_IMAGE", "Params", "cnn_gradients"]

Params = dict[str, Tensor]

BYTES_PER_IMAGE = 160_000
"""Memory that an image takes in single precision, besides arguments and result, from a dozen images per client on.

Exactly: 140 kB for an image and 223 kB for a client. On a CPU no more than `_IMAGES_AT_ONCE` images take it at a time.
"""

_IMAGES_AT_ONCE = 400  # on a CPU: few enough for the cache, enough to make the cost of a call small


def cnn_gradients(params: Params, x: Tensor, y: Tensor, weight: Tensor, out: Params | None = None) -> Params:
    """Gradients of the losses of K clients, each with respect to the client's own parameters.

    The loss of a client is the sum over its images of `weight` times the negative log likelihood; an image of weight 0
    is padding.

    Args:
        params: by name (`conv1.weight` to `fc2.bias`), the parameters of all clients [K, ...]; may be strided views.
        x: images [K, B, 1, 28, 28].
        y: classes [K, B], whole numbers from 0 to 9.
        weight: weights [K, B].
        out: where to put the gradients, named and shaped like `params`; made if absent.
    """
    clients, batch = y.shape
    if out is None:
        out = {name: torch.empty_like(p, memory_format=torch.contiguous_format) for name, p in params.items()}
    groups = 1 if y.is_cuda else math.ceil(clients * batch / _IMAGES_AT_ONCE)
    size = 2 * math.ceil(clients / max(groups, 1) / 2)  # even, for an even number of threads
    for start in range(0, clients, max(size, 1)):
        some = slice(start, start + size)
        mine, places = ({name: value[some] for name, value in of.items()} for of in (params, out))
        _group(mine, x[some], y[some], weight[some], places)
    return out


def _group(params: Params, x: Tensor, y: Tensor, weight: Tensor, out: Params) -> None:
    """The gradients of clients that are worked on together."""
    first, second = _First(params, y), _Second(params, y)
    features = second.forward(first.forward(x))
    second.backward(_dense(params, features, y, weight, out), out)
    for row in range(12):
        first.backward(row, second.input_gradient(row))
    first.write(out)


def _dense(params: Params, features: Tensor, y: Tensor, weight: Tensor, out: Params) -> Tensor:
    """Forward and backward of the dense layers: the gradient for the features [K, 800, B], which are overwritten."""
    hidden = torch.baddbmm(params["fc1.bias"].unsqueeze(2), params["fc1.weight"], features).relu_()
    output = torch.baddbmm(params["fc2.bias"].unsqueeze(2), params["fc2.weight"], hidden)
    target = y.unsqueeze(1) == torch.arange(10, device=y.device).unsqueeze(1)
    slope = output.softmax(1).sub_(target.to(output.dtype)).mul_(weight.unsqueeze(1))
    torch.bmm(slope, hidden.mT, out=out["fc2.weight"])
    torch.sum(slope, 2, out=out["fc2.bias"])
    slope = torch.bmm(params["fc2.weight"].mT, slope).mul_(hidden.gt_(0))
    torch.bmm(slope, features.mT, out=out["fc1.weight"])
    torch.sum(slope, 2, out=out["fc1.bias"])
    return torch.mul(torch.bmm(slope.mT, params["fc1.weight"]).mT, features.gt_(0), out=features)


class _Pool:
    """2x2 max pooling, one row of windows at a time, which remembers where each maximum came from.

    Of equal values the first in reading order wins, as in `torch.max_pool2d`. What is remembered are zeros and ones of
    the same type as the values: arithmetic on mixed types is several times slower.
    """

    def __init__(self, like: Tensor, rows: int, clients: int, *shape: int) -> None:
        self._from_right = like.new_empty(rows, clients, 2, *shape)
        self._from_below = like.new_empty(rows, clients, *shape)
        self._pair = like.new_empty(clients, 2, *shape)  # upper and lower half of the windows

    def forward(self, row: int, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Pool the left and right halves of the windows, [K, upper and lower, ...]."""
        torch.gt(right, left, out=self._from_right[row])
        upper, lower = torch.maximum(left, right, out=self._pair).unbind(1)
        torch.gt(lower, upper, out=self._from_below[row])
        torch.maximum(upper, lower, out=out)

    def backward(self, row: int, gradient: Tensor, left: Tensor, right: Tensor) -> None:
        """Send the gradient to where the maxima came from, and 0 elsewhere."""
        upper, lower = self._pair.unbind(1)
        torch.mul(gradient, self._from_below[row], out=lower)
        torch.sub(gradient, lower, out=upper)
        torch.mul(self._pair, self._from_right[row], out=right)
        torch.sub(self._pair, right, out=left)


class _First:
    """First convolution, pooling, relu.

    Four copies of every filter, shifted by 0 or 1 in both directions and filled up to 6x6, give the four values of a
    pooling window at once; the windows move in steps of 2 pixels.
    """

    def __init__(self, params: Params, y: Tensor) -> None:
        weight, self._bias = params["conv1.weight"], params["conv1.bias"]
        k, b = y.shape
        self._filters, self._slope = weight.new_zeros(2, k, 80, 36)
        for place in self._shifted(self._filters):
            place.copy_(weight.squeeze(2))
        self._windows = weight.new_empty(k, 12, b, 28, 6)  # place, image, row, column
        self._values = weight.new_empty(k, 80, 12 * b)
        self._left, self._right = self._values.view(k, 2, 2, 20, 12 * b).unbind(1)
        self._pool = _Pool(weight, 12, k, 20, 12 * b)
        self._active = weight.new_empty(k, 12, 20, 12 * b)  # row, channel, (column, image)

    @staticmethod
    def _shifted(filters: Tensor) -> list[Tensor]:
        """Where the four copies of the 5x5 filters lie in the 6x6 ones."""
        six = filters.unflatten(2, (6, 6)).unflatten(1, (2, 2, 20))  # right, below, filter, row, column
        return [six[:, i, j, :, j : j + 5, i : i + 5] for i in range(2) for j in range(2)]

    def _rows(self, row: int) -> Tensor:
        """The windows for one row of pooled values [K, 12 * B, 36]."""
        return self._windows.flatten(3).flatten(1, 2)[:, :, 12 * row : 12 * row + 36]

    def forward(self, x: Tensor) -> Tensor:
        """Activations [K, 12, 20, 12 * B]: row, channel, column and image."""
        self._windows.copy_(x.squeeze(2).unfold(3, 6, 2).permute(0, 3, 1, 2, 4))
        for row in range(12):
            torch.bmm(self._filters, self._rows(row).mT, out=self._values)
            self._pool.forward(row, self._left, self._right, self._active[:, row])
        return self._active.add_(self._bias[:, None, :, None]).relu_()

    def backward(self, row: int, gradient: Tensor) -> None:
        """Take the gradient for one row of the activations, which it replaces there."""
        slope = self._active[:, row]
        torch.mul(gradient, slope.gt_(0), out=slope)
        self._pool.backward(row, slope, self._left, self._right)
        self._slope.baddbmm_(self._values, self._rows(row))

    def write(self, out: Params) -> None:
        """Write the gradients, when all rows have been taken."""
        torch.sum(self._active, (1, 3), out=out["conv1.bias"])
        torch.sum(torch.stack(self._shifted(self._slope)), 0, out=out["conv1.weight"].squeeze(2))


class _Second:
    """Second convolution, pooling, relu."""

    def __init__(self, params: Params, y: Tensor) -> None:
        weight, self._bias = params["conv2.weight"], params["conv2.bias"]
        k, b = y.shape
        self._filters = weight.permute(0, 1, 3, 4, 2).reshape(k, 50, 500)  # filter x (row, column, channel)
        back = weight.flip(3).permute(0, 4, 2, 3, 1)
        self._back = back.reshape(k, 100, 250)  # (column, channel) x (row from the last to the first, filter)
        self._windows = weight.new_empty(k, 12, 5, 20, 8 * b)  # row, column, channel, (place, image)
        self._values = weight.new_empty(2, k, 50, 8 * b)  # of two rows
        self._left, self._right = self._values.view(2, k, 50, 4, 2, b).transpose(0, 1).unbind(4)
        self._pool = _Pool(weight, 4, k, 50, 4, b)
        self._active = weight.new_empty(k, 50, 4, 4, b)
        self._slope = weight.new_empty(k, 8, 50, 4, 2, b)
        self._spread = weight.new_empty(k, 100, 8 * b)
        self._gradient = weight.new_empty(k, 20, 12 * b)

    def _rows(self, row: int) -> Tensor:
        """The windows for one row of values [K, 500, 8 * B]."""
        return self._windows.flatten(1, 3)[:, 100 * row : 100 * row + 500]

    def forward(self, x: Tensor) -> Tensor:
        """Activations [K, 800, B] from those of the layer before."""
        b = self._active.shape[-1]
        self._windows.copy_(x.unfold(3, 8 * b, b).transpose(2, 3))
        for row in range(4):
            torch.bmm(self._filters, self._rows(2 * row), out=self._values[0])
            torch.bmm(self._filters, self._rows(2 * row + 1), out=self._values[1])
            self._pool.forward(row, self._left, self._right, self._active[:, :, row])
        return self._active.add_(self._bias[:, :, None, None, None]).relu_().flatten(1, 3)

    def backward(self, gradient: Tensor, out: Params) -> None:
        """Take the gradient for the activations, and write those for the parameters."""
        torch.sum(gradient.unflatten(1, (50, 16)), (2, 3), out=out["conv2.bias"])
        for row in range(4):
            left, right = self._slope[:, 2 * row : 2 * row + 2].unbind(4)
            self._pool.backward(row, gradient.view_as(self._active)[:, :, row], left, right)
        slope = torch.zeros_like(self._filters)
        for row in range(8):
            slope.baddbmm_(self._slope[:, row].flatten(2), self._rows(row).mT)
        out["conv2.weight"].copy_(slope.unflatten(2, (5, 5, 20)).permute(0, 1, 4, 2, 3))

    def input_gradient(self, row: int) -> Tensor:
        """The gradient for one row of the layer before [K, 20, 12 * B]; the next call overwrites it."""
        low, high = max(0, row - 4), min(8, row + 1)  # the rows of values that saw this row
        filters = self._back[:, :, 50 * (low + 4 - row) : 50 * (high + 4 - row)]
        torch.bmm(filters, self._slope.flatten(3).flatten(1, 2)[:, 50 * low : 50 * high], out=self._spread)
        self._gradient.zero_()
        b = self._active.shape[-1]
        for column, part in enumerate(self._spread.split(20, 1)):
            self._gradient[:, :, column * b : (column + 8) * b] += part
        return self._gradient
