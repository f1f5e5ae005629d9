"""Bring your own: a problem by the name of a module and an attribute, and data from a torch data set."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from safa.errors import SafaError
from safa.tasks.problem import Data, Problem
from safa.tasks.references import is_reference, load_reference

__all__ = ["Data", "Problem", "find_problem", "from_dataset"]


def find_problem(reference: str) -> Problem:
    """The problem that `package.module:attribute` names: a `Problem`, or a callable that takes nothing and makes one.

    The module may lie in the current folder.
    """
    if not is_reference(reference):
        raise SafaError(f"a task of your own is written package.module:attribute, not {reference!r}")
    return _made(load_reference(reference), reference)


def _made(found: Any, reference: str) -> Problem:
    """The problem itself, whether it was named or its maker."""
    if isinstance(found, Problem):
        return found
    if not callable(found) or not _takes_nothing(found):
        kind = type(found).__name__
        raise SafaError(f"{reference} must be a Problem or a callable that takes nothing and makes one, not a {kind}")
    try:
        made = found()
    except SafaError:
        raise
    except Exception as error:
        raise SafaError(f"{reference} failed: {type(error).__name__}: {error}") from error
    if not isinstance(made, Problem):
        raise SafaError(f"{reference} must make a Problem, not a {type(made).__name__}")
    return made


def _takes_nothing(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    except ValueError:  # some built-in functions do not say what they take
        pass
    return True


def from_dataset(dataset: Dataset[Any]) -> Data:
    """All of a map-style data set, whose items are pairs (input, target), as two tensors."""
    if not isinstance(dataset, Sized) or not len(dataset):
        raise SafaError(f"a data set must have a length above 0 and items by number, not be a {type(dataset).__name__}")
    try:
        pairs = [(inputs, target) for inputs, target in (dataset[i] for i in range(len(dataset)))]
        return _stacked([inputs for inputs, _ in pairs]), _stacked([target for _, target in pairs])
    except (TypeError, ValueError, RuntimeError) as error:
        wanted = "pairs (input, target) of tensors, arrays or numbers, all of one shape"
        raise SafaError(f"the items of a data set must be {wanted}: {error}") from error


def _stacked(values: Sequence[Any]) -> Tensor:
    return torch.stack([torch.as_tensor(value) for value in values])
