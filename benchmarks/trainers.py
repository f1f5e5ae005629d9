"""How fast the trainers are for seven models: milliseconds of a client, and how many times as fast as a plain loop.

    python benchmarks/trainers.py [--device cpu|cuda] [--models NAME ...] [--clients N] [--trainers NAME ...] [--tf32]

Every trainer trains the same clients in turns, and the medians are compared. The plain loop is what one would write
with torch alone, with all of its threads, in a process of its own; on a GPU it is the serial trainer. `auto` is what a
run would choose. The paper's network is compared with a matrix product, too. numpy and torch are all that is needed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from safa.bench.models import MODELS
from safa.runs.settings import Settings
from safa.training import Optimiser, Trainer
from safa.training.auto import choose_trainer
from safa.training.setup import make_trainer

LR = 0.01
PAPER_CNN_FLOPS = 3 * 2 * (24 * 24 * 20 * 25 + 8 * 8 * 50 * 500 + 800 * 500 + 500 * 10)
"""Of an image, forward and backward."""


def seconds(trainer: Trainer, clients: np.ndarray, row: torch.Tensor) -> float:
    """Wall time of one epoch of these clients, to its last kernel."""
    rows = row.expand(len(clients), -1)
    if row.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    trainer.train(clients, rows, epochs=1)
    if row.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def plain_loop(pipe: Connection, name: str, clients: int) -> None:
    """For every message, the seconds of a client and epoch in a plain loop; in a process of its own."""
    model = MODELS[name]
    problem, shards = model.problem(clients, 5 * model.batch_size)
    module, first, (inputs, targets) = problem.start_model(0), problem.start_model(0).state_dict(), problem.train
    while pipe.recv():
        start = time.perf_counter()
        for shard in shards:
            module.load_state_dict(first)
            optimiser = torch.optim.SGD(module.parameters(), lr=LR)
            for batch in torch.from_numpy(shard).split(model.batch_size):
                optimiser.zero_grad()
                problem.loss(module(inputs[batch]), targets[batch]).backward()
                optimiser.step()
        pipe.send((time.perf_counter() - start) / clients)


@contextmanager
def plain_process(name: str, clients: int) -> Iterator[Connection]:
    """The plain loop, which answers every message."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=plain_loop, args=(there, name, clients))
    process.start()
    yield here
    here.send(None)
    process.join()


def made(name: str, device: torch.device, clients: int, kinds: list[str]) -> tuple[dict[str, Trainer], torch.Tensor]:
    """The trainers by name, `auto` among them by the name of what it is, and the model to start from."""
    model = MODELS[name]
    problem, shards = model.problem(clients, 5 * model.batch_size)
    how: dict[str, Any] = {"batch_size": model.batch_size, "optimiser": Optimiser(lr=LR), "device": device}
    how["memory_mb"] = 32768.0 if device.type == "cuda" else 1024.0
    found = {kind: make_trainer(kind, problem, shards, **how) for kind in kinds}
    module = problem.start_model(0)
    row = found[kinds[0]].layout.row(dict(module.named_parameters()) | dict(module.named_buffers()))
    return found, row.to(device)


def chosen(name: str, device: torch.device, clients: int) -> str:
    """What a run would train with."""
    model = MODELS[name]
    problem, shards = model.problem(clients, 5 * model.batch_size)
    settings = Settings.of("digits", batch_size=model.batch_size, device=device.type, clients=clients)
    return choose_trainer(settings, problem, shards, device)[0]


def compare(name: str, device: torch.device, clients: int, kinds: list[str], repeats: int) -> dict[str, float]:
    """Seconds per client and epoch, by trainer, and in a plain loop on a CPU."""
    trainers, row = made(name, device, clients, kinds)
    spent: dict[str, list[float]] = {kind: [] for kind in (*(["plain"] if device.type == "cpu" else []), *trainers)}
    with plain_process(name, clients) if "plain" in spent else nullcontext() as plain:
        for _ in range(repeats + 1):
            if plain is not None:
                plain.send(True)
                spent["plain"].append(plain.recv())
            for kind, trainer in trainers.items():
                some = np.arange(clients if kind != "serial" or device.type == "cpu" else max(4, clients // 10))
                spent[kind].append(seconds(trainer, some, row) / len(some))
    return {kind: statistics.median(found[1:]) for kind, found in spent.items()}


def product_rate(device: torch.device) -> float:
    """Floating-point operations per second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1500
    matrix = torch.randn(size, size, device=device)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        matrix @ matrix
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def report(name: str, found: dict[str, float], device: torch.device) -> str:
    """A line about one model."""
    plain = found.get("plain", found["serial"])
    line = "   ".join(f"{kind} {spent * 1e3:.2f} ms ({plain / spent:.2f}x)" for kind, spent in found.items())
    if name != "paper_cnn":
        return line
    images = 5 * MODELS[name].batch_size
    share = PAPER_CNN_FLOPS * images / min(found.values()) / product_rate(device)
    return f"{line}   {share:.0%} of a matrix product's rate"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--trainers", nargs="*", help="default: serial, threads and processes (on a CPU), and batched")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    kinds = arguments.trainers or ["serial", *(["threads", "processes"] if device.type == "cpu" else []), "batched"]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arguments.tf32
    print(f"torch {torch.__version__}, {device.type}, {torch.get_num_threads()} threads, {arguments.clients} clients")
    results = {}
    for name in arguments.models:
        auto = chosen(name, device, arguments.clients)
        found = compare(name, device, arguments.clients, list(dict.fromkeys(["serial", *kinds])), arguments.repeats)
        found["auto"] = found.get(auto, float("nan"))
        results[name] = {"seconds": found, "auto": auto, "best": min(kinds, key=lambda kind: found.get(kind, np.inf))}
        print(f"{name:12}", report(name, found, device), f"  auto is {auto}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
