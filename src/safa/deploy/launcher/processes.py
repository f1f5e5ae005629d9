"""Flower's programs, which are started together and stopped together, with all that they have started in turn.

They start others, some of them detached in sessions of their own. So everything that is started here carries a mark in
its environment, a random token, and is found again by it. Where the environment of a process cannot be read, it is
found by its parent or its session; where there is no /proc, by its process group.

A guardian watches: a small process that does nothing but wait for the end of the one that started it. When that comes,
be it by SIGKILL, the guardian stops what is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self, cast

# The guardian runs this file by itself, so it imports nothing but the standard library.

__all__ = [
    "LOOPBACK",
    "STARTED",
    "SUPERLINK",
    "SUPERNODE",
    "Kept",
    "Node",
    "Processes",
    "bound",
    "environment",
    "family",
    "free_port",
    "private_files",
]

LOOPBACK = "127.0.0.1"
STARTED = "started"
"""What `Kept` tells of a start."""
SUPERLINK = "from safa.deploy.flower.gate import superlink; superlink()"
"""The code of a SuperLink with two doors. Its arguments are host and port of the outer one, how many parts a reply may
have, and then those of `flower-superlink`, which name the inner door."""
SUPERNODE = "from safa.deploy.flower.gate import supernode; supernode()  # flower-supernode"
"""The code of a SuperNode that runs no app but ours. Its arguments are those of `flower-supernode`."""

_SERVER_APP = b"flwr-serverapp"
_PRIVATE = 0o077  # the umask: what a deployment writes is for its own user
_MARK = "SAFA_FAMILY"
_PROC = Path("/proc")
_TERM_S, _KILL_S = 2.0, 1.0
_POLL_S = 0.05
_RESERVED: deque[socket.socket] = deque(maxlen=64)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What is written in here is for the user of this process and nobody else; so is all that `Processes` start."""
    before = os.umask(_PRIVATE)
    try:
        yield
    finally:
        os.umask(before)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on, and that nobody else on this machine is given.

    A program that is to listen on it takes seconds to start. Until then, a socket of this process is bound to the port:
    the kernel gives the number to no one who asks for any, and still lets a program bind it that asks for this one.
    """
    server = bound(LOOPBACK, 0)
    port = int(server.getsockname()[1])
    if sys.platform == "linux":
        _RESERVED.append(server)
    else:  # a port that is bound cannot be bound again
        server.close()
    return port


class Processes:
    """Starts programs, and stops all of them in the end, whatever happens in between.

    with Processes() as processes:
        link = processes.start(["flower-superlink", "--insecure"], log=Path("superlink.log"))
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is that of all programs (default: one's own)."""
        self._environment = dict(os.environ if environment is None else environment)
        self.token = secrets.token_hex(16)
        self._started: list[subprocess.Popen[bytes]] = []
        self._guardian: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self.token],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        try:
            _stop(self.alive)
            for process in self._started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_S)
        finally:
            guardian, self._guardian = self._guardian, None
            if guardian is not None:
                with contextlib.suppress(OSError):
                    cast(IO[bytes], guardian.stdin).close()
                guardian.wait()

    def start(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program, whose output goes to the end of a file."""
        with private_files(), log.open("ab") as output:
            return self._popen(command, environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def ask(
        self, command: Sequence[str], text: str, *, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> tuple[str, str]:
        """What a program that is given a text on its standard input writes to its output, and to its errors."""
        pipe = subprocess.PIPE
        process = self._popen(command, environment, stdin=pipe, stdout=pipe, stderr=pipe)
        try:
            output, errors = process.communicate(text.encode(), timeout=timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
        return output.decode(errors="replace"), errors.decode(errors="replace")

    def stop(self, some: Iterable[subprocess.Popen[bytes]], *, patience_s: float) -> None:
        """Ask some programs to end, and give them so much time to do it in good order."""
        processes = [process for process in some if process.poll() is None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(_POLL_S)

    def kill_server_app(self) -> None:
        """End the server app, before it takes the end of others for a loss. What it has done is on the disk."""
        _kill_server_app(self.alive())

    def alive(self) -> set[int]:
        """Everything that was started here, directly or not, and still runs."""
        self._started = [process for process in self._started if process.poll() is None]
        return family(self.token, [process.pid for process in self._started])

    def _popen(
        self, command: Sequence[str], environment: Mapping[str, str] | None, **streams: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        if self._guardian is None:
            raise RuntimeError("programs are started inside of `with Processes()` only")
        variables = {
            **self._environment,
            **(environment or {}),
            f"{_MARK}_{self.token}": "1",
        }  # others may have marked it, too
        process = subprocess.Popen(  # type: ignore[call-overload]
            list(command), env=variables, start_new_session=True, umask=_PRIVATE, **streams
        )
        self._started.append(process)
        with contextlib.suppress(OSError):  # a guardian that is dead is missed at the end only
            stdin = cast(IO[bytes], self._guardian.stdin)
            stdin.write(f"{process.pid}\n".encode())
            stdin.flush()
        return cast("subprocess.Popen[bytes]", process)


class Kept:
    """A program that is started again whenever it ends, after a pause that doubles as long as that does not help."""

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        tell: Callable[[str], object],
        why: Callable[[], str] = lambda: "",
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` is given one line for every start and end; `why` says what is known of an end."""
        self._start, self._tell, self._why, self._clock = start, tell, why, clock
        self._next = clock()
        self._began = 0.0
        self._pause = _FIRST_PAUSE_S
        self.process: subprocess.Popen[bytes] | None = None

    def tick(self) -> None:
        """Look after it."""
        now = self._clock()
        if self.process is not None and self.process.poll() is not None:
            if now - self._began >= _LONGEST_PAUSE_S:
                self._pause = _FIRST_PAUSE_S
            reason = self._why()
            ended = f"ended with exit code {self.process.returncode}{f' ({reason})' if reason else ''}"
            self._tell(f"{ended}; starts again in {self._pause:g} s")
            self.process, self._next = None, now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        if self.process is None and now >= self._next:
            self.process, self._began = self._start(), now
            self._tell(STARTED)


# -- Flower ----------------------------------------------------------------------------------------------------------


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs: off the network, with a home of their own, and those of this Python."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    return inherited | {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    }


def bound(host: str, port: int) -> socket.socket:
    """A socket that nobody listens on yet."""
    door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, port))
    except OSError:
        door.close()
        raise
    return door


