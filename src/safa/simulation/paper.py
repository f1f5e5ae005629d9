"""The paper clock: the idealised rounds behind the paper's printed tables, for reproduction.

Every client that does not crash finishes inside its round, however slow it is. Updates come in by client speed, the
fastest first. A round lasts as long as the slowest client that counts, cut at T_lim, plus T_dist outside the cut. Who
counts differs from protocol to protocol:

- SAFA: the picked clients. A client whose training alone takes longer than T_lim is never picked, only undrafted.
- FedCS: the selected clients, crashed ones included, as if their full time had to be waited for. Its filter counts
  training and upload, not the download.
- FedAvg: the selected clients; if any of them crashed, the round lasts until T_lim.
- fully local: the selected clients.

Every client crashes in every round with probability `crash_rate`, at a uniform point of its work. Wasted is, for SAFA,
the work of clients in rounds in which they were deprecated, out of all work done; for the others the work of crashed
clients, out of all work that was asked for. FedCS is charged, as lost work, with what the clients could have done that
it drew and then left out: the printed futility of the cells in which it left somebody out (boston, C = 0.1, cr = 0.1:
0.21 where crashes cost 0.05) is met that way only.

The version variance (Eq. 10) is that of the clients that did not crash in the round: with cr = 0.7, tau = 5 and C = 0.1
the paper's Figure 4 shows about 0.5, where all clients together have 1.8.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from safa.errors import SafaError
from safa.fleet import Fleet
from safa.protocol import Events, FedAvg, FedCS, Local, Protocol, Safa
from safa.protocol.records import Ids, RoundRecord
from safa.server.server import Server
from safa.simulation.edge import complete_record, open_round

__all__ = ["paper_rounds"]


def paper_rounds(server: Server, fleet: Fleet, *, estimate_error: float = 0.0) -> Iterator[RoundRecord]:
    """A fleet drives a server under the paper clock, a record a round; what does not fit is said at once."""
    protocol = server.protocol
    if type(protocol) not in (Safa, FedAvg, FedCS, Local):
        raise SafaError(
            f"the paper clock knows safa, fedavg, fedcs and local only; run {protocol.name} with clock = causal"
        )
    if protocol.asks_for_parts:
        raise SafaError("the paper clock knows no parts of the work; use clock = causal with work_cap")
    if fleet.faults.availability is not None:
        raise SafaError("the paper clock knows no availability trace; use clock = causal")
    return _rounds(server, fleet, estimate_error)


def _rounds(server: Server, fleet: Fleet, estimate_error: float) -> Iterator[RoundRecord]:
    protocol = server.protocol
    fastest_first = np.argsort(-fleet.speeds, kind="stable")
    too_slow = fleet.train_s > protocol.round_limit_s
    now = 0.0
    for number in range(1, server.rounds + 1):
        dispatch = open_round(server, now=now, duration_s=fleet.train_s + fleet.up_s, estimate_error=estimate_error)
        crashing, point = fleet.faults.draw(number)
        at_work = np.zeros(len(fleet), dtype=np.bool_)
        at_work[dispatch.sync] = at_work[dispatch.resume] = True
        finishing = fastest_first[(at_work & ~crashing)[fastest_first]]
        crashed = np.flatnonzero(at_work & crashing)
        versions = protocol.versions[finishing]
        _feed(server, finishing, too_slow, crashed, now)
        record = server.close_round(now=now)
        distribution_s = len(dispatch.sync) * fleet.copy_s
        work_done, work_lost = _work(protocol, fleet, record, at_work, crashing, point, dispatch.dropped)
        now += distribution_s + _wait_s(protocol, fleet, record, np.flatnonzero(at_work), crashed)
        record = complete_record(
            record,
            fleet,
            arrival_s=record.opened_s + distribution_s + fleet.turnaround_s[record.client],
            closed_s=now,
            distribution_s=distribution_s,
            crashed=crashed,
            work_done=work_done,
            work_lost=work_lost,
            version_variance=float(np.var(versions)) if len(versions) else 0.0,
        )
        yield server.commit(record)


def _feed(server: Server, finishing: Ids, too_slow: NDArray[np.bool_], crashed: Ids, now: float) -> None:
    """Tell the server the round: updates by speed, then those that cannot be picked any more, then the losses."""
    protocol = server.protocol
    in_time = finishing[~too_slow[finishing]] if protocol.has_bypass else finishing
    receipt = server.receive(Events.arrivals(in_time, protocol.versions[in_time], at_s=now))
    if protocol.has_bypass:
        late = np.concatenate([in_time[receipt.consumed :], finishing[too_slow[finishing]]])
        server.receive(Events.arrivals(late, protocol.versions[late], at_s=now), late=True)
    if not protocol.done:
        server.receive(Events.losses(crashed, at_s=now))


def _wait_s(protocol: Protocol, fleet: Fleet, record: RoundRecord, at_work: Ids, crashed: Ids) -> float:
    """How long the server waits in a round, T_dist aside."""
    limit_s = protocol.round_limit_s
    if isinstance(protocol, Safa):
        return min(limit_s, float(fleet.turnaround_s[record.picked].max(initial=0.0)))
    if isinstance(protocol, Local):
        return min(limit_s, float(fleet.train_s[at_work].max(initial=0.0)))
    if not isinstance(protocol, FedCS) and len(crashed) and limit_s < np.inf:
        return limit_s
    return min(limit_s, float(fleet.turnaround_s[at_work].max(initial=0.0)))


def _work(
    protocol: Protocol,
    fleet: Fleet,
    record: RoundRecord,
    at_work: NDArray[np.bool_],
    crashing: NDArray[np.bool_],
    point: NDArray[np.float64],
    dropped: Ids,
) -> tuple[float, float]:
    """Work and wasted work of a round, as the tables count them."""
    work = np.where(crashing, point, 1.0) * fleet.batches
    if isinstance(protocol, Safa):
        return float(work[at_work].sum()), float(work[record.deprecated].sum())
    never_done = float(fleet.batches[dropped].sum())
    return float(fleet.batches[at_work].sum()) + never_done, float(work[at_work & crashing].sum()) + never_done
