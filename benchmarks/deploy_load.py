"""A deployment under load: a real SuperLink and the real server, and a fleet of senders that never tires.

    python benchmarks/deploy_load.py [--clients 50] [--minutes 10] [--model-kb 400] [--out FILE.json]

The senders are threads of this process, in `tests/deploy/sender.py`. Each answers a request after a random time, or now
and then not at all: it forgets the request, or is gone for a while and comes back as another node. It is measured

- whether memory grows once every client has its row in the cache, in the server app and in the SuperLink, and whether
  the SuperLink's database does;
- whether every update that was sent is accounted for: in a round, or as refused in the log. In the end the senders fall
  silent, and a round without any update is awaited, so that nothing is under way any more;
- how long an update waits until the server has taken note of it, and its client until it has the next request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import torch
from torch import nn

from safa.deploy.exchange.files import finished_rounds
from safa.deploy.exchange.messages import Update
from safa.deploy.exchange.options import Options
from safa.deploy.flower.internals import environment
from safa.deploy.flower.ports import LOOPBACK
from safa.deploy.flower.records import read_train_reply
from safa.deploy.launcher.link import FLOWER, Link, begin
from safa.deploy.launcher.processes import Processes
from safa.deploy.launcher.superlink import SuperLink
from safa.protocol.records import RoundRecord
from safa.runs.settings import Settings
from safa.tasks import Problem

if TYPE_CHECKING:
    from tests.deploy.sender import Sender

ROOT = Path(__file__).resolve().parent.parent
MODEL_KB = "SAFA_LOAD_MODEL_KB"
PAGE, TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
REFUSED = re.compile(r"refused: (?!node )(.+), [a-z ]+: ")


def problem() -> Problem:
    """A model of as many kB as the environment says, and next to no data, so that evaluation costs nothing."""
    hidden = max(1, int(float(os.environ.get(MODEL_KB, "400")) * 1000 / 4 / 3))
    data = torch.linspace(-1, 1, 8)[:, None], torch.zeros(8, 1)
    return Problem(
        model=lambda: nn.Sequential(nn.Linear(1, hidden), nn.Linear(hidden, 1)),
        loss=nn.functional.mse_loss,
        metrics={"accuracy": lambda output, target: -nn.functional.mse_loss(output, target)},
        train=data,
        test=data,
    )


# -- the fleet -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What the senders do."""

    address: str
    think_s: float
    """How long a client works on an request, on average; the shortest is a fifth of that."""
    drop: float
    """How often it drops out instead."""
    poll_s: float
    seed: int


@dataclass(frozen=True)
class Sent:
    """An update that was sent."""

    version: int
    at: float


class Fleet:
    """What all clients share: when they may work, and what they have done."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.silent, self.over = threading.Event(), threading.Event()
        self.sent: dict[str, list[Sent]] = defaultdict(list)
        self.waited_s: list[float] = []
        """From an update until the next request, with all that a round has to wait for."""
        self.counts: Counter[str] = Counter()
        self._threads: list[threading.Thread] = []

    def start(self, clients: int) -> None:
        """Let so many clients come."""
        for number in range(clients):
            self._threads.append(threading.Thread(target=self._live, args=(number,), daemon=True))
            self._threads[-1].start()
            time.sleep(0.05)

    def stop(self) -> None:
        """Let all of them go."""
        self.silent.set()
        self.over.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _live(self, number: int) -> None:
        """One client: it comes, works, leaves for a while, and comes back."""
        from tests.deploy.sender import Sender

        rng = np.random.default_rng([self.load.seed, number])
        while not self.over.is_set():
            try:
                with Sender(self.load.address, poll_s=self.load.poll_s) as sender:
                    away_s = _Client(self, sender, f"client-{number}", rng).work()
            except httpx.HTTPError as problem:
                self.counts[f"broken connections ({type(problem).__name__})"] += 1
                away_s = 5.0
            self.over.wait(away_s)


class _Client:
    """One client while it is connected."""

    def __init__(self, fleet: Fleet, sender: Sender, name: str, rng: np.random.Generator) -> None:
        self._fleet, self._sender, self._name, self._rng = fleet, sender, name, rng
        self._answered_at: float | None = None

    def work(self) -> float:
        """Reply requests, until it is over or the client drops out; how long it will be away."""
        from tests.deploy.sender import honest, request_in

        fleet, load = self._fleet, self._fleet.load
        while not fleet.silent.is_set():
            message = self._sender.receive(load.poll_s)
            if message is None:
                continue
            request = request_in(message)
            if request is not None:
                if self._answered_at is not None:
                    fleet.waited_s.append(time.time() - self._answered_at)
                self._answered_at = None
                if fleet.silent.wait(load.think_s * self._rng.uniform(0.2, 1.8)):
                    break
                if self._rng.random() < load.drop:
                    if self._rng.random() < 0.5:
                        fleet.counts["requests forgotten"] += 1
                        continue
                    fleet.counts["clients gone for a while"] += 1
                    return float(self._rng.uniform(5, 30))
            content = honest(message, self._name, 100.0)
            self._sender.reply(message, content)
            if request is None:
                fleet.counts["introductions"] += 1
            elif not isinstance(read_train_reply(content), Update):
                fleet.counts["models missed"] += 1
            else:
                self._answered_at = time.time()
                fleet.sent[self._name].append(Sent(request.version, self._answered_at))
        fleet.over.wait()  # online, but silent
        return 0.0


# -- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look at everything."""

    seconds: float
    sent: int
    rounds: int
    app_mb: float
    app_own_mb: float
    """What is the process's own: without files that are mapped into memory."""
    app_cpu_s: float
    link_mb: float
    link_own_mb: float
    link_cpu_s: float
    database_mb: float
    """With its write-ahead log."""


