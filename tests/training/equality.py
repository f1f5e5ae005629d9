"""The trainers against the serial one, for models of many kinds, in single and double precision.

    python -m tests.training.equality [--device cpu|cuda]

prints lines for every model with the largest difference of any number of any update, and ends with 1 if one is too
large. Needs numpy and torch alone; the tests run the same comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from safa.bench.models import MODELS
from safa.tasks.problem import Problem
from safa.training import Attempt, BatchedTrainer, Optimiser, SerialTrainer, torch_threads
from safa.training.layout import Layout
from safa.training.processes import ProcessesTrainer, can_fork
from safa.training.threaded import ThreadsTrainer
from tests.training.problems import hits, ragged_shards

SAMPLES, WORDS, LENGTH, CLASSES, IGNORED = 200, 30, 6, 3, -100
BATCH, CLIENTS = 8, np.array([5, 0, 3, 9, 1, 6])
WAYS: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.5, "weight_decay": 0.01},
    "shuffled, nesterov, clipped": {"shuffle": True, "momentum": 0.5, "nesterov": True, "clip": 1.0},
}
"""How the clients train."""
CLOSE = {torch.float32: 1e-6, torch.float64: 1e-9}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.5},
    "adamw": {"kind": "adamw", "lr": 0.001, "weight_decay": 0.01},
    "fedprox": {"lr": 0.05, "proximal": 0.1},
}
"""How the clients of the seven models train."""
HELD = np.split(np.arange(14), [6, 10])
"""Which samples they hold."""
GRADIENT = 1e-4
"""Smaller ones may be off by a thousandth in single precision, and 0.001 is AdamW's learning rate here."""


# -- models ----------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Words go through an embedding and a body; the mean over the words is classified."""

    def __init__(self, body: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, 8), body, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.body(self.words(x))
        output: Tensor = self.head((found[0] if isinstance(found, tuple) else found).mean(dim=1))
        return output


class Tagger(Classifier):
    """Every word is classified: [B, classes, words]."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.body(self.words(x)))
        return output.transpose(1, 2)


class Positions(nn.Module):
    """Buffers that never change."""

    places: Tensor
    shown: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.sin(torch.arange(LENGTH * 8.0)).view(LENGTH, 8), persistent=False)
        self.register_buffer("shown", torch.arange(LENGTH) < LENGTH - 1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.places).masked_fill(~self.shown[:, None], 0.0)


class Convolution(nn.Module):
    """Along the words."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.filters(x.transpose(1, 2))
        return output.relu().transpose(1, 2)


class Tied(nn.Module):
    """One matrix in two places, and one parameter that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.two(torch.tanh(self.one(x)))
        return output


class Branch(nn.Module):
    """Asks for the value of a tensor, which nothing that works on many clients at once can answer."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else 2 * x


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # in the old style, which torch.func does not take
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return 2 * slopes[0]


class Foreign(nn.Module):
    """A gradient of its own, which torch.func cannot see through."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Doubled.apply(x)  # type: ignore[no-untyped-call]
        return output


def frozen() -> nn.Module:
    """A model whose first layer is not to be trained."""
    model = Classifier(nn.Linear(8, 8))
    model.words.requires_grad_(False)
    return model


def switched_off() -> nn.Module:
    """Dropout that is there, and in evaluation mode."""
    model = Classifier(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    model.body.eval()
    return model


def images(*layers: nn.Module) -> nn.Module:
    """A network on images of 4 channels and 6 x 6 pixels."""
    body = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(body, nn.Linear(body(torch.zeros(2, 4, 6, 6)).shape[1], CLASSES))


def network(*layers: nn.Module) -> nn.Module:
    """A network on 7 numbers."""
    return nn.Sequential(nn.Linear(7, 9), *layers, nn.Linear(9, CLASSES))


def transformer(**given: Any) -> nn.Module:
    """One layer of an encoder."""
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **{"dropout": 0.0} | given)


# -- losses ----------------------------------------------------------------------------------------------------------


def smoothed(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples, written by hand."""
    found = functional.log_softmax(output, dim=1)
    return -(0.9 * found.gather(1, target[:, None])[:, 0] + 0.1 * found.mean(dim=1)).mean()


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """Some classes count more: no mean over samples."""
    return functional.cross_entropy(output, target, weight=torch.tensor([1.0, 5.0, 0.2]).to(output))


def summed(output: Tensor, target: Tensor) -> Tensor:
    """A sum over samples."""
    return functional.cross_entropy(output, target, reduction="sum") / 10


