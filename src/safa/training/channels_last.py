"""Convolutions on a CPU: filters whose channels lie innermost in memory make them and the pooling after them faster."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from safa.tasks.problem import Problem

__all__ = ["channels_innermost", "filter_names", "filters", "shaped", "takes_channels_last"]


def shaped(part: Tensor, like: Tensor, channels_last: bool) -> Tensor:
    """A part of a row in the shape of a parameter, whose channels (its second dimension) may lie innermost."""
    if not channels_last:
        return part.view(like.shape)
    outer, inner, *window = like.shape
    return part.view(outer, *window, inner).movedim(-1, 1)


def channels_innermost(weight: Tensor) -> Tensor:
    """Filters with the same numbers, whose channels lie innermost, also if there is but one."""
    return shaped(weight.movedim(1, -1).flatten(), weight, channels_last=True)


def filters(module: nn.Module) -> list[Tensor]:
    """The filters of its convolutions."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return [part.weight for part in module.modules() if isinstance(part, kinds)]


def filter_names(module: nn.Module) -> list[str]:
    """The names of the parameters that are filters."""
    found = set(map(id, filters(module)))
    return [name for name, parameter in module.named_parameters() if id(parameter) in found]


def takes_channels_last(problem: Problem) -> bool:
    """Whether a model has convolutions, and no `view` that needs their results in the usual order in memory."""
    module = problem.start_model(0)
    for weight in filters(module):
        weight.data = channels_innermost(weight.detach())
    inputs, targets = (part[:2] for part in problem.train)
    with torch.random.fork_rng(devices=[]), contextlib.suppress(Exception):
        problem.loss(module(inputs), targets).backward()
        return bool(filters(module))
    return False
