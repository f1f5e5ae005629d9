"""The map of clients and rounds on a page, and what it tells of each client.

`map.js` draws it. The cells are sent as one compressed array, and a million of them take a few megabytes at most.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safa.analysis.client_map import ClientMap, State
from safa.analysis.client_totals import ClientTotals, of_all
from safa.protocol.records import Ids
from safa.report.figures import STATES
from safa.report.page import ClientFigure
from safa.report.words import counted, duration, number

__all__ = ["Clients", "client_figure"]

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
        """The story of each of these clients in numbers, to be shown as cards."""
        place = np.empty(len(self.order), dtype=np.int64)
        place[self.order] = np.arange(1, len(self.order) + 1)
        came, refused, crashed, over = (
            of_all(total, len(self.order))[chosen].astype(np.int64).tolist()
            for total in (self.totals.came_in, self.totals.refused, self.totals.crashed, self.totals.started_over)
        )
        behind = self.totals.mean_lag(len(self.order))[chosen].tolist()
        took = [f"{duration(took_s)} for an update" if took_s >= 0 else "" for took_s in self.took_s[chosen].tolist()]
        ranks = [f"place {rank:,} of {len(self.order):,}, the fastest first" for rank in place[chosen].tolist()]
        speeds = [] if self.speeds is None else [f"{number(speed)} batches/s" for speed in self.speeds[chosen].tolist()]
        sizes = [] if self.sizes is None else [counted(int(size), "sample") for size in self.sizes[chosen].tolist()]
        merged = self.merged[chosen].tolist()
        return [
            _card("Speed", speeds or [text or "unknown" for text in took],
                  [f"{text}; {rank}" if speeds and text else rank for text, rank in zip(took, ranks, strict=True)]),
            _card("Data", sizes or ["unknown"] * len(chosen), column="n_k"),
            _card("Updates merged", map(number, merged), [f"of {number(count)} that came in" for count in came]),
            _card("Updates refused", map(number, refused)),
            _card("Versions behind", [number(lag) or "none came in" for lag in behind], ["on average"] * len(chosen)),
            _card("Work cut short", [counted(count, "time") for count in crashed],
                  [f"and started over {counted(count, 'time')}" if count else "" for count in over]),
        ]  # fmt: skip


def _card(name: str, values: Any, meanings: Sequence[str] = (), column: str = "") -> dict[str, Any]:
    shown = list(values)
    return {"name": name, "column": column, "values": shown, "meanings": list(meanings) or [""] * len(shown)}


def client_figure(cells: ClientMap, clients: Clients, caption: str) -> ClientFigure:
    """The map of `cells`, which may be some of the clients and rounds."""
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
    return base64.b64encode(zlib.compress(b"".join(part.tobytes() for part in parts), 9)).decode()
