"""What is learnt: a model, a loss, metrics and data. Bring your own in a few lines, as `docs/data.md` shows."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from safa.errors import SafaError
from safa.tasks.datasets import Data, as_pair, pooled
from safa.tasks.dealing import checked_parts

__all__ = ["Data", "Measure", "Metric", "Problem"]

Measure = Callable[[Tensor, Tensor], Tensor | float]
"""A number, or one for each of several classes, from (output, target) of a whole set."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_TAKEN = ("loss", "held", "round", "time")


@dataclass(frozen=True)
class Metric:
    """A measure, and whether more of it is better."""

    measure: Measure
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A learning problem. Everything that is trained or measured comes from here."""

    model: Callable[[], nn.Module]
    """Makes a fresh model. Random initial weights come from torch's global generator, which the caller seeds."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """The loss of a batch, from (output, target). One that is a mean over the samples is the fastest to train."""
    metrics: Mapping[str, Metric | Measure] = field(default_factory=dict)
    """What is measured beside the loss, by name, the main one first. A bare function is better the higher it is."""
    train: Data
    test: Data
    shards: Sequence[NDArray[np.int64]] | None = None
    """For every client the indices of its own training samples, where the data come in such parts."""
    columns: Mapping[str, ArrayLike] = field(default_factory=dict)
    """Further facts about the training samples, one value for each, by name: who wrote it, where it was taken."""
    kernel: str | None = None
    """The name of a hand-written gradient, where there is one for this model and loss; a wrong one is refused."""

    def __post_init__(self) -> None:
        if isinstance(self.model, nn.Module) or not callable(self.model):
            raise SafaError(f"model must be a function that makes a fresh model, not {_short(self.model)}")
        for part in ("train", "test"):
            object.__setattr__(self, part, as_pair(getattr(self, part), f"the {part} data"))
        if not isinstance(self.metrics, Mapping):
            raise SafaError(f"metrics are functions by name, not {self.metrics!r}")
        if self.shards is not None:
            object.__setattr__(self, "shards", checked_parts(self.shards, len(self.train[0]), what="shard"))
        for name, column in self.columns.items():
            if np.shape(column) != (len(self.train[0]),):
                raise SafaError(f"the column {name!r} needs a value for each of {len(self.train[0])} training samples")
        for name in self.metrics:
            if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _TAKEN:
                raise SafaError(
                    f"a metric needs a name of letters, digits and _, other than {', '.join(_TAKEN)}: {name!r}"
                )

    @classmethod
    def of_clients(
        cls,
        clients: Sequence[Data | Dataset[Any]],
        *,
        test: Data | Dataset[Any],
        model: Callable[[], nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        metrics: Mapping[str, Metric | Measure] | None = None,
    ) -> Self:
        """A problem whose training data are its clients' own: for each a pair of tensors or a map-style data set.

        Data sets are read once, with their transforms; a bar on stderr shows how far that is where it takes long.
        """
        train, shards = pooled(clients)
        tested, _ = pooled([test], ["the test data"])
        return cls(model=model, loss=loss, metrics=metrics or {}, train=train, test=tested, shards=shards)

    def start_model(self, seed: int) -> nn.Module:
        """w(0), the same for the same seed; torch's global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = self.model()
        if not isinstance(made, nn.Module):
            raise SafaError(f"the function model must return a torch.nn.Module, not {_short(made)}")
        return made

    @property
    def directions(self) -> dict[str, str]:
        """The metrics by name, the main one first: "higher" or "lower", whichever is better."""
        lower = {
            name for name, metric in self.metrics.items() if isinstance(metric, Metric) and not metric.higher_is_better
        }
        return {name: "lower" if name in lower else "higher" for name in self.metrics}

    def measure(self, output: Tensor, target: Tensor) -> dict[str, float]:
        """All metrics of a set by name; one of a number per class is NAME_0, NAME_1, ... and their mean without NaN."""
        found: dict[str, float] = {}
        for name, metric in self.metrics.items():
            values = _values(name, metric.measure if isinstance(metric, Metric) else metric, output, target)
            several = values.flatten().tolist() if values.ndim else []
            found[name] = float(values.nanmean()) if several else float(values)
            per_class = {f"{name}_{place}": one for place, one in enumerate(several)}
            if taken := [one for one in per_class if one in self.metrics]:
                raise SafaError(
                    f"the metric {name} has a number for each class, and one of these is called {taken[0]}, too"
                )
            found |= per_class
        return found


def _short(value: object) -> str:
    """What was given instead of something else."""
    return f"a {type(value).__name__}" if isinstance(value, nn.Module) else reprlib.repr(value)


def _values(name: str, measure: Measure, output: Tensor, target: Tensor) -> Tensor:
    """What a metric comes to, in double precision."""
    try:
        value = measure(output, target)
    except Exception as error:
        raise SafaError(f"the metric {name} failed: {type(error).__name__}: {error}") from error
    try:
        values = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        values = torch.empty(0)
    if not values.numel():
        raise SafaError(f"the metric {name} must be a number, or a tensor of one for each class, not {value!r}")
    return values
