"""How much memory of its own a run takes where the clients' models do not fit `memory_mb`.

    python benchmarks/memory.py [--protocol safa fedavg fedasync] [--memory-mb 256] [--rounds 3] [--trainer auto]
    python benchmarks/memory.py --model cnn --clients 10000 --samples 6 --memory-mb 4096 --rounds 1 [--protocol ...]

The model is a network of two million parameters, with 500 clients, or the paper's convolutional network, on random
images. Each protocol runs in a process of its own. What is printed is the peak of RssAnon in /proc/self/status, sampled
all the time: memory that is the process's own. Models that do not fit are in memory-mapped files, which the system
writes out and drops as it needs to. "at start" is torch and the data; the last column is what the clients' models take
together. numpy and torch are all that is needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safa.tasks import Problem

FEATURES, WIDTH, CLASSES = 32, 1400, 10
_NOT_PASSED_ON = ("protocol", "here")


def rss_anon_mib() -> float:
    """Private memory of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def make_problem(kind: str, samples: int) -> Problem:
    """Random data, and the model of that name."""
    import torch
    from torch import nn

    from safa.tasks import Problem
    from safa.tasks.mnist import PaperCNN

    def network() -> nn.Module:
        first, second, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    generator = torch.Generator().manual_seed(0)
    shape = (1, 28, 28) if kind == "cnn" else (FEATURES,)
    inputs, test = (torch.randn(count, *shape, generator=generator) for count in (samples, 20))
    targets, wanted = (part.flatten(1)[:, :CLASSES].argmax(dim=1) for part in (inputs, test))
    return Problem(
        model=PaperCNN if kind == "cnn" else network,
        loss=nn.functional.nll_loss if kind == "cnn" else nn.functional.cross_entropy,
        metrics={"accuracy": lambda output, target: (output.argmax(dim=1) == target).float().mean()},
        train=(inputs, targets),
        test=(test, wanted),
    )


def run(given: argparse.Namespace) -> str:
    """One run in this process, as a line of the table."""
    from safa import simulate

    protocol, clients = given.protocol[0], given.clients
    problem = make_problem(given.model, clients * given.samples)
    sizes = sum(p.numel() for p in problem.start_model(0).parameters())
    peak, done = [rss_anon_mib()], threading.Event()
    base = peak[0]

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], rss_anon_mib())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    simulate(
        problem, protocol=protocol, clients=clients, rounds=given.rounds, batch_size=given.samples,
        memory_mb=given.memory_mb, lr=0.1, fraction=0.3, crash_rate=0.1, trainer=given.trainer, epochs=given.epochs,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    together = clients * sizes * 4 / 2**20
    return f"{protocol:>10} {sizes:>11,} {peak[0]:>9.0f} {base:>9.0f} {seconds:>8.0f} {together:>11.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--protocol", nargs="*", default=["safa", "fedavg", "fedasync"])
    parser.add_argument("--model", choices=["network", "cnn"], default="network")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--samples", type=int, default=20, help="of a client, on average")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--memory-mb", type=float, default=256.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainer", default="auto")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(run(given), flush=True)
        return
    print(f"{given.clients:,} clients, memory_mb = {given.memory_mb:g}, {given.rounds} rounds, {given.trainer} trainer")
    titles = ("protocol", "parameters", "peak MiB", "at start", "seconds", "models MiB")
    print("{:>10} {:>11} {:>9} {:>9} {:>8} {:>11}".format(*titles), flush=True)
    own = [f"--{name.replace('_', '-')}={value}" for name, value in vars(given).items() if name not in _NOT_PASSED_ON]
    for protocol in given.protocol:
        subprocess.run([sys.executable, __file__, "--here", "--protocol", protocol, *own], check=True)


if __name__ == "__main__":
    main()