def root(output: Tensor, target: Tensor) -> Tensor:
    """The root of a mean."""
    return functional.cross_entropy(output, target).sqrt()


@dataclass(frozen=True)
class Case:
    """A model, what goes into it, and its loss."""

    model: Callable[[], nn.Module]
    inputs: str = "words"
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    tags: bool = False
    """Whether there is a target for every word, some of which are to be ignored."""
    batched: bool = True
    """Whether torch can work on many clients at once (on a CPU)."""
    whole: bool = False
    """Whether batches must not be padded."""


CASES: dict[str, Case] = {
    "embedding": Case(lambda: Classifier(nn.Tanh())),
    "lstm": Case(lambda: Classifier(nn.LSTM(8, 8, batch_first=True))),
    "gru": Case(lambda: Classifier(nn.GRU(8, 8, batch_first=True))),
    "transformer": Case(lambda: Classifier(transformer())),
    "transformer with positions": Case(lambda: Classifier(nn.Sequential(Positions(), transformer(norm_first=True)))),
    "conv1d": Case(lambda: Classifier(Convolution())),
    "conv2d": Case(lambda: images(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()), "images"),
    "conv2d with groups": Case(lambda: images(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU()), "images"),
    "batch norm": Case(lambda: network(nn.BatchNorm1d(9), nn.ReLU()), "numbers", whole=True),
    "batch norm in 2d": Case(lambda: images(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), "images", whole=True),
    "batch norm without memory": Case(
        lambda: network(nn.BatchNorm1d(9, track_running_stats=False)), "numbers", whole=True
    ),
    "layer norm": Case(lambda: network(nn.LayerNorm(9), nn.GELU()), "numbers"),
    "dropout of 0": Case(lambda: network(nn.ReLU(), nn.Dropout(0.0)), "numbers"),
    "dropout in evaluation mode": Case(switched_off),
    "custom loss": Case(lambda: network(nn.ReLU()), "numbers", smoothed),
    "class weights": Case(lambda: network(nn.ReLU()), "numbers", weighted, whole=True),
    "sum as loss": Case(lambda: network(nn.ReLU()), "numbers", summed, whole=True),
    "root as loss": Case(lambda: network(nn.ReLU()), "numbers", root, whole=True),
    "ignored targets": Case(lambda: Tagger(nn.Tanh()), tags=True, whole=True),
    "tied weights": Case(lambda: Classifier(Tied())),
    "frozen layer": Case(frozen),
    "branch": Case(lambda: Classifier(Branch()), batched=False),
    "foreign gradient": Case(lambda: Classifier(Foreign()), batched=False),
}


# -- the comparison --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Make models and data in this precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def problem_of(case: Case, dtype: torch.dtype) -> Problem:
    """The problem of a case, with random data that are the same every time."""
    generator = torch.Generator().manual_seed(7)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
    numbers = torch.randn(SAMPLES, 7, generator=generator, dtype=dtype)
    pixels = torch.randn(SAMPLES, 4, 6, 6, generator=generator, dtype=dtype)
    inputs = {"words": words, "numbers": numbers, "images": pixels}[case.inputs]
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    if case.tags:
        lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=generator)
        targets = torch.where(torch.arange(LENGTH) < lengths, words % CLASSES, IGNORED)

    def model() -> nn.Module:
        with precision(dtype):
            return case.model()

    test = inputs[:50], targets[:50]
    return Problem(model=model, loss=case.loss, metrics={"accuracy": hits}, train=(inputs, targets), test=test)


def compare(
    case: Case, dtype: torch.dtype, device: torch.device, *, shuffle: bool = False, **optimiser: Any
) -> tuple[float, BatchedTrainer, SerialTrainer]:
    """The largest difference between what the trainers make of some clients, one of them in pieces, too."""
    problem, shards = problem_of(case, dtype), ragged_shards(BATCH)
    common: dict[str, Any] = {"batch_size": BATCH, "optimiser": Optimiser(lr=0.05, **optimiser), "device": device}
    common["shuffle"] = shuffle
    serial, batched = SerialTrainer(problem, shards, **common), BatchedTrainer(problem, shards, **common)
    start = torch.stack([row_of(problem, seed, serial.layout) for seed in range(len(CLIENTS))]).to(device)
    with torch_threads(2):
        threads = ThreadsTrainer(problem, shards, **common)
    slow, fast, beside = (trainer.train(CLIENTS, start, epochs=2) for trainer in (serial, batched, threads))
    moved = (slow - start)[:, : serial.layout.trained].abs().amax(dim=1)
    assert float(moved.min()) > 1e-3, "somebody has learnt nothing"
    attempt = Attempt(batched, start[0], int(CLIENTS[0]), epochs=2)
    attempt.epoch()
    again = Attempt(batched, start[0], int(CLIENTS[0]), epochs=2)
    again.restore(attempt.state())
    again.epoch()
    return float(torch.cat([fast - slow, beside - slow, (again.row - slow[0])[None]]).abs().max()), batched, serial


