"""How far an honest update moves the model, before any client has shown it: the server trains a little itself.

Screening compares an update with what other clients have sent. In the beginning nobody has sent anything, so the server
does what a client would do: it trains from w(0) on a part of its own test data, with the clients' settings. How far
that moves the model, carried forward to as many steps as a client takes, is used in place of the median of the
clients' norms. On the built-in tasks this was between 0.6 and 9 times what clients come to, for one to sixty epochs
(mnist: to ten); `tests/deploy/test_reference.py` holds it to the bounds of screening. The trained model is discarded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from safa.runs.settings import Settings
from safa.tasks.problem import Problem
from safa.training.auto import for_one_client
from safa.training.setup import find_device, make_optimiser, make_trainer, memory_for

__all__ = ["Reference", "reference", "steps_of"]

_MOST_STEPS = 50


@dataclass(frozen=True)
class Reference:
    """The norm of the delta of so many mini-batch steps from w(0)."""

    norm: float
    steps: int

    def for_steps(self, steps: int) -> float:
        """The norm that so many steps come to at most, if each goes as far as these did."""
        return self.norm * max(1.0, steps / self.steps)


def steps_of(size: float, settings: Settings) -> int:
    """How many mini-batch steps a client with n_k samples takes for one update."""
    return settings.local_steps or int(-(-size // settings.batch_size)) * settings.epochs


def reference(settings: Settings, problem: Problem) -> Reference:
    """Train from w(0) on test samples spread over the whole test set, in about `_MOST_STEPS` steps at most."""
    known = len(problem.test[0])
    steps, epochs = min(settings.local_steps, _MOST_STEPS), min(settings.epochs, _MOST_STEPS)
    count = min(known, settings.batch_size * (steps or max(1, _MOST_STEPS // settings.epochs)))
    shard = np.linspace(0, known - 1, count).astype(np.int64)
    device = find_device(settings.device)
    trainer = make_trainer(
        for_one_client(problem),
        replace(problem, train=problem.test),
        [shard],
        batch_size=settings.batch_size,
        optimiser=make_optimiser(settings),
        device=device,
        memory_mb=memory_for(settings, device),
    )
    module = problem.start_model(settings.seed)
    start = trainer.layout.row(dict(module.named_parameters()) | dict(module.named_buffers()))
    start = start.to(device)
    amount: dict[str, Any] = {"steps": np.array([steps])} if steps else {"epochs": epochs}
    trained = trainer.train(np.zeros(1, dtype=np.int64), start.expand(1, -1), **amount)[0]
    norm = float(torch.linalg.vector_norm(trained.double() - start.double()))
    return Reference(norm, steps or -(-count // settings.batch_size) * epochs)
