"""`safa deploy expel`: clients that are to leave a run for good."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from safa.aggregation import registry as aggregators
from safa.cli.console import Terminal
from safa.cli.deploy.common import add_command
from safa.deploy.exchange.files import EXPEL
from safa.deploy.exchange.text import printable
from safa.deploy.launcher.link import FLOWER, Link
from safa.errors import SafaError
from safa.protocol import registry as protocols
from safa.runs import Run, Settings, load_run, write_atomically
from safa.runs.lock import alone, is_launched

__all__ = ["add_expel"]


def add_expel(kinds: Any) -> None:
    """Add the sub-command."""
    expel = add_command(
        kinds, "expel", _expel, "take a client out of a run for good, and its update out of the server's cache"
    )
    expel.add_argument("folder", metavar="DIR", help="the folder of the run; its server may be running or stopped")
    expel.add_argument("name", metavar="NAME", nargs="+", help="the names of clients")


def _expel(arguments: argparse.Namespace) -> None:
    folder, names = Path(arguments.folder), list(dict.fromkeys(arguments.name))
    run, link = load_run(folder), Link.read(folder)
    if run.summary is not None:
        raise SafaError(f"the run in {folder} is finished; nobody can be expelled")
    _check_known(run, names)
    with alone(folder / FLOWER / "expel.lock"):
        write_atomically(folder / EXPEL, json.dumps(list(dict.fromkeys([*_to_expel(folder), *names]))).encode())
    kind = "local" if link.local else "server"
    when = "when the next round opens" if is_launched(folder) else f"with safa deploy {kind} --resume {folder}"
    lines = [f"{', '.join(names)}: expelled {when}; from then on nothing of theirs is accepted."]
    lines += ["Their entries count no more." if _has_entries(run.settings) else "What was merged of theirs stays."]
    if link.keys:
        files = ", ".join(str(Path(link.keys, "clients", f"{name}.pub")) for name in names)
        lines += [f"Their keys still open a connection; remove {files} to revoke them."]
    for line in lines:
        Terminal().print(line, soft_wrap=True, markup=False)


def _has_entries(settings: Settings) -> bool:
    """Whether the aggregator of a run has an entry per client, which can be left out of the sum."""
    protocol = protocols.build(settings.protocol, [1.0], settings.values(), settings.protocol_options)
    name = protocol.aggregator if settings.aggregator == "auto" else settings.aggregator
    return aggregators.find(name).keeps_entries


def _check_known(run: Run, names: list[str]) -> None:
    known = [member["name"] for member in run.roster() or []]
    for name in names:
        if name not in known:
            there = f"there are {', '.join(map(printable, known[:10]))}" if known else "no round has been closed yet"
            raise SafaError(f"there is no client {name!r} in {run.folder}; {there}{', ...' if len(known) > 10 else ''}")


def _to_expel(folder: Path) -> list[str]:
    """The names that are to be expelled already."""
    file = folder / EXPEL
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SafaError(f"{file} is damaged; remove it, and expel all clients again")
    return names
