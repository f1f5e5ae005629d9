"""The tasks by name, with the settings of the paper's Table II and of Section 2 of its experiments."""

from __future__ import annotations

from dataclasses import dataclass

from safa.errors import SafaError

__all__ = ["TASKS", "Task", "find_task"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a task brings along as defaults."""

    name: str
    about: str
    samples: int
    """n, over all clients, training and test part together."""
    clients: int
    rounds: int
    epochs: int
    batch_size: int
    lr: float
    round_limit_s: float
    speed_floor: float
    """The slowest speed that was let into the fleet, in mini-batches per second."""


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
        ),
    )
}


def find_task(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise SafaError(f"there is no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]
