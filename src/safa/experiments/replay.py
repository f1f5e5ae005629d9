"""Replay: train the model of a run anew, from its records alone.

The records of a run say who trained from which version and what became of it. That is enough to make its model again,
whether the run was simulated or took place on real devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.experiments.simulate import fleet_of
from safa.protocol import build
from safa.runs import Run
from safa.runs.schedule import check_given
from safa.server import Server
from safa.tasks import problem_of

if TYPE_CHECKING:
    from torch import Tensor

    from safa.tasks.problem import Problem

__all__ = ["replay"]

_NEVER = sys.maxsize  # a number of rounds that no run has


def replay(
    run: Run,
    problem: str | Problem | Callable[[], Problem] | None = None,
    shards: Sequence[NDArray[np.int64]] | None = None,
    *,
    schedule: str | Callable[[int], float] | None = None,
    how: Callable[[str], str] = lambda task: f"safa.replay(run, {task!r})",
) -> dict[str, Tensor]:
    """The last global model of a run, trained anew from its records, as a module's state.

    `problem` is needed where the task of the run is not built in: the problem itself, a function that makes it, or its
    name as `package.module:attribute`. So is `schedule` where that of the run is a function. No module is imported
    because the run's settings name it.

    `shards` says by client number which training samples a client holds, where that is not what the run's settings
    say. In a deployment, clients are numbered in the order in which they enrolled; its roster says which part of the
    task's data each of them holds.
    """
    first, ever = _clients(run)
    settings = replace(run.settings, eval_every=_NEVER)
    check_given(settings.schedule, schedule)
    chosen = problem_of(settings.task, problem, how=how)
    _check_model(run, chosen)
    if shards is None and run.roster() is None and first != settings.clients:
        raise SafaError(f"the rounds of this run began with {first} clients, but its settings say {settings.clients}")
    from safa.server.setup import Learning
    from safa.training.auto import for_one_client
    from safa.training.setup import make_shards

    fleet = fleet_of(settings, chosen)
    sizes = np.asarray(fleet.sizes, dtype=np.float64)
    given = _rostered(run, make_shards(settings, chosen, sizes, fleet.speeds)) if shards is None else shards
    if ever > len(given):
        raise SafaError(f"{ever} clients took part in the run, but there is data for {len(given)} only")
    if first != len(sizes):
        sizes = np.array([len(shard) for shard in given[:first]], dtype=np.float64)
    protocol = build(settings.protocol, sizes, settings.values(), settings.protocol_options)
    if settings.trainer == "auto":  # a deployment, whose devices trained each by itself
        settings = replace(settings, trainer=for_one_client(chosen))
    learning = Learning(settings, chosen, protocol, shards=given)
    server = Server(protocol, seed=settings.seed, rounds=settings.rounds, learner=learning.learner)
    for record in run.records():
        try:
            server.commit(record)
        except (KeyError, IndexError) as missing:
            what = "it builds on a model that the rounds before it did not make"
            raise SafaError(f"round {record.round} cannot be replayed: {what}") from missing
    return learning.model()


def _check_model(run: Run, problem: Problem) -> None:
    """Complain about a problem whose model is not that of the run, where the run's is there to be compared."""
    try:
        own = run.model()
    except SafaError:
        return
    model = problem.start_model(0).state_dict()
    if {name: tensor.shape for name, tensor in own.items()} != {name: tensor.shape for name, tensor in model.items()}:
        raise SafaError("the model of the run has other tensors than that of the problem")


def _rostered(run: Run, parts: Sequence[NDArray[np.int64]]) -> Sequence[NDArray[np.int64]]:
    """The parts of a task's data by client number."""
    roster = run.roster()
    if roster is None:
        return parts
    found = []
    for member in roster:
        part = member["details"].get("partition")
        if type(part) is not int or not 0 <= part < len(parts):
            raise SafaError(f"the data of {member['name']} is its own and not here; give the shards to replay with")
        found.append(parts[part])
    return found


def _clients(run: Run) -> tuple[int, int]:
    """How many clients there were before the first round, and how many there ever were."""
    if not run.settings.train:
        raise SafaError("this run only simulated its rounds: it trained nothing that could be replayed")
    first = ever = 0
    for record in run.records():
        if record.round == 1:
            ever = first = record.clients - len(record.joined) + len(record.left)
        ever = max(ever, int(record.joined.max(initial=-1)) + 1)
    if not ever:
        raise SafaError("no client took part in a finished round of this run: it trained nothing")
    return first, ever