@dataclass(kw_only=True)
class Account:
    """Which of the updates that were sent the server has taken note of."""

    sent: int = 0
    in_rounds: int = 0
    refused: int = 0
    """By the screening, as the log says; what the protocol refuses is in a round."""
    lost: int = 0
    rounds: int = 0
    heard_s: list[float] = field(default_factory=list)
    """How long each of them waited to be noticed."""


def rounds(folder: Path) -> Iterator[RoundRecord]:
    """The rounds that are closed."""
    whole, _, _ = (folder / "rounds.jsonl").read_text().rpartition("\n")  # behind it, one may be just being written
    return map(RoundRecord.from_json, whole.splitlines())


def began_at(folder: Path) -> float:
    """When a deployment began: its records count seconds from then on, by a clock of their own."""
    return (folder / "deployment.json").stat().st_mtime


def account(folder: Path, sent: dict[str, list[Sent]]) -> Account:
    """Find every update that was sent in the rounds, by its client and the version it is based on, or in the log."""
    found = Account(sent=sum(map(len, sent.values())))
    began = began_at(folder)
    names = [member["name"] for member in json.loads((folder / "roster.json").read_text())]
    open_: dict[tuple[str, int], deque[Sent]] = defaultdict(deque)
    for name, updates in sent.items():
        for update in updates:
            open_[name, update.version].append(update)
    for record in rounds(folder):
        found.rounds += 1
        found.in_rounds += len(record.client)
        for client, base, arrival_s in zip(record.client, record.base, record.arrival_s, strict=True):
            waiting = open_[names[client], int(base)]
            if waiting:
                found.heard_s.append(began + float(arrival_s) - waiting.popleft().at)
    refused = Counter(REFUSED.findall((folder / "server.log").read_text()))
    found.refused = refused.total()
    left: Counter[str] = Counter()
    for (name, _), waiting in open_.items():
        left[name] += len(waiting)
    found.lost = (left - refused).total()
    return found


def memory_mb(pid: int) -> tuple[float, float]:
    """The resident memory of a process, and the part of it that is its own."""
    resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    return resident * PAGE / 1e6, (resident - shared) * PAGE / 1e6


