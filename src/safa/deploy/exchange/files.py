"""The files of a run's folder that only a deployment has, beside `deploy.toml`."""

from __future__ import annotations

from pathlib import Path

from safa.runs.storage import reading

__all__ = ["EXPEL", "LOG", "NODES", "ROUNDS", "UNBLOCK", "finished_rounds"]

LOG = "server.log"
"""The log of the server."""
NODES = "nodes.json"
"""The name of the registered key of each node id. The launcher writes it, the server reads it."""
EXPEL = "expel.json"
"""The names of clients to be expelled, a JSON list. The server removes it when that is done."""
UNBLOCK = "unblock.json"
"""The names of clients that are to be blocked no longer, likewise."""
ROUNDS = "rounds.jsonl"


def finished_rounds(folder: Path) -> int:
    """How many rounds of a run are on the disk."""
    path = folder / ROUNDS
    with reading(path):
        return path.read_bytes().count(b"\n") if path.exists() else 0
