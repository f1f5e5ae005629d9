"""Every kind of model is trained alike by both trainers; what cannot be batched is found out, and said in one line."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from safa import simulate
from safa.bench.models import MODELS
from safa.errors import SafaError
from safa.tasks.problem import Problem
from safa.training import BatchedTrainer, Optimiser, choice
from tests.training.equality import (
    BATCH,
    CASES,
    CLOSE,
    OPTIMISERS,
    WAYS,
    Case,
    Classifier,
    Small,
    compare,
    network,
    problem_of,
    row_of,
)
from tests.training.problems import make, ragged_shards, squared_hinge

CPU = torch.device("cpu")


def trainer_of(problem: Problem, **given: Any) -> BatchedTrainer:
    common: dict[str, Any] = {"batch_size": BATCH, "optimiser": Optimiser(lr=0.05), "device": CPU}
    return BatchedTrainer(problem, ragged_shards(BATCH), **common | given)


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_batched_equals_serial(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    apart, batched, _ = compare(case, dtype, CPU, **WAYS["momentum"])
    assert apart <= CLOSE[dtype]
    assert (batched.note is None) == case.batched
    assert batched._kernel.needs_whole_batches == case.whole


@pytest.mark.slow
@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_all_trainers_equal_serial_for_the_models_of_the_benchmark(name: str, dtype: torch.dtype) -> None:
    ways = OPTIMISERS if dtype == torch.float32 else ("momentum", "adamw")
    found = {way: Small(name, way, dtype).differences(CPU) for way in ways}
    assert {way: apart for way, apart in found.items() if not max(apart.values()) <= CLOSE[dtype]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_batched_equals_serial_with_shuffled_samples(name: str) -> None:
    apart, _, _ = compare(CASES[name], torch.float64, CPU, **WAYS["shuffled, nesterov, clipped"])
    assert apart <= CLOSE[torch.float64]


def test_batches_are_padded_where_that_changes_nothing() -> None:
    """Batch norm apart, clients of all sizes are trained together."""
    assert not trainer_of(problem_of(CASES["transformer with positions"], torch.float32))._kernel.needs_whole_batches
    assert trainer_of(problem_of(CASES["batch norm"], torch.float32))._kernel.needs_whole_batches


@pytest.mark.slow
def test_a_token_model_learns_in_a_run() -> None:
    problem = problem_of(CASES["embedding"], torch.float32)
    words, _ = problem.train
    targets = words[:, 0] % 3
    easy = replace(problem, train=(words, targets), test=(words[:50], targets[:50]))
    run = simulate(easy, clients=5, rounds=10, epochs=3, batch_size=8, lr=0.5, crash_rate=0.0, fraction=1.0)
    losses = [record.loss for record in run.records() if record.loss is not None]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(("name", "part"), [("branch", "Branch body"), ("foreign gradient", "Foreign body")])
def test_what_cannot_be_batched_is_said_in_one_line(name: str, part: str, caplog: pytest.LogCaptureFixture) -> None:
    choice._tell.cache_clear()
    problem = problem_of(CASES[name], torch.float32)
    with caplog.at_level(logging.WARNING, logger="safa"):
        for _ in range(2):  # as in a sweep
            trainer = trainer_of(problem)
    assert [record.getMessage() for record in caplog.records] == [trainer.note]
    assert trainer.note is not None
    assert f"torch cannot batch this model over clients ({part}: " in trainer.note
    assert trainer.note.endswith("): each client is trained by itself")
    assert "\n" not in trainer.note


@pytest.mark.slow
def test_the_line_is_seen_on_the_terminal() -> None:
    script = (
        "from safa import simulate; from tests.training.equality import CASES, problem_of; import torch\n"
        "p = problem_of(CASES['branch'], torch.float32)\n"
        "for _ in range(2): simulate(p, clients=3, rounds=1)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(done.stderr.splitlines()) == 1
    assert "each client is trained by itself" in done.stderr


def test_dropout_is_batched_and_leaves_the_random_numbers_of_others_alone() -> None:
    case = Case(lambda: Classifier(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))))
    before = torch.get_rng_state()
    trainer = trainer_of(problem_of(case, torch.float32))
    assert torch.equal(torch.get_rng_state(), before)
    assert trainer.note is None
    start = torch.stack([row_of(problem_of(case, torch.float32), 1, trainer.layout)] * 2)
    with torch.random.fork_rng():
        one, two = trainer.train(np.array([1, 1]), start, epochs=1)
    assert not torch.equal(one, two)


def test_dropout_beside_batch_norm_needs_whole_batches() -> None:
    case = Case(lambda: network(nn.BatchNorm1d(9), nn.Dropout(0.5)), "numbers")
    assert trainer_of(problem_of(case, torch.float32))._kernel.needs_whole_batches


def test_a_model_that_fails_on_its_own_data_is_refused_in_a_sentence() -> None:
    problem = replace(problem_of(CASES["custom loss"], torch.float32), model=lambda: nn.Linear(6, 3))
    with pytest.raises(SafaError, match="the model and its loss fail on a batch of the training data: RuntimeError"):
        trainer_of(problem)


def test_a_class_that_is_rare_is_not_overlooked() -> None:
    """Only one sample of two hundred is of a class that counts more, and it is in nobody's first batch."""
    problem = problem_of(CASES["custom loss"], torch.float32)
    inputs, _ = problem.train
    targets = torch.zeros(len(inputs), dtype=torch.int64)
    targets[137] = 2

    def rare(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, weight=torch.tensor([1.0, 1.0, 9.0]).to(output))

    assert trainer_of(replace(problem, train=(inputs, targets), loss=rare))._kernel.needs_whole_batches


# -- kernels that are written out ------------------------------------------------------------------------------------


def doubled(output: Tensor, target: Tensor) -> Tensor:
    return 2 * functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("regression", {"loss": doubled}),
        ("regression", {"loss": squared_hinge}),
        ("svm", {"loss": functional.mse_loss}),
        ("regression", {"kernel": "linear_squared_hinge"}),
        ("svm", {"kernel": "linear_mse"}),
        ("network", {"kernel": "linear_mse"}),
        ("network", {"kernel": "linear_squared_hinge"}),
        ("batch norm", {"kernel": "linear_mse"}),
        ("regression", {"model": lambda: nn.Sequential(nn.Linear(7, 1, bias=False), nn.Flatten(0)).double()}),
        ("regression", {"model": lambda: nn.Sequential(nn.Linear(7, 1), nn.Tanh(), nn.Flatten(0)).double()}),
    ],
)
def test_a_kernel_of_another_model_or_loss_is_refused(kind: str, change: dict[str, Any]) -> None:
    problem = replace(make(kind), **change)
    with pytest.raises(SafaError, match=f"the kernel '{problem.kernel}' does not compute this model and loss"):
        trainer_of(problem)


def test_a_kernel_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SafaError, match="there is no kernel 'qubits'; there is linear_mse, linear_squared_hinge"):
        trainer_of(replace(make("svm"), kernel="qubits"))


def test_a_wrong_kernel_ends_a_run_before_its_first_round() -> None:
    with pytest.raises(SafaError, match="does not compute this model and loss"):
        simulate(replace(make("regression"), kernel="linear_squared_hinge"), clients=3, rounds=1)
