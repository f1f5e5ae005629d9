"""The commands of `safa deploy`: `local`, `server`, `client`, `keys`, `expel`. Flower is loaded only when one runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from safa.cli.arguments import add_options, add_settings, foreign_settings, given_options, given_settings, settings_of
from safa.deploy.exchange.options import EXPEL, Options
from safa.deploy.exchange.options import FILE as OPTIONS_FILE
from safa.deploy.exchange.roster import name_fault
from safa.deploy.exchange.text import printable
from safa.deploy.launcher.processes import Node, environment, private_files
from safa.errors import SafaError
from safa.protocol.records import RoundRecord
from safa.runs import has_checkpoint, load_run, next_folder, presets, write_atomically
from safa.runs.lock import alone, hold_launcher, is_launched
from safa.runs.settings import Settings
from safa.tasks import TASKS, find_task

__all__ = ["add"]

_HOST, _PORT = "0.0.0.0", 9092
_SAME = "a run goes on as it was begun: give the same or nothing, or begin another one with a new --out"


def add(commands: Any) -> None:
    """Add `safa deploy` to the commands."""
    deploy = commands.add_parser(
        "deploy",
        help="run a protocol on real devices, with Flower",
        description="Run a protocol on real devices, with Flower: as a trial on one machine, or server and clients "
        "each on its own.",
        allow_abbrev=False,
    )
    kinds = deploy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_local(kinds)
    _add_server(kinds)
    _add_client(kinds)
    _add_keys(kinds)
    _add_expel(kinds)


# -- options ---------------------------------------------------------------------------------------------------------


def _add_local(kinds: Any) -> None:
    local = _command(kinds, "local", _local, "a trial on one machine: the server, and every client as a process")
    _add_run_options(local, "local")
    local.add_argument("--insecure", action="store_true", help="plain text and no keys, instead of TLS and a key each")
    local.add_argument(
        "--pause",
        metavar="NAME=SECONDS",
        action="append",
        default=[],
        help="make a client slow: so many seconds more for each of its updates (clients are client-0, client-1, ...)",
    )


def _add_server(kinds: Any) -> None:
    server = _command(kinds, "server", _server, "the server of a deployment, for clients on other machines")
    _add_run_options(server, "server")
    server.add_argument(
        "--keys", metavar="DIR", help="the keys, as safa deploy keys makes them; clients/*.pub may join"
    )
    server.add_argument("--host", help=f"the address to listen on (default: {_HOST}, all there are)")
    server.add_argument("--port", type=int, metavar="N", help=f"the port (default: {_PORT})")
    server.add_argument(
        "--insecure", action="store_true", help="plain text and no keys; on the loopback interface only"
    )
    server.add_argument(
        "--go-on", action="store_true", help="go on with the run in --out if it was begun, else begin it"
    )
    server.add_argument(
        "--pardon",
        metavar="NAME",
        action="append",
        default=[],
        help="when a run is taken up: let a client take part again that was set aside for bad updates",
    )


def _add_client(kinds: Any) -> None:
    client = _command(
        kinds, "client", _client, "one client of a deployment: starts its SuperNode, and keeps it running"
    )
    client.add_argument("--server", metavar="HOST:PORT", required=True, help="where the server listens")
    client.add_argument("--name", required=True, help="what the client is called, the same at every start")
    client.add_argument(
        "--state", metavar="DIR", required=True, help="a folder in which it keeps what it is at work on"
    )
    client.add_argument("--keys", metavar="DIR", help="a folder with ca.crt and clients/NAME.key")
    client.add_argument("--ca", metavar="FILE", help="the server's ca.crt, where there is no such folder")
    client.add_argument("--key", metavar="FILE", help="the client's own NAME.key, likewise")
    client.add_argument("--insecure", action="store_true", help="plain text and no key; to a loopback address only")
    client.add_argument("--task", help="the only task that it will train; needed for one of your own")
    client.add_argument(
        "--partition", type=int, metavar="K", help="its data are part K of the task's (default: all of them)"
    )
    client.add_argument(
        "--pause", type=float, default=0.0, metavar="X", help="take X seconds more for each update (for trials)"
    )


def _add_keys(kinds: Any) -> None:
    keys = _command(kinds, "keys", _keys, "make the keys of a deployment: an authority, the server's, one per client")
    keys.add_argument("folder", metavar="DIR", help="where to put them")
    keys.add_argument("--host", nargs="+", action="extend", default=[], help="by which names clients call the server")
    keys.add_argument("--client", nargs="+", action="extend", default=[], metavar="NAME", help="names of clients")
    keys.add_argument("--add", metavar="NAME", help="a further client, in a folder that has keys already")
    keys.add_argument(
        "--days", type=float, default=365.0, metavar="N", help="how long the certificates hold (default: 365)"
    )
    keys.add_argument("--force", action="store_true", help="replace keys that are there")


def _add_expel(kinds: Any) -> None:
    expel = _command(
        kinds, "expel", _expel, "take a client out of a run for good, and its update out of the server's cache"
    )
    expel.add_argument("folder", metavar="DIR", help="the folder of the run; its server may be running or stopped")
    expel.add_argument("name", metavar="NAME", nargs="+", help="the names of clients")


def _command(kinds: Any, name: str, function: Callable[[argparse.Namespace], None], about: str) -> Any:
    """A subcommand, which says so in one sentence where Flower is not installed."""

    def checked(arguments: argparse.Namespace) -> None:
        programs = environment(Path())["PATH"]
        if importlib.util.find_spec("flwr") is None or not shutil.which("flower-superlink", path=programs):
            raise SafaError("safa deploy needs Flower, which is not installed here; pip install 'safa[deploy]' does it")
        try:
            function(arguments)
        except BrokenPipeError:
            raise
        except OSError as problem:  # a disk that is full, a folder that is not to be written
            where = problem.filename or "the folder of the run"
            raise SafaError(f"cannot read or write {where}: {problem.strerror or problem}") from None

    parser = kinds.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
    parser.set_defaults(command=checked)
    return parser


def _add_run_options(parser: Any, kind: str) -> None:
    parser.usage = f"safa deploy {kind} TASK [options]"
    parser.add_argument("task", metavar="TASK", nargs="?", help=f"one of {', '.join(TASKS)}, or your own")
    parser.add_argument("--task", dest="named_task", metavar="TASK", help="the same")
    add_settings(parser, lists=False)
    add_options(parser, Options)
    parser.add_argument("--config", metavar="FILE", help="settings from a config.toml, and options from its [deploy]")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in this folder where it was stopped")
    parser.add_argument("--out", metavar="DIR", help="write the run into this folder (default: a new one in runs/)")


# -- what was asked for ----------------------------------------------------------------------------------------------


def _asked(arguments: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """The settings of a new run and the options that were given; those on the command line go before the file."""
    if arguments.named_task and arguments.task not in (None, arguments.named_task):
        raise SafaError(f"two tasks are named, {arguments.task} and {arguments.named_task}")
    arguments.task = arguments.task or arguments.named_task
    settings = settings_of(arguments)
    table = Settings.read_toml(arguments.config).get("deploy", {}) if arguments.config else {}
    if not isinstance(table, dict):
        raise SafaError(f"deploy in {arguments.config} must be a table")
    return settings, table | {name: value for name, (value,) in given_options(arguments, Options).items()}


def _taken_up(arguments: argparse.Namespace, kind: str) -> Path:
    """The folder of a run that was stopped; everything is in it."""
    given = given_settings(arguments) | given_options(arguments, Options)
    if arguments.task or arguments.named_task or arguments.config or arguments.out or arguments.insecure or given:
        raise SafaError("--resume takes everything from its folder; give no task and no settings with it")
    folder = Path(arguments.resume)
    if _is_finished(folder, kind):
        raise SafaError(f"the run in {folder} came to its end; there is nothing to take up")
    return folder


def _is_finished(folder: Path, kind: str) -> bool:
    """Whether a run of this kind of deployment came to its end; one of another kind is an error."""
    from safa.deploy.launcher.launch import Link
    from safa.deploy.launcher.watch import finished_rounds

    run = load_run(folder)
    begun_with = "local" if Link.read(folder).local else "server"
    Options.read(folder / OPTIONS_FILE)  # that it is damaged is to be said now
    rounds = finished_rounds(folder)
    if run.summary is None and rounds and not has_checkpoint(folder):
        raise SafaError(
            f"{folder} holds {rounds} rounds and no checkpoint: restore its folder checkpoint from a backup, or begin "
            "anew in another folder, or here with --force"
        )
    if begun_with != kind:
        raise SafaError(f"the run in {folder} was begun with safa deploy {begun_with}, and goes on with that only")
    return run.summary is not None


def _check_same(arguments: argparse.Namespace, folder: Path) -> None:
    """Complain about anything that was given and is not what the run in a folder was begun with."""
    from safa.deploy.launcher.launch import Link

    config = Settings.read_toml(arguments.config) if arguments.config else {}
    table = config.pop("deploy", {})
    if not isinstance(table, dict):
        raise SafaError(f"deploy in {arguments.config} must be a table")
    if arguments.named_task and arguments.task not in (None, arguments.named_task):
        raise SafaError(f"two tasks are named, {arguments.task} and {arguments.named_task}")
    foreign = dict(config.pop("protocol_options", {})) | foreign_settings(arguments)
    given = config | dict(presets.read(arguments.preset) if arguments.preset is not None else {})
    given |= {name: value for name, (value,) in given_settings(arguments).items()} | foreign
    task = arguments.task or arguments.named_task or given.get("task")
    given |= {"task": find_task(task).name} if task else {}
    _compare(given, load_run(folder).settings.values(), folder)
    options = table | {name: value for name, (value,) in given_options(arguments, Options).items()}
    held = Options.read(folder / OPTIONS_FILE)
    _compare(options, {item.name: getattr(held, item.name) for item in fields(Options)}, folder)
    link = Link.read(folder)
    if arguments.insecure and link.keys:
        raise SafaError(f"{folder} was begun with the keys in {link.keys}, and --insecure is given; {_SAME}")
    keys = str(Path(arguments.keys).resolve()) if arguments.keys else None
    named = {"host": arguments.host, "port": arguments.port, "keys": keys}
    _compare({name: value for name, value in named.items() if value is not None}, asdict(link), folder)


_OPEN = {"threads": 0}
"""What is given so was left open, and decided when the run began."""


def _compare(given: Mapping[str, Any], held: Mapping[str, Any], folder: Path) -> None:
    for name, value in given.items():
        if name not in held:
            raise SafaError(f"there is no setting {name!r}")
        if value != held[name] and _OPEN.get(name, held[name]) != value:
            raise SafaError(f"{name} is {held[name]} in {folder}, and {value} is given; {_SAME}")


def _pauses(texts: list[str]) -> Mapping[str, float]:
    pauses = {}
    for text in texts:
        name, equals, seconds = text.rpartition("=")
        try:
            pauses[name] = float(seconds)
        except ValueError:
            equals = ""
        if not equals:
            raise SafaError(f"--pause needs NAME=SECONDS, not {text!r}")
    return pauses


def _file(path: str | Path, what: str) -> Path:
    if not Path(path).is_file():
        raise SafaError(f"there is no {what} {path}")
    return Path(path).resolve()


# -- commands --------------------------------------------------------------------------------------------------------


def _local(arguments: argparse.Namespace) -> None:
    from safa.deploy.launcher.launch import begin_local, run_local

    if arguments.resume:
        if arguments.pause:
            raise SafaError("--resume takes everything from its folder; give no --pause with it")
        folder = _taken_up(arguments, "local")
    else:
        settings, given = _asked(arguments)
        options = Options.of({"start_with": settings.clients} | given)
        if options.start_with > settings.clients:
            raise SafaError(f"start_with is {options.start_with}, but there are only {settings.clients} clients")
        folder = Path(arguments.out) if arguments.out else next_folder(f"deploy-{settings.task}-{settings.protocol}")
        pauses = _pauses(arguments.pause)
        begin_local(folder, settings, options, insecure=arguments.insecure, pauses=pauses, force=arguments.force)
    with hold_launcher(folder):
        _attended(arguments, "local", folder, run_local)


def _server(arguments: argparse.Namespace) -> None:
    from safa.deploy.launcher.launch import Link, begin, is_loopback, run_server

    begun = bool(arguments.go_on and arguments.out and (Path(arguments.out) / "config.toml").exists())
    if arguments.go_on and not arguments.out:
        raise SafaError("--go-on needs --out, the folder of the run")
    if arguments.go_on and arguments.force:
        raise SafaError("--go-on goes on with the run in --out, and --force replaces it; give one of them")
    if arguments.pardon and not arguments.resume and not begun:
        raise SafaError("--pardon goes with --resume: nobody is set aside in a run that begins")
    if arguments.resume:
        if arguments.keys or arguments.host or arguments.port:
            raise SafaError("--resume takes everything from its folder; give no keys, host or port with it")
        folder = _taken_up(arguments, "server")
    elif begun:
        folder = Path(arguments.out)
        is_finished = _is_finished(folder, "server")
        _check_same(arguments, folder)
        if is_finished:
            Console(stderr=True).print(f"The run in {folder} came to its end.", highlight=False, soft_wrap=True)
            return
    else:
        settings, given = _asked(arguments)
        if arguments.insecure == bool(arguments.keys):
            raise SafaError("a server needs --keys DIR (safa deploy keys makes them), or --insecure, and not both")
        host, port = arguments.host or _HOST, _PORT if arguments.port is None else arguments.port
        if not 0 < port < 65536:
            raise SafaError(f"a port is a number from 1 to 65535, not {port}")
        if arguments.insecure and not is_loopback(host):
            raise SafaError(f"--insecure is for trials on one machine: {host} is not a loopback address")
        folder = Path(arguments.out) if arguments.out else next_folder(f"deploy-{settings.task}-{settings.protocol}")
        keys = str(Path(arguments.keys).resolve()) if arguments.keys else None
        link = Link(host=host, port=port, keys=keys)
        begin(folder, settings, Options.of(given), link, force=arguments.force)
    with hold_launcher(folder):
        _pardon(folder, arguments.pardon)
        _attended(arguments, "server", folder, run_server)


def _pardon(folder: Path, names: list[str]) -> None:
    from safa.deploy.launcher.watch import PARDONS

    known = [member["name"] for member in load_run(folder).roster() or []]
    for name in names:
        if name not in known:
            raise SafaError(f"there is no client {name!r} to pardon in {folder}")
    if names:
        write_atomically(folder / PARDONS, json.dumps(names).encode())


def _client(arguments: argparse.Namespace) -> None:
    from safa.deploy.launcher.launch import FLOWER, is_loopback, run_client

    host, colon, port = arguments.server.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise SafaError(f"--server needs HOST:PORT, not {arguments.server!r}")
    fault = name_fault(arguments.name)
    if fault:
        raise SafaError(fault)
    if not 0 <= arguments.pause < float("inf"):
        raise SafaError(f"a pause must be a number of seconds, not {arguments.pause}")
    if (arguments.partition or 0) < 0:
        raise SafaError(f"partition must be at least 0, not {arguments.partition}")
    if arguments.insecure and not is_loopback(host.strip("[]")):
        raise SafaError(f"--insecure is for trials on one machine: {host} is not a loopback address")
    ca, key = _trust(arguments)
    state = Path(arguments.state).resolve()
    try:
        with private_files():
            (state / FLOWER).mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise SafaError(f"cannot make the folder {state}: {problem.strerror}") from None
    node = Node(
        name=arguments.name,
        server=arguments.server,
        state=state,
        folder=state / FLOWER,
        ca=ca,
        key=key,
        task=arguments.task,
        partition=arguments.partition,
        pause_s=arguments.pause,
    )
    console = Console(highlight=False)
    with _sigterm_like_ctrl_c():
        run_client(node, lambda line: console.print(printable(line), soft_wrap=True, markup=False))


def _trust(arguments: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Whom a client trusts, and the key that it has itself."""
    ways = bool(arguments.keys), bool(arguments.ca or arguments.key), arguments.insecure
    if sum(ways) != 1:
        raise SafaError("a client needs --keys DIR, or --ca FILE and --key FILE, or --insecure")
    if arguments.insecure:
        return None, None
    if not arguments.keys and not (arguments.ca and arguments.key):
        raise SafaError("--ca and --key go together")
    ca = _file(arguments.ca or Path(arguments.keys, "ca.crt"), "certificate of an authority")
    key = _file(arguments.key or Path(arguments.keys, "clients", f"{arguments.name}.key"), "private key")
    from cryptography.x509 import load_pem_x509_certificate

    from safa.deploy.launcher.launch import private_key_fault

    try:
        load_pem_x509_certificate(ca.read_bytes())
    except ValueError:
        raise SafaError(f"{ca} is not a certificate") from None
    if private_key_fault(key):
        raise SafaError(f"{key} is not a client's private key: {private_key_fault(key)}")
    return ca, key


