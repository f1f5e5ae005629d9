"""Following what others write: the folder of a run, and the folder of the keys that may take part in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safa.deploy.roster import name_fault
from safa.errors import SafaError
from safa.records import RoundRecord
from safa.runs import has_checkpoint, write_atomically
from safa.settings import Settings
from safa.storage import reading

__all__ = [
    "LOG",
    "NODES",
    "PARDONS",
    "REGISTERED",
    "Register",
    "Tell",
    "attend",
    "finished_rounds",
    "follow",
    "last_words",
    "problem_of",
]

Tell = Callable[[RoundRecord | str], object]
"""Is told every round as it is finished, and in one line whatever else a person should know."""

NODES, REGISTERED = "nodes.json", "registered.json"
"""Whose node is which, for the server app; and for which keys that holds."""
LOG = "server.log"
"""The server's log in the folder of a run."""
PARDONS = "pardons.json"
"""The names of clients that are no longer to be set aside, for when the server is started again."""

_IN_USE, _NO_NODE = "code: 23", "code: 24"  # such a public key was registered before; there is no such node any more
_LAST, _BEGINS = 4000, "Starting Flower SuperNode"
_FAILED = re.compile(r"Failed to initialize the connection to the SuperLink\.\n(.+)")
_MEANS = {
    "code: 2001": "the server wants a key",
    "code: 2004": "the server does not know this key, or takes it to be connected still",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not to be trusted",
}
_ROUNDS, _SUMMARY = "rounds.jsonl", "summary.json"
_GRAVE = re.compile(r"\S+ (WARNING|ERROR|CRITICAL) (.*)")
_COMES = re.compile(r"\S+ INFO (.+ is (?:new|back|here again): .*|going on behind .*)")
_PAUSE_S, _TIDY_S = 0.25, 2.0


class _Tail:
    """The lines that are added to a file from now on, each once it is whole. The file may be cut shorter meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            length = file.seek(0, os.SEEK_END)
            self._offset = min(self._offset, length)  # what was cut off is written anew
            file.seek(self._offset)
            whole, newline, _ = file.read(length - self._offset).rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").split("\n") if newline else []


def follow(
    folder: Path, over: Callable[[], bool], *, sleep: Callable[[float], object] = time.sleep
) -> Iterator[RoundRecord | str]:
    """The rounds of a run that come from now on, and of its log who comes, and what is a warning or worse.

    It ends with the run: when there is a summary, or when `over`, which is asked a few times a second, says so.
    """
    rounds, log = _Tail(folder / _ROUNDS), _Tail(folder / LOG)

    def events() -> Iterator[RoundRecord | str]:
        last = False
        while True:
            for line in log.lines():
                grave = _GRAVE.match(line)
                comes = _COMES.match(line)
                if grave:
                    yield f"{grave[1].lower()}: {grave[2]}"
                elif comes:
                    yield comes[1]
            yield from map(RoundRecord.from_json, rounds.lines())
            if last:
                return
            last = (folder / _SUMMARY).exists() or over()  # and then look once more
            if not last:
                sleep(_PAUSE_S)

    return events()


def finished_rounds(folder: Path) -> int:
    """How many rounds of a run are on the disk."""
    path = folder / _ROUNDS
    with reading(path):
        return path.read_bytes().count(b"\n") if path.exists() else 0


def attend(
    folder: Path,
    settings: Settings,
    tell: Tell,
    *,
    start: Callable[[], None],
    over: Callable[[], bool],
    also: Callable[[], None],
    kind: str,
) -> None:
    """Stay with a run to its end, and tell what happens. That its server stopped before the end is an error.

    `start` starts the server, `over` says whether it has stopped, and `also` is done a few times a second, for the
    first time before the start. `kind` is the word for the command that goes on with such a run.
    """

    def tended() -> bool:
        also()
        return over()

    events = follow(folder, tended)
    also()
    start()
    for event in events:
        tell(event)
    if not (folder / _SUMMARY).exists():
        done = finished_rounds(folder)
        log = next((log for log in (folder / LOG, folder / "flower" / "superlink.log") if log.exists()), folder)
        stopped = f"the server stopped after round {done} of {settings.rounds} ({log} says more)"
        raise SafaError(f"{stopped}; safa deploy {kind} --resume {folder} goes on")
    deadline = time.monotonic() + _TIDY_S
    while has_checkpoint(folder) and time.monotonic() < deadline:  # the server clears it away last
        time.sleep(_PAUSE_S)


def last_words(log: Path) -> str:
    """Why a SuperNode ended, as far as the end of its log says."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST))
            text = file.read().decode(errors="replace").rpartition(_BEGINS)[2]
    except OSError:
        return ""
    failed = _FAILED.search(text)
    said = failed[1].strip() if failed else ""
    return next((meaning for mark, meaning in _MEANS.items() if mark in said), said)


