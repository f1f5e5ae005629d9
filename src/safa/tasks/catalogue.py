"""The tasks by name, with the settings of the paper's Table II and of Section 2 of its experiments.

A task's data and model are loaded when they are asked for, so that rounds alone are simulated without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

from safa.errors import SafaError, did_you_mean
from safa.tasks.references import reference_of

if TYPE_CHECKING:
    from safa.tasks.problem import Problem

__all__ = ["TASKS", "UNNAMED", "Task", "find_task", "given_task", "load_problem", "problem_of", "task_of"]

UNNAMED = "your own"
"""The task of a run whose problem was given in Python as an object."""
_WRITTEN, _IS_NAME = "package.module:attribute", re.compile(r"[\w.]{1,200}:[\w.]{1,200}")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a task brings along as defaults, and how to get at what is learnt."""

    name: str
    about: str
    samples: int
    """n, over all clients, training and test part together."""
    clients: int
    rounds: int
    epochs: int
    batch_size: int
    lr: float | Literal["auto"]
    round_limit_s: float
    speed_floor: float
    """The slowest speed that was let into the fleet, in mini-batches per second."""
    metrics: Mapping[str, str] = field(default_factory=lambda: {"accuracy": "higher"})
    """The metrics of its problem, the main one first: "higher" or "lower", whichever is better."""
    sizes: Sequence[int] = ()
    """How many training samples each client holds, where the data come in such shards."""
    load: Callable[[], Problem]
    """Reads the data, and downloads them where they are not there yet."""


def _boston() -> Problem:
    from safa.tasks.boston import load

    return load()


def _mnist() -> Problem:
    from safa.tasks.mnist import load

    return load()


def _kdd99() -> Problem:
    from safa.tasks.kdd99 import load

    return load()


def _digits() -> Problem:
    from safa.tasks.digits import load

    return load()


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="boston",
            about="linear regression on the Boston housing data (the paper's Task 1)",
            samples=506,
            clients=5,
            rounds=100,
            epochs=3,
            batch_size=5,
            lr=1e-4,
            round_limit_s=830.0,
            speed_floor=0.05,
            load=_boston,
        ),
        Task(
            name="mnist",
            about="a small convolutional network on handwritten digits (Task 2)",
            samples=70_000,
            clients=100,
            rounds=50,
            epochs=5,
            batch_size=40,
            lr=1e-3,
            round_limit_s=5600.0,
            speed_floor=0.016,
            load=_mnist,
        ),
        Task(
            name="kdd99",
            about="a linear support vector machine on the KDD Cup 1999 intrusion data (Task 3)",
            samples=186_480,
            clients=500,
            rounds=100,
            epochs=5,
            batch_size=100,
            lr=1e-2,
            round_limit_s=1620.0,
            speed_floor=0.012,
            load=_kdd99,
        ),
        Task(
            name="digits",
            about="a tiny convolutional network on 8x8 handwritten digits, for quick trials without a download",
            samples=1797,
            clients=20,
            rounds=50,
            epochs=2,
            batch_size=20,
            lr=0.3,
            round_limit_s=420.0,
            speed_floor=0.03,
            load=_digits,
        ),
    )
}


def find_task(name: str) -> Task:
    """The task of that name, or a task made of the caller's own problem, `package.module:attribute`."""
    if ":" in name:
        return _own_task(name)
    if name not in TASKS:
        close = did_you_mean(name, TASKS)
        own = "or your own as package.module:name"
        raise SafaError(f"there is no task {name!r}{close}; there are {', '.join(TASKS)}, {own}")
    return TASKS[name]


@cache
def _own_task(reference: str) -> Task:
    """A task around a problem that somebody brought."""
    from safa.tasks.own import find_problem

    return task_of(find_problem(reference), reference)


def given_task(given: str | Problem | Callable[[], Problem]) -> Task:
    """The task that was given in Python: a name, a problem, or a function that makes one.

    A function that another process can import gives its task its name, `package.module:function`.
    """
    if isinstance(given, str):
        return find_task(given)
    return task_of(_problem(given), UNNAMED if not callable(given) else _reference(given))


def _reference(function: Callable[[], Problem]) -> str:
    try:
        return reference_of(function)
    except SafaError:
        return UNNAMED


def _problem(given: Problem | Callable[[], Problem]) -> Problem:
    from safa.tasks.own import make_problem

    return make_problem(given, getattr(given, "__qualname__", "what is given as a problem"))


def task_of(problem: Problem, name: str) -> Task:
    """A task around a problem, with defaults that suit nothing in particular."""
    sizes = [len(shard) for shard in problem.shards or ()]
    return Task(
        name=name,
        about=f"the problem {name}",
        samples=len(problem.train[0]) + len(problem.test[0]),
        clients=len(sizes) or 10,
        rounds=20,
        epochs=1,
        batch_size=32,
        lr="auto",
        round_limit_s=math.inf,
        speed_floor=0.05,
        metrics=problem.directions,
        sizes=sizes,
        load=lambda: problem,
    )


@cache
def load_problem(task: str) -> Problem:
    """A task's problem; a sweep reads the data once."""
    return find_task(task).load()


def problem_of(task: str, given: str | Problem | Callable[[], Problem] | None, *, how: Callable[[str], str]) -> Problem:
    """The problem of a run that was written earlier, of this task: one that is built in, or the one that is given.

    Nothing is imported because a run's folder names it: a task that is not built in has to be given. `how` says what to
    type for a task of that name.
    """
    if given is not None and not isinstance(given, str):
        return _problem(given)
    if given is None and task in TASKS:
        return load_problem(task)
    if given is None:
        if task == UNNAMED:
            raise SafaError(f"this run is of a problem that was given in Python; name it: {how(_WRITTEN)}")
        if not _IS_NAME.fullmatch(task):
            raise SafaError(f"the settings of this run name no task: {task[:60]!r}")
        raise SafaError(f"the task of this run, {task}, is not built in; if you trust it, name it: {how(task)}")
    if given != task and (task != UNNAMED or given in TASKS):
        raise SafaError(f"the task of this run is {task!r}, not {given!r}")
    return load_problem(given)
