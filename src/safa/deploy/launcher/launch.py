"""Flower's programs around the folder of a run: SuperLink, SuperNodes, keys, and the run itself.

Everything of Flower's lies in RUN/flower/:

    link.json         where the server listens and how it is protected, for when the run is taken up again
    keys/             those of a trial on one machine (see `safa.deploy.launcher.keys`)
    app/              the app that is submitted; `FLWR_HOME=RUN/flower/home flwr run RUN/flower/app safa` by hand
    home/             FLWR_HOME: how `flwr` reaches the SuperLink, and what Flower installs
    state.db          the SuperLink's memory: nodes, keys, messages
    registered.json   which public key is registered under which name, and as which node
    superlink.log     what the SuperLink said, and the server app on it
    NAME/             FLWR_HOME, node config and log of a client's SuperNode on this machine

**Two doors.** Flower's SuperLink serves devices and operator on one port, and asks only devices for a key: who reaches
that port could register a key of his own, or have his own code run on the server. So it gets two doors (see
`safa.deploy.flower.gate`). Devices come in by the port that was asked for, and find there what is for devices,
nothing else. The rest is served on a second port, on the loopback interface alone.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import socket
import sqlite3
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, Never

from safa.deploy.exchange.codec import most_parts
from safa.deploy.exchange.options import FILE as OPTIONS_FILE
from safa.deploy.exchange.options import Options
from safa.deploy.exchange.text import printable
from safa.deploy.flower.app import write_app
from safa.deploy.flower.clock import Steps
from safa.deploy.launcher.processes import (
    LOOPBACK,
    STARTED,
    SUPERLINK,
    Kept,
    Node,
    Processes,
    bound,
    environment,
    free_port,
    private_files,
)
from safa.deploy.launcher.watch import (
    NODES,
    REGISTERED,
    Register,
    Said,
    Tell,
    attend,
    last_line,
    last_words,
    problem_of,
    registered_in,
)
from safa.errors import SafaError
from safa.runs import has_checkpoint, load_run, new_folder, write_atomically, write_config
from safa.runs.lock import in_use, is_held, is_launched
from safa.runs.settings import Settings
from safa.tasks import find_task

__all__ = [
    "FLOWER",
    "Link",
    "Server",
    "begin",
    "begin_local",
    "check_keys",
    "check_port",
    "clock_fault",
    "is_loopback",
    "private_key_fault",
    "run_client",
    "run_local",
    "run_server",
    "unreachable",
    "write_fault",
]

FLOWER = "flower"
"""Where everything of Flower's lies in the folder of a run."""

