"""The round of a deployment that is under way, from the file in which its server says what it is doing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safa.report.page import Block, Cell, Fact, Facts, Markup, Section, Table, Words
from safa.report.words import counted, number
from safa.runs.folder import STATUS, STATUS_FORMAT

__all__ = ["round_section"]

_OLD_S = 15.0
"""A status that is older than this is of a server that hangs or was killed."""
_TITLE, _ID = "The round under way", "under-way"
_COLUMNS = ("device", "state", "now", "last seen, s ago", "versions behind", "updates refused")


def round_section(folder: Path, *, running: bool) -> Section:
    """Quota, deadline and devices; where no server runs, a sentence that says so."""
    status = _read(folder / STATUS) if running else None
    if status is None:
        words = "The server has not said anything yet." if running else "No server runs, so that no round is under way."
        return Section(_TITLE, [Words(words)], _ID)
    try:
        return Section(_TITLE, _blocks(status), _ID)
    except (KeyError, TypeError, ValueError, AttributeError):
        return Section(_TITLE, [Words(f"{STATUS} cannot be read.")], _ID)


def _read(path: Path) -> dict[str, Any] | None:
    """The status with its age, if there is one of a format that is known."""
    try:
        status = json.loads(path.read_bytes())
        age_s = max(0.0, time.time() - path.stat().st_mtime)
    except (OSError, ValueError, RecursionError):
        return None
    known = isinstance(status, dict) and status.get("format") == STATUS_FORMAT
    return status | {"age_s": age_s} if known else None


def _blocks(status: Mapping[str, Any]) -> list[Block]:
    clients = status["clients"]
    old = f" This is as of {status['age_s']:,.0f} s ago." if status["age_s"] > _OLD_S else ""
    filled = (
        f'<progress value="{int(status["accepted"])}" max="{int(status["quota"])}" aria-label="updates in"></progress>'
    )
    return [Words(_state(status) + old), Markup(filled), Facts(_facts(status, clients)), _devices(status, clients)]


def _state(status: Mapping[str, Any]) -> str:
    if not status["is_open"]:
        return f"Round {status['round']:,} is about to open; the server waits for devices."
    again = f", opened {status['openings']} times" if status["openings"] > 1 else ""
    return f"Round {status['round']:,} is open{again}."


def _facts(status: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> list[Fact]:
    online, present = (sum(bool(client[name]) for client in clients) for name in ("online", "present"))
    refused, blocked = sum(status["refusals"].values()), sum(bool(client["blocked"]) for client in clients)
    reasons = [f"{reason} {count:,}" for reason, count in status["refusals"].items()]
    reasons += [f"{counted(blocked, 'device')} blocked"] if blocked else []
    return [
        Fact(
            "updates in", f"{status['accepted']:,} of {status['quota']:,}", "the round is closed when it has them all"
        ),
        Fact("time left", _time_left(status), "then the round is closed with what it has"),
        Fact("devices online", f"{online:,} of {present:,}", "of those that take part"),
        Fact("updates refused", f"{refused:,}", ", ".join(reasons) or "since the run began"),
    ]


def _time_left(status: Mapping[str, Any]) -> str:
    if status["deadline_s"] is None:
        return "no limit" if status["is_open"] else "not open"
    return f"{max(0.0, status['deadline_s'] - status['now_s'] - status['age_s']):,.0f} s"


def _devices(status: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[list[str | Cell]] = [
        [
            str(client["name"]),
            _presence(client),
            "at work" if client["at_work"] else "",
            _count(max(0.0, round(status["now_s"] - client["last_seen_s"], 0))),
            _count(client["lag"]),
            _count(client["refused"]),
        ]
        for client in clients
    ]
    return Table(_COLUMNS, rows, caption="The devices", filterable=len(rows) > 12)


def _count(value: float) -> Cell:
    return Cell(number(int(value)), int(value))


def _presence(client: Mapping[str, Any]) -> str:
    for name in ("expelled", "blocked"):
        if client[name]:
            return name
    if not client["present"]:
        return "left"
    return "online" if client["online"] else "offline"
