"""The SuperLink of a run, as a process: its keys, and the run that is submitted to it.

Everything of Flower's lies in RUN/flower/:

    link.json         where the server listens and how it is protected, for when the run is resumed
    keys/             those of a trial on one machine (see `safa.deploy.launcher.keys`)
    app/              the app that is submitted; `FLWR_HOME=RUN/flower/home flwr run RUN/flower/app safa` by hand
    home/             FLWR_HOME: how `flwr` reaches the SuperLink, and what Flower installs
    state.db          the SuperLink's database: nodes, keys, messages
    registered.json   which public key is registered under which name, and as which node
    superlink.log     the log of the SuperLink, and of the server app on it
    NAME/             FLWR_HOME, node config and log of a client's SuperNode on this machine

The SuperLink has two listeners (see `safa.deploy.flower.request_filter`): devices use the public port that was asked
for; the operator's commands use a second port, on the loopback interface only.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from safa.deploy.exchange.files import NODES
from safa.deploy.exchange.options import FILE as OPTIONS_FILE
from safa.deploy.exchange.options import Options
from safa.deploy.exchange.text import printable
from safa.deploy.flower.app import write_app
from safa.deploy.flower.internals import FLWR_PROGRAM, SERVER_APP_PROCESS, max_parts
from safa.deploy.flower.ports import LOOPBACK, free_port
from safa.deploy.launcher.checks import check_keys, check_port, unreachable, write_fault
from safa.deploy.launcher.follow import last_line
from safa.deploy.launcher.link import FLOWER, OWNER_ONLY, Link
from safa.deploy.launcher.processes import Processes
from safa.deploy.launcher.register import REGISTERED, Register, error_of, registered_in
from safa.errors import SafaError
from safa.runs import has_checkpoint, write_atomically
from safa.runs.lock import is_held

__all__ = ["SuperLink"]

PROGRAM = ("-m", "safa.deploy.flower.superlink")
"""What Python executes for a SuperLink."""

_CONNECTION = "safa"
_LOG = "superlink.log"
_UP_S, _ASK_S = 60.0, 120.0
_PORT_S = 6.0  # how long a killed server may still hold its port
_STATUS_S, _STATUS_HELD_S = 5.0, 30.0
_TRY_EVERY_S = 5.0
_APP_STOP_S = 2.0
_START_S, _GONE_S = 60.0, 10.0  # how long the server app may take to start, and a process be missing that was there


class SuperLink:
    """The process of the SuperLink of a run, the keys that are registered with it, and the run on it."""

    def __init__(self, processes: Processes, folder: Path, link: Link) -> None:
        self._processes = processes
        self.folder = folder.resolve()
        self._flower = self.folder / FLOWER
        self.keys = self.folder / link.keys if link.keys else None  # an absolute path stays what it is
        self.host, self.port = link.host, link.port or free_port()
        self.inner_port = next(port for port in iter(free_port, 0) if port != self.port)
        self.resumes = has_checkpoint(self.folder)
        self._process: subprocess.Popen[bytes] | None = None
        names = self.folder / NODES, self._flower / REGISTERED
        self.register = Register(self.keys, *names, self.flwr, _CONNECTION) if self.keys else None
        self._run = ""
        self._held = False
        self._seen: dict[str, float] = {}
        self._submitted_at = 0.0
        self._asked_at = 0.0
        self._try_at, self._unwritable = 0.0, ""
        self._ended = ""

    def open(self) -> None:
        """Start the SuperLink, and wait until it answers. Where the run is resumed, it keeps its database."""
        if self.keys:
            check_keys(self.keys)
        self._wait_for_port()
        with suppress(PermissionError):
            self.folder.chmod(OWNER_ONLY)  # an earlier version may have made it readable for all
        self._remove_damaged()
        self._write_connection()
        self._process = self._processes.start(self._command(), log=self._flower / _LOG)
        deadline = time.monotonic() + _UP_S
        while unreachable(f"{LOOPBACK}:{self.inner_port}", None):
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._flower / _LOG
                reason = write_fault(self._flower) or last_line(log)
                raise SafaError(f"Flower's SuperLink did not start{reason and f': {reason}'}; see {log}")
            time.sleep(0.1)

    def _write_connection(self) -> None:
        """Write how `flwr` reaches this SuperLink."""
        home = self._flower / "home"
        home.mkdir(exist_ok=True)
        trust = f"root-certificates = {_quoted(self.keys / 'ca.crt')}" if self.keys else "insecure = true"
        address = f'address = "{LOOPBACK}:{self.inner_port}"'
        write_atomically(home / "config.toml", f"[superlink.{_CONNECTION}]\n{address}\n{trust}\n".encode())

    def _remove_damaged(self) -> None:
        """Remove Flower's database where the run begins, and where it or the register of keys is unusable.

        Otherwise it would consider every key revoked. Devices keep their names, and the run its clients.
        """
        database, registered = self._flower / "state.db", self._flower / REGISTERED
        is_known = not self.keys or registered_in(registered) is not None
        if not (self.resumes and is_known and _is_database(database)):
            for old in (*self._flower.glob("state.db*"), registered, self.folder / NODES):
                old.unlink(missing_ok=True)

    def _wait_for_port(self) -> None:
        """Wait for the port: a server that was killed just now holds it until its watchdog has stopped the rest."""
        deadline = time.monotonic() + _PORT_S
        while True:
            try:
                return check_port(self.host, self.port)
            except SafaError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def _command(self) -> list[str]:
        parts = max_parts(int(Options.read(self.folder / OPTIONS_FILE).max_mb * 1e6))
        command = [sys.executable, "-P", *PROGRAM, self.host, str(self.port), str(parts)]
        command += ["--host", LOOPBACK, "--port", str(self.inner_port), "--database", str(self._flower / "state.db")]
        command += ["--disable-runtime-dependency-installation"]
        if not self.keys:
            return [*command, "--insecure"]
        command += ["--enable-supernode-auth", f"--ssl-ca-certfile={self.keys / 'ca.crt'}"]
        return [*command, f"--ssl-certfile={self.keys / 'server.pem'}", f"--ssl-keyfile={self.keys / 'server.key'}"]

    def submit(self) -> None:
        """Submit the run. An earlier one that Flower still considers running is stopped."""
        app = self._flower / "app"
        write_app(app, run=self.folder)
        stops = [["stop", run, _CONNECTION] for run in self._unfinished()] if self.resumes else []
        *_, answer = self.flwr(*stops, ["run", str(app), _CONNECTION])
        if not answer.get("run-id"):
            raise SafaError(f"Flower did not accept the run: {error_of(answer)}")
        self._run, self._asked_at = str(answer["run-id"]), time.monotonic()
        self._submitted_at = self._asked_at

    def _unfinished(self) -> list[str]:
        """The runs that Flower considers running."""
        (listed,) = self.flwr(["ls", _CONNECTION])
        return [run["run-id"] for run in listed.get("runs", []) if not run["status"].startswith("finished")]

    def is_over(self) -> bool:
        """Whether the run has ended, finished or not.

        A server app that is killed releases the lock of the folder. Flower notices a minute later; it is asked to
        notice an app that never held the lock, and only now and then while the lock is held, since that takes a second.
        On a full disk all processes would wait forever: the run is stopped instead.
        """
        if not self._ended:
            app_fault = self._app_fault()  # looked for first: an app ends with its SuperLink, which is to be named then
            self._ended = self._link_fault() or app_fault or self._disk_fault() or self._status_fault()
        return bool(self._ended)

    def stop(self) -> None:
        """Kill the server app, which would otherwise go on retrying, and wait until it has ended."""
        self._processes.kill()
        deadline = time.monotonic() + _APP_STOP_S
        while is_held(self.folder) and time.monotonic() < deadline:
            time.sleep(0.05)

    def why(self, error: str) -> str:
        """Why the run has ended: a full disk, or the last error in the server's log, or what was observed."""
        return write_fault(self._flower) or error or self._ended

    def _link_fault(self) -> str:
        code = self._process.poll() if self._process else 0
        if code is None:
            return ""
        line = last_line(self._flower / _LOG) if code > 0 else ""
        return f"the SuperLink {_ending(code)}{line and f'; its log ends with: {line}'}"

    def _app_fault(self) -> str:
        held = is_held(self.folder)
        ended, self._held = self._held and not held, held
        if ended:
            return "the server app was killed, or stopped by Flower"
        return "" if held else self._start_fault()

    def _start_fault(self) -> str:
        """What has been missing for too long before the server app held the lock. Flower would wait for it forever."""
        executor, app = "Flower's SuperExec", "the server app"
        now = time.monotonic()
        for name, marks in ((executor, ("superexec", f":{self.inner_port}")), (app, (SERVER_APP_PROCESS,))):
            if self._processes.is_running(*marks):
                self._seen[name] = now
            limit_s = _START_S if name == app and app not in self._seen else _GONE_S
            if now - self._seen.get(name, self._submitted_at) > limit_s:
                return f"{name} ended while the run was started"
        return ""

    def _disk_fault(self) -> str:
        if time.monotonic() < self._try_at:
            return ""
        self._try_at = time.monotonic() + _TRY_EVERY_S
        before, self._unwritable = self._unwritable, write_fault(self.folder)
        return before and self._unwritable  # twice in a row: a network disk may fail for a moment

    def _status_fault(self) -> str:
        if time.monotonic() < self._asked_at + (_STATUS_HELD_S if self._held else _STATUS_S):
            return ""
        (listed,) = self.flwr(["ls", _CONNECTION, "--run-id", self._run])
        self._asked_at = time.monotonic()
        ended = [run["status"] for run in listed.get("runs", []) if run["status"].startswith("finished")]
        return f"Flower says of the server app: {printable(ended[0])}" if ended else ""

    def flwr(self, *commands: Sequence[str]) -> list[dict[str, Any]]:
        """The answers of `flwr` to some commands, all executed by one process, since that takes a second to start."""
        if not commands:
            return []
        asked = json.dumps([[*command, "--format", "json"] for command in commands])
        try:
            output, errors = self._processes.ask([sys.executable, "-P", "-c", FLWR_PROGRAM], asked, timeout_s=_ASK_S)
        except subprocess.TimeoutExpired:
            output, errors = "", "it took too long"
        answers: list[dict[str, Any]] = []
        for text in [*output.split("\x1e"), *("" for _ in commands)][: len(commands)]:
            try:
                answers.append(json.loads(text))
            except ValueError:
                answers.append({"error-message": text.strip() or errors.strip()})
        return answers


def _is_database(file: Path) -> bool:
    """Whether a file is an intact SQLite database."""
    if not file.is_file():
        return False
    try:
        with closing(sqlite3.connect(file)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


def _ending(code: int) -> str:
    """How a process ended, in words."""
    return f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"


def _quoted(path: Path) -> str:
    """A path as in TOML; JSON's escapes of rare characters are not."""
    return json.dumps(str(path), ensure_ascii=False)