def row_of(problem: Problem, seed: int, layout: Layout) -> Tensor:
    """A start model as a row."""
    module = problem.start_model(seed)
    return layout.row(dict(module.named_parameters()) | dict(module.named_buffers()))


@dataclass(frozen=True)
class Small:
    """One of the seven models with a few samples for three clients, who train in one of the usual ways."""

    name: str
    optimiser: str
    dtype: torch.dtype

    def differences(self, device: torch.device) -> dict[str, float]:
        """The largest difference to the serial trainer, by trainer."""
        serial, batched = (self._trainer(kind, device) for kind in (SerialTrainer, BatchedTrainer))
        with torch_threads(2):
            kinds = [ThreadsTrainer, *([ProcessesTrainer] if can_fork(device) else [])]
            others = batched, *(self._trainer(kind, device) for kind in kinds)
        problem = self._problem(self.dtype)
        start = torch.stack([row_of(problem, 1 + seed, serial.layout) for seed in range(len(HELD))]).to(device)
        slow, *found = (trainer.train(np.arange(len(HELD)), start, epochs=1) for trainer in (serial, *others))
        assert float((slow - start).abs().amax(dim=1).min()) > 1e-3, "somebody has learnt nothing"
        compared = self._compared(start)
        names = [type(trainer).__name__ for trainer in others]
        return {name: float((rows - slow)[compared].abs().max()) for name, rows in zip(names, found, strict=True)}

    def _trainer(self, kind: Callable[..., Any], device: torch.device) -> Any:
        optimiser = Optimiser(**OPTIMISERS[self.optimiser])
        return kind(self._problem(self.dtype), HELD, batch_size=4, optimiser=optimiser, device=device)

    def _problem(self, dtype: torch.dtype) -> Problem:
        def make() -> nn.Module:
            with precision(dtype):
                return MODELS[self.name].make()

        problem, _ = MODELS[self.name].problem(1, sum(map(len, HELD)))
        inputs, targets = problem.train
        data = inputs.to(dtype) if inputs.is_floating_point() else inputs, targets
        return replace(problem, model=make, train=data, test=data)

    def _compared(self, start: Tensor) -> Tensor:
        """Which numbers are compared: all, but with AdamW in single precision those with a gradient to speak of.

        AdamW divides a gradient by its own size, and what it makes of one that is mere rounding, such as that of the
        bias of an attention's keys, is of the size of the learning rate.
        """
        if self.optimiser != "adamw" or self.dtype != torch.float32:
            return torch.ones_like(start, dtype=torch.bool)
        exact = SerialTrainer(
            self._problem(torch.float64), HELD, batch_size=4, optimiser=Optimiser(lr=1.0), device=start.device
        )
        gradients = exact.train(np.arange(len(HELD)), start.double(), steps=np.ones(len(HELD), np.int64)) - start
        return gradients.abs() > GRADIENT


def main() -> int:
    """Print the comparison; the exit code is 1 if something differs by too much."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(f"torch {torch.__version__} on {device}")
    wrong = 0
    for (name, case), (dtype, close), (way, given) in itertools.product(CASES.items(), CLOSE.items(), WAYS.items()):
        apart, batched, _ = compare(case, dtype, device, **given)
        how = "one by one" if batched.note else "side by side"
        is_wrong = not apart <= close
        print(f"{'NO ' if is_wrong else 'ok '} {apart:8.1e} {str(dtype)[6:]:8} {name}: {how}, {way}", flush=True)
        wrong += is_wrong
    for small in itertools.starmap(Small, itertools.product(MODELS, OPTIMISERS, CLOSE)):
        for trainer, apart in small.differences(device).items():
            is_wrong = not apart <= CLOSE[small.dtype]
            words = f"{str(small.dtype)[6:]:8} {small.name}: {trainer}, {small.optimiser}"
            print(f"{'NO ' if is_wrong else 'ok '} {apart:8.1e} {words}", flush=True)
            wrong += is_wrong
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
