"""The habits of the paper's experiments, around aggregators of every kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.aggregation.mean import PopulationMean
from safa.aggregation.model_cache import ModelCache
from safa.aggregation.own_models import OwnModels
from safa.aggregation.rows import Versions
from safa.errors import SafaError
from safa.paper.habits import AsPrinted
from safa.protocol.records import Ids, Rule

START = torch.zeros(3)
SIZES = np.array([1.0, 1.0, 2.0])


def loss(model: Tensor) -> float:
    """The nearer to 1, the better."""
    return float((model - 1).abs().mean())


def train(clients: Ids, start: Tensor, epochs: int) -> Tensor:
    """A client's number is what an epoch adds."""
    return start + epochs * torch.from_numpy(clients).float().unsqueeze(1)


def begun(inner: Aggregator, memory_mb: float = 64.0, **given: Any) -> AsPrinted:
    found = AsPrinted(inner)
    found.begin(Versions(START), SIZES, memory_mb=memory_mb)
    found.prepare(**{"evaluate": loss, "train": train} | given)
    return found


def make(aggregator: AsPrinted, clients: Sequence[int], values: Sequence[float], rule: Rule) -> float:
    """A version of picked updates, each of one value; the value of the model that becomes the global one."""
    weight = SIZES[list(clients)] / SIZES.sum()
    rows = torch.tensor(values).unsqueeze(1).expand(-1, 3).contiguous()
    ids, version = np.array(clients, dtype=np.int64), aggregator.versions.latest + 1
    picked = np.ones(len(clients), np.bool_)
    updates = Updates(ids, np.zeros_like(ids), weight, picked, rows, torch.zeros_like(rows))
    step = Step(version, rule, float(weight.sum()), np.empty(0, np.int64), iter([updates]))
    model = aggregator.step(step)
    aggregator.versions.add(version, model)
    assert torch.equal(model, model[0].expand(3))
    return float(model[0])


def test_the_best_model_by_test_loss_is_sent_out() -> None:
    it = begun(PopulationMean())
    made = [make(it, [0, 1, 2], [value] * 3, Rule.AVERAGE) for value in (3.0, 0.5, 0.0, 1.25, 0.9)]
    assert made == pytest.approx([3.0, 0.5, 0.5, 1.25, 0.9])


def test_the_next_model_is_made_from_the_best_and_not_from_the_latest() -> None:
    it = begun(PopulationMean())
    assert make(it, [0, 1, 2], [0.8] * 3, Rule.AVERAGE) == pytest.approx(0.8)
    assert make(it, [0, 1, 2], [-9.0] * 3, Rule.AVERAGE) == pytest.approx(0.8)
    assert make(it, [2], [1.0], Rule.AVERAGE) == pytest.approx(0.9)  # half of 0.8, half of 1.0


def test_a_model_without_a_loss_is_the_best_only_until_there_is_another() -> None:
    it = begun(PopulationMean(), evaluate=lambda model: math.nan if model[0] > 5 else loss(model))
    made = [make(it, [0, 1, 2], [value] * 3, Rule.AVERAGE) for value in (6.0, 4.0, 7.0, 3.0)]
    assert made == pytest.approx([6.0, 4.0, 4.0, 3.0])


@pytest.mark.parametrize("inner", [ModelCache, OwnModels])
@pytest.mark.parametrize("memory_mb", [1e-9, 64.0])
def test_entries_begin_with_one_epoch_of_training(inner: type[ModelCache], memory_mb: float) -> None:
    """One client at a time where no more fit the memory."""
    asked: list[tuple[list[int], int]] = []

    def noted(clients: Ids, start: Tensor, epochs: int) -> Tensor:
        asked.append((clients.tolist(), epochs))
        return train(clients, start, epochs)

    it = begun(inner(), memory_mb, train=noted)
    assert it.entries(np.arange(3))[:, 0].tolist() == [0.0, 1.0, 2.0]
    assert asked == ([([0], 1), ([1], 1), ([2], 1)] if memory_mb < 1 else [([0, 1, 2], 1)])
    rule = next(iter(it.rules & {Rule.CACHE, Rule.OWN}))
    assert make(it, [], [], rule) == pytest.approx(0.25 * 1 + 0.5 * 2)  # weighted by n_k


def test_without_entries_nothing_is_trained_beforehand() -> None:
    def never(clients: Ids, start: Tensor, epochs: int) -> Tensor:
        raise AssertionError

    it = begun(PopulationMean(), train=never)
    assert not it.keeps_entries
    assert it.references() == set()


def test_an_entry_that_diverged_stays_what_it_was() -> None:
    def diverging(clients: Ids, start: Tensor, epochs: int) -> Tensor:
        rows = train(clients, start, epochs)
        rows[1] = torch.inf
        return rows

    it = begun(ModelCache(), train=diverging)
    assert it.entries(np.arange(3))[:, 0].tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("inner", [PopulationMean, ModelCache])
def test_it_cannot_be_deployed(inner: type[Aggregator]) -> None:
    with pytest.raises(SafaError, match=r"the paper's habits .* cannot be deployed"):
        begun(inner(), train=None)


def test_it_is_as_the_aggregator_inside() -> None:
    own = AsPrinted(OwnModels())
    assert (own.rules, own.keeps_entries, own.trains_own_models) == (OwnModels.rules, True, True)
    assert AsPrinted(PopulationMean()).rules == PopulationMean.rules


def test_clients_that_join_and_leave_are_reported_to_the_aggregator_inside() -> None:
    it = begun(ModelCache())
    it.follow(np.array([3]), np.array([4.0]), np.array([2]))
    assert it.references() == {0}  # the entry of the new client
    assert make(it, [], [], Rule.CACHE) == pytest.approx(1 / 6)


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_it_continues_where_it_was(stop_after: int) -> None:
    values = (0.7, 5.0, -1.0, 0.95, 8.0, 1.01)
    through, stopped = begun(ModelCache()), begun(ModelCache())
    whole = [make(through, [0, 1, 2], [value] * 3, Rule.CACHE) for value in values]
    for value in values[:stop_after]:
        make(stopped, [0, 1, 2], [value] * 3, Rule.CACHE)
    later = begun(ModelCache())
    for name, table in stopped.tables().items():
        later.tables()[name].restore(table.numbers, table.get(table.numbers))
    kept = stopped.versions
    later.versions.restore(kept.numbers, kept.get(kept.numbers))
    later.restore(stopped.state())
    assert [make(later, [0, 1, 2], [value] * 3, Rule.CACHE) for value in values[stop_after:]] == whole[stop_after:]
