"""The batched trainer against the serial one, and the kernels behind it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from safa import simulate
from safa.errors import SafaError
from safa.training import BatchedTrainer, Layout, Optimiser, SerialTrainer
from tests.training.problems import make, ragged_shards

BATCH = 8
CLIENTS = np.array([5, 0, 3, 9, 1, 6])
KINDS = ["regression", "svm", "network", "batch norm"]
OPTIMISERS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"kind": "adam", "weight_decay": 0.01},
    {"proximal": 0.5},
]


def start_rows(kind: str, layout: Layout) -> torch.Tensor:
    """A start model of its own for every client."""
    modules = [make(kind).start_model(seed) for seed in range(len(CLIENTS))]
    return torch.stack([layout.row(dict(m.named_parameters()) | dict(m.named_buffers())) for m in modules])


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_batched_equals_serial(kind: str, optimiser: dict[str, Any]) -> None:
    problem, shards = make(kind), ragged_shards(BATCH)
    common: dict[str, Any] = {
        "batch_size": BATCH,
        "optimiser": Optimiser(lr=0.05, **optimiser),
        "device": torch.device("cpu"),
    }
    serial, batched = SerialTrainer(problem, shards, **common), BatchedTrainer(problem, shards, **common)
    start = start_rows(kind, serial.layout)
    slow, fast = (trainer.train(CLIENTS, start, epochs=3) for trainer in (serial, batched))
    assert (slow - start).abs().amax(dim=1).min() > 1e-3  # everybody has learnt something
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["regression", "svm", "network"])
def test_the_memory_budget_changes_nothing(kind: str) -> None:
    problem, shards = make(kind), ragged_shards(BATCH)
    updates = []
    for memory_mb in (0.001, 0.02, 100.0):
        trainer = BatchedTrainer(
            problem,
            shards,
            batch_size=BATCH,
            optimiser=Optimiser(lr=0.05),
            device=torch.device("cpu"),
            memory_mb=memory_mb,
        )
        updates.append(trainer.train(CLIENTS, start_rows(kind, trainer.layout), epochs=2))
    assert torch.equal(updates[0], updates[1])
    assert torch.equal(updates[0], updates[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_is_freed_as_soon_as_nobody_refers_to_it(kind: str) -> None:
    batched = BatchedTrainer(
        make(kind), ragged_shards(BATCH), batch_size=BATCH, optimiser=Optimiser(lr=0.05), device=torch.device("cpu")
    )
    batched.train(CLIENTS, start_rows(kind, batched.layout), epochs=2)
    gone = weakref.ref(batched)
    gc.disable()  # the memory of a GPU is full before Python looks for cycles
    try:
        del batched
        assert gone() is None
    finally:
        gc.enable()


def test_all_clients_at_once_are_trained_as_each_by_itself() -> None:
    trainer = BatchedTrainer(
        make("svm"), ragged_shards(BATCH), batch_size=BATCH, optimiser=Optimiser(lr=0.05), device=torch.device("cpu")
    )
    everyone = np.arange(10)
    start = torch.zeros(10, trainer.layout.size, dtype=torch.float64)
    together = trainer.train(everyone, start, epochs=2)
    alone = torch.cat([trainer.train(everyone[k : k + 1], start[:1], epochs=2) for k in range(10)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_training_leaves_the_start_models_alone() -> None:
    trainer = BatchedTrainer(
        make("network"), ragged_shards(BATCH), batch_size=BATCH, optimiser=Optimiser(lr=1.0), device=torch.device("cpu")
    )
    start = start_rows("network", trainer.layout)
    before = start.clone()
    trainer.train(CLIENTS, start, epochs=1)
    assert torch.equal(start, before)


def test_a_row_holds_parameters_and_buffers() -> None:
    module = make("batch norm").start_model(3)
    layout = Layout(module)
    state = module.state_dict()
    row = layout.row(state)
    assert len(row) == layout.size == layout.trained + 9 + 9 + 1
    again = layout.state(row)
    assert all(torch.equal(again[name], state[name]) and again[name].dtype == state[name].dtype for name in state)
    assert layout.views(torch.stack([row, row]))["0.weight"].shape == (2, 9, 7)


def test_an_unknown_optimiser_is_refused() -> None:
    with pytest.raises(SafaError, match="optimiser must be one of sgd, adam, adamw, not 'lbfgs'"):
        Optimiser(kind="lbfgs", lr=0.1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [100_000_000, 10**30])
def test_a_batch_is_never_larger_than_the_data(kind: str, batch_size: int) -> None:
    """A hundred million samples in a mini-batch are all that a client has, and take no more memory than that."""
    problem, shards = make(kind), ragged_shards(BATCH)
    common: dict[str, Any] = {"optimiser": Optimiser(lr=0.05, momentum=0.5), "device": torch.device("cpu")}
    whole = max(map(len, shards))
    start = start_rows(kind, Layout(problem.start_model(0)))
    expected = SerialTrainer(problem, shards, batch_size=whole, **common).train(CLIENTS, start, epochs=2)
    serial = SerialTrainer(problem, shards, batch_size=batch_size, **common)
    batched = BatchedTrainer(problem, shards, batch_size=batch_size, **common)
    assert torch.equal(serial.train(CLIENTS, start, epochs=2), expected)
    torch.testing.assert_close(batched.train(CLIENTS, start, epochs=2), expected, rtol=1e-9, atol=1e-9)


def test_small_clients_are_not_padded_to_the_size_of_a_large_one() -> None:
    sizes = np.array([100, *[2] * 40, *[5] * 4])
    shards = np.split(np.arange(200), np.cumsum(sizes)[:-1])
    common: dict[str, Any] = {"batch_size": 10**8, "optimiser": Optimiser(lr=0.05), "device": torch.device("cpu")}
    problem = make("network")
    batched, serial = BatchedTrainer(problem, shards, **common), SerialTrainer(problem, shards, **common)
    held = sum(x.shape[0] * x.shape[1] for band in batched._bands for x, _, _ in band.steps)
    assert held <= 2 * sizes.sum()
    everyone = np.random.default_rng(0).permutation(len(sizes))
    start = batched.layout.row(problem.start_model(1).state_dict()).repeat(len(sizes), 1)
    slow, fast = (trainer.train(everyone, start, epochs=2) for trainer in (serial, batched))
    torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    alone = batched.alone(7, start[0], epochs=2)
    alone.epoch(0)
    alone.epoch(1)
    torch.testing.assert_close(alone.rows[0], slow[list(everyone).index(7)], rtol=1e-9, atol=1e-9)


def test_a_run_with_an_endless_batch_size_ends() -> None:
    run = simulate("boston", rounds=2, batch_size=100_000_000)
    assert run.summary is not None
    assert run.summary["diverged"] == 0