def _keys(arguments: argparse.Namespace) -> None:
    from safa.deploy.launcher.keys import add_client, make_keys

    if arguments.add is not None:
        if arguments.host or arguments.client:
            raise SafaError("--add makes the key of one more client; --host and --client are for a new folder")
        files = add_client(arguments.folder, arguments.add, force=arguments.force)
    elif not arguments.host or not arguments.client:
        raise SafaError("name the server with --host and its clients with --client, or one more client with --add")
    elif not arguments.days > 0:
        raise SafaError(f"days must be above 0, not {arguments.days:g}")
    else:
        hosts, clients = arguments.host, arguments.client
        files = make_keys(arguments.folder, hosts=hosts, clients=clients, days=arguments.days, force=arguments.force)
    console = Console(highlight=False)
    for file in files:
        console.print(str(file), soft_wrap=True, markup=False)
    root = Path(arguments.folder)
    console.print(
        f"A client gets {root / 'ca.crt'} and its own key, clients/NAME.key; the server needs no clients/*.key, and "
        f"nobody but you needs {root / 'ca.key'}.",
        soft_wrap=True,
        markup=False,
    )


def _expel(arguments: argparse.Namespace) -> None:
    from safa.deploy.launcher.launch import FLOWER, Link

    folder, names = Path(arguments.folder), list(dict.fromkeys(arguments.name))
    run, link = load_run(folder), Link.read(folder)
    if run.summary is not None:
        raise SafaError(f"the run in {folder} came to its end; its model is what it is")
    known = [member["name"] for member in run.roster() or []]
    for name in names:
        if name not in known:
            there = f"there are {', '.join(map(printable, known[:10]))}" if known else "no round has been closed yet"
            raise SafaError(f"there is no client {name!r} in {folder}; {there}{', ...' if len(known) > 10 else ''}")
    with alone(folder / FLOWER / "expel.lock"):
        write_atomically(folder / EXPEL, json.dumps(list(dict.fromkeys([*_to_expel(folder), *names]))).encode())
    kind = "local" if link.local else "server"
    when = "when the next round opens" if is_launched(folder) else f"with safa deploy {kind} --resume {folder}"
    lines = [f"{', '.join(names)}: expelled {when}; from then on nothing of theirs is in the cache or taken."]
    if run.settings.protocol != "safa":
        lines += [f"{run.settings.protocol} keeps no cache: what it has merged of theirs stays in the model."]
    if link.keys:
        files = ", ".join(str(Path(link.keys, "clients", f"{name}.pub")) for name in names)
        lines += [f"Their keys still open a connection; remove {files} to revoke them."]
    for line in lines:
        Console(highlight=False).print(line, soft_wrap=True, markup=False)


