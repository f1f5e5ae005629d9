"""Operations that are replaced before clients are put side by side give the same numbers, and can be put there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from safa.training.convolution import convolution
from safa.training.graphs import rounded_up
from safa.training.lowering import lowered

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(5, 7),
    "lstm, two layers, both directions, batch first": lambda: nn.LSTM(5, 7, 2, bidirectional=True, batch_first=True),
    "lstm without bias": lambda: nn.LSTM(5, 7, bias=False),
    "gru, both directions": lambda: nn.GRU(5, 7, 2, bidirectional=True),
    "rnn": lambda: nn.RNN(5, 7),
    "rnn with relu": lambda: nn.RNN(5, 7, 2, nonlinearity="relu"),
    "attention": lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True),
}


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def flat(output: Any) -> Tensor:
    """All numbers of a module's output."""
    if isinstance(output, Tensor):
        return output.flatten()
    return torch.cat([flat(part) for part in output])


@pytest.mark.parametrize("name", RECURRENT)
def test_a_replaced_layer_computes_the_same_and_goes_side_by_side(name: str) -> None:
    torch.manual_seed(0)
    modules = [RECURRENT[name]() for _ in range(3)]
    x = torch.randn(3, 4, 6, 5)
    expected = torch.stack([flat(module(part)) for module, part in zip(modules, x, strict=True)])
    stacked = {key: torch.stack([dict(m.named_parameters())[key] for m in modules]) for key in modules[0].state_dict()}
    with lowered():
        found = vmap(lambda p, x: flat(functional_call(modules[0], p, (x,))))(stacked, x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
def test_a_convolution_of_many_clients_and_its_gradients(stride: int, padding: int, dilation: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, 9, 8, requires_grad=True)
    w, b = torch.randn(3, 5, 4, 3, 3, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    how = [stride] * 2, [padding] * 2, [dilation] * 2
    expected = torch.stack([torch.conv2d(*parts, *how) for parts in zip(x, w, b, strict=True)])
    slope = torch.randn_like(expected)
    one = lambda x, w, b: convolution(x[None], w[None], b[None], *how)[0]  # noqa: E731
    for found in (convolution(x, w, b, *how), vmap(one)(x, w, b)):
        torch.testing.assert_close(found, expected)
        gradients = torch.autograd.grad(found, (x, w, b), slope)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, (x, w, b), slope, retain_graph=True))


def test_numbers_of_clients_are_rounded_up_to_few_sizes() -> None:
    sizes = [rounded_up(count) for count in range(1, 1025)]
    assert all(count <= size <= count * 9 / 8 for count, size in enumerate(sizes, 1))
    assert sizes[:16] == list(range(1, 17))
    assert len(set(sizes)) <= 16 + 6 * 8
