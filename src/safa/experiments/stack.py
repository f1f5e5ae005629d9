"""Several runs of a sweep side by side: when all of them wait for updates, these are trained as one computation.

Every run has a thread of its own, and one of all threads runs at a time: each in its turn until it asks for updates or
is over. So nothing depends on how long anything takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from threading import Semaphore, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from safa.runs import Settings
from safa.tasks import load_problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from safa.tasks.problem import Problem
    from safa.training.batches import Shards
    from safa.training.setup import TrainerOf
    from safa.training.stacked import Request, StackedTrainer
    from safa.training.trainer import Trainer

__all__ = ["group_runs", "run_side_by_side"]

_T = TypeVar("_T")
_SAME = (
    "task", "trainer", "batch_size", "optimiser", "momentum", "nesterov", "weight_decay", "proximal", "clip", "shuffle",
    "epochs", "device", "compile", "tf32", "threads", "memory_mb",
)  # fmt: skip
"""Settings that runs must have in common to be trained as one, besides whether local work is given in steps."""


def group_runs(runs: Sequence[Settings], numbers: Sequence[int], most: int) -> list[list[int]]:
    """These runs in groups that can be trained as one, of at most so many, in their order."""

    def kind(number: int) -> tuple[Any, ...]:
        run = runs[number]
        own = () if run.train else (number,)
        return *own, bool(run.local_steps), *(getattr(run, name) for name in _SAME)

    groups = [list(alike) for _, alike in groupby(numbers, key=kind)]
    return [group[i : i + most] for group in groups for i in range(0, len(group), most)]


def run_side_by_side(
    runs: Sequence[Settings], jobs: Sequence[Callable[[Problem, TrainerOf], _T]], problem: Problem | None = None
) -> list[_T | Exception]:
    """What each run's job comes to, or the error that it ends with; a job makes its trainer as it is told to."""
    from safa.training import torch_threads
    from safa.training.setup import stacked_trainer

    problem = problem or load_problem(runs[0].task)
    with torch_threads(runs[0].threads or 1):
        trainer = stacked_trainer(runs[0], problem)
        turns = [_Turn(partial(job, problem), trainer) for job in jobs]
        try:
            waiting = [turn for turn in turns if turn.advance({})]
            while waiting:
                updates = trainer.train([turn.request for turn in waiting if turn.request])
                waiting = [turn for turn in waiting if turn.advance(updates)]
        finally:
            for turn in turns:
                turn.stop()
    return [turn.outcome for turn in turns]


class _Stopped(BaseException):
    """Ends a run that is not to be continued."""


class _Turn:
    """A run in a thread of its own, which runs when it is its turn and waits when it needs updates."""

    def __init__(self, job: Callable[[TrainerOf], Any], trainer: StackedTrainer) -> None:
        self._job, self._trainer = job, trainer
        self._turn, self._done = Semaphore(0), Semaphore(0)
        self._thread = Thread(target=self._run, daemon=True)
        self._stopped, self._updates = False, dict[int, "Tensor"]()
        self.request: Request | None = None
        """What it waits for."""
        self.outcome: Any = None
        self._thread.start()

    def advance(self, updates: dict[int, Tensor]) -> bool:
        """Give it what it waits for, let it run until it waits again, and say whether it does: else it is over."""
        self._updates = updates
        self._turn.release()
        self._done.acquire()
        return self.request is not None

    def stop(self) -> None:
        """End it if it is not over."""
        self._stopped = True
        self._turn.release()
        self._thread.join()

    # -- in its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._wait()
            self.outcome = self._job(self._trainer_of)
        except _Stopped:
            pass
        except Exception as error:
            self.outcome = error
        finally:
            self.request = None
            self._done.release()

    def _trainer_of(self, settings: Settings, problem: Problem, shards: Shards, device: torch.device) -> Trainer:
        """The run's part of the stacked trainer, or, where it does not train batched, a trainer of its own."""
        from safa.training.setup import trainer_of

        if settings.trainer != "batched":
            return trainer_of(settings, problem, shards, device)
        return self._trainer.add(shards, self._ask, seed=settings.seed, lr=settings.learning_rate)

    def _ask(self, request: Request) -> Tensor:
        self.request = request
        self._done.release()
        self._wait()
        return self._updates.pop(request.run)

    def _wait(self) -> None:
        self._turn.acquire()
        if self._stopped:
            raise _Stopped
