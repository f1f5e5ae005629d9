"""What every wrapper around an aggregator is: it resembles the one inside in everything that it does not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from safa.aggregation.aggregator import Aggregator, Updates
from safa.protocol.records import Ids

if TYPE_CHECKING:
    from torch import Tensor

    from safa.aggregation.rows import RowTable, Versions

__all__ = ["Wrapper"]

_INSIDE = "inside."  # what the names of the inner aggregator's state begin with
_MIRRORED = ("rules", "compares", "keeps_entries", "trains_own_models", "corrects")

_SENTENCES = ("caution", "not_deployed")  # its own, or else those of the aggregator inside


class Wrapper(Aggregator):
    """An aggregator around another one. A subclass says what becomes of a step (`step`), and what else it keeps."""

    def __init__(self, inner: Aggregator) -> None:
        self.inner = inner
        vars(self).update({name: getattr(inner, name) for name in _MIRRORED})
        vars(self).update({name: getattr(type(self), name) or getattr(inner, name) for name in _SENTENCES})

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin, with the aggregator inside."""
        super().begin(versions, sizes, memory_mb=memory_mb)
        self.inner.begin(versions, sizes, memory_mb=memory_mb)

    def prepare(
        self, *, evaluate: Callable[[Tensor], float], train: Callable[[Ids, Tensor, int], Tensor] | None
    ) -> None:
        """For the aggregator inside."""
        self.inner.prepare(evaluate=evaluate, train=train)

    def follow(self, joined: Ids, sizes: NDArray[np.float64], left: Ids) -> None:
        """For the aggregator inside."""
        self.inner.follow(joined, sizes, left)

    def keep(self, updates: Updates) -> None:
        """For the aggregator inside."""
        self.inner.keep(updates)

    def entries(self, clients: Ids) -> Tensor:
        """The entries of the aggregator inside."""
        return self.inner.entries(clients)

    def correction(self, clients: Ids) -> Tensor | None:
        """That of the aggregator inside."""
        return self.inner.correction(clients)

    def references(self) -> set[int]:
        """The versions that the aggregator inside needs."""
        return self.inner.references()

    def state(self) -> dict[str, Tensor]:
        """What the wrapper keeps, and the state of the aggregator inside."""
        return self.kept() | {_INSIDE + name: value for name, value in self.inner.state().items()}

    def kept(self) -> dict[str, Tensor]:
        """What the wrapper itself needs to continue later, as named tensors on the CPU that nobody changes."""
        return {}

    def tables(self) -> Mapping[str, RowTable]:
        """The tables of the aggregator inside."""
        return self.inner.tables()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        inside = {name: value for name, value in state.items() if name.startswith(_INSIDE)}
        self.inner.restore({name.removeprefix(_INSIDE): value for name, value in inside.items()})
