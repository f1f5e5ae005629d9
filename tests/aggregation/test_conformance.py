"""The checks of `safa.testing` pass for every aggregator of this package and find those that are broken."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import safa.aggregation
from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.aggregation.optimisers import Adam, ServerOptimiser
from safa.aggregation.robust import CoordinateMedian
from safa.aggregation.update_cache import Mifa
from safa.records import Ids, Rule
from safa.testing import check_aggregator
from safa.testing.aggregators import check_refused


def found() -> Iterator[type[Aggregator]]:
    """Every aggregator of the package that can be made, but for those around another one."""
    for module in pkgutil.iter_modules(safa.aggregation.__path__, "safa.aggregation."):
        for kind in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(kind) and issubclass(kind, Aggregator) and is_own(kind, module.name):
                yield kind


def is_own(kind: type[Aggregator], module: str) -> bool:
    around_another = issubclass(kind, ServerOptimiser)
    return kind.__module__ == module and hasattr(kind, "name") and not inspect.isabstract(kind) and not around_another


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(found()))
def test_every_aggregator_keeps_the_contract(kind: Callable[[], Aggregator]) -> None:
    check_aggregator(kind, scripts=2, seed=100)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in found() if not kind.trains_own_models])
def test_every_aggregator_keeps_the_contract_inside_an_optimiser(kind: Callable[[], Aggregator]) -> None:
    check_aggregator(lambda: Adam(kind()), scripts=1, seed=200)


class TakesTheLast(Aggregator):
    """The next model is whichever update came last."""

    name = "last"
    rules = frozenset({Rule.AVERAGE})

    def step(self, step: Step) -> Tensor:
        rows = [row for part in step.updates for row in part.rows]
        return rows[-1] if rows else self.versions.model


class TakesTheFirstPart(CoordinateMedian):
    """It forgets that there may be more than one part."""

    def step(self, step: Step) -> Tensor:
        first = [part for _, part in zip(range(1), step.updates, strict=False)]
        return super().step(Step(step.version, step.rule, step.weight, step.deprecated, iter(first)))


class Forgets(Mifa):
    """It does not save its sum."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        super().restore(dict(state) | {"sum": torch.zeros_like(state["sum"])})


class LendsItsState(Mifa):
    """What it saves is changed by the steps that follow."""

    def state(self) -> dict[str, Tensor]:
        return super().state() | {"sum": self._sum}


class WritesIntoTheModel(CoordinateMedian):
    """It makes the new model in place of the old one."""

    def step(self, step: Step) -> Tensor:
        return self.versions.model.copy_(super().step(step))


class WritesIntoUpdates(CoordinateMedian):
    """It uses what it was lent as room of its own."""

    def step(self, step: Step) -> Tensor:
        def spoiled() -> Iterator[Updates]:
            for part in step.updates:
                yield part
                part.rows.zero_()

        return super().step(Step(step.version, step.rule, step.weight, step.deprecated, spoiled()))


class DependsOnMemory(CoordinateMedian):
    """Its result depends on how much memory it has."""

    def step(self, step: Step) -> Tensor:
        return super().step(step) * (1 if self.memory_mb > 1 else 1 + 1e-6)


class ForgetsTheReturned(Mifa):
    """A client that leaves loses its entry in the sum, and has none when it is back."""

    def follow(self, joined: Ids, sizes: NDArray[np.float64], left: Ids) -> None:
        super().follow(joined, sizes, left)
        self._has_row[left] = False


class WrongKind(CoordinateMedian):
    """It makes models in double precision, whatever is asked for."""

    def step(self, step: Step) -> Tensor:
        return super().step(step).double()


BROKEN = {
    TakesTheLast: "check_arrival_order, seed .*another order of arrival",
    TakesTheFirstPart: "check_parts, seed .*updates in parts",
    Forgets: "check_saving, seed .*after a restart",
    LendsItsState: "check_saving, seed .*after a restart",
    WritesIntoTheModel: "check_step, seed .*in place",
    WritesIntoUpdates: "check_step, seed .*changed the updates",
    DependsOnMemory: "check_memory, seed .*another model",
    ForgetsTheReturned: "check_return, seed .*left and came back",
    WrongKind: "check_step, seed .*float64",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_aggregator_is_found(kind: Callable[[], Aggregator]) -> None:
    with pytest.raises(AssertionError, match=BROKEN[kind]):  # type: ignore[index]
        check_aggregator(kind, scripts=3)


def test_a_wrong_formula_is_found() -> None:
    with pytest.raises(AssertionError, match="check_formula, seed 0: the literal formula"):
        check_aggregator(CoordinateMedian, naive=lambda steps: steps[-1].before, scripts=1)


def test_parameters_that_are_not_refused_are_found() -> None:
    with pytest.raises(AssertionError, match="were not refused"):
        check_refused([CoordinateMedian])
