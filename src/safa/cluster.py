"""Ray: the connection to a cluster, and workers there that answer calls. What a lost worker held is done again."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from safa.errors import SafaError

__all__ = ["Workers", "connect", "room"]

_TRIES = 4
"""How often a call is begun before it is given up."""
_LONGEST_WAIT_S = 300.0
"""How long to wait for a first worker before it is given up."""
_PROBE_S = 5.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray would warn about otherwise
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # Ray prints on stdout that a worker was lost
}


def connect(address: str | None = None, *, cores: int | None = None) -> Any:
    """The module `ray`, connected to the cluster at this address, or at RAY_ADDRESS.

    Where there is neither, Ray is started on this machine, with so many cores (all by default), and ends with
    this program. A program that is connected already stays so.
    """
    for name, value in _QUIET.items():
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


def _probe(address: str) -> None:
    """Try whether anybody listens there, which Ray itself does for minutes; "local" and "auto" are no addresses."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


class _Worker:
    """Runs in a process on some machine of the cluster, and answers calls with a function that is made there."""

    def __init__(self, folder: str, data: str | None, make: Callable[..., Callable[..., Any]], *given: Any) -> None:
        """The driver's current folder and SAFA_DATA count where there are such folders, and no other SAFA_DATA."""
        if os.path.isdir(folder):
            os.chdir(folder)
        if data and os.path.isdir(data):
            os.environ.setdefault("SAFA_DATA", data)
        self._make, self._given = make, given

    def start(self) -> None:
        """Make the function."""
        self._answer = self._make(*self._given)

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
    function raises is raised here.
    """

    def __init__(
        self, ray: Any, make: Callable[..., Callable[..., Any]], *given: Any, cores: int = 1, gpus: int = 0,
        most: int | None = None,
    ) -> None:  # fmt: skip
        """`make(*given)` makes the function. There are as many workers as the cluster has room for, or `most`."""
        self._ray, self._given = ray, (os.getcwd(), os.environ.get("SAFA_DATA"), make, *given)
        self._kind = ray.remote(_Worker).options(num_cpus=cores, num_gpus=gpus, runtime_env=_environment())
        found = room(ray, cores, gpus)
        self._count = min(found, most or found)
        self._idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, _Call]] = {}
        self._start = _START
        self._add_missing()

    def answers(self, calls: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, Any]]:
        """The answers to calls, as they come in, with the names of the calls."""
        left = [_Call(name, given) for name, given in calls.items()][::-1]
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
            self._drop_calls()

    def _add_missing(self) -> None:
        while len(self._idle) + len(self._busy) < self._count:
            worker = self._kind.remote(*self._given)
            self._busy[worker.start.remote()] = worker, self._start

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
        """Have a call made again that was lost with its worker."""
        if call.tries == _TRIES:
            raise SafaError(f"{call.name} was lost with its worker {_TRIES} times: {_first_line(error)}")
        again = replace(call, tries=call.tries + 1)
        if call.given is None:
            self._start = again
        else:
            left.append(again)

    def _drop_calls(self) -> None:
        """End the workers that are still at work on calls, which nobody waits for any more."""
        for ref, (worker, call) in list(self._busy.items()):
            if call.given is not None:
                del self._busy[ref]
                self._ray.kill(worker)

    def close(self) -> None:
        """End all workers."""
        for worker in (*self._idle, *(worker for worker, _ in self._busy.values())):
            self._ray.kill(worker)
        self._idle, self._busy = [], {}


def _environment() -> dict[str, Any]:
    """What a worker's Python has to know: the folders that the driver imports from, besides those of its own Python."""
    own = (sys.prefix, sys.base_prefix)
    folders = [os.path.abspath(folder) for folder in sys.path if not folder.startswith(own)]
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(folders)}}


def room(ray: Any, cores: int, gpus: int) -> int:
    """How many workers the machines of a cluster have room for, which need so much each; an error if for none."""
    needed = {"CPU": cores, "GPU": gpus}
    machines = [machine["Resources"] for machine in ray.nodes() if machine["Alive"]]
    count = sum(min(int(has.get(name, 0) // n) for name, n in needed.items() if n) for has in machines)
    if not count:
        what = f"{cores} core{'s' if cores > 1 else ''}" + (" and a GPU" if gpus else "")
        raise SafaError(f"no machine of the Ray cluster has {what}, which every worker needs")
    return count
