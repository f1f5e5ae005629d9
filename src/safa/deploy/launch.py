"""Flower's programs around the folder of a run: SuperLink, SuperNodes, keys, and the run itself.

Everything of Flower's lies in RUN/flower/:

    link.json         where the server listens and how it is protected, for when the run is taken up again
    keys/             those of a trial on one machine (see `safa.deploy.keys`)
    app/              the app that is submitted; `FLWR_HOME=RUN/flower/home flwr run RUN/flower/app safa` by hand
    home/             FLWR_HOME: how `flwr` reaches the SuperLink, and what Flower installs
    state.db          the SuperLink's memory: nodes, keys, messages
    registered.json   which public key is registered under which name, and as which node
    superlink.log     what the SuperLink said, and the server app on it
    NAME/             FLWR_HOME, node config and log of a client's SuperNode on this machine

**Two doors.** Flower's SuperLink serves devices and operator on one port, and asks only devices for a key: who reaches
that port could register a key of his own, or have his own code run on the server. So it gets two doors (see
`safa.deploy.gate`). Devices come in by the port that was asked for, and find there what is for devices,
nothing else. The rest is served on a second port, on the loopback interface alone.
"""

from __future__ import annotations

import ipaddress
import json
import math
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Never

from safa.deploy.app import write_app
from safa.deploy.lock import is_held
from safa.deploy.options import FILE as OPTIONS_FILE
from safa.deploy.options import Options
from safa.deploy.processes import (
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
from safa.deploy.watch import NODES, REGISTERED, Register, Tell, attend, last_words, problem_of
from safa.errors import SafaError
from safa.runs import has_checkpoint, load_run, new_folder, write_atomically
from safa.settings import Settings
from safa.tasks import find_task

__all__ = [
    "FLOWER",
    "Link",
    "Server",
    "begin",
    "begin_local",
    "check_keys",
    "check_port",
    "is_loopback",
    "private_key_fault",
    "run_client",
    "run_local",
    "run_server",
    "unreachable",
]

FLOWER = "flower"
"""Where everything of Flower's lies in the folder of a run."""

_CONNECTION = "safa"
_LINK, _LINK_LOG = "link.json", "superlink.log"
_OWN = 0o700  # a folder that is for its owner alone
_UP_S, _ASK_S = 60.0, 120.0
_NODES_STOP_S = 1.5
_KEYS_EVERY_S, _TICK_S = 3.0, 0.25
_STATUS_FIRST_S, _STATUS_LAST_S = 5.0, 30.0
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
        try:
            return cls(**json.loads((folder / FLOWER / _LINK).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise SafaError(f"{folder} holds no run that was deployed: there is no {FLOWER}/{_LINK} in it") from None
        except (OSError, ValueError, TypeError):
            raise SafaError(f"{folder / FLOWER / _LINK} cannot be read") from None


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
    if settings.warm_start:
        raise SafaError("warm_start is a habit of the paper's experiments; devices start from one model")
    if link.keys and not link.local:
        check_keys(folder / link.keys)
    if link.port:
        check_port(link.host, link.port)
    find_task(settings.task).load()  # data that cannot be had is missed now
    new_folder(folder, force=force)
    folder.chmod(_OWN)
    with private_files():
        (folder / FLOWER).mkdir()
        link.write(folder)
        write_atomically(folder / OPTIONS_FILE, options.to_toml().encode())
        write_atomically(folder / "config.toml", settings.to_toml().encode())


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
    from safa.deploy.keys import make_keys

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

    def open(self) -> None:
        """Start the SuperLink, and wait until it answers. Where the run goes on, it remembers what it knew."""
        if self.keys:
            check_keys(self.keys)
        check_port(self.host, self.port)
        with suppress(PermissionError):
            self.folder.chmod(_OWN)  # one that an earlier version has made is open to all
        if not self.goes_on:
            for old in (*self._flower.glob("state.db*"), self._flower / REGISTERED, self.folder / NODES):
                old.unlink(missing_ok=True)
        home = self._flower / "home"
        home.mkdir(exist_ok=True)
        trust = f"root-certificates = {_quoted(self.keys / 'ca.crt')}" if self.keys else "insecure = true"
        address = f'address = "{LOOPBACK}:{self.inner_port}"'
        write_atomically(home / "config.toml", f"[superlink.{_CONNECTION}]\n{address}\n{trust}\n".encode())
        self._process = self._processes.start(self._command(), log=self._flower / _LINK_LOG)
        deadline = time.monotonic() + _UP_S
        while unreachable(f"{LOOPBACK}:{self.inner_port}", None):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SafaError(f"Flower's SuperLink did not start; {self._flower / _LINK_LOG} says more")
            time.sleep(0.1)

    def _command(self) -> list[str]:
        command = [sys.executable, "-P", "-c", SUPERLINK, self.host, str(self.port)]
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
        then, since that is a second of work, for the sake of an app that never came so far.
        """
        if self._process is None or self._process.poll() is not None:
            return True
        held = is_held(self.folder)
        if self._held and not held:
            return True
        self._held = held
        if time.monotonic() < self._ask_at:
            return False
        (listed,) = self.flwr(["ls", _CONNECTION, "--run-id", self._run])
        self._ask_at, self._ask_every = time.monotonic() + self._ask_every, min(2 * self._ask_every, _STATUS_LAST_S)
        return any(run["status"].startswith("finished") for run in listed.get("runs", []))

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
        seen = None
        try:
            while True:
                kept.tick()
                if kept.process is not seen:
                    seen = kept.process
                    fault = unreachable(node.server, node.ca) if seen else ""
                    if fault:
                        tell(f"{node.name} cannot reach {node.server} yet: {fault}")
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
            attend(folder, settings, tell, start=server.submit, over=server.is_over, also=look, kind="local")
        finally:  # the nodes before the SuperLink, so that it hears of their end and takes them back at once
            processes.kill_server_app()
            processes.stop([node.process for node in nodes if node.process], patience_s=_NODES_STOP_S)


def run_server(folder: Path, tell: Tell) -> None:
    """Run the server of the run that `begin` has prepared, or go on with it; its clients are elsewhere."""
    settings, link = load_run(folder).settings, Link.read(folder)
    with private_files(), Processes(environment(folder.resolve() / FLOWER / "home")) as processes:
        server = _opened(processes, folder, link, tell)
        tell(f"listening on {server.host}, port {server.port}")
        looked = time.monotonic()

        def look() -> None:
            nonlocal looked
            if server.register and time.monotonic() - looked >= _KEYS_EVERY_S:
                for line in server.register.look():
                    tell(line)
                looked = time.monotonic()

        attend(folder, settings, tell, start=server.submit, over=server.is_over, also=look, kind="server")


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
