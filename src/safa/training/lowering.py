"""Operations that `torch.vmap` cannot put side by side, or only slowly, in terms of those that it can.

While `lowered()` is in force, what a module calls is replaced on its way into torch: convolutions by one that has the
clients as a dimension of its own and linear layers by products whose gradients lie in memory as the weights do (on a
GPU), recurrent layers by their formulas step by step, and attention by its matrix products. The numbers are the same up
to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from safa.training.convolution import by_triton, convolution
from safa.training.pooling import max_pool

__all__ = ["lowered"]

Cell = Callable[[Tensor, tuple[Tensor, ...], Tensor, Tensor | None], tuple[Tensor, ...]]
"""(gates of the input, state, weights of the state, their bias) -> the next state, the output first."""


def lowered(*, pooling: bool = True) -> ExitStack:
    """Replace these operations in the calls of this block; without `pooling`, where a compiler can do better there."""
    stack = ExitStack()
    stack.enter_context(sdpa_kernel(SDPBackend.MATH))
    stack.enter_context(
        cudnn.flags(
            enabled=False, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=cudnn.allow_tf32
        )
    )
    stack.enter_context(_Lowered(pooling))
    return stack


class _Lowered(TorchFunctionMode):
    def __init__(self, pooling: bool) -> None:
        super().__init__()
        self._replaced = _REPLACED if pooling else {name: new for name, new in _REPLACED.items() if new is not _pool}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the replacement, where there is one for these arguments."""
        replacement = self._replaced.get(func)
        if replacement is not None:
            found = replacement(*args, **(kwargs or {}))
            if found is not NotImplemented:
                return found
        return func(*args, **(kwargs or {}))


# -- convolutions ------------------------------------------------------------------------------------------------------


def _convolve(
    dimensions: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """A convolution in one or two dimensions on a GPU."""
    if not x.is_cuda or isinstance(padding, str) or x.dim() != dimensions + 2 or groups != 1:
        return NotImplemented
    how = [_each(value, dimensions) for value in (stride, padding, dilation)]
    if dimensions == 1:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
        how = [[one, *values] for one, values in zip((1, 0, 1), how, strict=True)]
    y = convolution(x.unsqueeze(0), weight.unsqueeze(0), None if bias is None else bias.unsqueeze(0), *how).squeeze(0)
    return y.squeeze(2) if dimensions == 1 else y


def _each(value: Any, dimensions: int) -> list[int]:
    """One number for each dimension, where one stands for all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dimensions if len(values) == 1 else values


def _pool(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The largest values of windows on a GPU, where these lie side by side."""
    kernel, apart = _each(kernel_size, 2), _each(kernel_size if stride is None else stride, 2)
    plain = kernel == apart and _each(padding, 2) == [0, 0] and _each(dilation, 2) == [1, 1] and not ceil_mode
    if not (plain and by_triton(x) and x.dim() == 4 and not return_indices and kernel[0] * kernel[1] < 256):
        return NotImplemented
    return max_pool(x, kernel)


# -- linear layers -----------------------------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Weights times inputs on a GPU; with inputs times weights, torch would compute the gradient of the transpose."""
    if not x.is_cuda or x.dim() < 2:
        return NotImplemented
    y = (weight @ x.flatten(0, -2).mT).mT.unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


# -- recurrent layers --------------------------------------------------------------------------------------------------


def _lstm_cell(gates: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    i, f, g, o = (gates + functional.linear(state[0], weight, bias)).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru_cell(gates: Tensor, state: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    (r, z, n), (hr, hz, hn) = gates.chunk(3, -1), functional.linear(state[0], weight, bias).chunk(3, -1)
    z = (z + hz).sigmoid()
    return ((1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * state[0],)


def _simple_cell(
    activation: Callable[[Tensor], Tensor],
    gates: Tensor,
    state: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, ...]:
    return (activation(gates + functional.linear(state[0], weight, bias)),)


def _recurrent(
    cell: Cell,
    x: Tensor,
    state: Any,
    weights: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """Layers of a recurrent network, as `torch.lstm` and its like have them; packed sequences are not replaced."""
    if not isinstance(weights, list | tuple):
        return NotImplemented
    states = state if isinstance(state, list | tuple) else (state,)
    count, directions = 4 if has_biases else 2, 2 if bidirectional else 1
    last: list[tuple[Tensor, ...]] = []
    x = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
    for layer in range(layers):
        if dropout and train and layer:
            x = functional.dropout(x, dropout)
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            mine = weights[place * count : (place + 1) * count]
            output, after = _one_direction(
                cell, x, tuple(part[place] for part in states), mine, backwards=direction == 1
            )
            outputs.append(output)
            last.append(after)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    x = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
    return x, *(torch.stack(parts) for parts in zip(*last, strict=True))


def _one_direction(
    cell: Cell, x: Tensor, state: tuple[Tensor, ...], weights: Sequence[Tensor], *, backwards: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs of all times and the last state of one layer; what the inputs add is computed for all at once."""
    inner, outer = weights[:2]
    inner_bias, outer_bias = weights[2:] or (None, None)
    gates = functional.linear(x, inner, inner_bias).unbind(0)
    outputs = []
    for now in reversed(gates) if backwards else gates:
        state = cell(now, state, outer, outer_bias)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


# -- operations that need their input in the usual order in memory -----------------------------------------------------


def _in_usual_order(function: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Side by side, torch gets these wrong, or refuses them, where channels are innermost in memory."""
    return function(x.contiguous(), *args, **kwargs)


_USUAL_ORDER = (
    functional.group_norm, functional.batch_norm, functional.instance_norm, functional.adaptive_avg_pool2d,
    functional.adaptive_max_pool2d, functional.avg_pool2d, functional.interpolate, torch.group_norm, torch.batch_norm,
)  # fmt: skip

_REPLACED: dict[Any, Callable[..., Any]] = {
    torch.conv1d: partial(_convolve, 1),
    torch.conv2d: partial(_convolve, 2),
    functional.max_pool2d: _pool,
    functional.linear: _linear,
    torch.lstm: partial(_recurrent, _lstm_cell),
    torch.gru: partial(_recurrent, _gru_cell),
    torch.rnn_tanh: partial(_recurrent, partial(_simple_cell, torch.tanh)),
    torch.rnn_relu: partial(_recurrent, partial(_simple_cell, torch.relu)),
    **{function: partial(_in_usual_order, function) for function in _USUAL_ORDER},
}
