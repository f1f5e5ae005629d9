"""Clients side by side in processes: the bytes of the threads, whatever becomes of a process, and none is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from safa import simulate
from safa.errors import SafaError
from safa.tasks.problem import Problem
from safa.training import Optimiser, torch_threads
from safa.training.processes import ProcessesTrainer, can_fork
from safa.training.setup import make_trainer
from safa.training.threaded import ThreadsTrainer
from tests.training.equality import CASES, Case, Classifier, problem_of, row_of
from tests.training.problems import make, ragged_shards

CPU, BATCH, ALL = torch.device("cpu"), 8, np.arange(10)
COMMON: dict[str, Any] = {"batch_size": BATCH, "optimiser": Optimiser(lr=0.05, momentum=0.5), "device": CPU}
BOUND = 60
"""Seconds until something that does not end is given up."""

pytestmark = pytest.mark.skipif(not can_fork(CPU), reason="needs Linux")


def trainer_of(problem: Problem, workers: int = 2, **given: Any) -> ProcessesTrainer:
    with torch_threads(workers):
        return ProcessesTrainer(problem, ragged_shards(BATCH), **COMMON | given)


def start_of(problem: Problem, trainer: ProcessesTrainer) -> Tensor:
    return torch.stack([row_of(problem, seed, trainer.layout) for seed in range(len(ALL))])


def by_threads(problem: Problem, start: Tensor, **amount: Any) -> Tensor:
    with torch_threads(2):
        return ThreadsTrainer(problem, ragged_shards(BATCH), **COMMON).train(ALL, start, **amount)


def pids(trainer: ProcessesTrainer) -> list[int]:
    return [worker.process.pid for worker in trainer._workers]


def is_child(pid: int) -> bool:
    """Whether it is a child of this process, dead or alive."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


# -- the same bytes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv2d", "batch norm", "lstm", "tied weights"])
def test_the_updates_are_those_of_the_threads_with_any_number_of_processes(name: str) -> None:
    problem = problem_of(CASES[name], torch.float32)
    for workers in (1, 2, 3):
        trainer = trainer_of(problem, workers)
        start = start_of(problem, trainer)
        assert torch.equal(trainer.train(ALL, start, epochs=2), by_threads(problem, start, epochs=2))
        assert len(pids(trainer)) == workers


@pytest.mark.parametrize("memory_mb", [1024.0, 0.0])
def test_all_that_a_client_is_told_reaches_it(memory_mb: float) -> None:
    problem = make("network")
    given: dict[str, Any] = {"shuffle": True, "seed": 4}
    trainer = trainer_of(problem, memory_mb=memory_mb, **given)
    start = start_of(problem, trainer)
    generator = torch.Generator().manual_seed(1)
    amount: dict[str, Any] = {
        "steps": np.array([3, 0, 9, 1, 1, 2, 30, 4, 5, 6]),
        "lr": np.linspace(0.01, 0.1, 10),
        "bases": np.arange(10)[::-1].copy(),
        "correction": torch.randn(start.shape, generator=generator, dtype=start.dtype),
    }
    threads = ThreadsTrainer(problem, ragged_shards(BATCH), **COMMON | given)
    expected = threads.train(ALL, start, **amount)
    for name in amount:
        assert not torch.equal(expected, threads.train(ALL, start, **amount | {name: _other(amount[name])}))
    assert torch.equal(trainer.train(ALL, start, **amount), expected)
    again = trainer.train(ALL[:3], start[:3], epochs=1)
    assert torch.equal(again, threads.train(ALL[:3], start[:3], epochs=1))
    assert trainer.train(ALL[:0], start[:0], epochs=1).shape == (0, trainer.layout.size)


def _other(value: Any) -> Any:
    return value.flip(0) if isinstance(value, Tensor) else value[::-1].copy()


def test_every_client_draws_random_numbers_of_its_own_with_any_number_of_processes() -> None:
    problem = problem_of(Case(lambda: Classifier(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))), torch.float32)
    found = []
    for workers in (1, 2):
        trainer = trainer_of(problem, workers)
        start = row_of(problem, 1, trainer.layout).expand(2, -1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            found.append(trainer.train(np.array([1, 1]), start, epochs=1))
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], found[0][1])


# -- errors ----------------------------------------------------------------------------------------------------------

MARK = 13.0


