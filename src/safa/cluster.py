"""Ray: the connection to a cluster, and workers there that answer calls. What a lost worker held is done again."""

from __future__ import annotations

import logging
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from safa.errors import SafaError

__all__ = ["QUIET", "Workers", "connect", "disconnect", "room"]

_TRIES = 3
"""How often a call is begun before it is given up."""
_LONGEST_WAIT_S = 300.0
"""How long to wait for a first worker before it is given up."""
_PROBE_S = 5.0
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray would warn about otherwise
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray prints on stdout that a worker was lost
}
"""Variables for an environment in which Ray leaves the terminal alone; it reads them when it is imported."""


def connect(address: str | None = None, *, cores: int | None = None) -> Any:
    """The module `ray`, connected to the cluster at this address, or at RAY_ADDRESS.

    Where there is neither, Ray is started on this machine, with so many cores (all by default), and ends with
    this program. A program that is connected already stays so.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ModuleNotFoundError:
        raise SafaError("Ray is not installed: pip install 'safa[ray]'") from None
    if ray.is_initialized():
        return ray
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    own: dict[str, Any] = {"num_cpus": cores, "include_dashboard": False} if address == "local" else {}
    try:
        _probe(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise SafaError(f"no Ray answers at {address}: {_first_line(error)}") from None
    return ray


def disconnect() -> None:
    """End the connection, and Ray itself where it was started here; otherwise both happen when the program ends."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def _probe(address: str) -> None:
    """Try whether anybody listens there, which Ray itself does for minutes; "local" and "auto" are no addresses."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _version() -> str:
    return str(sys.modules["safa"].__version__)


@dataclass(frozen=True)
class _Driver:
    """What a worker has to know of the program that it works for."""

    version: str = field(default_factory=_version)
    folder: str = field(default_factory=os.getcwd)
    imports: tuple[str, ...] = field(default_factory=lambda: tuple(map(os.path.abspath, sys.path)))
    data: str = field(default_factory=lambda: os.environ.get("SAFA_DATA", ""))


class _Worker:
    """Runs in a process on some machine of the cluster, and answers calls with a function that is made there."""

    def __init__(self, driver: _Driver) -> None:
        """The driver's folders count where they are on this machine, too; its SAFA_DATA if there is no other one."""
        self._driver = driver
        sys.path += [folder for folder in driver.imports if folder not in sys.path]
        if os.path.isdir(driver.folder):
            os.chdir(driver.folder)
        if os.path.isdir(driver.data):
            os.environ.setdefault("SAFA_DATA", driver.data)

    def start(self, make: Callable[..., Callable[..., Any]], *given: Any) -> None:
        """Make the function."""
        if _version() != self._driver.version:
            versions = f"has safa {_version()}, and this program has {self._driver.version}"
            raise SafaError(f"a worker on {socket.gethostname()} {versions}")
        self._answer = make(*given)

    def call(self, *given: Any) -> Any:
        """Answer with it."""
        return self._answer(*given)


@dataclass(frozen=True)
class _Call:
    """What a worker is at work on: a call, or its own start, which is given nothing."""

    name: str
    given: tuple[Any, ...] | None
    tries: int = 1


_START = _Call("a worker of Ray", None)


