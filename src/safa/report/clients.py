"""The map of clients and rounds on a page, and what it says about each client.

`map.js` draws it. The cells are sent as one compressed array, and a million of them take a few megabytes at most.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.analysis.client_map import ClientMap, State, client_map
from safa.analysis.client_totals import ClientTotals, of_all
from safa.errors import SafaError
from safa.fleet import make_fleet
from safa.protocol.records import Ids, RoundRecord
from safa.report.figures import STATES
from safa.report.page import ClientFigure
from safa.report.words import counted, duration, number
from safa.runs import Run

__all__ = ["MAP_CLIENTS", "MAP_ROUNDS", "Clients", "client_figure", "clients_of", "spread"]

MAP_CLIENTS, MAP_ROUNDS = 1000, 1000
"""The most clients and rounds that the map shows."""

_OVER, _MISSING = 8, 2**16 - 1
"""The bit that says that a client starts over, and the number of what is missing, as in `map.js`."""


@dataclass(frozen=True)
class Clients:
    """What is known of every client of a run, by its number."""

    names: Sequence[str]
    order: Ids
    """The clients, the fastest first."""
    by: str
    """What they are ordered by."""
    speeds: NDArray[np.float64] | None
    """Mini-batches per second."""
    took_s: NDArray[np.float64]
    """The time for an update."""
    sizes: NDArray[np.float64] | None
    """Samples (n_k)."""
    merged: NDArray[np.int64]
    """Updates that reached the global model."""
    totals: ClientTotals

    def facts(self, chosen: Ids) -> list[dict[str, Any]]:
        """What is known of each of these clients, to be shown as cards."""
        totals, every = self.totals, len(self.order)
        came, refused, crashed, over = (
            of_all(total, every)[chosen].astype(np.int64).tolist()
            for total in (totals.came_in, totals.refused, totals.crashed, totals.started_over)
        )
        sizes = np.full(every, np.nan) if self.sizes is None else self.sizes
        merged, behind = self.merged[chosen].tolist(), totals.mean_lag(every)[chosen].tolist()
        return [
            self._speed(chosen),
            _card("Data", [_known_as(size, "samples") for size in sizes[chosen].tolist()], column="n_k"),
            _card("Updates merged", map(number, merged), [f"of {n:,} that came in" for n in came]),
            _card("Updates refused", map(number, refused)),
            _card("Versions behind", [number(lag) or "none came in" for lag in behind], ["on average"] * len(chosen)),
            _card("Work cut short", [counted(n, "time") for n in crashed],
                  [f"and started over {counted(n, 'time')}" if n else "" for n in over]),
        ]  # fmt: skip

    def _speed(self, chosen: Ids) -> dict[str, Any]:
        """Mini-batches per second where they are known, and the time for an update."""
        ranks = [
            f"place {rank + 1:,} of {len(self.order):,} by speed" for rank in np.argsort(self.order)[chosen].tolist()
        ]
        took = ["" if np.isnan(took_s) else duration(took_s) for took_s in self.took_s[chosen].tolist()]
        if self.speeds is None:
            return _card("Time for an update", [text or "unknown" for text in took], ranks)
        also = [f"{text} for an update; {rank}" if text else rank for text, rank in zip(took, ranks, strict=True)]
        return _card("Speed", [_known_as(speed, "batches/s") for speed in self.speeds[chosen].tolist()], also)


def _known_as(value: float, unit: str) -> str:
    return f"{number(value)} {unit}" if number(value) else "unknown"


def _card(name: str, values: Any, meanings: Sequence[str] = (), column: str = "") -> dict[str, Any]:
    shown = list(values)
    return {"name": name, "column": column, "values": shown, "meanings": list(meanings) or [""] * len(shown)}


def clients_of(
    run: Run, merged: NDArray[np.int64], totals: ClientTotals, took_s: NDArray[np.float64], speeds: ArrayLike | None
) -> Clients:
    """What is known of the clients of a run; without `speeds` they are ordered by the time that their updates took."""
    count, roster = len(merged), run.roster()
    took_s = _known(took_s, count)
    given = None if speeds is None else _known(speeds, count)
    slowness, by = (took_s, "the time their updates took") if given is None else (-given, "speed")
    return Clients(
        names=[
            str(client) if roster is None or client >= len(roster) else str(roster[client]["name"])
            for client in range(count)
        ],
        order=np.argsort(np.where(np.isnan(slowness), np.inf, slowness), kind="stable"),
        by=by,
        speeds=given,
        took_s=took_s,
        sizes=_sizes(run, count),
        merged=merged,
        totals=totals,
    )


def _known(values: ArrayLike, count: int) -> NDArray[np.float64]:
    """The values of the first so many clients, NaN where there is none."""
    given = np.asarray(values, dtype=np.float64)[:count]
    return np.concatenate([given, np.full(count - len(given), np.nan)])


def _sizes(run: Run, count: int) -> NDArray[np.float64] | None:
    """How many samples each client holds, where that is known without the data."""
    roster = run.roster()
    if roster is not None:
        return _known([member["size"] for member in roster], count)
    try:
        return _known(make_fleet(run.settings).sizes, count)
    except SafaError:
        return None


def spread(items: Ids, most: int) -> Ids:
    """At most that many items, evenly spread."""
    if len(items) <= most:
        return items
    return items[np.linspace(0, len(items) - 1, most).round().astype(np.int64)]


def client_figure(records: Iterable[RoundRecord], clients: Clients, rounds: int) -> ClientFigure:
    """The map of a run of so many rounds; of many clients and rounds, some."""
    every, count = -(-rounds // MAP_ROUNDS), len(clients.order)
    cells = client_map(records, spread(clients.order, MAP_CLIENTS), every=every)
    caption = f"A row is a client, a column a round; the clients are ordered by {clients.by}, the fastest on top."
    if cells.deprecated.any():
        caption += " Starts over: the client lagged too far behind and had to begin again from the latest version."
    if len(cells.clients) < count:
        caption += f" Shown are {len(cells.clients):,} of {count:,} clients, evenly spread over that order."
    if every > 1:
        caption += f" Shown is one round in {every}."
    return _figure(cells, clients, caption)


def _figure(cells: ClientMap, clients: Clients, caption: str) -> ClientFigure:
    rounds, rows = cells.state.shape
    counts = np.bincount(cells.state.ravel(), minlength=len(State))
    parts = ", ".join(f"{STATES[State(place)][0]} {count:,}" for place, count in enumerate(counts) if count)
    over = int(cells.deprecated.sum())
    said = f"Map of {rows:,} clients by {rounds:,} rounds. Cells: {parts}; starting over {over:,}."
    step_s = _step_s(cells)
    data = {
        "clients": [clients.names[client] for client in cells.clients],
        "rounds": cells.rounds.tolist(),
        "ends": ["fastest", "slowest"],
        "states": [STATES[state] for state in State],
        "legend": [int(state) for state in STATES if counts[state]],
        "over": over > 0,
        "step_s": step_s,
        "facts": clients.facts(cells.clients),
        "cells": _packed(cells, step_s),
    }
    return ClientFigure(data, "Who did what, round by round", caption, said)


def _step_s(cells: ClientMap) -> float:
    """The unit that arrivals are counted in: a tenth of a second, or more where rounds are too long for that."""
    into_s = cells.arrival_s - cells.opened_s[:, None]
    return float(max(0.1, np.nanmax(into_s, initial=0.0) / (_MISSING - 1)))


def _packed(cells: ClientMap, step_s: float) -> str:
    """Lags, arrivals within the round and states, each client by client."""
    into = np.maximum(0, cells.arrival_s - cells.opened_s[:, None]) / step_s
    lags = np.where(cells.lag < 0, _MISSING, np.minimum(cells.lag, _MISSING - 1))
    arrivals = np.where(np.isnan(into), _MISSING, into.round())
    states = cells.state | np.where(cells.deprecated, _OVER, 0)
    parts = [lags.T.astype("<u2"), arrivals.T.astype("<u2"), states.T.astype("u1")]
    return base64.b64encode(zlib.compress(b"".join(part.tobytes() for part in parts), 4)).decode()
