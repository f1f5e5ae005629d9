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

from safa.deploy.exchange.roster import name_fault
from safa.deploy.exchange.text import printable
from safa.errors import SafaError
from safa.protocol.records import RoundRecord
from safa.runs import has_checkpoint, write_atomically
from safa.runs.settings import Settings
from safa.runs.storage import reading

__all__ = [
    "LOG",
    "NODES",
    "PARDONS",
    "REGISTERED",
    "Register",
    "Said",
    "Tell",
    "attend",
    "finished_rounds",
    "follow",
    "last_line",
    "last_words",
    "problem_of",
    "registered_in",
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
_UNTOLD = "SuperNode terminated gracefully"  # so it says where the server answers with 401
_REFUSED = "the server does not take its signature: is its clock right, and its key not revoked?"
_ROUNDS, _SUMMARY = "rounds.jsonl", "summary.json"
_GRAVE = re.compile(r"\S+ (WARNING|ERROR|CRITICAL) (.*)")
_COMES = re.compile(r"\S+ INFO (.+ is (?:new|back|here again): .*|going on behind .*)")
_SAID = re.compile(r"WARNING\s*:\s+To the server: (.+)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # Flower's log is coloured
_ERRORS = ("error: ", "critical: ")
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
                    yield f"{grave[1].lower()}: {printable(grave[2])}"
                elif comes:
                    yield printable(comes[1])
            for line in rounds.lines():
                yield _round(line)
            if last:
                return
            last = (folder / _SUMMARY).exists() or over()  # and then look once more
            if not last:
                sleep(_PAUSE_S)

    return events()


def _round(line: str) -> RoundRecord | str:
    """A round from its line, or a warning that this is none."""
    try:
        return RoundRecord.from_json(line)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return f"warning: a line of {_ROUNDS} is damaged"


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
    why: Callable[[str], str] = lambda error: error,
) -> None:
    """Stay with a run to its end, and tell what happens. That its server stopped before the end is an error.

    `start` starts the server, `over` says whether it has stopped, and `also` is done a few times a second, for the
    first time before the start. `kind` is the word for the command that goes on with such a run. `why` is given the
    last error in the server's log, if there is one, and says why it stopped.
    """

    def tended() -> bool:
        also()
        return over()

    events = follow(folder, tended)
    also()
    start()
    error = ""
    for event in events:
        if isinstance(event, str) and event.startswith(_ERRORS):
            error = event.partition(": ")[2]
        tell(event)
    if not (folder / _SUMMARY).exists():
        done, reason = finished_rounds(folder), printable(why(error))
        if reason != error:
            _note(folder / LOG, reason)
        log = next((log for log in (folder / LOG, folder / "flower" / "superlink.log") if log.exists()), folder)
        stopped = f"the server stopped after round {done} of {settings.rounds}{reason and f': {reason}'}"
        more = "" if reason.endswith("says more") else f" ({log} says more)"
        raise SafaError(f"{stopped}{more}; safa deploy {kind} --resume {folder} goes on")
    deadline = time.monotonic() + _TIDY_S
    while has_checkpoint(folder) and time.monotonic() < deadline:  # the server clears it away last
        time.sleep(_PAUSE_S)


def _note(log: Path, reason: str) -> None:
    """Write to the server's log what it could not write itself, if that is possible now."""
    with contextlib.suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} ERROR {reason}\n")


class Said:
    """What a client app tells the server that went wrong, found in the log of its SuperNode; each once in a row."""

    def __init__(self, log: Path) -> None:
        self._tail, self._last = _Tail(log), ""

    def look(self) -> list[str]:
        """What was told since the last look."""
        new = []
        for line in self._tail.lines():
            said = _SAID.match(_COLOURS.sub("", line))
            if said and said[1] != self._last:
                self._last = said[1]
                new.append(printable(said[1]))
        return new


def last_words(log: Path) -> str:
    """Why a SuperNode ended, as far as the end of its log says."""
    text = _end(log).rpartition(_BEGINS)[2]
    failed = _FAILED.search(text)
    if failed is None and _UNTOLD in text:
        return _REFUSED
    said = failed[1].strip() if failed else ""
    return next((meaning for mark, meaning in _MEANS.items() if mark in said), printable(said))


def last_line(log: Path) -> str:
    """The last line of a log that is not empty."""
    lines = [line.strip() for line in _COLOURS.sub("", _end(log)).splitlines()]
    return printable(next((line for line in reversed(lines) if line), ""))


def _end(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


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
            self._known = registered_in(self._file) or {}
        if not self._folder.is_dir():
            return []
        known, there = self._known, self._keys()
        gone = {name for name, entry in known.items() if there.get(name) != entry["key"]}
        told = self._revoke(known, sorted(gone if first else gone & self._gone))
        self._gone = gone
        new = {name: key for name, key in there.items() if name not in known and self._hopeless.get(name) != key}
        told += self._enter(known, new)
        if first or gone or new or not self._nodes.exists():
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


def registered_in(file: Path) -> dict[str, dict[str, str]] | None:
    """By name, the node and the key of those that are registered; None where the file does not say."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): {"node": str(int(of["node"])), "key": str(of["key"])} for name, of in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


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
