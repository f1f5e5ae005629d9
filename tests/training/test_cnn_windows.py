"""The network's gradients for GPUs equal those for CPUs; both run on a CPU."""

from __future__ import annotations

import pytest
import torch

from safa.training.cnn import Params, cnn_gradients
from safa.training.cnn_windows import windows_gradients
from tests.test_cnn_kernel import assert_same, draw, empty_rows, views


def by_windows(*arguments: object) -> Params:
    params = arguments[0]
    assert isinstance(params, dict)
    out = views(empty_rows(len(params["fc1.bias"])).fill_(torch.nan))
    windows_gradients(*arguments, out)  # type: ignore[arg-type, call-arg]
    return out


@pytest.mark.parametrize(("clients", "batch"), [(3, 5), (1, 1), (2, 40)])
def test_both_ways_give_the_same_gradients(clients: int, batch: int) -> None:
    arguments = draw(clients, batch)
    assert_same(by_windows(*arguments), cnn_gradients(*arguments))


def test_padding_and_ties_are_treated_alike() -> None:
    params, x, y, weight = draw(2, 6, seed=2)
    weight[0, 4:] = 0
    x = (x > 0.5).double() * 255
    for name in ("conv1.weight", "conv2.weight"):
        params[name].copy_((params[name] * 64).round() / 64)
    assert_same(by_windows(params, x, y, weight), cnn_gradients(params, x, y, weight))
