"""How much memory of its own a run takes: 500 clients, a model of two million parameters, `memory_mb` = 256.

    python benchmarks/memory.py [--protocol safa fedavg fedasync] [--memory-mb 256] [--rounds 3] [--trainer batched]

Each protocol runs in a process of its own. What is printed is the peak of RssAnon in /proc/self/status, sampled all the
time: memory that is the process's own. Models that do not fit are in memory-mapped files, which the system writes out
and drops as it needs to. The last column is what the clients' models take together. numpy and torch are all that is
needed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

CLIENTS, SAMPLES, FEATURES, WIDTH, CLASSES = 500, 20, 32, 1400, 10


def rss_anon_mib() -> float:
    """Private memory of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def run(protocol: str, memory_mb: float, rounds: int, trainer: Literal["batched", "serial"]) -> str:
    """One run in this process, as a line of the table."""
    import torch
    from torch import nn

    from safa import simulate
    from safa.tasks import Problem

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn((CLIENTS + 1) * SAMPLES, FEATURES, generator=generator)
    targets = inputs[:, :CLASSES].argmax(dim=1)
    held = CLIENTS * SAMPLES

    def model() -> nn.Module:
        first, second, last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    sizes = sum(p.numel() for p in model().parameters())
    problem = Problem(
        model=model,
        loss=nn.functional.cross_entropy,
        metrics={"accuracy": lambda output, target: (output.argmax(dim=1) == target).float().mean()},
        train=(inputs[:held], targets[:held]),
        test=(inputs[held:], targets[held:]),
    )
    peak, done = [rss_anon_mib()], threading.Event()
    base = peak[0]

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], rss_anon_mib())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    start = time.perf_counter()
    simulate(
        problem, protocol=protocol, clients=CLIENTS, rounds=rounds, batch_size=SAMPLES, memory_mb=memory_mb, lr=0.1,
        fraction=0.3, crash_rate=0.1, trainer=trainer,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    together = CLIENTS * sizes * 4 / 2**20
    return f"{protocol:>10} {sizes:>11,} {peak[0]:>9.0f} {base:>9.0f} {seconds:>8.0f} {together:>11.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--protocol", nargs="*", default=["safa", "fedavg", "fedasync"])
    parser.add_argument("--memory-mb", type=float, default=256.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainer", default="batched")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(run(given.protocol[0], given.memory_mb, given.rounds, given.trainer))
        return
    print(f"{CLIENTS} clients, memory_mb = {given.memory_mb:g}, {given.rounds} rounds, {given.trainer} trainer")
    titles = ("protocol", "parameters", "peak MiB", "at start", "seconds", "models MiB")
    print("{:>10} {:>11} {:>9} {:>9} {:>8} {:>11}".format(*titles), flush=True)
    for protocol in given.protocol:
        own = [sys.executable, __file__, "--here", "--protocol", protocol, "--memory-mb", str(given.memory_mb)]
        own += ["--rounds", str(given.rounds), "--trainer", given.trainer]
        subprocess.run(own, check=True)


if __name__ == "__main__":
    main()
