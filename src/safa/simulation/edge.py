"""What both clocks do at the two ends of a round: estimate how long clients take, and complete the record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from safa.fleet import Fleet
from safa.protocol import Dispatch
from safa.protocol.records import Ids, RoundRecord
from safa.server.server import Server
from safa.streams import stream

__all__ = ["complete_record", "open_round"]

_BYTES_PER_MEGABYTE = 1e6


def open_round(
    server: Server,
    *,
    now: float,
    duration_s: NDArray[np.float64],
    links_s: NDArray[np.float64] | None = None,
    estimate_error: float,
) -> Dispatch:
    """Open the next round with the clients' durations as a server would guess them, and of these the links' part.

    A guess is off by a factor whose logarithm has the standard deviation `estimate_error`.
    """
    number, clients = server.protocol.round + 1, len(duration_s)
    if not estimate_error:
        return server.open_round(now=now, expected_s=duration_s, fixed_s=links_s)
    factor = np.exp(estimate_error * stream(server.seed, "estimate", number).normal(size=clients))
    fixed_s = None if links_s is None else links_s * factor
    return server.open_round(now=now, expected_s=duration_s * factor, fixed_s=fixed_s)


def complete_record(
    record: RoundRecord,
    fleet: Fleet,
    *,
    closed_s: float,
    distribution_s: float,
    crashed: Ids,
    work_done: float,
    work_lost: float,
    arrival_s: NDArray[np.float64] | None = None,
    version_variance: float | None = None,
) -> RoundRecord:
    """The record with what the world knows and the protocol does not."""
    model_bytes = fleet.model_size_mb * _BYTES_PER_MEGABYTE
    return replace(
        record,
        arrival_s=record.arrival_s if arrival_s is None else arrival_s,
        version_variance=record.version_variance if version_variance is None else version_variance,
        closed_s=closed_s,
        distribution_s=distribution_s,
        bytes_down=len(record.sent) * model_bytes,
        bytes_up=record.uploads * model_bytes,
        crashed=crashed,
        work_done=work_done,
        work_lost=work_lost,
    )
