"""The causal clock once more, slow and literal: one client, one event at a time, in plain Python.

It shares nothing with the package but the numbers that the world hands out (speeds, lots, faults). The protocols are
written down again from their papers (`tests/simulation/servers.py`). What the fast simulation yields must be the same
to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from safa.fleet import Fleet
from safa.runs.settings import Settings
from tests.simulation.servers import SERVERS, Server


@dataclass
class Client:
    """One device and its attempt."""

    busy: bool = False
    base: int = 0
    share: float = 1.0
    full_s: float = 0.0
    before_s: float = 0.0
    begin_s: float = 0.0
    cut_s: float = math.inf
    next_s: float = math.inf
    stretches: int = 0


@dataclass
class Round:
    """What happened, in the words of the record."""

    opened_s: float
    closed_s: float = 0.0
    sent: list[int] = field(default_factory=list)
    deprecated: list[int] = field(default_factory=list)
    arrivals: list[tuple[int, int, str]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Of its full work, what each of these was asked for."""
    weights: list[float] = field(default_factory=list)
    """What each of these counts, where versions are made in mid-round."""
    crashed: list[int] = field(default_factory=list)


class World:
    """The devices and the server's link."""

    server: Server

    def __init__(self, settings: Settings, fleet: Fleet, sparing: bool) -> None:
        self.settings, self.fleet, self.sparing = settings, fleet, sparing
        self.clients = [Client() for _ in range(len(fleet))]
        self.link_free_s = 0.0
        self.round = 0

    def stretch(self, k: int, begin_s: float) -> None:
        client = self.clients[k]
        left_s = client.full_s - client.before_s
        cut_s = self.fleet.faults.crash_times(
            np.array([k]),
            np.array([begin_s]),
            np.array([left_s]),
            round_number=self.round,
            ordinal=np.array([client.stretches]),
        )[0]
        client.stretches += 1
        client.begin_s, client.cut_s = begin_s, float(cut_s)
        crashed = client.cut_s < math.inf
        client.next_s = client.cut_s + self.settings.detection_delay_s if crashed else begin_s + left_s

    def start(self, k: int, base: int, begin_s: float) -> None:
        client, fleet = self.clients[k], self.fleet
        client.busy, client.base, client.before_s = True, base, 0.0
        client.share = self.share(k)
        client.full_s = float(fleet.down_s[k] + client.share * fleet.train_s[k] + fleet.up_s[k])
        self.stretch(k, begin_s)

    def share(self, k: int) -> float:
        """The share of its work that a client is asked for, maybe as `tests.protocol.helpers.Sparing` has it."""
        asked = self.server.asked(k)
        if self.sparing and self.round % 2 == 0:
            asked = min(1.0, 2 * min(self.fleet.turnaround_s) / self.fleet.turnaround_s[k])
        return float(min(asked, self.server.estimates.capped(k)))

    def elapsed_s(self, k: int, now: float) -> float:
        client = self.clients[k]
        return client.before_s + max(0.0, min(client.cut_s, now) - client.begin_s)

    def open_round(self, sync: list[int], resume: list[int], base: int, now: float) -> None:
        self.round += 1
        copies_s = len(sync) * self.fleet.copy_s
        self.link_free_s = max(now, self.link_free_s) + copies_s
        for client in self.clients:
            client.stretches = 0
        for k, client in enumerate(self.clients):
            crashed = client.busy and client.cut_s <= now
            if k in sync:
                self.start(k, base, self.link_free_s)
            elif crashed and k in resume:
                client.before_s = self.elapsed_s(k, now) if self.settings.keep_progress else 0.0
                self.stretch(k, now)
            elif crashed:
                client.busy, client.cut_s, client.next_s = False, math.inf, math.inf
            elif client.busy and self.settings.fault_model == "round":
                client.before_s = self.elapsed_s(k, now)
                self.stretch(k, max(client.begin_s, now))

    def next_event(self, until_s: float) -> tuple[float, int]:
        """When the server hears of whom next."""
        return min((client.next_s, k) for k, client in enumerate(self.clients))

    def hear(self, k: int) -> bool:
        """The server hears of a client: whether it is lost."""
        client = self.clients[k]
        client.next_s = math.inf
        return client.cut_s < math.inf

    def away(self, now: float) -> list[int]:
        """Whose attempt has been cut short, and not taken up again."""
        return [k for k, client in enumerate(self.clients) if client.busy and client.cut_s <= now]


