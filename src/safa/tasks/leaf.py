"""Data in the JSON format of LEAF (Caldas et al., 2018), in which every user is a client.

A file holds `users`, a list of names; `num_samples`, a number for each; and `user_data`, by name an object with the
lists `x` and `y`. LEAF writes the training part to `train/*.json` and the test part to `test/*.json` of a folder.

A user has all of its samples of a part in one file; one that is in two files is refused. Users without a training
sample are no clients. The samples of all test users are one test set, whether they are clients or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from safa.errors import SafaError
from safa.tasks.datasets import Data, pooled
from safa.tasks.measures import accuracy, perplexity
from safa.tasks.problem import Problem

__all__ = ["ALPHABET", "femnist", "read_leaf", "shakespeare"]

ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""The characters of `shakespeare`, numbered from 1; whatever else there is has the number 0."""

_PIXELS, _CLASSES = 28 * 28, 62
_FIELDS = {"users": list, "num_samples": list, "user_data": dict}
_NUMBER = {character: number for number, character in enumerate(ALPHABET, start=1)}

_User = tuple[str, list[Any], list[Any]]
_Part = str | Path | Iterable[str | Path]


def read_leaf(source: _Part) -> dict[str, tuple[list[Any], list[Any]]]:
    """By user, x and y of its samples, from the JSON files of a folder, in the order of their names, or from files."""
    return {user: (x, y) for user, x, y in _users(source)}


def femnist(folder: str | Path, *, width: int = 32) -> Problem:
    """Handwritten characters of 62 classes, 28x28 pixels, a client per writer, from `folder`/train and /test.

    The network has two convolutions of 5x5, of `width` and twice as many channels, and a hidden layer of 16 `width`.
    """
    return _problem(folder, _images, lambda: _network(width), {"accuracy": accuracy})


def shakespeare(folder: str | Path, *, embedding: int = 8, hidden: int = 256, layers: int = 2) -> Problem:
    """The next character of a text, a client per speaker, from `folder`/train and `folder`/test.

    An LSTM reads the characters of x, numbered as in `ALPHABET`, and its last output says which one follows.
    """
    measures = {"accuracy": accuracy, "perplexity": perplexity}
    return _problem(folder, _texts, lambda: _NextCharacter(embedding, hidden, layers), measures)


def _problem(
    folder: str | Path, tensors: Callable[[_User], Data], model: Callable[[], nn.Module], metrics: Mapping[str, Any]
) -> Problem:
    (train, shards), (test, _) = (_pool(Path(folder) / part, tensors) for part in ("train", "test"))
    return Problem(model=model, loss=cross_entropy, metrics=metrics, train=train, test=test, shards=shards)


def _pool(folder: Path, tensors: Callable[[_User], Data]) -> tuple[Data, list[NDArray[np.int64]]]:
    """The samples of all users of a folder, and which are whose.

    Users are converted one by one: the numbers of a file take many times as much memory as a tensor of them.
    """
    found = {user[0]: tensors(user) for user in _users(folder) if user[2]}
    if not found:
        raise SafaError(f"there is no sample in {folder}")
    return pooled(list(found.values()), [f"the user {name!r}" for name in found])


# -- files -----------------------------------------------------------------------------------------------------------


def _users(source: _Part) -> Iterator[_User]:
    """Every user with x and y of its samples, a file at a time."""
    where: dict[str, Path] = {}
    for file in _files(source):
        for user, x, y in _users_of(file):
            if user in where:
                raise SafaError(f"the user {user!r} is in {where[user]} and again in {file}")
            where[user] = file
            yield user, x, y


def _files(source: _Part) -> Sequence[Path]:
    if not isinstance(source, str | Path):
        return [Path(file) for file in source]
    if not Path(source).is_dir():
        return [Path(source)]
    found = sorted(Path(source).glob("*.json"))
    if not found:
        raise SafaError(f"there is no .json file in {source}")
    return found


def _users_of(file: Path) -> Iterator[_User]:
    """The users of a file, checked, in the order of its list."""
    content = _content(file)
    users, counts, data = (content[name] for name in _FIELDS)
    if len(users) != len(counts) or set(map(str, users)) != data.keys():
        told = f"{len(users)} users, {len(counts)} num_samples and user_data of {len(data)}"
        raise SafaError(f"{file} has {told}, which do not belong together")
    for user, count in zip(map(str, users), counts, strict=True):
        x, y = _lists(data[user], f"the user {user!r} in {file}")
        if not len(x) == len(y) == count:
            raise SafaError(f"the user {user!r} in {file} has {len(x)} x and {len(y)} y, but num_samples is {count}")
        yield user, x, y


def _lists(samples: Any, owner: str) -> tuple[list[Any], list[Any]]:
    match samples:
        case {"x": list(x), "y": list(y)}:
            return x, y
    raise SafaError(f"{owner} must have two lists, x and y")


def _content(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SafaError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SafaError(f"{file} is not JSON: {error}") from None
    for name, kind in _FIELDS.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise SafaError(f"{file} is not of LEAF's format: it needs a {kind.__name__} {name!r}")
    return content


# -- samples as tensors ----------------------------------------------------------------------------------------------


def _images(user: _User) -> Data:
    """Images of 28x28 pixels and their classes."""
    name, x, y = user
    try:
        images, labels = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    except (TypeError, ValueError, RuntimeError):
        images, labels = torch.empty(0), torch.empty(0)
    if images.shape != (len(y), _PIXELS) or labels.shape != (len(y),):
        raise SafaError(f"every x of the user {name!r} must be {_PIXELS} numbers, and every y one")
    if labels.is_floating_point() or labels.min() < 0 or labels.max() >= _CLASSES:
        raise SafaError(f"every y of the user {name!r} must be a whole number from 0 to {_CLASSES - 1}")
    return images.reshape(-1, 1, 28, 28), labels


def _texts(user: _User) -> Data:
    """The numbers of characters, and that of the character that follows."""
    name, x, y = user
    if not all(isinstance(text, str) for text in (*x, *y)) or {len(text) for text in y} != {1}:
        raise SafaError(f"every x of the user {name!r} must be a text, and every y one character")
    if len({len(text) for text in x}) != 1 or not x[0]:
        raise SafaError(f"the texts x of the user {name!r} must have the same length above 0")
    inputs = torch.tensor([[_NUMBER.get(character, 0) for character in text] for text in x])
    return inputs, torch.tensor([_NUMBER.get(character, 0) for character in y])


# -- models ----------------------------------------------------------------------------------------------------------


def _network(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 7 * 7, 16 * width),
        nn.ReLU(),
        nn.Linear(16 * width, _CLASSES),
    )


class _NextCharacter(nn.Module):
    """An LSTM over the characters, and a linear layer on its last output."""

    def __init__(self, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        characters = len(ALPHABET) + 1
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)
        self.output = nn.Linear(hidden, characters)

    def forward(self, texts: Tensor) -> Tensor:
        """The logits of the character that follows each text."""
        states, _ = self.lstm(self.embedding(texts))
        logits: Tensor = self.output(states[:, -1])
        return logits
