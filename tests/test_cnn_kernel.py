"""The hand-written gradients of the paper's network, beside those of a plain module by automatic differentiation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile

from safa.training import cnn
from safa.training.cnn import BYTES_PER_IMAGE, Params, cnn_gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


with torch.device("meta"):
    NET = Net()
SHAPES = {name: tuple(p.shape) for name, p in NET.named_parameters()}


def views(rows: Tensor) -> Params:
    """The parameters as strided views into rows, one row per client."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    pieces = rows.split(sizes, dim=1)
    return {name: piece.unflatten(1, shape) for (name, shape), piece in zip(SHAPES.items(), pieces, strict=True)}


def empty_rows(clients: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(clients, sum(math.prod(shape) for shape in SHAPES.values()), dtype=dtype)


def draw(clients: int, batch: int, seed: int = 0) -> tuple[Params, Tensor, Tensor, Tensor]:
    """Parameters as a new module would have them, and pictures that are mostly background."""
    generator = torch.Generator().manual_seed(seed)
    params = views(empty_rows(clients))
    for name, p in params.items():
        bound = 1 / math.sqrt(math.prod(SHAPES[name.replace("bias", "weight")][1:]))
        p.copy_((2 * torch.rand(p.shape, generator=generator, dtype=p.dtype) - 1) * bound)
    x = torch.randint(-300, 256, (clients, batch, 1, 28, 28), generator=generator).clamp(min=0).double() / 255
    y = torch.randint(0, 10, (clients, batch), generator=generator)
    return params, x, y, torch.full((clients, batch), 1 / batch, dtype=torch.float64)


def loss(params: Params, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    output: Tensor = functional_call(NET, params, (x,))
    return -(output.gather(1, y.unsqueeze(1)).squeeze(1) * weight).sum()


def one_by_one(params: Params, x: Tensor, y: Tensor, weight: Tensor) -> Params:
    """The slow, literal version: one client after the other, by automatic differentiation."""
    found = []
    for k in range(len(y)):
        leaves = {name: p[k].clone().requires_grad_() for name, p in params.items()}
        found.append(torch.autograd.grad(loss(leaves, x[k], y[k], weight[k]), list(leaves.values())))
    return {name: torch.stack(of) for name, of in zip(params, zip(*found, strict=True), strict=True)}


def assert_same(actual: Params, expected: Params, tolerance: float = 1e-9) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].shape == value.shape
        assert actual[name].dtype == value.dtype
        assert (actual[name] - value).abs().max() <= tolerance * value.abs().max(), name


@pytest.mark.parametrize(("clients", "batch"), [(3, 5), (1, 1), (1, 4), (4, 1), (2, 13)])
def test_gradients_are_those_of_the_module(clients: int, batch: int) -> None:
    arguments = draw(clients, batch)
    assert_same(cnn_gradients(*arguments), one_by_one(*arguments))


@pytest.mark.slow
def test_gradients_are_those_of_vmap() -> None:
    arguments = draw(3, 4, seed=1)
    assert_same(cnn_gradients(*arguments), vmap(grad(loss))(*arguments))


def test_padding_counts_for_nothing() -> None:
    params, x, y, weight = draw(3, 6, seed=2)
    weight[0, 4:], weight[1] = 0, 0
    gradients = cnn_gradients(params, x, y, weight)
    assert_same(gradients, one_by_one(params, x, y, weight))
    assert all(not value[1].any() for value in gradients.values())
    x[0, 4:], y[0, 4:] = 1000, 0
    assert_same(cnn_gradients(params, x, y, weight), gradients, tolerance=1e-12)


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    """Small whole numbers, so that sums are exact and different windows often give the same value."""
    params, _, y, weight = draw(2, 6, seed=3)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(0, 2, (2, 6, 1, 28, 28), generator=generator).double() * 255
    x[:, 0] = 255
    for name in ("conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias"):
        params[name].copy_(torch.randint(-1, 2, params[name].shape, generator=generator) / 1024)
    values = F.conv2d(x[0], params["conv1.weight"][0]).unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2)
    ties = (values == values.amax(-1, keepdim=True)).sum(-1) > 1
    assert ties[1:].double().mean() > 0.1
    assert_same(cnn_gradients(params, x, y, weight), one_by_one(params, x, y, weight))


def test_relu_lets_nothing_through_at_zero() -> None:
    params, x, y, weight = draw(2, 3, seed=4)
    for name in ("conv1.weight", "conv1.bias", "fc1.weight", "fc1.bias"):
        params[name][0] = 0
    gradients = cnn_gradients(params, x, y, weight)
    assert_same(gradients, one_by_one(params, x, y, weight))
    assert not gradients["fc1.bias"][0].any()
    assert gradients["fc1.bias"][1].any()


def test_groups_of_clients_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = draw(7, 3, seed=5)
    together = cnn_gradients(*arguments)
    monkeypatch.setattr(cnn, "_IMAGES_AT_ONCE", 6)
    assert_same(cnn_gradients(*arguments), together, tolerance=1e-12)


def test_gradients_go_where_they_are_wanted() -> None:
    arguments = draw(3, 2, seed=6)
    rows = empty_rows(3).fill_(math.nan)
    places = views(rows)
    assert cnn_gradients(*arguments, out=places) is places
    assert not rows.isnan().any()
    assert_same(places, cnn_gradients(*arguments), tolerance=1e-12)


def test_arguments_may_lie_anyhow_and_are_left_alone() -> None:
    params, x, y, weight = draw(2, 4, seed=7)
    turned = {name: p.transpose(0, -1).contiguous().transpose(0, -1) for name, p in params.items()}
    mirrored, y_turned, weight_turned = x.mT.contiguous().mT, y.T.contiguous().T, weight.T.contiguous().T
    found = cnn_gradients(turned, mirrored, y_turned, weight_turned)
    assert_same(found, cnn_gradients(params, x, y, weight), tolerance=1e-12)
    assert all(torch.equal(turned[name], p) for name, p in params.items())
    assert torch.equal(mirrored, x)
    assert torch.equal(weight_turned, weight)


def test_single_precision() -> None:
    params, x, y, weight = draw(2, 5, seed=8)
    narrow = cnn_gradients({name: p.float() for name, p in params.items()}, x.float(), y, weight.float())
    assert all(value.dtype == torch.float32 for value in narrow.values())
    wide = {name: value.double() for name, value in narrow.items()}
    assert_same(wide, cnn_gradients(params, x, y, weight), tolerance=1e-5)


def test_memory_is_as_announced() -> None:
    clients, batch = 2, 40
    params, x, y, weight = draw(clients, batch)
    out = views(empty_rows(clients))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        cnn_gradients(params, x, y, weight, out)
    held, most = 0, 0
    for event in sorted(run.events(), key=lambda event: event.time_range.start):
        held += event.self_cpu_memory_usage
        most = max(most, held)
    announced = clients * batch * BYTES_PER_IMAGE * 2  # double precision
    assert 0.8 * announced < most < announced
