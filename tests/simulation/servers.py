"""The protocols once more, slow and literal, from their papers: one client at a time, in plain Python."""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from safa.fleet import Fleet
from safa.runs.settings import Settings
from safa.streams import stream

Arrival = tuple[int, int, str]


def stale(lag: int, exponent: float) -> float:
    """(1 + lag)^-exponent, as numpy rounds it in an array."""
    return float((np.array([1.0 + lag]) ** -exponent)[0])


class Estimates:
    """What the server knows about how long clients take, which is the truth, and what the work cap makes of it."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self.full_s = [float(seconds) for seconds in fleet.turnaround_s]
        self.links_s = [float(down + up) for down, up in zip(fleet.down_s, fleet.up_s, strict=True)]
        own = 3.0 if settings.protocol == "fedsecant" else 0.0
        self.cap = own if settings.work_cap == "auto" else float(settings.work_cap)

    def within(self, k: int, seconds: float) -> float:
        """The share of its work that a client does in some time, a hundredth at least."""
        return min(1.0, max(0.01, self.until(k, seconds)))

    def until(self, k: int, seconds: float) -> float:
        return (seconds - self.links_s[k]) / (self.full_s[k] - self.links_s[k])

    def capped(self, k: int) -> float:
        return self.within(k, self.cap * statistics.median(self.full_s)) if self.cap else 1.0

    def takes_s(self, k: int, share: float) -> float:
        return self.links_s[k] + share * (self.full_s[k] - self.links_s[k]) if share < 1 else self.full_s[k]


class Server(ABC):
    """What the servers have in common."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self.settings, self.m, self.sizes = settings, len(fleet), fleet.sizes
        self.quota = math.ceil(settings.fraction * self.m - 1e-9)
        self.estimates = Estimates(settings, fleet)
        self.version = 0
        self.now = 0.0

    @abstractmethod
    def open(self, t: int) -> tuple[list[int], list[int], list[int]]:
        """Who is sent the model, who continues, and who of the former is deprecated."""

    def deadline(self, opened_s: float) -> float:
        return opened_s + self.settings.round_limit_s

    def asked(self, k: int) -> float:
        """The share of its work that a client is asked for which begins now."""
        return 1.0

    def enough(self) -> bool:
        return False

    def weight(self, k: int, base: int) -> float:
        """What an update counts that arrives now."""
        return math.nan

    @abstractmethod
    def arrive(self, k: int, base: int) -> str:
        """What becomes of an update that arrives now."""

    def answer(self, k: int) -> list[int]:
        """Who is sent the latest model because of this arrival."""
        return []

    def close(self, arrivals: list[Arrival]) -> list[Arrival]:
        return arrivals


class SafaServer(Server):
    """Eq. 3 and Algorithm 1, word for word."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        super().__init__(settings, fleet)
        self.tau = settings.lag_tolerance
        self.v = [0] * self.m
        self.picked_last: set[int] = set()

    def open(self, t: int) -> tuple[list[int], list[int], list[int]]:
        self.t = t
        self.p: list[int] = []
        self.q: list[int] = []
        deprecated = [k for k in range(self.m) if self.v[k] < t - self.tau]
        sync = [k for k in range(self.m) if self.v[k] == t - 1 or k in deprecated]
        for k in sync:
            self.v[k] = t - 1
        return sync, [k for k in range(self.m) if k not in sync], deprecated

    def enough(self) -> bool:
        return len(self.p) >= self.quota

    def arrive(self, k: int, base: int) -> str:
        (self.q if k in self.picked_last else self.p).append(k)
        self.v[k] = self.t
        return "?"

    def close(self, arrivals: list[Arrival]) -> list[Arrival]:
        picked = self.p + self.q[: self.quota - len(self.p)]
        self.picked_last = set(picked)
        self.version = self.t
        return [(k, b, "picked" if k in picked else "undrafted") for k, b, _ in arrivals]


class FedAvgServer(Server):
    """A random C-fraction, drawn before training; late replies are of no use."""

    def open(self, t: int) -> tuple[list[int], list[int], list[int]]:
        lots = stream(self.settings.seed, "lottery", t).random(self.m)
        self.t = t
        self.selected = sorted(sorted(range(self.m), key=lambda k: lots[k])[: self.quota])
        return self.selected, [], []

    def arrive(self, k: int, base: int) -> str:
        return "picked" if k in self.selected and base == self.version else "refused"

    def close(self, arrivals: list[Arrival]) -> list[Arrival]:
        self.version = self.t
        return arrivals


class TimelyServer(FedAvgServer):
    """FedAvg with an interval, that of the k-th fastest, for which everybody's work is cut."""

    def open(self, t: int) -> tuple[list[int], list[int], list[int]]:
        found = super().open(t)
        times = sorted(self.estimates.takes_s(k, self.estimates.capped(k)) for k in self.selected)
        self.interval_s = times[math.ceil(self.settings.interval_share * len(times) - 1e-9) - 1]
        return found

    def deadline(self, opened_s: float) -> float:
        return min(super().deadline(opened_s), opened_s + self.settings.late_factor * self.interval_s)

    def asked(self, k: int) -> float:
        return self.estimates.within(k, self.interval_s)


