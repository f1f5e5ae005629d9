"""The public keys that may take part in a run, and their registration with Flower."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safa.deploy.exchange.roster import name_fault
from safa.deploy.flower.internals import KEY_IN_USE, NO_SUCH_NODE
from safa.deploy.launcher.checks import public_key_fault
from safa.runs import write_atomically

__all__ = ["REGISTERED", "Register", "error_of", "registered_in"]

REGISTERED = "registered.json"
"""Which public key is registered under which name, and as which node."""


class Register:
    """The public keys of a folder, and the nodes under which Flower has registered them.

    Who may take part is decided by the files clients/NAME.pub: one that is added is registered, one that is removed or
    replaced is revoked. Flower never accepts a revoked key again, so a file must be gone twice in a row before that is
    done. The server app reads the names of nodes from `nodes.json`.
    """

    def __init__(
        self, keys: Path, nodes: Path, registered: Path, flwr: Callable[..., list[dict[str, Any]]], connection: str
    ) -> None:
        """`flwr` takes commands and returns their answers; `connection` is its name of the SuperLink."""
        self._folder, self._nodes, self._file = keys / "clients", nodes, registered
        self._flwr, self._connection = flwr, connection
        self._known: dict[str, dict[str, str]] | None = None
        self._gone: set[str] = set()
        self._rejected: dict[str, str] = {}

    def look(self) -> list[str]:
        """Register and revoke keys as the folder says; returns lines about that."""
        first = self._known is None
        if self._known is None:
            self._known = registered_in(self._file) or {}
        if not self._folder.is_dir():
            return []
        known, there = self._known, self._keys()
        gone = {name for name, entry in known.items() if there.get(name) != entry["key"]}
        lines = self._revoke(known, sorted(gone if first else gone & self._gone))
        self._gone = gone
        new = {name: key for name, key in there.items() if name not in known and self._rejected.get(name) != key}
        lines += self._register(known, new)
        if first or gone or new or not self._nodes.exists():
            write_atomically(self._file, json.dumps(known, indent=2).encode())
            names = {entry["node"]: name for name, entry in known.items()}
            write_atomically(self._nodes, json.dumps(names, indent=2).encode())
        return lines

    def _keys(self) -> dict[str, str]:
        """By name, the public keys that are there."""
        keys = {}
        for file in sorted(self._folder.glob("*.pub")):
            with contextlib.suppress(OSError):  # it is being removed
                keys[file.stem] = file.read_text(encoding="utf-8", errors="replace").strip()
        return keys

    def _revoke(self, known: dict[str, dict[str, str]], names: Sequence[str]) -> list[str]:
        lines = []
        commands = [["supernode", "unregister", known[name]["node"], self._connection] for name in names]
        for name, answer in zip(names, self._flwr(*commands), strict=True):
            if answer.get("success") or NO_SUCH_NODE in error_of(answer):
                del known[name]
                lines.append(f"the key of {name} is revoked")
            else:
                lines.append(f"the key of {name} cannot be revoked: {error_of(answer)}")
        return lines

    def _register(self, known: dict[str, dict[str, str]], new: Mapping[str, str]) -> list[str]:
        faults = {name: name_fault(name) or public_key_fault(key) for name, key in new.items()}
        good = [name for name, fault in faults.items() if fault is None]
        files = [str(self._folder / f"{name}.pub") for name in good]
        command, lines = ("supernode", "register"), []
        commands = [[*command, f, self._connection, f"--name={n}"] for f, n in zip(files, good, strict=True)]
        for name, answer in zip(good, self._flwr(*commands), strict=True):
            if answer.get("node-id"):
                known[name] = {"node": str(answer["node-id"]), "key": new[name]}
            elif KEY_IN_USE in error_of(answer):
                faults[name] = "it was revoked before, or is another client's"
            else:
                lines.append(f"the key of {name} is not accepted yet: {error_of(answer)}")
        self._rejected |= {name: new[name] for name, fault in faults.items() if fault}
        return lines + [f"the key of {name} is not accepted: {fault}" for name, fault in faults.items() if fault]


def registered_in(file: Path) -> dict[str, dict[str, str]] | None:
    """By name, the node and the key of those that are registered; None where the file does not say."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): {"node": str(int(of["node"])), "key": str(of["key"])} for name, of in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def error_of(answer: Mapping[str, Any]) -> str:
    """The error of an answer of `flwr`: its last line."""
    lines = str(answer.get("error-message", "")).strip().splitlines()
    return lines[-1].strip() if lines else "no reason was given"