@dataclass(frozen=True, kw_only=True)
class Node:
    """The SuperNode of one client."""

    name: str
    server: str
    """HOST:PORT."""
    state: Path
    """What the client keeps."""
    folder: Path
    """What Flower keeps: home, node config, log."""
    ca: Path | None = None
    """The certificate of the authority that vouches for the server; None: plain text."""
    key: Path | None = None
    """The client's private key."""
    task: str | None = None
    partition: int | None = None
    pause_s: float = 0.0

    @property
    def log(self) -> Path:
        """What the SuperNode said, and the client app on it."""
        return self.folder / "supernode.log"

    def start(self, processes: Processes) -> subprocess.Popen[bytes]:
        """Start it."""
        with private_files():
            self.folder.mkdir(parents=True, exist_ok=True)
        config = {"name": self.name, "state": str(self.state.resolve()), "pause-s": self.pause_s}
        config |= {"task": self.task} if self.task is not None else {}
        config |= {"partition-id": self.partition} if self.partition is not None else {}
        file = self.folder / "node.toml"
        lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in config.items())  # as in TOML
        with private_files():
            file.write_text("".join(lines), encoding="utf-8")
        command = [sys.executable, "-P", "-c", SUPERNODE, "--superlink", self.server, "--node-config", str(file)]
        command += ["--host", LOOPBACK, "--port", str(free_port())]
        command += ["--root-certificates", str(self.ca)] if self.ca else ["--insecure"]
        command += ["--auth-supernode-private-key", str(self.key)] if self.key else []
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        own = {"FLWR_HOME": str(self.folder.resolve()), "OMP_NUM_THREADS": threads}
        return processes.start(command, log=self.log, environment=own)


# -- finding and stopping --------------------------------------------------------------------------------------------


def family(token: str, groups: Iterable[int] = ()) -> set[int]:
    """The processes that carry a mark, that descend from one that does, or that share its session.

    Without /proc, those of the `groups` that are alive.
    """
    if not _PROC.is_dir():
        return {group for group in groups if _signal_group(group, 0)}
    mark = f"{_MARK}_{token}=1".encode()
    table = _table()
    found = {pid for pid in table if mark in _environment(pid)} | (set(groups) & table.keys())
    sessions = {table[pid][1] for pid in found}
    found |= {pid for pid, (_, session) in table.items() if session in sessions}
    while more := {pid for pid, (parent, _) in table.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _table() -> dict[int, tuple[int, int]]:
    """Parent and session of every process that runs; one that has ended and waits to be noticed does not."""
    table = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX":
                    table[int(folder.name)] = int(parent), int(session)
    return table


def _environment(pid: int) -> list[bytes]:
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _stop(alive: Callable[[], set[int]]) -> None:
    """Stop all that is alive, and what comes up in the meantime: in good order, then by force."""
    _kill_server_app(alive())
    for number, patience in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        deadline = time.monotonic() + patience
        told: set[int] = set()
        while living := alive():
            for pid in living - told:
                _signal(pid, number)
            told |= living
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        else:
            return


def _kill_server_app(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            if _SERVER_APP in (_PROC / str(pid) / "cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    if not _PROC.is_dir():
        _signal_group(pid, number)
    else:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def _guard() -> None:
    """Wait until the one that started this ends, and stop what it has left behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    token = sys.argv[1]
    groups = [int(line) for line in sys.stdin]
    _stop(lambda: family(token, groups if not _PROC.is_dir() else ()))


if __name__ == "__main__":
    _guard()