def cpu_s(pid: int) -> float:
    """The processor time that a process has used."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / TICKS


def find(alive: set[int]) -> dict[str, int]:
    """The server app and the SuperLink among the processes that were started."""
    found = {}
    for pid in alive:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"flwr-serverapp" in command:
                found["app"] = pid
            elif b"--database" in command:
                found["link"] = pid
    return found


def look(folder: Path, alive: set[int], fleet: Fleet, began: float) -> Sample | None:
    """A sample; None if the server app or the SuperLink is not there."""
    pids = find(alive)
    if len(pids) < 2:
        return None
    (app, app_own), (link, link_own) = memory_mb(pids["app"]), memory_mb(pids["link"])
    return Sample(
        seconds=time.monotonic() - began,
        sent=sum(map(len, list(fleet.sent.values()))),
        rounds=finished_rounds(folder),
        app_mb=app,
        app_own_mb=app_own,
        app_cpu_s=cpu_s(pids["app"]),
        link_mb=link,
        link_own_mb=link_own,
        link_cpu_s=cpu_s(pids["link"]),
        database_mb=sum(file.stat().st_size for file in (folder / "flower").glob("state.db*")) / 1e6,
    )


# -- running ---------------------------------------------------------------------------------------------------------

EVERY_S = 5.0
HEAD = f"{'minute':>6} {'updates':>8} {'rounds':>7} {'app MB':>8} {'own':>6} {'link MB':>8} {'own':>6} {'db MB':>7}"


def line(sample: Sample) -> str:
    """A row of the table."""
    memory = f"{sample.app_mb:>8.0f} {sample.app_own_mb:>6.0f} {sample.link_mb:>8.0f} {sample.link_own_mb:>6.0f}"
    return f"{sample.seconds / 60:>6.1f} {sample.sent:>8} {sample.rounds:>7} {memory} {sample.database_mb:>7.1f}"


def watch(server: SuperLink, processes: Processes, fleet: Fleet, seconds: float) -> list[Sample]:
    """Look every few seconds, and print every minute."""
    began = time.monotonic()
    samples: list[Sample] = []
    while time.monotonic() - began < seconds:
        time.sleep(EVERY_S)
        sample = look(server.folder, processes.alive(), fleet, began)
        if sample is not None:
            if not samples or sample.seconds // 60 > samples[-1].seconds // 60:
                print(line(sample), flush=True)
            samples.append(sample)
        elif samples or time.monotonic() - began > 60:
            logs = [server.folder / "server.log", server.folder / "flower" / "superlink.log"]
            said = "".join(log.read_text()[-2000:] for log in logs if log.exists())
            raise RuntimeError(f"the server has ended:\n{said}")
    return samples


def settle(folder: Path, round_limit_s: float) -> None:
    """Wait until nothing comes any more, so that whatever was sent is in a round: twice, one came to nothing."""
    log = folder / "server.log"
    said = len(log.read_text())
    deadline = time.monotonic() + 10 * round_limit_s + 60
    while time.monotonic() < deadline and log.read_text()[said:].count("no update came in") < 2:
        time.sleep(2)


def summary(samples: list[Sample], found: Account, fleet: Fleet, warm_up_s: float) -> dict[str, Any]:
    """What it all comes to."""
    warm = [sample for sample in samples if sample.seconds >= warm_up_s] or samples
    minutes = max((warm[-1].seconds - warm[0].seconds) / 60, 1e-9)

    def slope(name: str) -> float:
        values = [getattr(sample, name) for sample in warm]
        return float(np.polyfit([sample.seconds / 60 for sample in warm], values, 1)[0]) if len(warm) > 2 else 0.0

    def quantiles(values: list[float]) -> dict[str, float]:
        ordered = sorted(values) or [float("nan")]
        return {
            "median": statistics.median(ordered),
            "p95": ordered[int(0.95 * (len(ordered) - 1))],
            "max": ordered[-1],
        }

    return {
        "sent": found.sent,
        "in_rounds": found.in_rounds,
        "refused_by_screening": found.refused,
        "lost": found.lost,
        "rounds": found.rounds,
        "per_second": (warm[-1].sent - warm[0].sent) / minutes / 60,
        "heard_after_s": quantiles(found.heard_s),
        "next_order_after_s": quantiles(fleet.waited_s),
        "growth_per_minute": {
            name: slope(name) for name in ("app_mb", "app_own_mb", "link_mb", "link_own_mb", "database_mb")
        },
        "cores": {
            name: (getattr(warm[-1], f"{name}_cpu_s") - getattr(warm[0], f"{name}_cpu_s")) / minutes / 60
            for name in ("app", "link")
        },
        "events": dict(fleet.counts),
    }


def show(found: dict[str, Any]) -> None:
    """Print the summary."""
    for name, value in found.items():
        text = ", ".join(f"{k} {v:.4g}" for k, v in value.items()) if isinstance(value, dict) else f"{value:.4g}"
        print(f"{name.replace('_', ' '):>22}: {text}")


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Deploy, load, measure."""
    settings = Settings.of(
        "benchmarks.deploy_load:problem",
        clients=arguments.clients,
        rounds=1_000_000,
        round_limit_s=arguments.round_limit,
        protocol=arguments.protocol,
        seed=arguments.seed,
        eval_every=10,
    )
    link = Link(host=LOOPBACK, port=0, keys=None)
    begin(folder, settings, Options(start_with=arguments.clients), link)
    with Processes(environment(folder / FLOWER / "home")) as processes:
        server = SuperLink(processes, folder, link)
        server.open()
        load = Load(f"{LOOPBACK}:{server.port}", arguments.think, arguments.drop, arguments.poll, arguments.seed)
        fleet = Fleet(load)
        try:
            fleet.start(arguments.clients)
            server.submit()
            print(HEAD)
            samples = watch(server, processes, fleet, arguments.minutes * 60)
            fleet.silent.set()
            settle(folder, arguments.round_limit)
            found = summary(samples, account(folder, fleet.sent), fleet, min(120.0, arguments.minutes * 20))
        finally:
            fleet.stop()
    return {"arguments": vars(arguments) | {"out": None}, **found, "samples": [asdict(sample) for sample in samples]}


def main() -> None:
    """Measure, print, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model-kb", type=float, default=400.0)
    parser.add_argument("--protocol", default="safa")
    parser.add_argument("--think", type=float, default=15.0, help="mean time that a client works on an request, in s")
    parser.add_argument("--drop", type=float, default=0.03, help="how often a client drops out instead of answering")
    parser.add_argument("--poll", type=float, default=3.0, help="how often a client looks for an request, in s")
    parser.add_argument("--round-limit", type=float, default=30.0, help="T_lim in s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to keep the run (default: it is removed)")
    parser.add_argument("--out", type=Path, help="a file for the result, as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ |= {MODEL_KB: str(arguments.model_kb), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        found = run(arguments, (arguments.folder or Path(temporary) / "run").resolve())
    show({name: value for name, value in found.items() if name not in ("arguments", "samples")})
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
