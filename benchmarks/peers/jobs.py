"""The jobs that all frameworks do, and what a runner reports; numpy, torch and safa's models are all that is needed.

A runner is `run_NAME.py JOB [--limit S] [--model FILE]`, where JOB is a job as JSON. It prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

import safa
from safa.bench.models import pfl_cnn
from safa.tasks.kdd99 import loss as squared_hinge
from safa.tasks.mnist import PaperCNN
from safa.tasks.tables import zero_linear

__all__ = ["JOBS", "KINDS", "Job", "Kind", "Rounds", "main"]

State = Mapping[str, Tensor]
_SIGNAL = 0.1  # how far the classes lie from one another, in standard deviations of a feature
_SMALL = 10_000  # parameters of a model whose products are not worth a second thread
_LOOKED_AT = 1000  # samples on which the loss is measured


@dataclass(frozen=True)
class Kind:
    """A model with its loss and the shape of its data."""

    make: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    shape: tuple[int, ...]
    classes: int
    signs: bool = False
    """Whether the targets are -1 and +1."""
    kernel: str | None = None
    """The hand-written gradient that safa has for it."""


KINDS = {
    "paper_cnn": Kind(PaperCNN, nll_loss, (1, 28, 28), 10),
    "svm": Kind(lambda: zero_linear(35), squared_hinge, (35,), 2, signs=True, kernel="linear_squared_hinge"),
    "logistic": Kind(lambda: nn.Linear(10, 2), cross_entropy, (10,), 2),
    "pfl_cnn": Kind(pfl_cnn, cross_entropy, (3, 32, 32), 10),
}
"""The models by name."""


@dataclass(frozen=True)
class Job:
    """FedAvg with clients of equal size that never fail; what is random is drawn from the seed."""

    model: str
    clients: int
    samples: int
    batch_size: int
    epochs: int
    cohort: int
    lr: float
    rounds: int
    """The first, which warms up, included."""
    seed: int = 0

    def use_threads(self) -> None:
        """Have torch compute with as many threads as suit a loop over clients: one where the model is small."""
        if sum(parameter.numel() for parameter in self.kind.make().parameters()) < _SMALL:
            torch.set_num_threads(1)

    @property
    def kind(self) -> Kind:
        """The model, its loss and its data."""
        return KINDS[self.model]

    def data(self) -> tuple[Tensor, Tensor]:
        """Random samples of classes that differ a little: inputs [clients, samples, ...] and targets."""
        generator = torch.Generator().manual_seed(self.seed)
        middles = _SIGNAL * torch.randn(self.kind.classes, *self.kind.shape, generator=generator)
        targets = torch.randint(self.kind.classes, (self.clients, self.samples), generator=generator)
        inputs = torch.randn(self.clients, self.samples, *self.kind.shape, generator=generator)
        for own, target in zip(inputs, targets, strict=True):
            own += middles[target]
        return inputs, (2.0 * targets - 1 if self.kind.signs else targets)

    def start_model(self) -> nn.Module:
        """The model that everybody starts from."""
        torch.manual_seed(self.seed)
        return self.kind.make()

    def loss(self, state: State) -> float:
        """The loss of a global model on samples of the first clients, without dropout."""
        inputs, targets = (part.flatten(0, 1)[:_LOOKED_AT] for part in self.data())
        model = self.start_model()
        model.load_state_dict(state)
        with torch.no_grad():
            return float(self.kind.loss(model.eval()(inputs), targets))

    def smaller(self) -> Job:
        """The same with a tenth of the clients, for a framework that does not get through in time."""
        return replace(self, clients=max(1, self.clients // 10), cohort=max(1, self.cohort // 10))


JOBS = {
    "cnn": Job("paper_cnn", clients=100, samples=200, batch_size=40, epochs=1, cohort=100, lr=0.02, rounds=6),
    "svm": Job("svm", clients=500, samples=373, batch_size=100, epochs=5, cohort=500, lr=0.01, rounds=6),
    "tiny": Job("logistic", clients=10_000, samples=20, batch_size=20, epochs=1, cohort=10_000, lr=0.1, rounds=4),
    "pfl": Job("pfl_cnn", clients=1000, samples=50, batch_size=10, epochs=1, cohort=50, lr=0.1, rounds=11),
}
"""The jobs of the comparison by name."""


class Rounds:
    """When rounds ended."""

    def __init__(self, limit_s: float) -> None:
        self.begun = time.perf_counter()
        self.limit_s = limit_s
        self.ends: list[float] = []
        self.how = ""
        """How the clients of a round are computed, where it is not a loop in one process."""

    def done(self) -> bool:
        """Note the end of a round; whether time is up and a round besides the first has been measured."""
        self.ends.append(time.perf_counter())
        return len(self.ends) > 1 and self.ends[-1] - self.begun > self.limit_s

    def report(self, job: Job) -> dict[str, Any]:
        """Seconds per round after the first, and the rest that follows from them."""
        spent = np.diff(self.ends).tolist()
        median = statistics.median(spent)
        return {
            "how": self.how or f"{torch.get_num_threads()} torch thread(s)",
            "rounds": len(self.ends),
            "start_s": self.ends[0] - self.begun,
            "round_s": spent,
            "median_s": median,
            "updates_per_s": job.cohort / median,
        }


def flat(state: State) -> np.ndarray:
    """A model as one row."""
    return torch.cat([tensor.detach().cpu().flatten() for tensor in state.values()]).numpy()


def main(run: Callable[[Job, Rounds], State], *packages: str) -> None:
    """Do the job of the command line; `run` returns the last global model. Prints what was measured as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=json.loads)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no round begins")
    parser.add_argument("--model", type=Path, help="where the last global model is written, as .npy")
    arguments = parser.parse_args()
    job, rounds = Job(**arguments.job), Rounds(arguments.limit)
    state = run(job, rounds)
    if int(os.environ.get("LOCAL_RANK", "0")):
        return  # one of several processes reports
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if arguments.model:
        np.save(arguments.model, flat(state))
    found = {
        "memory_mb": memory_mb,
        "loss_before": job.loss(job.start_model().state_dict()),
        "loss_after": job.loss(state),
        "moved": float(np.linalg.norm(flat(state) - flat(job.start_model().state_dict()))),
        "versions": {name: version(name) for name in (*packages, "torch", "numpy")} | {"safa": safa.__version__},
    }
    print(json.dumps({"job": asdict(job)} | rounds.report(job) | found), flush=True)
