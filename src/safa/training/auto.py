"""`trainer = auto`: the trainer that is fastest for a model here, found by a short measurement that is remembered.

On a GPU that is the batched one, which was 30 times faster and more for every model that was tried. On a CPU, a few
clients of the run make a few steps with each trainer, in turns. What they took is kept under a name that says all that
it depends on: the model, its data and loss, how the clients train, the machine, torch and its threads. What was
measured while the machine was busy is measured again when it is not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import threading
import time
from dataclasses import replace
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.cache import cached_arrays
from safa.runs.settings import Settings
from safa.tasks.problem import Problem
from safa.training.batched import BatchedTrainer
from safa.training.batches import Ids, Shards
from safa.training.processes import can_fork, is_beside_grpc
from safa.training.setup import find_device, trainer_of
from safa.training.threads import torch_threads
from safa.training.trainer import Amount, Trainer

__all__ = ["choose_trainer", "for_one_client", "with_trainer"]

_BATCHES = 2  # of a client in an epoch that is measured
_MOST_CLIENTS, _NUMBERS = 256, 2_000_000  # clients that are measured on a CPU, and numbers in all of their models
_ROUNDS, _MOST_ROUNDS = 4, 16  # the most where the two fastest are close to each other
_CLOSE = 1.2  # times the fastest
_LEAST_S, _MOST_S = 0.03, 2.0  # how long the fastest is measured in a round, and after how much no further one is begun
_HOPELESS, _SHORT_S = 3.0, 0.25  # times slower than the fastest; measured all the same where that takes no longer
_LR = 1e-4
_BUSY = "busy"
_LOAD = 0.75  # processes per core that make a machine busy


def with_trainer(settings: Settings, problem: Problem, shards: Shards) -> tuple[Settings, str]:
    """Settings that name a trainer, and how it was chosen, where it had to be measured."""
    if settings.trainer != "auto":
        return settings, ""
    kind, words = choose_trainer(settings, problem, shards, find_device(settings.device))
    return replace(settings, trainer=kind), words


def for_one_client(problem: Problem) -> str:
    """The trainer for a single client: where there is nobody to train beside it, the plain one is the fastest."""
    return "serial" if problem.kernel is None else "batched"


def choose_trainer(settings: Settings, problem: Problem, shards: Shards, device: torch.device) -> tuple[str, str]:
    """The fastest trainer for these clients, and a sentence about it; empty where nothing had to be measured."""
    if problem.kernel is not None or device.type != "cpu" or not any(len(shard) for shard in shards):
        return "batched", ""
    with torch_threads(settings.threads):
        chosen = _some(shards, _measured_clients(problem), settings.batch_size)
        name = f"trainer-{_digest(settings, problem, chosen, device)}"
        busy = _is_busy()
        found = cached_arrays(
            name,
            lambda: _measured(settings, problem, chosen, device) | {_BUSY: np.array(busy)},
            is_good=lambda kept: _BUSY in kept and (busy or not kept[_BUSY]),
        )
    spent = {kind: float(seconds) for kind, seconds in found.items() if kind != _BUSY}
    kind = min(spent, key=lambda kind: spent[kind])
    return kind, _sentence(kind, spent)


def _kinds(device: torch.device) -> list[str]:
    """The trainers that are measured."""
    # Processes were as fast as threads or faster on 2 cores already; 16 of them are made in 0.15 s. One gains nothing.
    # A thread that computes while a process is forked can leave a lock behind in it for ever: not beside other threads.
    is_alone = threading.active_count() == 1 and not is_beside_grpc()
    forks = can_fork(device) and is_alone and torch.get_num_threads() > 1
    return ["batched", "processes" if forks else "threads", "serial"]


def _is_busy() -> bool:
    """Whether the cores have other work now, so that what is measured may be wrong."""
    return os.getloadavg()[0] > _LOAD * (os.cpu_count() or 1)


def _measured_clients(problem: Problem) -> int:
    """How many clients are measured on a CPU: the smaller the model, the more of them are worth training together."""
    size = sum(parameter.numel() for parameter in problem.start_model(0).parameters())
    return max(2 * torch.get_num_threads(), min(_MOST_CLIENTS, _NUMBERS // size))


def _sentence(kind: str, spent: dict[str, float]) -> str:
    others = [f"{other} {spent[other] * 1e3:.3g}" for other in spent if other != kind]
    found = (
        f"trainer {kind}, measured as the fastest for this model here: {spent[kind] * 1e3:.3g} ms a step of a client"
    )
    return ", ".join([found, *others, *([] if "batched" in spent else ["and torch cannot batch it"])])


def _some(shards: Shards, count: int, batch_size: int) -> list[Ids]:
    """The first mini-batches of so many clients, from the one with the most samples to that with the fewest."""
    order = sorted((shard for shard in shards if len(shard)), key=len, reverse=True)
    places = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).astype(np.int64))
    return [np.asarray(order[place][: _BATCHES * batch_size]) for place in places]


def _digest(settings: Settings, problem: Problem, shards: Shards, device: torch.device) -> str:
    """A checksum of everything on which it depends how fast the trainers are."""
    module = problem.start_model(0)
    data = [(list(part.shape[1:]), str(part.dtype)) for part in problem.train]
    model = [(name, list(part.shape), str(part.dtype)) for name, part in module.state_dict().items()]
    loss = getattr(problem.loss, "__qualname__", str(type(problem.loss)))
    s = settings
    how = [s.batch_size, s.optimiser, bool(s.momentum), bool(s.proximal), bool(s.clip), bool(s.weight_decay), s.shuffle]
    where = [device.type, torch.get_num_threads(), torch.__version__, platform.node(), platform.machine()]
    known = [repr(module), model, data, loss, problem.kernel, how, len(shards), where, _kinds(device)]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()[:32]


def _measured(
    settings: Settings, problem: Problem, shards: Shards, device: torch.device
) -> dict[str, NDArray[np.float64]]:
    """Seconds per client and step, by the name of the trainer."""
    with torch.random.fork_rng(devices=[]):
        race = _Race(settings, problem, shards, device)
        begun = time.perf_counter()
        race.warm_up()
        for rounds in range(_MOST_ROUNDS):
            if time.perf_counter() - begun < _MOST_S and (rounds < _ROUNDS or race.is_close()):
                race.round()
    return {kind: np.array(seconds) for kind, seconds in race.spent.items()}


class _Race:
    """Trainers that train the same clients in turns, and the shortest time that a step took each of them."""

    def __init__(self, settings: Settings, problem: Problem, shards: Shards, device: torch.device) -> None:
        of = replace(settings, lr=_LR)
        made = {kind: trainer_of(replace(of, trainer=kind), problem, shards, device) for kind in _kinds(device)}
        self._trainers = {kind: trainer for kind, trainer in made.items() if not _is_one_by_one(trainer)}
        module = problem.start_model(settings.seed)
        row = made["serial"].layout.row(dict(module.named_parameters()) | dict(module.named_buffers()))
        self._start = row.to(device).expand(len(shards), -1)
        self._steps = sum(-(-len(shard) // settings.batch_size) for shard in shards)
        self.spent = dict.fromkeys(self._trainers, math.inf)

    def warm_up(self) -> None:
        """Half of the clients make one step each: for a large model that has to do. The very first does not count.

        Of processes, the first step of each does not.
        """
        some = np.arange(-(-len(self._start) // 2))
        for kind, trainer in self._trainers.items():
            first = some if kind == "processes" else some[:1]
            _seconds(trainer, first, self._start, steps=np.ones_like(first))
            self.spent[kind] = _seconds(trainer, some, self._start, steps=np.ones_like(some)) / len(some)

    def is_close(self) -> bool:
        """Whether a bad moment of one of them may have decided which is the fastest."""
        best, *others = sorted(self.spent.values())
        return bool(others) and others[0] < _CLOSE * best

    def round(self) -> None:
        """Each trains for a moment, unless it is far behind and would take long; of its times, the shortest counts."""
        best = min(self.spent.values())
        epochs = max(1, min(50, round(_LEAST_S / (best * self._steps)))) if best < math.inf else 1
        for kind, trainer in self._trainers.items():
            steps = epochs * self._steps
            if self.spent[kind] <= _HOPELESS * best or self.spent[kind] * steps <= _SHORT_S:
                found = _seconds(trainer, np.arange(len(self._start)), self._start, epochs=epochs)
                self.spent[kind] = min(self.spent[kind], found / steps)


def _is_one_by_one(trainer: Trainer) -> bool:
    return isinstance(trainer, BatchedTrainer) and trainer.note is not None


def _seconds(trainer: Trainer, clients: Ids, start: Tensor, **amount: Unpack[Amount]) -> float:
    """How long these clients train; infinitely, where they cannot: a run with this trainer says why."""
    begun = time.perf_counter()
    try:
        trainer.train(clients, start[: len(clients)], **amount)
    except Exception:
        return math.inf
    return time.perf_counter() - begun