class FedAsyncServer(Server):
    """Every arrival makes a version and is answered."""

    def open(self, t: int) -> tuple[list[int], list[int], list[int]]:
        self.arrived = 0
        everyone = list(range(self.m))
        return (everyone, [], []) if t == 1 else ([], everyone, [])

    def enough(self) -> bool:
        return self.arrived >= self.quota

    def weight(self, k: int, base: int) -> float:
        return float(self.settings.mixing * stale(self.version - base, self.settings.staleness_exponent))

    def arrive(self, k: int, base: int) -> str:
        self.arrived += 1
        self.version += 1
        return "picked"

    def answer(self, k: int) -> list[int]:
        return [k]


class FedBuffServer(FedAsyncServer):
    """Every K-th arrival makes a version."""

    exponent = 0.5

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        super().__init__(settings, fleet)
        self.k, self.step, self.buffer = settings.buffer_size, settings.server_lr, 0

    def weight(self, k: int, base: int) -> float:
        return float(self.step / self.k * stale(self.version - base, self.exponent))

    def arrive(self, k: int, base: int) -> str:
        self.arrived += 1
        self.buffer += 1
        if self.buffer == self.k:
            self.version, self.buffer = self.version + 1, 0
        return "picked"


class FedSecantServer(FedBuffServer):
    """FedBuff with a K that follows the lags of the updates, and is the record's quota, too."""

    exponent = 0.25

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        super().__init__(settings, fleet)
        self.step, self.share = 1.0, 1.0
        self.lags: list[int] = []

    def open(self, t: int) -> tuple[list[int], list[int], list[int]]:
        if self.lags:
            at_work = (statistics.median(self.lags) + 0.5) * self.k
            self.share = self.share + 0.25 * (min(1.0, at_work / self.m) - self.share)
        self.lags = []
        n = self.share * self.m
        least = next(k for k in range(2, self.m + 3) if k * k >= n - 1e-6 and 10 * k >= n - 1e-6)
        self.k = self.quota = max(self.buffer + 1, least)
        return super().open(t)

    def arrive(self, k: int, base: int) -> str:
        if base > 0:
            self.lags.append(self.version - base)
        return super().arrive(k, base)


@dataclass
class Group:
    """Clients that are to arrive together."""

    due_s: float
    latest_s: float
    members: set[int] = field(default_factory=set)
    here: set[int] = field(default_factory=set)


class FedCompassServer(FedAsyncServer):
    """Clients join groups by the work that they can do until the group arrives."""

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        super().__init__(settings, fleet)
        self.groups: list[Group] = []
        self.idle = set(range(self.m))

    def release(self) -> list[int]:
        """Who need not wait any longer: their group is complete, or its time is over."""
        over = [g for g in self.groups if g.here and (g.latest_s < self.now or g.here == g.members)]
        freed = sorted(k for group in over for k in group.here)
        for group in over:
            group.members -= group.here
            group.here = set()
        self.groups = [group for group in self.groups if group.members]
        return freed

    def open(self, t: int) -> tuple[list[int], list[int], list[int]]:
        self.arrived = 0
        here = {k for group in self.groups for k in group.here}
        resume = [k for k in range(self.m) if k not in here and k not in self.idle]
        sync = sorted({*self.release(), *self.idle})
        self.idle = set()
        return sync, resume, []

    def asked(self, k: int) -> float:
        ratio, times = self.settings.step_ratio, self.estimates
        alive = [group for group in self.groups if group.latest_s > self.now]
        fitting = [(times.until(k, g.due_s - self.now), g) for g in alive]
        fitting = [(share, g) for share, g in fitting if ratio <= share <= 1]
        if fitting:
            share, group = max(fitting, key=lambda pair: pair[0])
            group.members.add(k)
            return share
        again = [g.latest_s + min(times.full_s[other] for other in g.members) for g in alive]
        shares = [share for share in (times.until(k, at_s - self.now) for at_s in again) if share <= 1]
        share = max(ratio, *shares) if shares else 1.0
        takes_s = times.links_s[k] + share * (times.full_s[k] - times.links_s[k])
        new = Group(self.now + takes_s, self.now + self.settings.late_factor * takes_s)
        group = next((group for group in alive if group.due_s == new.due_s), new)  # groups of one time are one
        group.members.add(k)
        self.groups += [new] if group is new else []
        return share

    def weight(self, k: int, base: int) -> float:
        return float(self.settings.server_lr * (self.sizes[k] / sum(self.sizes)) * stale(self.version - base, 0.5))

    def arrive(self, k: int, base: int) -> str:
        self.arrived += 1
        next(group for group in self.groups if k in group.members).here.add(k)
        return "picked"

    def answer(self, k: int) -> list[int]:
        freed = self.release()
        self.version += bool(freed)
        return freed


SERVERS: dict[str, Callable[[Settings, Fleet], Server]] = {
    "safa": SafaServer,
    "fedavg": FedAvgServer,
    "fedasync": FedAsyncServer,
    "fedbuff": FedBuffServer,
    "timelyfl": TimelyServer,
    "fedcompass": FedCompassServer,
    "fedsecant": FedSecantServer,
}
