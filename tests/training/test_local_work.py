"""Optimisers, shuffling and amounts of work that differ: the batched trainer against the serial one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from safa import simulate
from safa.errors import MisuseError, SafaError
from safa.training import Attempt, BatchedTrainer, Optimiser, SerialTrainer
from safa.training.batches import Batches
from tests.training.equality import CASES, problem_of
from tests.training.problems import make, ragged_shards
from tests.training.test_trainer import BATCH, CLIENTS, KINDS, start_rows

CPU = torch.device("cpu")
OPTIMISERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "adamw": {"kind": "adamw", "weight_decay": 0.1, "proximal": 0.5},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "clipped": {"clip": 0.3, "weight_decay": 0.01, "proximal": 0.5},
    "clipped adam": {"kind": "adam", "clip": 0.3, "weight_decay": 0.01},
}
STEPS = np.array([7, 1, 12, 0, 3, 9])  # some clients begin a second and a third epoch, one makes no step at all
RATES = np.array([0.05, 0.01, 0.2, 0.05, 0.0, 0.1])
WORK: dict[str, dict[str, Any]] = {
    "shuffled epochs": {"epochs": 2},
    "steps": {"steps": STEPS},
    "rates": {"epochs": 2, "lr": RATES},
    "correction": {"epochs": 2, "correction": 0.1},
    "shuffled steps with rates and correction": {"steps": STEPS, "lr": RATES, "correction": 0.1},
}


def both(kind: str, **given: Any) -> tuple[SerialTrainer, BatchedTrainer]:
    problem, shards = make(kind), ragged_shards(BATCH)
    optimiser = Optimiser(lr=0.05, **given.pop("optimiser", {}))
    common: dict[str, Any] = {"batch_size": BATCH, "optimiser": optimiser, "device": CPU} | given
    return SerialTrainer(problem, shards, **common), BatchedTrainer(problem, shards, **common)


def with_correction(work: dict[str, Any], start: Tensor) -> dict[str, Any]:
    """The work with a correction of that size, a different one for every client."""
    if "correction" not in work:
        return work
    drawn = torch.randn(start.shape, dtype=start.dtype, generator=torch.Generator().manual_seed(1))
    return work | {"correction": work["correction"] * drawn}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("kind", KINDS)
def test_batched_equals_serial(kind: str, optimiser: str, work: str) -> None:
    trainers = both(kind, optimiser=OPTIMISERS[optimiser], shuffle="shuffled" in work, seed=3)
    start = start_rows(kind, trainers[0].layout)
    given = with_correction(WORK[work], start) | {"bases": np.arange(len(CLIENTS))}
    slow, fast = (trainer.train(CLIENTS, start, **given) for trainer in trainers)
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    moved = (slow - start)[:, : trainers[0].layout.trained].abs().amax(dim=1).numpy()
    idle = (given.get("steps", STEPS + 1) == 0) | (given.get("lr", RATES + 1) == 0)
    assert np.all(moved[idle] == 0)
    assert np.all(moved[~idle] > 1e-4)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("name", ["frozen layer", "tied weights", "branch", "class weights"])
def test_what_has_no_gradient_is_left_alone_by_both(name: str, optimiser: str) -> None:
    """Parameters that are frozen or unused are neither decayed nor corrected."""
    problem, shards = problem_of(CASES[name], torch.float64), ragged_shards(BATCH)
    common: dict[str, Any] = {"batch_size": BATCH, "device": CPU, "shuffle": True}
    common["optimiser"] = Optimiser(lr=0.05, **OPTIMISERS[optimiser])
    serial, batched = SerialTrainer(problem, shards, **common), BatchedTrainer(problem, shards, **common)
    start = serial.layout.row(problem.start_model(1).state_dict()).repeat(len(CLIENTS), 1)
    work = with_correction(WORK["shuffled steps with rates and correction"], start)
    slow, fast = (trainer.train(CLIENTS, start, **work) for trainer in (serial, batched))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_whole_epochs_are_epochs(kind: str) -> None:
    _, trainer = both(kind, optimiser={"momentum": 0.9})
    start = start_rows(kind, trainer.layout)
    steps = np.array([3 * -(-len(ragged_shards(BATCH)[k]) // BATCH) for k in CLIENTS])
    in_epochs, in_steps = trainer.train(CLIENTS, start, epochs=3), trainer.train(CLIENTS, start, steps=steps)
    torch.testing.assert_close(in_steps, in_epochs, rtol=1e-12, atol=1e-12)


def test_work_is_given_in_epochs_or_in_steps() -> None:
    for trainer in both("svm"):
        start = start_rows("svm", trainer.layout)
        for work in ({}, {"epochs": 1, "steps": STEPS}):
            with pytest.raises(MisuseError, match="in epochs or in steps"):
                trainer.train(CLIENTS, start, **work)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"kind": "sgd"}, {"kind": "adam", "momentum": 0.9}], ids=str)
def test_nesterov_needs_momentum(given: dict[str, Any]) -> None:
    with pytest.raises(SafaError, match="nesterov needs the optimiser sgd with a momentum above 0"):
        Optimiser(lr=0.1, nesterov=True, **given)


@pytest.mark.parametrize("kind", ["svm", "batch norm"])
def test_a_small_memory_changes_nothing(kind: str) -> None:
    updates = []
    for memory_mb in (0.001, 100.0):
        optimiser = Optimiser(lr=0.05, momentum=0.5)
        trainer = BatchedTrainer(
            make(kind), ragged_shards(BATCH), batch_size=BATCH, optimiser=optimiser, device=CPU, memory_mb=memory_mb,
            shuffle=True,
        )  # fmt: skip
        updates.append(trainer.train(CLIENTS, start_rows(kind, trainer.layout), steps=STEPS))
    torch.testing.assert_close(*updates, rtol=1e-12, atol=1e-12)


# -- the order of samples --------------------------------------------------------------------------------------------


def test_every_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    shards = ragged_shards(BATCH)
    batches = Batches(shards, BATCH, shuffle=True, seed=5)
    orders = [batches.order(1, base, epoch) for base in (0, 1) for epoch in (0, 1)]
    assert all(np.array_equal(np.sort(order), shards[1]) for order in orders)
    assert len({order.tobytes() for order in orders}) == 4
    drawn = np.concatenate(list(batches.of(1, 0, 10)))
    assert np.array_equal(drawn, np.concatenate(orders[:2]))
    other = Batches(shards, BATCH, shuffle=True, seed=6).order(1, 0, 0)
    assert not np.array_equal(other, orders[0])


def test_an_order_depends_on_the_number_of_the_client_not_on_its_place() -> None:
    shards = ragged_shards(BATCH)
    everyone = Batches(shards, BATCH, shuffle=True)
    alone = Batches(shards[4:5], BATCH, shuffle=True, first_client=4)
    assert np.array_equal(alone.order(0, 3, 2), everyone.order(4, 3, 2))


# -- in pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("work", [{"epochs": 3}, {"steps": 11}, {"steps": 2}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_attempt_in_pieces_is_the_same_as_in_one_go(kind: str, work: dict[str, int]) -> None:
    optimiser = {"kind": "adamw", "clip": 0.5, "weight_decay": 0.01}
    _, trainer = both(kind, optimiser=optimiser, shuffle=True, seed=2)
    start, client = start_rows(kind, trainer.layout)[0], 4  # three mini-batches in an epoch
    steps = None if "epochs" in work else np.array([work["steps"]])
    rest: dict[str, Any] = {"epochs": work.get("epochs"), "steps": steps, "lr": np.array([0.1]), "bases": np.array([7])}
    whole = trainer.train(np.array([client]), start[None], **rest)[0]

    def attempt() -> Attempt:
        return Attempt(trainer, start, client, **work, lr=0.1, base=7)

    first, kept = attempt(), []
    assert first.epochs == {3: 3, 11: 4, 2: 1}[next(iter(work.values()))]
    while first.done < first.epochs:
        kept.append(first.state())
        first.epoch()
    assert torch.equal(first.row, whole)
    for state in kept:
        again = attempt()
        again.restore(state)
        while again.done < again.epochs:
            again.epoch()
        assert torch.equal(again.row, whole)


# -- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["safa", "local"])
@pytest.mark.parametrize(
    "given",
    [
        {"optimiser": "adamw", "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"clip": 0.5},
        {"shuffle": True},
        {"local_steps": 3},
        {"schedule": "warmup:3+cosine"},
    ],
    ids=str,
)
def test_a_run_is_the_same_with_both_trainers_and_not_as_without_the_setting(
    given: dict[str, Any], protocol: str
) -> None:
    common: dict[str, Any] = {"protocol": protocol, "clients": 5, "rounds": 4, "batch_size": 8, "lr": 0.1}
    common |= {"round_limit_s": 900.0, "size_distribution": "equal"}
    usual, batched, serial = (
        simulate(make("network"), **common | more).model() for more in ({}, given, given | {"trainer": "serial"})
    )
    for name, tensor in batched.items():
        torch.testing.assert_close(tensor, serial[name], rtol=1e-9, atol=1e-9)
    assert any((tensor - usual[name]).abs().max() > 1e-4 for name, tensor in batched.items())