# -- keys -------------------------------------------------------------------------------------------------------------


class Register:
    """The public keys of a folder, and the nodes that Flower has made of them.

    Who may take part is decided by the files clients/NAME.pub: one that is added is registered, one that is removed or
    replaced is revoked. Flower never takes a revoked key again, so a file must be gone twice in a row before that is
    done. The server app learns from `nodes.json` what the nodes are called.
    """

    def __init__(
        self, keys: Path, nodes: Path, registered: Path, flwr: Callable[..., list[dict[str, Any]]], connection: str
    ) -> None:
        """`flwr` takes commands and returns their answers; `connection` is what it calls the SuperLink."""
        self._folder, self._nodes, self._file = keys / "clients", nodes, registered
        self._flwr, self._connection = flwr, connection
        self._known: dict[str, dict[str, str]] | None = None
        self._gone: set[str] = set()
        self._hopeless: dict[str, str] = {}

    def look(self) -> list[str]:
        """Compare the folder with what is registered, and put it right; what there is to tell."""
        first = self._known is None
        if self._known is None:
            self._known = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        if not self._folder.is_dir():
            return []
        known, there = self._known, self._keys()
        gone = {name for name, entry in known.items() if there.get(name) != entry["key"]}
        told = self._revoke(known, sorted(gone if first else gone & self._gone))
        self._gone = gone
        new = {name: key for name, key in there.items() if name not in known and self._hopeless.get(name) != key}
        told += self._enter(known, new)
        if gone or new or not self._nodes.exists():
            write_atomically(self._file, json.dumps(known, indent=2).encode())
            names = {entry["node"]: name for name, entry in known.items()}
            write_atomically(self._nodes, json.dumps(names, indent=2).encode())
        return told

    def _keys(self) -> dict[str, str]:
        """By name, the public keys that are there."""
        keys = {}
        for file in sorted(self._folder.glob("*.pub")):
            with contextlib.suppress(OSError):  # it is being removed
                keys[file.stem] = file.read_text(encoding="utf-8", errors="replace").strip()
        return keys

    def _revoke(self, known: dict[str, dict[str, str]], names: Sequence[str]) -> list[str]:
        told = []
        commands = [["supernode", "unregister", known[name]["node"], self._connection] for name in names]
        for name, answer in zip(names, self._flwr(*commands), strict=True):
            if answer.get("success") or _NO_NODE in problem_of(answer):
                del known[name]
                told.append(f"the key of {name} is revoked")
            else:
                told.append(f"the key of {name} cannot be revoked: {problem_of(answer)}")
        return told

    def _enter(self, known: dict[str, dict[str, str]], new: Mapping[str, str]) -> list[str]:
        faults = {name: name_fault(name) or _key_fault(key) for name, key in new.items()}
        good = [name for name, fault in faults.items() if fault is None]
        files = [str(self._folder / f"{name}.pub") for name in good]
        register, told = ("supernode", "register"), []
        commands = [[*register, f, self._connection, f"--name={n}"] for f, n in zip(files, good, strict=True)]
        for name, answer in zip(good, self._flwr(*commands), strict=True):
            if answer.get("node-id"):
                known[name] = {"node": str(answer["node-id"]), "key": new[name]}
            elif _IN_USE in problem_of(answer):
                faults[name] = "it was revoked before, or is another client's"
            else:
                told.append(f"the key of {name} is not taken yet: {problem_of(answer)}")
        self._hopeless |= {name: new[name] for name, fault in faults.items() if fault}
        return told + [f"the key of {name} is not taken: {fault}" for name, fault in faults.items() if fault]


def _key_fault(key: str) -> str | None:
    """What is wrong with a public key, or None. Flower must not see a wrong one: that would end its program."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        fits = isinstance(load_ssh_public_key(key.encode()), EllipticCurvePublicKey)
    except (ValueError, UnsupportedAlgorithm):
        fits = False
    return None if fits else "it is not an elliptic-curve key in the format of OpenSSH"


def problem_of(answer: Mapping[str, Any]) -> str:
    """What `flwr` says went wrong; the last line says it."""
    lines = str(answer.get("error-message", "")).strip().splitlines()
    return lines[-1].strip() if lines else "no reason was given"
