"""What every aggregator is: it turns the updates of a step into the next global model.

A step makes one version of the global model. It comes with what the record of a round says of that version (`Step`) and
with the updates themselves, as rows. An aggregator may remember: an entry per client, running sums, moments. What it
remembers it can save and restore, and what takes a row per client it holds in a `RowTable`, which is bounded in memory
and knows which of its rows have changed. It never sees a protocol, a fleet or a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from safa.errors import MisuseError
from safa.protocol.records import Ids, Rule

if TYPE_CHECKING:
    from torch import Tensor

    from safa.aggregation.rows import RowTable, Versions

__all__ = ["Aggregator", "Step", "Updates"]


@dataclass(frozen=True, eq=False)
class Updates:
    """Updates of a step, in order of arrival: all of them, or a part that fits the memory. All rows are finite."""

    client: Ids
    base: Ids
    """The version that each was trained from."""
    weight: NDArray[np.float64]
    """What the record gives it; 0 for one that was undrafted."""
    picked: NDArray[np.bool_]
    """Whether it was picked for this version; else it was undrafted in the round before (Eq. 8)."""
    rows: Tensor
    """The updates themselves, models [K, d]."""
    start: Tensor
    """The models that they were trained from, [K, d]."""
    step_size: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The number of its steps times their learning rate, where the aggregator corrects gradients; else empty."""
    share: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """How much of its change counts, where the aggregator shortens changes; else empty: all of it."""

    def __len__(self) -> int:
        return len(self.client)

    @property
    def deltas(self) -> Tensor:
        """What the clients' training changed, [K, d]."""
        return self.deltas_in(slice(None), slice(None))

    def deltas_in(self, rows: slice, columns: slice) -> Tensor:
        """Some rows and columns of `deltas`."""
        deltas = self.rows[rows, columns] - self.start[rows, columns]
        return deltas.mul_(deltas.new_tensor(self.share[rows, None])) if len(self.share) else deltas

    def part(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Updates:
        """Some of these updates, by a mask or by their places in rising order."""
        places = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        if len(places) == len(self):
            return self
        in_a_row = len(places) > 0 and places[-1] - places[0] + 1 == len(places)
        index = slice(places[0], places[-1] + 1) if in_a_row else places.tolist()
        named = (self.client[places], self.base[places], self.weight[places], self.picked[places])
        sizes, shares = (kept[places] if len(kept) else kept for kept in (self.step_size, self.share))
        return Updates(*named, rows=self.rows[index], start=self.start[index], step_size=sizes, share=shares)


@dataclass(frozen=True, eq=False)
class Step:
    """One version to be made."""

    version: int
    rule: Rule
    """What the weights mean (see `Rule`)."""
    weight: float
    """The sum of the weights that the record gives to the picked updates, those included that diverged."""
    deprecated: Ids
    """Clients that were forced to start over from the version before this one (Eq. 3, Eq. 6), and were not picked."""
    updates: Iterator[Updates]
    """The updates, part by part; they can be gone through once. There may be none."""


class Aggregator(ABC):
    """Turns the updates of a step into the next global model."""

    name: ClassVar[str]
    """What it is called on the command line."""
    rules: ClassVar[frozenset[Rule]]
    """The meanings of weights that it can work with."""
    compares: ClassVar[bool] = False
    """Whether it compares the updates of a step with each other, so that a version must be made of several."""
    keeps_entries: ClassVar[bool] = False
    """Whether it holds an entry per client; only then it is given undrafted updates, one step later."""
    trains_own_models: ClassVar[bool] = False
    """Whether a client starts from its own entry instead of from a global model."""
    corrects: ClassVar[bool] = False
    """Whether it corrects the gradients of clients: they must use plain SGD and start from the latest model."""
    caution: ClassVar[str] = ""
    """What somebody who uses it has to know."""
    not_deployed: ClassVar[str] = ""
    """Why it is refused where clients are not simulated, if it is."""
    run_settings: ClassVar[tuple[str, ...]] = ()
    """For an aggregator of another package: its parameters that are to be filled from the run's settings of that name,
    besides those that it has from a class of this package."""

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin with w(0), the only one of the `versions`, and clients of these n_k; `memory_mb` is for entries."""
        self.versions = versions
        self.memory_mb = memory_mb

    def prepare(  # noqa: B027
        self, *, evaluate: Callable[[Tensor], float], train: Callable[[Ids, Tensor, int], Tensor] | None
    ) -> None:
        """Right after `begin`: `evaluate` gives the test loss of a model; `train` the updates of clients, who start
        from these rows and make so many epochs, where clients are simulated. Few have any use for it.
        """

    def follow(self, joined: Ids, sizes: NDArray[np.float64], left: Ids) -> None:  # noqa: B027
        """Clients have joined or come back, with these n_k, and left, since the last step.

        A client that is in both is there before and after, with its new n_k.
        """

    @abstractmethod
    def step(self, step: Step) -> Tensor:
        """The next global model; the one before it is `self.versions.model`."""

    def keep(self, updates: Updates) -> None:  # noqa: B027
        """Take in updates of a round that makes no version, or entries to begin with; there may be several parts.

        Only where there is an entry per client it makes a difference.
        """

    def entries(self, clients: Ids) -> Tensor:
        """The entries of these clients, one row each, where there is an entry per client."""
        raise MisuseError(f"{self.name} holds no entry per client")

    def correction(self, clients: Ids) -> Tensor | None:
        """What is to be added to every gradient of these clients, one row each [K, d]; None for nothing.

        It is asked right before their updates are trained, from the latest model.
        """
        return None

    def references(self) -> set[int]:
        """The versions that are needed besides the latest."""
        return set()

    # -- to be continued later ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue later besides `tables`, as named tensors on the CPU that nobody changes."""
        return {}

    def tables(self) -> Mapping[str, RowTable]:
        """What is held in rows, by name; a checkpoint writes the rows that have changed."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Continue from `state`; the tables, and the versions, have been restored before."""
