"""Data as tensors: from pairs of tensors and from map-style torch data sets, of one owner or of many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from safa.errors import SafaError

__all__ = ["Data", "as_pair", "from_dataset", "pooled"]

Data = tuple[Tensor, Tensor]
"""Inputs and targets, with the samples along the first dimension."""

_PATIENCE_S = 2.0  # what takes longer gets a progress bar
_Count = Callable[[int], object]


def from_dataset(dataset: Dataset[Any]) -> Data:
    """All of a map-style data set, whose items are pairs (input, target), as two tensors."""
    return pooled([dataset], ["the data set"])[0]


def pooled(
    parts: Sequence[Data | Dataset[Any]], names: Sequence[str] | None = None
) -> tuple[Data, list[NDArray[np.int64]]]:
    """The samples of all parts in one pair of tensors, and for each part the indices of its own.

    A part is a pair of tensors or a map-style data set, of which every item is read once. Errors call it by its
    name, by default "client 0" and so on.
    """
    names = names or [f"client {number}" for number in range(len(parts))]
    if not isinstance(parts, Sequence):
        raise SafaError(f"the data of the clients must be a list, not a {type(parts).__name__}")
    if not parts:
        raise SafaError("there must be the data of one client at least")
    sets = [part for part in parts if not isinstance(part, tuple | list)]
    with _progress(sum(map(_length, sets))) as count:
        pairs = [_pair(part, name, count) for part, name in zip(parts, names, strict=True)]
    for name, pair in zip(names, pairs, strict=True):
        _check_like(pair, pairs[0], name, names[0])
    ends = np.cumsum([len(inputs) for inputs, _ in pairs])
    pool = torch.cat([inputs for inputs, _ in pairs]), torch.cat([targets for _, targets in pairs])
    return pool, np.split(np.arange(ends[-1]), ends[:-1])


def _pair(part: Data | Dataset[Any], name: str, count: _Count) -> Data:
    return as_pair(part, name) if isinstance(part, tuple | list) else _read(part, name, count)


def as_pair(part: Any, name: str) -> Data:
    """Inputs and targets as tensors, equally many; what is none is an error that calls it by its name."""
    try:
        inputs, targets = map(torch.as_tensor, part)
        lengths = len(inputs), len(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SafaError(f"{name} must be a pair (inputs, targets) of tensors, or a data set: {error}") from error
    if lengths[0] != lengths[1] or not lengths[0]:
        raise SafaError(f"{name} has {lengths[0]} inputs and {lengths[1]} targets")
    return inputs, targets


def _check_like(pair: Data, first: Data, name: str, other_name: str) -> None:
    """Refuse data that cannot be put into one tensor with those of the first part."""
    for what, tensor, other in zip(("inputs", "targets"), pair, first, strict=True):
        own, wanted = ((list(one.shape[1:]), one.dtype) for one in (tensor, other))
        if own != wanted:
            told = f"{own[0]} of {own[1]}", f"{wanted[0]} of {wanted[1]}"
            raise SafaError(f"the {what} of {name} are {told[0]}, but those of {other_name} are {told[1]}")


def _length(dataset: Dataset[Any]) -> int:
    if not isinstance(dataset, Sized) or not len(dataset):
        raise SafaError(f"a data set must have a length above 0 and items by number, not be a {type(dataset).__name__}")
    return len(dataset)


def _read(dataset: Dataset[Any], name: str, count: _Count) -> Data:
    """Every item of a data set, read once."""
    length, inputs, targets = _length(dataset), [], []
    try:
        for number in range(length):
            one, target = dataset[number]
            inputs.append(torch.as_tensor(one))
            targets.append(torch.as_tensor(target))
            count(1)
        return torch.stack(inputs), torch.stack(targets)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        wanted = "items by number that are pairs (input, target) of tensors, arrays or numbers, all of one shape"
        raise SafaError(f"{name} must have {wanted}: {type(error).__name__}: {error}") from error


@contextmanager
def _progress(total: int) -> Iterator[_Count]:
    """Counts samples, on a bar on stderr if that is a terminal and reading takes long."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        yield lambda _: None
        return
    with tqdm(desc="samples", total=total, unit="", leave=False, disable=None, delay=_PATIENCE_S) as bar:
        yield bar.update
