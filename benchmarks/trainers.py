"""How fast the trainers are for seven models: client updates per second, as ratios to the plain loop.

    python benchmarks/trainers.py [--device cpu|cuda] [--models NAME ...] [--clients N] [--trainers NAME ...] [--tf32]

Every trainer trains the same clients in turns, and the medians are compared. numpy and torch are all that is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from safa.bench.models import MODELS
from safa.training import Optimiser
from safa.training.setup import make_trainer


def seconds(trainer: object, clients: np.ndarray, row: torch.Tensor) -> float:
    """Wall time of one epoch of these clients, to its last kernel."""
    rows = row.expand(len(clients), -1)
    if row.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    trainer.train(clients, rows, epochs=1)  # type: ignore[attr-defined]
    if row.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(name: str, device: torch.device, clients: int, kinds: list[str], repeats: int) -> dict[str, float]:
    """Seconds per client and epoch, by trainer."""
    model = MODELS[name]
    problem, shards = model.problem(clients, 5 * model.batch_size)
    how = {"batch_size": model.batch_size, "optimiser": Optimiser(lr=0.01), "device": device}
    memory = 32768.0 if device.type == "cuda" else 1024.0
    made = {kind: make_trainer(kind, problem, shards, memory_mb=memory, **how) for kind in kinds}  # type: ignore[arg-type]
    module = problem.start_model(0)
    spent: dict[str, list[float]] = {kind: [] for kind in kinds}
    for repeat in range(repeats + 1):
        for kind, trainer in made.items():
            row = trainer.layout.row(dict(module.named_parameters()) | dict(module.named_buffers())).to(device)
            some = np.arange(clients if kind != "serial" or device.type == "cpu" else max(4, clients // 10))
            found = seconds(trainer, some, row) / len(some)
            if repeat:
                spent[kind].append(found)
    return {kind: statistics.median(found) for kind, found in spent.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--trainers", nargs="*", default=["serial", "threads", "batched"])
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arguments.tf32
    print(f"torch {torch.__version__}, {device.type}, {torch.get_num_threads()} threads, {arguments.clients} clients")
    results = {}
    for name in arguments.models:
        found = results[name] = compare(name, device, arguments.clients, arguments.trainers, arguments.repeats)
        plain = found[arguments.trainers[0]]
        cells = (f"{kind} {spent * 1e3:.2f} ms ({plain / spent:.2f}x)" for kind, spent in found.items())
        print(f"{name:12}", "   ".join(cells), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