_CONNECTION = "safa"
_LINK, _LINK_LOG = "link.json", "superlink.log"
_LARGE_BYTES = 100_000_000  # less than what fits into the parts that any reply may have
_OWN = 0o700  # a folder that is for its owner alone
_UP_S, _ASK_S = 60.0, 120.0
_NODES_STOP_S, _CLEARED_UP_S = 1.5, 6.0
_KEYS_EVERY_S, _TICK_S = 3.0, 0.25
_STATUS_FIRST_S, _STATUS_LAST_S = 5.0, 30.0
_TRY_EVERY_S, _TRIAL_BYTES = 5.0, 65_536
_AHEAD_S, _BEHIND_S = 5.0, 305.0  # how far Flower lets a device's clock be off
_FLWR = """
import json, sys
from flwr.cli.app import app
for arguments in json.load(sys.stdin):
    try:
        app(arguments, standalone_mode=False)
    except (Exception, SystemExit) as problem:
        print(problem, file=sys.stderr)
    print("\\x1e", file=sys.__stdout__, flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where the server of a run listens, and how it is protected."""

    host: str
    port: int
    """0: any that is free."""
    keys: str | None
    """The folder of keys, relative to that of the run; None: plain text, and everybody is who he says."""
    local: bool = False
    """Whether the clients run on this machine, too."""
    pauses: Mapping[str, float] | None = None
    """By client, how many seconds to add to each of its orders (local only)."""

    def write(self, folder: Path) -> None:
        """Keep it with a run."""
        write_atomically(folder / FLOWER / _LINK, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Link:
        """What was kept with a run."""
        file = folder / FLOWER / _LINK
        try:
            link = cls(**json.loads(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise SafaError(f"{folder} holds no run that was deployed: there is no {FLOWER}/{_LINK} in it") from None
        except OSError as problem:
            raise SafaError(f"cannot read {file}: {problem.strerror}") from None
        except (ValueError, TypeError):
            raise SafaError(f"{file} is damaged; put a copy of it in its place") from None
        if not link._is_sound():
            raise SafaError(f"{file} is damaged; put a copy of it in its place")
        return link

    def _is_sound(self) -> bool:
        """Whether everything has the type that it must have, wherever it was read from."""
        pauses = {} if self.pauses is None else self.pauses
        return (
            isinstance(self.host, str)
            and type(self.port) is int
            and 0 <= self.port < 65536
            and isinstance(self.keys, str | None)
            and isinstance(self.local, bool)
            and isinstance(pauses, dict)
            and all(isinstance(seconds, int | float) for seconds in pauses.values())
        )


def is_loopback(host: str) -> bool:
    """Whether what is sent to a host never leaves the machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- the folder ------------------------------------------------------------------------------------------------------


def begin(folder: Path, settings: Settings, options: Options, link: Link, *, force: bool = False) -> None:
    """Make the folder of a run that is to be deployed."""
    if not settings.train:
        raise SafaError("a deployment trains a model; rounds alone can only be simulated")
    if link.keys and not link.local:
        check_keys(folder / link.keys)
    if link.port:
        check_port(link.host, link.port)
    if is_launched(folder):
        raise SafaError(in_use(folder))
    problem = find_task(settings.task).load()  # data that cannot be had is missed now
    model_bytes = sum(tensor.nbytes for tensor in problem.start_model(settings.seed).state_dict().values())
    if model_bytes > _LARGE_BYTES:  # then the gate must know how many parts an update has
        options = replace(options, max_mb=options.screen(model_bytes).max_bytes / 1e6)
    if (folder / FLOWER).exists() and not (folder / FLOWER / _LINK).is_file():
        raise SafaError(f"{folder / FLOWER} is there, and this program did not write it; choose another folder")
    new_folder(folder, force=force)
    folder.chmod(_OWN)
    with private_files():
        (folder / FLOWER).mkdir()
        link.write(folder)
        write_atomically(folder / OPTIONS_FILE, options.to_toml().encode())
        write_config(folder, settings)


def begin_local(
    folder: Path,
    settings: Settings,
    options: Options,
    *,
    insecure: bool = False,
    pauses: Mapping[str, float] | None = None,
    force: bool = False,
) -> None:
    """Make the folder of a trial on one machine, with keys for all clients unless it is `insecure`."""
    from safa.deploy.launcher.keys import make_keys

    names = _local_names(settings)
    for name, seconds in (pauses or {}).items():
        if name not in names:
            raise SafaError(f"there is no client {name!r} to pause; there are {names[0]} to {names[-1]}")
        if not 0 <= seconds < math.inf:
            raise SafaError(f"a pause must be a number of seconds, not {seconds}")
    keys = None if insecure else f"{FLOWER}/keys"
    link = Link(host=LOOPBACK, port=0, keys=keys, local=True, pauses=dict(pauses or {}))
    begin(folder, settings, options, link, force=force)
    if keys:
        with private_files():
            make_keys(folder / keys, hosts=[], clients=names)


def _local_names(settings: Settings) -> list[str]:
    return [f"client-{number}" for number in range(settings.clients)]


# -- the server ------------------------------------------------------------------------------------------------------


class Server:
    """The SuperLink of a run, the keys that it knows, and the run on it."""

    def __init__(self, processes: Processes, folder: Path, link: Link) -> None:
        self._processes = processes
        self.folder = folder.resolve()
        self._flower = self.folder / FLOWER
        self.keys = self.folder / link.keys if link.keys else None  # an absolute path stays what it is
        self.host, self.port = link.host, link.port or free_port()
        self.inner_port = next(port for port in iter(free_port, 0) if port != self.port)
        self.goes_on = has_checkpoint(self.folder)
        self._process: subprocess.Popen[bytes] | None = None
        names = self.folder / NODES, self._flower / REGISTERED
        self.register = Register(self.keys, *names, self.flwr, _CONNECTION) if self.keys else None
        self._run = ""
        self._held = False
        self._ask_at, self._ask_every = 0.0, _STATUS_FIRST_S
        self._try_at, self._unwritable = 0.0, ""
        self._ended = ""

    def open(self) -> None:
        """Start the SuperLink, and wait until it answers. Where the run goes on, it remembers what it knew."""
        if self.keys:
            check_keys(self.keys)
        self._wait_for_port()
        with suppress(PermissionError):
            self.folder.chmod(_OWN)  # one that an earlier version has made is open to all
        self._forget_what_is_damaged()
        home = self._flower / "home"
        home.mkdir(exist_ok=True)
        trust = f"root-certificates = {_quoted(self.keys / 'ca.crt')}" if self.keys else "insecure = true"
        address = f'address = "{LOOPBACK}:{self.inner_port}"'
        write_atomically(home / "config.toml", f"[superlink.{_CONNECTION}]\n{address}\n{trust}\n".encode())
        self._process = self._processes.start(self._command(), log=self._flower / _LINK_LOG)
        deadline = time.monotonic() + _UP_S
        while unreachable(f"{LOOPBACK}:{self.inner_port}", None):
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self._flower / _LINK_LOG
                reason = write_fault(self._flower) or last_line(log)
                raise SafaError(f"Flower's SuperLink did not start{reason and f': {reason}'}; {log} says more")
            time.sleep(0.1)

    def _forget_what_is_damaged(self) -> None:
        """Let Flower begin anew where the run does, and where its database or the register of its keys is unusable.

        It would take every key for one that was revoked before. Devices keep their names and the run its clients.
        """
        database, registered = self._flower / "state.db", self._flower / REGISTERED
        is_known = not self.keys or registered_in(registered) is not None
        if not (self.goes_on and is_known and _is_database(database)):
            for old in (*self._flower.glob("state.db*"), registered, self.folder / NODES):
                old.unlink(missing_ok=True)

    def _wait_for_port(self) -> None:
        """Where a server was killed a moment ago, its port is free only when its guardian has cleared up."""
        deadline = time.monotonic() + _CLEARED_UP_S
        while True:
            try:
                return check_port(self.host, self.port)
            except SafaError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def _command(self) -> list[str]:
        parts = most_parts(int(Options.read(self.folder / OPTIONS_FILE).max_mb * 1e6))
        command = [sys.executable, "-P", "-c", SUPERLINK, self.host, str(self.port), str(parts)]
        command += ["--host", LOOPBACK, "--port", str(self.inner_port), "--database", str(self._flower / "state.db")]
        command += ["--disable-runtime-dependency-installation"]
        if not self.keys:
            return [*command, "--insecure"]
        command += ["--enable-supernode-auth", f"--ssl-ca-certfile={self.keys / 'ca.crt'}"]
        return [*command, f"--ssl-certfile={self.keys / 'server.pem'}", f"--ssl-keyfile={self.keys / 'server.key'}"]

    def submit(self) -> None:
        """Submit the run. One of an earlier time that Flower takes to be running still is stopped."""
        if self.goes_on:
            (listed,) = self.flwr(["ls", _CONNECTION])
            runs = [run["run-id"] for run in listed.get("runs", []) if not run["status"].startswith("finished")]
            self.flwr(*(["stop", run, _CONNECTION] for run in runs))
        app = self._flower / "app"
        write_app(app, run=self.folder)
        (answer,) = self.flwr(["run", str(app), _CONNECTION])
        if not answer.get("run-id"):
            raise SafaError(f"Flower did not take the run: {problem_of(answer)}")
        self._run, self._ask_at = str(answer["run-id"]), time.monotonic() + _STATUS_FIRST_S

    def is_over(self) -> bool:
        """Whether the run has ended, well or not.

        A server app that is killed lets go of the folder. Flower notices a minute later, and is asked only now and
        then, since that is a second of work, for the sake of an app that never came so far. On a full disk everybody
        waits for everybody: the run is stopped instead.
        """
        self._ended = self._ended or self._link_fault() or self._app_fault()
        self._ended = self._ended or self._disk_fault() or self._status_fault()
        return bool(self._ended)

    def why(self, error: str) -> str:
        """Why the run has ended: what lies behind all else, or the server app's own word, or what was seen of it."""
        return write_fault(self._flower) or error or self._ended

    def _link_fault(self) -> str:
        code = self._process.poll() if self._process else 0
        if code is None:
            return ""
        said = last_line(self._flower / _LINK_LOG) if code > 0 else ""
        return f"the SuperLink {ending(code)}{said and f'; its log ends with: {said}'}"

    def _app_fault(self) -> str:
        held = is_held(self.folder)
        ended, self._held = self._held and not held, held
        return "the server app was killed, or stopped by Flower" if ended else ""

    def _disk_fault(self) -> str:
        if time.monotonic() < self._try_at:
            return ""
        self._try_at = time.monotonic() + _TRY_EVERY_S
        before, self._unwritable = self._unwritable, write_fault(self.folder)
        return before and self._unwritable  # twice in a row: a hiccup of a network disk is no reason to stop

    def _status_fault(self) -> str:
        if time.monotonic() < self._ask_at:
            return ""
        (listed,) = self.flwr(["ls", _CONNECTION, "--run-id", self._run])
        self._ask_at, self._ask_every = time.monotonic() + self._ask_every, min(2 * self._ask_every, _STATUS_LAST_S)
        ended = [run["status"] for run in listed.get("runs", []) if run["status"].startswith("finished")]
        return f"Flower says of the server app: {printable(ended[0])}" if ended else ""

    def flwr(self, *commands: Sequence[str]) -> list[dict[str, Any]]:
        """What `flwr` answers to some commands. All go to one process, because that takes a second to start."""
        if not commands:
            return []
        asked = json.dumps([[*command, "--format", "json"] for command in commands])
        try:
            said, errors = self._processes.ask([sys.executable, "-P", "-c", _FLWR], asked, timeout_s=_ASK_S)
        except subprocess.TimeoutExpired:
            said, errors = "", "it took too long"
        answers: list[dict[str, Any]] = []
        for text in [*said.split("\x1e"), *("" for _ in commands)][: len(commands)]:
            try:
                answers.append(json.loads(text))
            except ValueError:
                answers.append({"error-message": text.strip() or errors.strip()})
        return answers


def _is_database(file: Path) -> bool:
    """Whether there is a database of SQLite, and it is whole."""
    if not file.is_file():
        return False
    try:
        with closing(sqlite3.connect(file)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


def ending(code: int) -> str:
    """How a process ended, in words."""
    return f"was killed (signal {-code})" if code < 0 else f"ended with exit code {code}"


def write_fault(folder: Path) -> str:
    """Why nothing can be written into a folder, or ""."""
    trial = folder / f".trial-{os.getpid()}"
    try:
        trial.write_bytes(bytes(_TRIAL_BYTES))
    except OSError as problem:
        return f"{folder} cannot be written: {problem.strerror}"
    finally:
        with suppress(OSError):
            trial.unlink(missing_ok=True)
    return ""


def _quoted(path: Path) -> str:
    """A path as TOML writes it; JSON's way with rare characters is not TOML's."""
    return json.dumps(str(path), ensure_ascii=False)


def check_keys(folder: Path) -> None:
    """Complain about a folder of keys with which no server can be run."""
    from cryptography.x509 import load_pem_x509_certificate

    for name in ("ca.crt", "server.pem", "server.key"):
        if not (folder / name).is_file():
            raise SafaError(f"{folder} holds no keys of a server: there is no {name} in it (see safa deploy keys)")
    file = folder / "server.pem"
    try:
        until = load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError):
        raise SafaError(f"{file} is not a certificate that can be read") from None
    if until < datetime.now(UTC):
        raise SafaError(f"the certificate {file} has expired on {until:%Y-%m-%d}; make new ones with safa deploy keys")


def private_key_fault(file: Path) -> str | None:
    """What is wrong with the private key of a client, or None."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        fits = isinstance(load_ssh_private_key(file.read_bytes(), None), EllipticCurvePrivateKey)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        fits = False
    return None if fits else "it is not an elliptic-curve key in the format of OpenSSH, without a password"


def check_port(host: str, port: int) -> None:
    """Complain about an address on which no server can listen."""
    try:
        bound(host, port).close()
    except (OSError, OverflowError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise SafaError(f"no server can listen on {host}, port {port}: {reason}") from None


# -- the clients -----------------------------------------------------------------------------------------------------


def keep(node: Node, processes: Processes, tell: Callable[[str], object], *, starts: bool = True) -> Kept:
    """A SuperNode that is started again whenever it ends: after a SIGKILL, Flower refuses its key for a minute.

    Without `starts`, only its ends are told.
    """

    def told(line: str) -> None:
        if starts or line != STARTED:
            tell(f"{node.name} {line}")

    return Kept(lambda: node.start(processes), told, lambda: last_words(node.log))


def run_client(node: Node, tell: Callable[[str], object]) -> Never:
    """Keep the SuperNode of a client running until this process is stopped; tell every start, end and fault."""
    with private_files(), Processes(environment(node.folder)) as processes:
        kept = keep(node, processes, tell)
        said = Said(node.log)
        seen = None
        try:
            while True:
                kept.tick()
                if kept.process is not seen:
                    seen = kept.process
                    fault = unreachable(node.server, node.ca) if seen else ""
                    if fault:
                        tell(f"{node.name} cannot reach {node.server} yet: {fault}")
                    elif seen and node.key and (fault := clock_fault(node.server, node.ca)):
                        tell(f"{node.name}'s clock is {fault}")
                for line in said.look():
                    tell(f"{node.name} tells the server: {line}")
                time.sleep(_TICK_S)
        finally:
            processes.stop([kept.process] if kept.process else [], patience_s=_NODES_STOP_S)


def unreachable(server: str, ca: Path | None) -> str:
    """Why a server cannot be reached, or trusted, or ""; Flower's own log does not say."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as plain:
            if ca:
                ssl.create_default_context(cafile=str(ca)).wrap_socket(plain, server_hostname=host).close()
    except ssl.SSLCertVerificationError as problem:
        return f"its certificate is not to be trusted: {problem.verify_message}"
    except ssl.SSLError as problem:
        return f"it does not speak TLS: {problem.reason}"
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def clock_fault(server: str, ca: Path | None) -> str:
    """How far this machine's clock is off, where that is too far for Flower to take a device's signature, or ""."""
    host, _, port = server.rpartition(":")
    host = host.strip("[]")
    context = ssl.create_default_context(cafile=str(ca)) if ca else None
    door = HTTPSConnection(host, int(port), timeout=5, context=context) if context else HTTPConnection(host, int(port))
    try:
        began = time.time()
        door.request("HEAD", "/")
        theirs = parsedate_to_datetime(door.getresponse().headers["Date"]).timestamp()
        ahead_s = (began + time.time()) / 2 - (theirs + 0.5)  # it tells whole seconds
    except (OSError, HTTPException, TypeError, ValueError):
        return ""  # it does not tell the time
    finally:
        door.close()
    if -_BEHIND_S <= ahead_s <= _AHEAD_S:
        return ""
    off = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the server's"
    return (
        f"{off}; Flower takes a device that is up to {_AHEAD_S:.0f} s ahead or {_BEHIND_S:.0f} s behind: set it by NTP"
    )


# -- runs ------------------------------------------------------------------------------------------------------------


def run_local(folder: Path, tell: Tell) -> None:
    """Run the trial that `begin_local` has prepared, or go on with it, with all of its clients on this machine."""
    settings, link = load_run(folder).settings, Link.read(folder)
    with private_files(), Processes(environment(folder.resolve() / FLOWER / "home")) as processes:
        server = _opened(processes, folder, link, tell)
        nodes = [keep(node, processes, tell, starts=False) for node in _local_nodes(server, settings, link)]
        tell(f"{len(nodes)} clients are started; each takes some seconds, and so does every update")

        def look() -> None:
            for node in nodes:
                node.tick()

        try:
            _attend(folder, server, settings, tell, also=look, kind="local")
        finally:  # the nodes before the SuperLink, so that it hears of their end and takes them back at once
            processes.kill_server_app()
            processes.stop([node.process for node in nodes if node.process], patience_s=_NODES_STOP_S)


def run_server(folder: Path, tell: Tell) -> None:
    """Run the server of the run that `begin` has prepared, or go on with it; its clients are elsewhere."""
    settings, link = load_run(folder).settings, Link.read(folder)
    with private_files(), Processes(environment(folder.resolve() / FLOWER / "home")) as processes:
        server = _opened(processes, folder, link, tell)
        tell(f"listening on {server.host}, port {server.port}")
        looked, steps = time.monotonic(), Steps()

        def look() -> None:
            nonlocal looked
            step = steps.look()
            if step:
                tell(f"warning: {step}")
            if server.register and time.monotonic() - looked >= _KEYS_EVERY_S:
                for line in server.register.look():
                    tell(line)
                looked = time.monotonic()

        _attend(folder, server, settings, tell, also=look, kind="server")


def _attend(
    folder: Path, server: Server, settings: Settings, tell: Tell, *, also: Callable[[], None], kind: str
) -> None:
    attend(
        folder,
        settings,
        tell,
        start=server.submit,
        over=server.is_over,
        also=also,
        kind=kind,
        why=server.why,
    )


def _opened(processes: Processes, folder: Path, link: Link, tell: Tell) -> Server:
    server = Server(processes, folder, link)
    server.open()
    for line in server.register.look() if server.register else []:
        tell(line)
    return server


def _local_nodes(server: Server, settings: Settings, link: Link) -> list[Node]:
    return [
        Node(
            name=name,
            server=f"{LOOPBACK}:{server.port}",
            state=server.folder / "clients" / name,
            folder=server.folder / FLOWER / name,
            ca=server.keys and server.keys / "ca.crt",
            key=server.keys and server.keys / "clients" / f"{name}.key",
            task=settings.task,
            partition=number,
            pause_s=(link.pauses or {}).get(name, 0.0),
        )
        for number, name in enumerate(_local_names(settings))
    ]
