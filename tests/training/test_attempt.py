"""One client's training in pieces against the same in one go, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from safa.errors import SafaError
from safa.training import Attempt, BatchedTrainer, Optimiser
from tests.training.problems import make, ragged_shards

BATCH, CLIENT, EPOCHS = 8, 4, 3
KINDS = ["regression", "svm", "network", "batch norm"]
OPTIMISERS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.01},
    {"proximal": 0.5},
    {"momentum": 0.9, "weight_decay": 0.01, "proximal": 0.5},
    {"kind": "adam", "weight_decay": 0.01, "proximal": 0.5},
]


def trainer_of(problem: str, /, **optimiser: Any) -> BatchedTrainer:
    return BatchedTrainer(
        make(problem),
        ragged_shards(BATCH),
        batch_size=BATCH,
        optimiser=Optimiser(lr=0.05, **optimiser),
        device=torch.device("cpu"),
    )


def start_of(kind: str, trainer: BatchedTrainer) -> Tensor:
    return trainer.layout.row(make(kind).start_model(3).state_dict())


@pytest.mark.parametrize("optimiser", OPTIMISERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_training_in_pieces_is_the_same_as_in_one_go(kind: str, optimiser: dict[str, Any]) -> None:
    trainer = trainer_of(kind, **optimiser)
    start = start_of(kind, trainer)
    whole = trainer.train(np.array([CLIENT]), start[None], epochs=EPOCHS)[0]
    assert (whole - start)[: trainer.layout.trained].abs().max() > 1e-3
    attempt, kept = Attempt(trainer, start, CLIENT, epochs=EPOCHS), []
    for done in range(EPOCHS):
        assert attempt.done == done
        kept.append(attempt.state())
        attempt.epoch()  # what was kept must not follow
    assert torch.equal(attempt.row, whole)
    for done, state in enumerate(kept):
        again = Attempt(trainer, start, CLIENT, epochs=EPOCHS)
        again.restore(state)
        assert again.done == done
        while again.done < EPOCHS:
            again.epoch()
        assert torch.equal(again.row, whole), done


def test_an_attempt_leaves_its_start_and_its_rows_alone() -> None:
    trainer = trainer_of("network")
    start = start_of("network", trainer)
    before = start.clone()
    attempt = Attempt(trainer, start, epochs=EPOCHS)
    row = attempt.row
    attempt.epoch()
    assert torch.equal(start, before)
    assert torch.equal(row, before)
    assert not torch.equal(attempt.row, before)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    adam = trainer_of("svm", kind="adam")
    other = Attempt(adam, start_of("svm", adam), epochs=EPOCHS)
    other.epoch()
    trainer = trainer_of("svm", momentum=0.9)
    start = start_of("svm", trainer)
    attempt = Attempt(trainer, start, epochs=EPOCHS)
    own = attempt.state()
    for state in (other.state(), {}, own | {"row": own["row"][:-1]}, own | {"row": own["row"].float()}):
        with pytest.raises(SafaError, match="not the state of an attempt with this model and this optimiser"):
            attempt.restore(state)
    assert attempt.done == 0
    assert torch.equal(attempt.row, start)
