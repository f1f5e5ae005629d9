"""Clients side by side, one torch thread each: the same bytes whatever the number of threads, and errors are heard."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from safa.tasks.problem import Problem
from safa.training import Optimiser, torch_threads
from safa.training.threaded import RowTrainer, ThreadsTrainer
from safa.training.threads import side_by_side
from tests.training.equality import CASES, problem_of, row_of
from tests.training.problems import make, ragged_shards

BATCH = 8


def trainer_of(problem: Problem, threads: int, **given: Any) -> ThreadsTrainer:
    common: dict[str, Any] = {"optimiser": Optimiser(lr=0.05, momentum=0.5), "device": torch.device("cpu")}
    with torch_threads(threads):
        return ThreadsTrainer(problem, ragged_shards(BATCH), batch_size=BATCH, **common | given)


def updates(problem: Problem, threads: int, **given: Any) -> Tensor:
    trainer = trainer_of(problem, threads, **given)
    start = torch.stack([row_of(problem, seed, trainer.layout) for seed in range(10)])
    return trainer.train(np.arange(10), start, epochs=2)


def at_work() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("safa-trainer")]


@pytest.mark.parametrize("name", ["conv2d", "batch norm", "lstm", "tied weights"])
def test_the_number_of_threads_does_not_change_a_bit(name: str) -> None:
    problem = problem_of(CASES[name], torch.float32)
    one, *more = (updates(problem, threads, shuffle=True) for threads in (1, 2, 5))
    assert all(torch.equal(one, other) for other in more)
    assert at_work() == []


class Counting(nn.Linear):
    """Writes down how many threads torch computes with."""

    seen: set[tuple[int, bool]] = set()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.seen.add((torch.get_num_threads(), threading.current_thread() is threading.main_thread()))
        return super().forward(input)


def test_torch_has_one_thread_in_each_and_as_many_as_before_afterwards() -> None:
    problem = replace(make("network"), model=lambda: Counting(7, 3).double())
    with torch_threads(3):
        trainer = trainer_of(problem, 3)
        Counting.seen.clear()
        trainer.train(np.arange(10), torch.zeros(10, trainer.layout.size, dtype=torch.float64), epochs=1)
        assert Counting.seen == {(1, False)}
        assert torch.get_num_threads() == 3


class Unlucky(nn.Linear):
    """Cannot compute one sample."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if float(input[0, 0]) == UNLUCKY:
            raise ArithmeticError("no thirteenth sample here")
        return super().forward(input)


UNLUCKY = 13.0


def test_the_error_of_a_client_is_raised_and_no_thread_is_left() -> None:
    problem = make("network")
    inputs, targets = problem.train
    inputs = inputs.clone()
    inputs[ragged_shards(BATCH)[4][0], 0] = UNLUCKY
    problem = replace(problem, model=lambda: Unlucky(7, 3).double(), train=(inputs, targets))
    with pytest.raises(ArithmeticError, match="thirteenth"):
        updates(problem, 2)
    assert at_work() == []


def test_a_client_that_works_stops_when_it_is_told_to() -> None:
    halted = threading.Event()
    how: dict[str, Any] = {"batch_size": BATCH, "optimiser": Optimiser(lr=0.1), "device": torch.device("cpu")}
    trainer = RowTrainer(make("network"), ragged_shards(BATCH), is_halted=halted.is_set, **how)
    halted.set()
    with pytest.raises(CancelledError):
        trainer.train(np.array([0]), torch.zeros(1, trainer.layout.size, dtype=torch.float64), epochs=1)


def test_an_interrupt_ends_the_work_and_leaves_the_rest_undone() -> None:
    stopped, begun = threading.Event(), []

    def work(worker: str, item: int) -> None:
        begun.append(item)
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped.wait(30)

    with pytest.raises(KeyboardInterrupt):
        side_by_side(["one"], range(5), work, stopped.set)
    assert begun == [0]
    assert at_work() == []


def test_its_threads_are_gone_for_the_system_too_so_that_the_process_can_be_forked() -> None:
    seen: set[int] = set()
    for _ in range(20):
        side_by_side(range(4), range(8), lambda worker, item: seen.add(threading.get_native_id()), lambda: None)
        assert not [task for task in seen if os.path.exists(f"/proc/self/task/{task}")]
    assert seen


class Viewing(nn.Module):
    """A convolution whose result is viewed as a vector, which needs the usual order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.head = nn.Conv2d(4, 6, 3), nn.Linear(96, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.filters(x).relu().view(len(x), -1))
        return output


def test_a_model_that_views_the_result_of_a_convolution_is_trained_too() -> None:
    problem = problem_of(replace(CASES["conv2d"], model=Viewing), torch.float64)
    found = updates(problem, 2)
    assert torch.isfinite(found).all()
    assert not trainer_of(problem, 2)._workers[0]._innermost
    assert trainer_of(problem_of(CASES["conv2d"], torch.float64), 2)._workers[0]._innermost
