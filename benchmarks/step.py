"""One step of SGD on the paper's CNN for 100 clients x 40 images at once, on a GPU, by CUDA events.

    PYTHONPATH=src python benchmarks/step.py [--clients 100] [--compiled]

The best of six passes over twenty steps, in fp32 and with TF32; with --compiled also after torch.compile.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from safa.bench.models import MODELS
from safa.training import BatchedTrainer, Optimiser

EPOCHS, STEPS = 4, 5


def step_ms(clients: int, *, tf32: bool, compiled: bool, repeats: int = 6) -> float:
    """The milliseconds of one step."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    device = torch.device("cuda")
    problem, shards = MODELS["paper_cnn"].problem(clients, 40 * STEPS)
    trainer = BatchedTrainer(
        problem,
        shards,
        memory_mb=32768,
        batch_size=40,
        optimiser=Optimiser(lr=0.01),
        device=device,
        compile_=compiled,
    )
    start = trainer.layout.row(dict(problem.start_model(0).named_parameters())).to(device).expand(clients, -1)
    everyone = np.arange(clients)
    trainer.train(everyone, start, epochs=1)
    found = []
    for _ in range(repeats):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        trainer.train(everyone, start, epochs=EPOCHS)
        ended.record()
        torch.cuda.synchronize()
        found.append(began.elapsed_time(ended) / (EPOCHS * STEPS))
    return float(min(found))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--compiled", action="store_true", help="after torch.compile, too")
    given = parser.parse_args()
    for compiled in (False, True) if given.compiled else (False,):
        for tf32 in (False, True):
            ms = step_ms(given.clients, tf32=tf32, compiled=compiled)
            print(f"{'TF32' if tf32 else 'fp32'}{', compiled' if compiled else ''}: {ms:.2f} ms a step", flush=True)


if __name__ == "__main__":
    main()
