"""Hostile clients of a real SuperLink: they are refused by name, and the model is that of the honest ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.deploy.exchange.screening import RejectReason
from safa.deploy.flower.ports import free_port
from safa.fleet import make_fleet
from safa.protocol import registry
from safa.protocol.records import Verdict
from safa.runs import Run, load_run
from safa.server.learner import Learner
from safa.server.setup import make_aggregator
from safa.tasks import load_problem
from safa.training import BatchedTrainer, LocalTraining, Score
from safa.training.setup import make_optimiser, make_shards
from tests.deploy.harness import apart
from tests.deploy.real import listens, records, running, safa, wait_for
from tests.deploy.sender import NUDGE, Peer, Sender, serve

REASONS = {
    "nan": RejectReason.NOT_FINITE,
    "shapes": RejectReason.SHAPES,
    "norm": RejectReason.NORM,
    "stale": RejectReason.STALE_VERSION,
    "future": RejectReason.FUTURE_VERSION,
    "replay": RejectReason.NOT_ASKED,
    "large": RejectReason.TOO_LARGE,
    "garbage": RejectReason.UNREADABLE,
}
"""What is refused of whom, and why."""
OTHERS = ("unasked", "forged", "withheld")
"""They misbehave in ways that never reach the protocol."""


@pytest.mark.slow
def test_hostile_clients_are_refused_by_name_and_the_honest_make_the_model(tmp_path: Path) -> None:
    run, log, port = tmp_path / "run", tmp_path / "log", str(free_port())
    settings = ("--clients", "2", "--rounds", "7", "--fraction", "0.15", "--round-limit", "60", "--seed", "1")
    options = ("--start-with", str(2 + len(REASONS) + len(OTHERS)), "--norm-bound", "1000", "--max-mb", "1")
    server_log = run / "server.log"

    def all_were_refused() -> bool:
        said = server_log.read_text() if server_log.exists() else ""
        return all(f"rejected: {name}, {reason}" in said for name, reason in REASONS.items())

    with running() as processes:
        link = ("--host", "127.0.0.1", "--port", port, "--insecure", "--quiet", "--out", str(run))
        server = safa(processes, log, "deploy", "server", "boston", *settings, *options, *link)
        for part in range(2):
            where = ("--server", f"127.0.0.1:{port}", "--insecure", "--state", str(tmp_path / f"honest-{part}"))
            named = ("--name", f"honest-{part}", "--partition", str(part))
            safa(processes, tmp_path / f"honest-{part}.log", "deploy", "client", *where, *named)
        wait_for(lambda: listens(int(port)), server, log=log)
        with _crowd(f"127.0.0.1:{port}", (*REASONS, *OTHERS)):
            wait_for(lambda: all_were_refused() or len(records(run)) >= 7, server, log=server_log)
            assert all_were_refused(), server_log.read_text()
            assert server.wait(150) == 0, log.read_text()
    finished = load_run(run)
    roster = finished.roster()
    assert roster is not None
    names = [member["name"] for member in roster]
    taken = {
        names[client]
        for record in finished.records()
        for client in record.client[record.verdict != Verdict.REFUSED].tolist()
    }
    assert {"honest-0", "honest-1"} <= taken <= {"honest-0", "honest-1", "replay", "stale", "unasked", "forged"}
    assert apart(_honest_model(finished), finished.model()) <= 1e-6


@contextmanager
def _crowd(address: str, behaviours: Sequence[str]) -> Iterator[None]:
    """Clients of these behaviours, each called by what it does."""
    over = threading.Event()

    def live(behaviour: str) -> None:
        with suppress(httpx.TransportError), Sender(address, poll_s=0.5) as sender:  # the server ends before they do
            serve(Peer(sender, behaviour, behaviour), is_over=over.is_set)

    threads = [threading.Thread(target=live, args=(behaviour,)) for behaviour in behaviours]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class _Honest:
    """What honest clients make of a model: the first ones by training, the others by a nudge."""

    def __init__(self, trainer: BatchedTrainer, trains: NDArray[np.bool_]) -> None:
        self.layout = trainer.layout
        self._trainer, self._trains = trainer, trains

    def train(self, clients: NDArray[np.int64], start: Tensor, *, epochs: int | None = None, **given: Any) -> Tensor:
        updates = start + NUDGE
        mine = self._trains[clients]
        if mine.any():
            rows = torch.from_numpy(mine)
            updates[rows] = self._trainer.train(clients[mine], start[rows], epochs=epochs)
        return updates


def _honest_model(run: Run) -> dict[str, Tensor]:
    """The model of the records, if every update that was taken is what an honest client makes of its base."""
    settings, roster = run.settings, run.roster()
    assert roster is not None
    problem = load_problem(settings.task)
    parts = make_shards(settings, problem, np.asarray(make_fleet(settings).sizes, dtype=np.float64))
    held = [member["details"].get("partition") for member in roster]
    shards = [parts[part or 0] for part in held]
    trainer = BatchedTrainer(
        problem,
        shards,
        batch_size=settings.batch_size,
        optimiser=make_optimiser(settings),
        device=torch.device("cpu"),
    )
    trains = np.array([part is not None for part in held])
    protocol = registry.build(settings.protocol, np.empty(0), settings.values())
    start = problem.start_model(settings.seed)
    learner = Learner(
        LocalTraining(_Honest(trainer, trains), epochs=settings.epochs),
        make_aggregator(settings, protocol),
        trainer.layout.row(dict(start.named_parameters()) | dict(start.named_buffers())),
        np.empty(0),
        evaluate=lambda model: Score(0.0, {}),
    )
    for record in run.records():
        learner.apply(record)
    return trainer.layout.state(learner.model)
