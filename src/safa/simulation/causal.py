"""The causal clock: an update counts when it arrives.

Round t opens when round t-1 closed. The server sends w(t-1) to the clients that the protocol names, which takes its
link T_dist (Eq. 19); they download, train and upload. An attempt that is under way when the round closes continues. A
client that crashes is back when the next round opens, or after a delay of the fleet's (`safa.simulation.returns`). The
round closes when the protocol has enough, at T_lim, or when the server knows that nobody is left to wait for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from safa.errors import SafaError
from safa.fleet import Fleet
from safa.protocol import Protocol
from safa.protocol.records import RoundRecord
from safa.server.server import Server
from safa.simulation.devices import Devices
from safa.simulation.edge import complete_record, open_round
from safa.simulation.link import ServerLink
from safa.simulation.returns import ReturningDevices

__all__ = ["causal_rounds"]


def causal_rounds(
    server: Server,
    fleet: Fleet,
    *,
    detection_delay_s: float = 60.0,
    keep_progress: bool = True,
    estimate_error: float = 0.0,
    time_limit_s: float = math.inf,
) -> Iterator[RoundRecord]:
    """A fleet drives a server in causal time, a record a round, as long as rounds close within the time limit."""
    protocol = server.protocol
    kind = ReturningDevices if fleet.faults.return_delay_s else Devices
    devices = kind(fleet, detection_delay_s=detection_delay_s, keep_progress=keep_progress)
    link = ServerLink(fleet.copy_s)
    links_s = fleet.down_s + fleet.up_s
    now = 0.0
    for _ in range(server.rounds):
        dispatch = open_round(
            server, now=now, duration_s=fleet.turnaround_s, links_s=links_s, estimate_error=estimate_error
        )
        begin_s = link.broadcast(len(dispatch.sync), now=now)
        devices.open_round(dispatch, protocol.versions, protocol.work, now=now, begin_s=begin_s)
        now = _run_round(server, fleet, devices, link)
        if now > time_limit_s:
            return
        record = server.close_round(now=now)
        crashed = devices.crashed(now)
        record = complete_record(
            record,
            fleet,
            closed_s=now,
            distribution_s=len(record.sent) * fleet.copy_s,
            crashed=crashed,
            work_done=devices.work_done,
            work_lost=devices.work_lost,
        )
        yield server.commit(record)


def _run_round(server: Server, fleet: Fleet, devices: Devices, link: ServerLink) -> float:
    """Feed the open round what the server hears, in order, and return when to close it.

    Where arrivals are answered at once, a batch spans less time than any attempt takes, so that no answer can lead to
    an arrival inside its own batch. (An answered client that crashes can be found lost before its batch is over. That
    loss is reported at the end of the batch; since the batch's last client is still awaited then, it cannot be the one
    that ends the round any earlier.)
    """
    protocol = server.protocol
    within_s = _shortest_attempt_s(protocol, fleet) if protocol.answers_arrivals else math.inf
    while not protocol.done:
        events = devices.pending(protocol.deadline, most=2 * protocol.quota + 1000, within_s=within_s)
        if not len(events):
            if protocol.deadline == math.inf:
                raise SafaError(
                    f"round {protocol.round} would never end: the server waits for {protocol.waiting_for} "
                    "lost clients; set round_limit_s or a finite detection_delay_s"
                )
            return protocol.deadline
        events = replace(events, at_s=np.maximum(events.at_s, protocol.now))
        receipt = server.receive(events)
        heard = events[: receipt.consumed]
        devices.heard(heard, receipt.accepted)
        if len(receipt.sync):
            devices.start(receipt.sync, protocol.versions, protocol.work, link.queue(receipt.sync_s))
    return protocol.now


def _shortest_attempt_s(protocol: Protocol, fleet: Fleet) -> float:
    """What any attempt takes at least that begins in the open round."""
    if not protocol.asks_for_parts:
        return float(fleet.turnaround_s.min())
    return float((fleet.down_s + protocol.least_work * fleet.train_s + fleet.up_s).min())