class ReturningWorld(World):
    """Clients that are back after a delay of their own. A return is an event that the server does not hear of."""

    def __init__(self, settings: Settings, fleet: Fleet, sparing: bool) -> None:
        super().__init__(settings, fleet, sparing)
        self.back_s = [math.inf] * len(fleet)
        self.absent_s = [-math.inf] * len(fleet)  # until when, of who was given other work while it was away
        self.notice_s = [math.inf] * len(fleet)
        availability = fleet.faults.availability
        rows = [] if availability is None else availability.trace.tolist()
        self.windows = [[(a, b) for client, a, b in rows if client == k] for k in range(len(fleet))]
        self.period_s = [math.inf] * len(fleet)
        if availability is None:
            self.windows = [[(0.0, math.inf)] for _ in range(len(fleet))]
        elif availability.period_s is not None:
            self.period_s = availability.period_s.tolist()

    def online(self, k: int, at_s: float) -> tuple[float, float]:
        """From when on a client is online, not before that time, and until when."""
        period_s, windows = self.period_s[k], self.windows[k]
        if not windows or at_s == math.inf:
            return math.inf, math.inf
        first, until = windows[0]
        if first == 0 and until >= period_s:
            return at_s, math.inf
        past_s = at_s % period_s
        begin_s = at_s - past_s
        for start, end in windows:
            if end >= period_s:  # it is online on into the next period
                end = period_s + (until if first == 0 else 0.0)
            if start <= past_s < end and begin_s + end - at_s >= 1e-6:
                return at_s, begin_s + end
            if past_s < start:
                return max(at_s, begin_s + start), begin_s + end
        return max(at_s, begin_s + (period_s + first)), begin_s + (period_s + until)

    def start(self, k: int, base: int, begin_s: float) -> None:
        client, fleet = self.clients[k], self.fleet
        client.busy, client.base, client.before_s = True, base, 0.0
        client.share = self.share(k)
        client.full_s = float(fleet.down_s[k] + client.share * fleet.train_s[k] + fleet.up_s[k])
        there_s = self.online(k, max(begin_s, self.absent_s[k]))[0]
        if there_s > begin_s:
            self.cut(k, begin_s, begin_s, there_s)
        else:
            self.stretch(k, begin_s)

    def stretch(self, k: int, begin_s: float) -> None:
        client = self.clients[k]
        crashes, point, delay_s = (
            lots[0] for lots in self.fleet.faults.lots(np.array([k]), np.array([client.stretches]))
        )
        client.stretches += 1
        left_s = client.full_s - client.before_s
        end_s = begin_s + left_s
        crash_s = float(begin_s + point * left_s) if crashes else math.inf
        offline_s = self.online(k, begin_s)[1]
        if crash_s < end_s and crash_s <= offline_s:
            self.cut(k, begin_s, crash_s, self.online(k, float(crash_s + delay_s))[0])
        elif offline_s < end_s:
            self.cut(k, begin_s, offline_s, self.online(k, offline_s)[0])
        else:
            self.cut(k, begin_s, math.inf, math.inf)
            client.next_s = end_s

    def cut(self, k: int, begin_s: float, cut_s: float, back_s: float) -> None:
        client = self.clients[k]
        client.begin_s, client.cut_s, client.next_s = begin_s, cut_s, math.inf
        self.back_s[k] = back_s
        notice_s = cut_s + self.settings.detection_delay_s
        self.notice_s[k] = notice_s if notice_s < back_s else math.inf

    def open_round(self, sync: list[int], resume: list[int], base: int, now: float) -> None:
        self.round += 1
        self.link_free_s = max(now, self.link_free_s) + len(sync) * self.fleet.copy_s
        for k in range(len(self.clients)):
            self.come_back(k, now)
        for k, client in enumerate(self.clients):
            away = client.busy and client.cut_s <= now
            if k in sync:
                if away:
                    self.absent_s[k] = self.back_s[k]
                self.start(k, base, self.link_free_s)
            elif away and k in resume and self.back_s[k] == math.inf:
                self.notice_s[k] = now + self.settings.detection_delay_s

    def come_back(self, k: int, now: float) -> None:
        client = self.clients[k]
        while client.busy and client.cut_s < math.inf and self.back_s[k] <= now:
            client.before_s = self.elapsed_s(k, math.inf) if self.settings.keep_progress else 0.0
            self.stretch(k, self.back_s[k])

    def next_event(self, until_s: float) -> tuple[float, int]:
        while True:
            events = [
                (at_s, k)
                for k, client in enumerate(self.clients)
                if client.busy
                for at_s in (client.next_s, self.notice_s[k], self.back_s[k])
            ]
            at_s, k = min(events)
            if at_s > until_s or at_s == math.inf or at_s < self.back_s[k]:
                return at_s, k
            self.come_back(k, at_s)

    def hear(self, k: int) -> bool:
        client = self.clients[k]
        client.next_s = self.notice_s[k] = math.inf
        return client.cut_s < math.inf

    def away(self, now: float) -> list[int]:
        for k in range(len(self.clients)):
            self.come_back(k, now)
        return super().away(now)


def simulate(settings: Settings, fleet: Fleet, *, sparing: bool = False) -> list[Round]:
    """Run a protocol, round by round; a sparing one asks for parts of the work."""
    world = (ReturningWorld if settings.return_delay_s else World)(settings, fleet, sparing)
    server = world.server = SERVERS[settings.protocol](settings, fleet)
    rounds = []
    now = 0.0
    for t in range(1, settings.rounds + 1):
        this = Round(opened_s=now)
        server.now = now
        sync, resume, this.deprecated = server.open(t)
        world.open_round(sync, resume, server.version, now)
        this.sent += sync
        waiting = set(sync) | set(resume)
        deadline = server.deadline(now)
        while waiting and not server.enough():
            at_s, k = world.next_event(deadline)
            if at_s > deadline or at_s == math.inf:
                now = deadline
                break
            now = server.now = at_s
            client = world.clients[k]
            if world.hear(k):
                waiting.discard(k)
                continue
            client.busy = False
            this.shares.append(client.share)
            weight = server.weight(k, client.base)
            this.weights.append(weight / client.share if settings.normalise_work else weight)
            this.arrivals.append((k, client.base, server.arrive(k, client.base)))
            waiting.discard(k)
            for other in server.answer(k):
                world.link_free_s = max(now, world.link_free_s) + fleet.copy_s
                world.start(other, server.version, world.link_free_s)
                this.sent.append(other)
                waiting.add(other)
        this.closed_s = now
        this.arrivals = server.close(this.arrivals)
        this.crashed = world.away(now)
        rounds.append(this)
    return rounds