class Workers:
    """Workers on a cluster, each of which has made a function there and answers calls with it.

    A worker that is lost is replaced, and its call is given to another one, a few times at most. An error that the
    function raises is raised here. Workers are started when there are calls, and stay; but those that have nothing to
    do make room for other `Workers` of this program.
    """

    _last: ClassVar[weakref.ref[Workers] | None] = None
    """Those who were asked last; all others have no workers without a call."""

    def __init__(
        self, ray: Any, make: Callable[..., Callable[..., Any]], *given: Any, cores: int = 1, gpus: int = 0,
        most: int | None = None,
    ) -> None:  # fmt: skip
        """`make(*given)` makes the function. There are as many workers as the cluster has room for, or `most`."""
        self._ray, self._given = ray, (make, *given)
        self._kind = ray.remote(_Worker).options(num_cpus=cores, num_gpus=gpus)
        found = room(ray, cores, gpus)
        self._count = min(found, most or found)
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, _Call]] = {}
        self._start = _START

    def answers(self, calls: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, Any]]:
        """The answers to calls, as they come in, with the names of the calls."""
        left = [_Call(name, given) for name, given in calls.items()][::-1]
        self._take_over()
        try:
            while left or any(call.given is not None for _, call in self._busy.values()):
                self._add_missing()
                self._give(left)
                worker, call, outcome = self._wait()
                if isinstance(outcome, Exception):
                    self._lost(call, outcome, left)
                    continue
                self._idle.append(worker)
                if call.given is None:
                    self._start = _START
                else:
                    yield call.name, outcome
        finally:
            self._end(with_calls=True)  # which nobody waits for any more

    def _add_missing(self) -> None:
        while len(self._idle) + len(self._busy) < self._count:
            worker = self._kind.remote(_Driver())
            self._busy[worker.start.remote(*self._given)] = worker, self._start

    def _give(self, left: list[_Call]) -> None:
        """Give calls to those who have nothing to do."""
        while self._idle and left:
            worker, call = self._idle.pop(), left.pop()
            self._busy[worker.call.remote(*(call.given or ()))] = worker, call

    def _wait(self) -> tuple[Any, _Call, Any]:
        """A worker whose call has ended, and the answer; an error of Ray where it was lost."""
        errors = self._ray.exceptions
        nobody_works = all(call.given is None for _, call in self._busy.values())
        found, _ = self._ray.wait(list(self._busy), timeout=_LONGEST_WAIT_S if nobody_works else None)
        if not found:
            raise SafaError(f"the Ray cluster had no room for a worker in {_LONGEST_WAIT_S:.0f} s")
        worker, call = self._busy.pop(found[0])
        try:
            return worker, call, self._ray.get(found[0])
        except errors.RayTaskError as error:
            raise error.cause from (None if isinstance(error.cause, SafaError) else error)
        except errors.RayError as error:
            return worker, call, error

    def _lost(self, call: _Call, error: Exception, left: list[_Call]) -> None:
        """Have a call made again that was lost with its worker. Others may be lost, too: they have to answer first."""
        self._busy |= {worker.__ray_ready__.remote(): (worker, _START) for worker in self._idle}
        self._idle = []
        if call.tries == _TRIES:
            raise SafaError(f"{call.name} was lost with its worker {_TRIES} times: {_first_line(error)}")
        again = replace(call, tries=call.tries + 1)
        if call.given is None:
            self._start = again
        else:
            left.append(again)

    def _take_over(self) -> None:
        """End the workers of others that have nothing to do."""
        other = Workers._last() if Workers._last else None
        if other is not None and other is not self:
            other._end(with_calls=False)
        Workers._last = weakref.ref(self)

    def _end(self, *, with_calls: bool) -> None:
        """End the workers that have a call, or the others."""
        chosen = {ref: worker for ref, (worker, call) in self._busy.items() if (call.given is not None) == with_calls}
        for worker in (*chosen.values(), *(() if with_calls else self._idle)):
            self._ray.kill(worker)
        self._busy = {ref: at_work for ref, at_work in self._busy.items() if ref not in chosen}
        self._idle = self._idle if with_calls else []

    def close(self) -> None:
        """End all workers."""
        self._end(with_calls=True)
        self._end(with_calls=False)


def room(ray: Any, cores: int, gpus: int) -> int:
    """How many workers the machines of a cluster have room for, which need so much each; an error if for none."""
    needed = {"CPU": cores, "GPU": gpus}
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    count = sum(min(int(has.get(name, 0) // n) for name, n in needed.items() if n) for has in machines)
    if not count:
        what = f"{cores} core{'s' if cores > 1 else ''}" + (" and a GPU" if gpus else "")
        raise SafaError(f"no machine of the Ray cluster has {what}, which every worker needs")
    return count
