"""How fast the clients of a task are trained: the trainers in turns, in one process, as ratios.

    python benchmarks/learning.py [--device cpu|cuda] [--task boston kdd99 mnist] [--tf32]

For every task the same clients are trained by every trainer, in turns, and the medians are compared. For the paper's
CNN it also prints the arithmetic rate that was reached beside the rate of a large matrix product on the same device.
The data are found through SAFA_DATA. numpy and torch are all that is needed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from safa.experiments.simulate import Experiment
from safa.fleet import make_fleet
from safa.runs.settings import Settings
from safa.tasks import Samples, find_task, partition
from safa.training import Optimiser, Trainer
from safa.training.setup import make_trainer

CNN_FLOP_PER_IMAGE = 2 * (2 * 20 * 25 * 576 + 3 * (50 * 500 * 64 + 800 * 500 + 500 * 10))
"""Forward, gradient of the weights, gradient of the inputs (which the first layer does not need)."""


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of some work, to its last kernel."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations per second of a large matrix product."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device)
    torch.mm(a, b)
    return 2 * size**3 / min(seconds(lambda: torch.mm(a, b), device) for _ in range(5))


def trainers(task: str, device: torch.device) -> tuple[Settings, list[np.ndarray], dict[str, Trainer]]:
    """The trainers for a task, the serial one last, with the shards that they train on."""
    settings = Settings.of(task, preset="paper")
    problem = find_task(task).load()
    sizes = np.asarray(make_fleet(settings).sizes, dtype=np.float64)
    samples = Samples(targets=problem.train[1].numpy(), sizes=sizes)
    shards = partition(settings.partition, samples, np.random.default_rng(0))
    made = {
        kind: make_trainer(
            kind,
            problem,
            shards,
            batch_size=settings.batch_size,
            optimiser=Optimiser(lr=settings.learning_rate),
            device=device,
            memory_mb=8192 if device.type == "cuda" else 1024,
        )
        for kind in (("batched", "threads", "serial") if device.type == "cpu" else ("batched", "serial"))
    }
    return settings, shards, made


def compare(task: str, device: torch.device, repeats: int) -> None:
    """Train the same clients with every trainer, in turns."""
    settings, shards, made = trainers(task, device)
    everyone = np.arange(len(shards))
    # The serial trainer takes a part of the clients, so that the CNN does not take all day.
    some = everyone if task != "mnist" else everyone[:: max(1, len(everyone) // (10 if device.type == "cpu" else 20))]
    epochs = settings.epochs if task != "mnist" or device.type == "cuda" else 1
    start = find_task(task).load().start_model(0)
    row = made["serial"].layout.row(dict(start.named_parameters())).to(device)
    times: dict[str, list[float]] = {kind: [] for kind in made}
    for repeat in range(repeats + 1):
        for kind in made:
            clients = everyone if kind == "batched" and device.type == "cuda" else some
            rows = row.expand(len(clients), -1)
            spent = seconds(lambda k=kind, c=clients, r=rows: made[k].train(c, r, epochs=epochs), device)  # type: ignore[misc]
            if repeat:  # the first is for warming up
                times[kind].append(spent / len(clients))
    median = {kind: statistics.median(spent) for kind, spent in times.items()}
    words = [f"{kind} {one * 1e3:.3g} ms ({median['serial'] / one:.2f} times)" for kind, one in median.items()]
    print(f"{task}, a client: {', '.join(words)}", flush=True)
    if task == "mnist":
        images = float(np.mean([len(shards[k]) for k in some])) * epochs
        rate, work = matmul_rate(device), images * CNN_FLOP_PER_IMAGE
        reached = [f"{kind} {work / one / 1e9:.0f} ({work / one / rate:.0%})" for kind, one in median.items()]
        print(f"  GFLOP/s of the {rate / 1e9:.0f} of a large matrix product: {', '.join(reached)}", flush=True)


def compare_rounds(task: str, device: torch.device, rounds: int) -> None:
    """Rounds of SAFA with everything that belongs to them, evaluation included, by both trainers."""
    spent = {}
    for kind in ("batched", "serial", "batched"):  # the first is for warming up
        settings = Settings.of(task, preset="paper", rounds=rounds, trainer=kind, device=device.type)
        experiment = Experiment(settings)
        spent[kind] = seconds(lambda it=experiment: list(it.rounds()), device)  # type: ignore[misc]
    ratio = spent["serial"] / spent["batched"]
    print(f"  {rounds} rounds of safa, all included: {ratio:.1f} times faster", flush=True)


def whole_run(task: str, device: torch.device, **given: Any) -> None:
    """A run from start to end, as the paper's tables have it."""
    settings = Settings.of(task, preset="paper", device=device.type, **given)
    spent = seconds(lambda: experiment_to_end(settings), device)
    print(f"{task}: {settings.rounds} rounds of {settings.protocol} with {settings.clients} clients in {spent:.1f} s")


def experiment_to_end(settings: Settings) -> None:
    """Run all rounds and say how good the model became."""
    experiment = Experiment(settings)
    for _ in experiment.rounds():
        pass
    summary = experiment.summary()
    print(f"  best accuracy {summary['best_accuracy']:.4f}, last {summary['last_accuracy']:.4f}", flush=True)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--task", nargs="*", default=["boston", "kdd99", "mnist"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--runs", action="store_true", help="whole runs, too (mnist on a GPU only)")
    parser.add_argument("--tf32", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arguments.tf32
    print(f"torch {torch.__version__}, {device.type}, {torch.get_num_threads()} threads")
    for task in arguments.task:
        compare(task, device, arguments.repeats)
        if arguments.runs and (task != "mnist" or device.type == "cuda"):
            compare_rounds(task, device, rounds={"boston": 100, "kdd99": 5, "mnist": 2}[task])
            whole_run(task, device, tf32=arguments.tf32)


if __name__ == "__main__":
    main()
