"""Where many independent jobs are done: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from typing import Any, Protocol, Self, TypeVar

from safa.cluster import Workers, connect, room
from safa.errors import SafaError
from safa.experiments.workers import pool
from safa.runs.settings import Settings

__all__ = ["ENGINES", "Engine", "LocalEngine", "RayEngine", "make_engine"]

ENGINES = ("local", "ray")

_T = TypeVar("_T")


class Engine(Protocol):
    """Does jobs side by side. A job is a function without arguments that another process can be sent."""

    shares_disk: bool
    """Whether files that a job writes are where this program wants them."""

    def finished(self, jobs: Mapping[str, Callable[[], _T]]) -> Iterator[tuple[str, _T]]:
        """What the jobs return, by their names, as they finish; an error of one of them ends it."""


class LocalEngine:
    """So many processes of this machine; with one, everything is done in this process.

    As a context manager it keeps its processes from one call to the next: they have loaded their libraries and data.
    """

    shares_disk = True

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers
        self._kept = ExitStack()
        self._processes: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._workers > 1:
            self._processes = self._kept.enter_context(pool(self._workers))
        return self

    def __exit__(self, *error: Any) -> None:
        self._processes = None
        self._kept.__exit__(*error)

    def finished(self, jobs: Mapping[str, Callable[[], _T]]) -> Iterator[tuple[str, _T]]:
        """What the jobs return, by their names, as they finish; in order with one process."""
        workers = min(self._workers, len(jobs))
        if workers < 2:
            yield from ((name, job()) for name, job in jobs.items())
            return
        left = iter(jobs.items())
        with nullcontext(self._processes) if self._processes else pool(workers) as processes:
            # One more than there are workers: nobody waits for work, and little is under way when it is stopped.
            at_work = {processes.submit(job): name for name, job in itertools.islice(left, workers + 1)}
            while at_work:
                for done in wait(at_work, return_when=FIRST_COMPLETED).done:
                    at_work |= {processes.submit(job): name for name, job in itertools.islice(left, 1)}
                    yield at_work.pop(done), done.result()


class RayEngine:
    """The machines of a Ray cluster. A job that is lost with its worker is done again, a few times at most."""

    shares_disk = False

    def __init__(
        self, address: str | None = None, *, workers: int | None = None, cores: int = 1, gpus: int = 0
    ) -> None:
        """At most so many jobs at a time (all that the cluster has room for), each with so many cores and GPUs."""
        self._ray = connect(address, cores=workers and workers * cores)
        self._most = min(room(self._ray, cores, gpus), workers or sys.maxsize)
        self._needs = {"cores": cores, "gpus": gpus}

    def finished(self, jobs: Mapping[str, Callable[[], _T]]) -> Iterator[tuple[str, _T]]:
        """What the jobs return, by their names, as they finish."""
        if not jobs:
            return
        workers = Workers(self._ray, _caller, **self._needs, most=min(self._most, len(jobs)))
        try:
            yield from workers.answers({name: (job,) for name, job in jobs.items()})
        finally:
            workers.close()


def _caller() -> Callable[[Callable[[], Any]], Any]:
    return _call


def _call(job: Callable[[], Any]) -> Any:
    return job()


def make_engine(
    name: str, runs: Iterable[Settings], *, workers: int | None = None, address: str | None = None
) -> Engine:
    """The engine of that name, for runs with these settings."""
    if name not in ENGINES:
        raise SafaError(f"engine must be one of {', '.join(ENGINES)}, not {name!r}")
    if workers is not None and workers < 1:
        raise SafaError(f"workers must be at least 1, not {workers}")
    if name == "local":
        if address is not None:
            raise SafaError("an address is that of a Ray cluster, and needs the engine ray")
        return LocalEngine(workers or 1)
    trained = [run for run in runs if run.train]
    if any(run.trainer == "ray" for run in trained):
        raise SafaError("the engine ray spreads whole runs, and the trainer ray the clients of one; choose one of them")
    cores = max((run.threads for run in trained), default=0) or 1
    return RayEngine(address, workers=workers, cores=cores, gpus=int(any("cuda" in run.device for run in trained)))
