"""Deployments without a network: real devices and a real coordinator, in one process and in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from safa.deploy.exchange.coordinator import Coordinator
from safa.deploy.exchange.device import Device
from safa.deploy.exchange.messages import JoinReply, JoinRequest, Outgoing, Reply, TrainRequest, Update
from safa.deploy.exchange.options import FILE, Options
from safa.fleet import make_fleet
from safa.protocol import Events, registry
from safa.protocol.records import EndedBy, RoundRecord, Verdict
from safa.runs import Run, load_run, write_config
from safa.runs.settings import Settings
from safa.server.setup import Learning
from safa.streams import stream
from safa.tasks import load_problem
from safa.training.auto import for_one_client
from safa.training.setup import make_shards

PROTOCOLS = ["safa", "fedavg", "fedcs", "local", "fedasync", "fedbuff"]
Forge = Callable[[TrainRequest, Reply], Reply]


@dataclass
class Peer:
    """A device and how it behaves."""

    name: str
    part: int
    device: Device
    node: int
    delay_s: float = 3.0
    is_online: bool = True
    forge: Forge | None = None
    """What it sends instead of its honest reply to a request."""
    works_s: float | None = None
    """How long all its work takes, by its own clock, besides `delay_s`; without, it says how long it really took."""
    declares: float | None = None
    """The n_k that it claims to have."""
    requests: list[TrainRequest] = field(default_factory=list)


def prepare(folder: Path, given: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> Settings:
    """A run's folder, as a launcher makes it."""
    base = {"clients": 4, "rounds": 6, "fraction": 0.5, "lag_tolerance": 2, "round_limit_s": 60.0, "seed": 1}
    values = {"task": "boston"} | base | dict(given)
    settings = replace(Settings.of(values.pop("task")), **values)  # some have no effect with some protocols
    folder.mkdir(parents=True)
    write_config(folder, settings)
    (folder / FILE).write_text(Options.of({"start_with": settings.clients} | dict(options or {})).to_toml())
    return settings


class Harness:
    """A coordinator and its devices; a step is a second."""

    def __init__(
        self,
        folder: Path,
        given: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        delays_s: Mapping[int, float] | None = None,
    ) -> None:
        self.folder, self.now = folder, 1000.0
        self.settings = prepare(folder / "run", given or {}, options)
        self.peers: list[Peer] = []
        self._nodes = itertools.count(100)
        for part in range(self.settings.clients):
            self.join(f"client-{part}", part).delay_s = (delays_s or {}).get(part, 3.0 + part)
        self.coordinator = Coordinator(self.folder / "run", now=self.now)
        self._mail: list[tuple[float, int, Outgoing, Reply]] = []
        self._sent = itertools.count()

    def join(self, name: str, part: int) -> Peer:
        """A further device."""
        device = Device(name, self.folder / name, partition=part)
        self.peers.append(Peer(name, part, device, next(self._nodes)))
        return self.peers[-1]

    def restart(self, peer: Peer) -> None:
        """A device is started anew: it has its state file, and another node id."""
        peer.device = Device(peer.name, self.folder / peer.name, partition=peer.part)
        peer.node, peer.is_online = next(self._nodes), True

    def kill_server(self) -> None:
        """The server and everything under way is lost; a new one takes its place."""
        self._mail = []
        self.coordinator.stop()
        self.coordinator = Coordinator(self.folder / "run", now=self.now)

    def step(self) -> None:
        self.now += 1
        self.coordinator.on_nodes([peer.node for peer in self.peers if peer.is_online], now=self.now)
        while self._mail and self._mail[0][0] <= self.now:
            _, _, outgoing, reply = heapq.heappop(self._mail)
            if any(peer.node == outgoing.node and peer.is_online for peer in self.peers):
                self.coordinator.on_reply(outgoing, reply, now=self.now)
        self.coordinator.tick(now=self.now)
        while self.coordinator.outbox:
            self._carry(self.coordinator.outbox.popleft())

    def _carry(self, outgoing: Outgoing) -> None:
        peer = next((peer for peer in self.peers if peer.node == outgoing.node), None)
        if peer is None or not peer.is_online:
            return
        reply: Reply
        if isinstance(outgoing.message, JoinRequest):
            reply, due = peer.device.join(outgoing.message), self.now
            if peer.declares is not None:
                assert isinstance(reply, JoinReply)
                reply = replace(reply, size=peer.declares)
        else:
            peer.requests.append(outgoing.message)
            reply, due = peer.device.train(outgoing.message), self.now + peer.delay_s
            if peer.works_s is not None and isinstance(reply, Update):
                reply = replace(reply, seconds=outgoing.message.work * peer.works_s)
                due += reply.seconds
            if peer.forge is not None:
                reply = peer.forge(outgoing.message, reply)
        heapq.heappush(self._mail, (due, next(self._sent), outgoing.without_model(), reply))

    def run(self, until: Callable[[], bool] | None = None) -> Run:
        """Continue until the run is finished, or until something has come to pass."""
        for _ in range(5000):
            if self.coordinator.finished or (until is not None and until()):
                return load_run(self.folder / "run")
            self.step()
        raise AssertionError(f"still in round {self.coordinator.protocol.round} after 5000 seconds")

    def in_round(self, number: int) -> Callable[[], bool]:
        return lambda: self.coordinator.protocol.round >= number and self.coordinator.protocol.is_open


def fed_again(run: Run) -> dict[str, torch.Tensor]:
    """The model of a run that is fed the same arrivals without a fault, in one go; every round must come out alike."""
    settings = run.settings
    problem, roster = load_problem(settings.task), run.roster()
    assert roster is not None
    parts = make_shards(settings, problem, np.asarray(make_fleet(settings).sizes, dtype=np.float64))
    shards = [parts[member["details"]["partition"]] for member in roster]
    protocol = registry.build(settings.protocol, np.empty(0), settings.values())
    as_devices = replace(settings, trainer=for_one_client(problem))
    learning = Learning(as_devices, problem, protocol, shards=shards)
    for record in run.records():
        assert np.any(record.verdict != Verdict.REFUSED), f"round {record.round} took no update"
        again = _round_again(protocol, record, settings)
        for name in ("sent", "sent_version", "deprecated", "verdict", "refusal", "weight", "into", "version", "quota"):
            assert np.array_equal(getattr(again, name), getattr(record, name)), (record.round, name)
        learning.learner.apply(again)
    return learning.model()


def _round_again(protocol: Any, record: RoundRecord, settings: Settings) -> RoundRecord:
    new = record.joined >= protocol.clients
    if new.any():
        protocol.enrol(record.joined_size[new])
    resized = np.intersect1d(record.joined[~new], record.left)
    protocol.retire(np.setdiff1d(record.left, resized))
    protocol.resize(record.joined[~new], record.joined_size[~new])
    protocol.readmit(np.setdiff1d(record.joined[~new], resized))
    draws = stream(settings.seed, "lottery", record.round).random(protocol.clients)
    protocol.open_round(now=record.opened_s, draws=draws, expected_s=np.zeros(protocol.clients))
    for client, base, at_s in zip(record.client, record.base, record.arrival_s, strict=True):
        protocol.receive(Events.arrivals([client], [base], at_s=at_s))
    if record.ended_by is EndedBy.NOBODY_LEFT:
        protocol.receive(Events.losses(np.flatnonzero(protocol._awaited), at_s=record.closed_s))
    again: RoundRecord = protocol.close_round(now=record.closed_s)
    return again


def apart(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of two models."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
