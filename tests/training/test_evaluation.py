"""The evaluation of models with convolutions, which is laid out for speed, against that by the module itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from safa.tasks.measures import accuracy
from safa.tasks.mnist import PaperCNN
from safa.tasks.problem import Problem
from safa.training import Evaluator
from safa.training.channels_last import takes_channels_last
from safa.training.layout import Layout


class _Viewed(nn.Module):
    """A convolution whose result is viewed in the usual order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dense = nn.Conv2d(1, 3, 5), nn.Linear(3 * 24 * 24, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images)
        found: Tensor = self.dense(hidden.view(len(hidden), -1))
        return found


def _problem(model: type[nn.Module]) -> Problem:
    draws = torch.Generator().manual_seed(1)
    images, labels = torch.rand(250, 1, 28, 28, generator=draws), torch.randint(10, (250,), generator=draws)
    data = images, labels
    return Problem(model=model, loss=cross_entropy, metrics={"accuracy": accuracy}, train=data, test=data)


@pytest.mark.parametrize(("model", "taken"), [(PaperCNN, True), (_Viewed, False)])
def test_a_model_with_convolutions_is_evaluated_as_by_itself(model: type[nn.Module], taken: bool) -> None:
    problem = _problem(model)
    module = problem.start_model(3)
    row = Layout(module).row(module.state_dict())
    score = Evaluator(problem, device=torch.device("cpu")).evaluate(row)
    inputs, targets = problem.test
    with torch.no_grad():
        output = module.eval()(inputs)
    assert takes_channels_last(problem) == taken
    assert score.loss == pytest.approx(float(cross_entropy(output, targets)), rel=1e-5)
    assert score.metrics == {"accuracy": accuracy(output, targets)}


def test_filters_lie_with_their_channels_innermost_and_batches_are_small() -> None:
    """Both are what makes the evaluation fast; models that do not take it are evaluated as they are."""
    strides: dict[str, list[tuple[int, ...]]] = {}
    sizes: dict[str, list[int]] = {}
    for model in (PaperCNN, _Viewed):
        problem = _problem(model)
        row = Layout(problem.start_model(3)).row(problem.start_model(3).state_dict())
        evaluator = Evaluator(problem, device=torch.device("cpu"))

        def seen(module: nn.Module, inputs: tuple[Tensor, ...], name: str = model.__name__) -> None:
            sizes.setdefault(name, []).append(len(inputs[0]))
            strides.setdefault(name, []).append(next(module.parameters()).stride())

        evaluator._module.register_forward_pre_hook(seen)
        evaluator.evaluate(row)
    assert sizes == {"PaperCNN": [100, 100, 50], "_Viewed": [250]}
    assert strides["PaperCNN"] == [(25, 1, 5, 1)] * 3
    assert strides["_Viewed"] == [(25, 25, 5, 1)]