def _to_expel(folder: Path) -> list[str]:
    """Who is to be expelled already."""
    file = folder / EXPEL
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SafaError(f"{file} is damaged; remove it, and name everybody again who is to be expelled")
    return names


# -- what a person sees ----------------------------------------------------------------------------------------------


@contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Be stopped in the same good order by a service manager as by a person."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _attended(
    arguments: argparse.Namespace, kind: str, folder: Path, run: Callable[[Path, Callable[[Any], None]], None]
) -> None:
    """Stay with a run, show what happens, and say in the end what came out."""
    from safa.deploy.launcher.watch import finished_rounds

    show = _Show(quiet=arguments.quiet)
    rounds = load_run(folder).settings.rounds
    try:
        with _sigterm_like_ctrl_c():
            show.line(f"Written to {folder} as it happens.")
            run(folder, show)
    except KeyboardInterrupt:
        kept = f"{finished_rounds(folder)} of {rounds} rounds are finished and can be read in {folder}"
        raise KeyboardInterrupt(f"{kept}; go on with safa deploy {kind} --resume {folder}") from None
    show.end(folder)


class _Show:
    """Shows rounds as rows of a table, on stdout, and what else is told on stderr."""

    _COLUMNS = ("round", "time, s", "picked", "undrafted", "refused", "clients", "loss", "accuracy")

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._headed = quiet, False
        self._out, self._err = Console(highlight=False), Console(stderr=True, highlight=False)

    def __call__(self, event: RoundRecord | str) -> None:
        if isinstance(event, str):
            self.line(event)
        elif not self._quiet:
            if not self._headed:
                self._row(*self._COLUMNS, style="cyan")
                self._headed = True
            counts = len(event.picked), len(event.undrafted), len(event.refused), event.clients
            learnt = ("" if value is None else f"{value:.4g}" for value in (event.loss, event.accuracy))
            self._row(str(event.round), f"{event.closed_s:.1f}", *map(str, counts), *learnt)

    def line(self, text: str) -> None:
        """Something that is no round."""
        if not self._quiet:
            self._err.print(printable(text), soft_wrap=True, markup=False)

    def _row(self, *cells: str, style: str = "") -> None:
        text = "  ".join(cell.rjust(max(len(title), 7)) for cell, title in zip(cells, self._COLUMNS, strict=True))
        self._out.print(text, style=style, soft_wrap=True, markup=False)

    def end(self, folder: Path) -> None:
        """What came out."""
        if self._quiet:
            return
        run = load_run(folder)
        summary = run.summary or {}
        found = [f"{word} of {summary[k]:.4g}" for word, k in _FOUND.items() if summary.get(k) is not None]
        learnt = f"The model has {' and '.join(found)}. " if found else ""
        self._out.print(
            f"All {run.settings.rounds} rounds are done. {learnt}Written to {folder}; safa report {folder} makes a "
            f"page of it, safa replay {folder} trains its model anew.",
            soft_wrap=True,
            markup=False,
        )


_FOUND = {"an accuracy": "last_accuracy", "a loss": "last_loss"}