class Marked(nn.Linear):
    """Does something when it meets a sample of client 4."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(7, 3, dtype=torch.float64)
        self._act, self._parent = act, os.getpid()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        if float(input[0, 0]) == MARK and os.getpid() != self._parent:
            self._act()
        return super().forward(input)


def marked(act: Callable[[], None]) -> Problem:
    problem = make("network")
    inputs, targets = problem.train
    inputs = inputs.clone()
    inputs[ragged_shards(BATCH)[4][0], 0] = MARK
    return replace(problem, model=lambda: Marked(act), train=(inputs, targets))


def fail() -> None:
    raise SafaError("no fifth client here")


def fail_strangely() -> None:
    class StrangeError(Exception):  # not to be found by its name
        pass

    raise StrangeError("as strange as this")


def fail_at_the_end() -> None:
    raise EOFError("a file of the model's")


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (fail, SafaError, "no fifth client here"),
        (fail_strangely, RuntimeError, "StrangeError: as strange as this"),
        (fail_at_the_end, EOFError, "a file of the model's"),
    ],
)
def test_the_error_of_a_client_is_raised_and_the_others_can_be_trained(
    act: Callable[[], None], kind: type[Exception], words: str
) -> None:
    problem = marked(act)
    trainer = trainer_of(problem)
    start = start_of(problem, trainer)
    others = np.delete(ALL, 4)
    trainer.train(others, start[others], epochs=1)
    before = pids(trainer)
    with pytest.raises(kind) as raised:
        trainer.train(ALL, start, epochs=1)
    assert str(raised.value) == words
    assert not any(map(is_child, before))
    again = trainer.train(others, start[others], epochs=1)
    assert torch.equal(again, by_threads(problem, start, epochs=1)[others])


def test_the_clients_of_a_process_that_was_killed_are_trained_again(tmp_path: Path) -> None:
    def die_once() -> None:
        with open(tmp_path / "died", "a") as file:
            file.write(".")
        if (tmp_path / "died").stat().st_size == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    problem = marked(die_once)
    trainer = trainer_of(problem)
    start = start_of(problem, trainer)
    expected = by_threads(problem, start, epochs=1)
    assert torch.equal(trainer.train(ALL, start, epochs=1), expected)
    assert (tmp_path / "died").stat().st_size > 1
    for pid in pids(trainer):  # while they have nothing to do
        os.kill(pid, signal.SIGKILL)
    assert torch.equal(trainer.train(ALL, start, epochs=1), expected)


def test_a_client_that_ends_every_process_is_named() -> None:
    problem = marked(lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer = trainer_of(problem, 10)
    start = start_of(problem, trainer)
    with pytest.raises(SafaError, match=r"a process that trained client 4 ended twice \(SIGKILL\)"):
        trainer.train(ALL, start, epochs=1)
    assert trainer._workers == []


def test_an_interrupt_ends_the_work_at_once() -> None:
    problem = marked(lambda: os.kill(os.getppid(), signal.SIGINT))
    trainer = trainer_of(problem)
    start = start_of(problem, trainer)
    trainer.train(ALL[:2], start[:2], epochs=1)
    before = pids(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(np.array([1, 4]), start[:2], steps=np.full(2, 10**9))
    assert not any(map(is_child, before))


# -- processes come and go -------------------------------------------------------------------------------------------


def test_no_process_is_left_when_the_trainer_is_gone() -> None:
    problem = make("network")
    trainer = trainer_of(problem)
    trainer.train(ALL, start_of(problem, trainer), epochs=1)
    before = pids(trainer)
    assert all(map(is_child, before))
    del trainer
    assert not any(map(is_child, before))


def children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_a_run_learns_as_with_threads_and_leaves_no_process() -> None:
    before, given = children(), dict[str, Any](clients=4, rounds=2, lr=0.1, threads=2)
    one, other = (simulate(make("network"), **given, trainer=kind).model() for kind in ("threads", "processes"))
    assert children() <= before
    assert one is not None
    assert other is not None
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_process_that_was_forked_with_the_trainer_makes_workers_of_its_own() -> None:
    problem = make("network")
    trainer = trainer_of(problem)
    start = start_of(problem, trainer)
    expected = trainer.train(ALL, start, epochs=1)

    def use() -> None:
        equal = torch.equal(trainer.train(ALL, start, epochs=1), expected)
        os._exit(0 if equal and not set(pids(trainer)) & set(before) else 1)

    before = pids(trainer)
    child = multiprocessing.get_context("fork").Process(target=use, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    child.join(BOUND)
    assert child.exitcode == 0
    assert torch.equal(trainer.train(ALL, start, epochs=1), expected)
    assert pids(trainer) == before


SCRIPT = """
import atexit, numpy as np, sys, torch
from tests.training.test_processes import ALL, make, start_of, trainer_of
print("begun")
atexit.register(print, "bye")
problem = make("network")
trainer = trainer_of(problem)
start = start_of(problem, trainer)
trainer.train(ALL, start, epochs=1)
if sys.argv[1:]:
    print(flush=True)
    trainer.train(ALL[:1], start[:1], steps=np.array([10**9]))
"""


@pytest.mark.slow
def test_a_program_ends_as_usual_and_says_nothing_twice() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=BOUND)
    assert (done.stdout, done.stderr) == ("begun\nbye\n", "")


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed() -> None:
    """One trains without end, the other waits; the end of the output is that of the last process that could write."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT, "on"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        assert parent.stdout.readline() == "\n"
        parent.kill()
        assert parent.communicate(timeout=BOUND)[0] == ""


# -- where there is none ---------------------------------------------------------------------------------------------


def test_a_gpu_is_refused_in_a_sentence() -> None:
    with pytest.raises(SafaError, match="the trainer processes needs Linux, the device cpu and no GPU"):
        trainer_of(make("network"), device=torch.device("cuda"))


def test_beside_ray_threads_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.delitem(sys.modules, "grpc", raising=False)
    assert isinstance(make_trainer("processes", make("network"), ragged_shards(BATCH), **COMMON), ProcessesTrainer)
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    assert isinstance(make_trainer("processes", make("network"), ragged_shards(BATCH), **COMMON), ThreadsTrainer)
