"""pfl's CIFAR-10 benchmark through safa, all 1,500 rounds, beside the plain loop; numpy and torch are enough.

    PYTHONPATH=src python benchmarks/peers/pfl_job.py --device cuda [--tf32] [--rounds 1500] [--plain-rounds 20]

1,000 users x 50 random images, cohorts of 50, one epoch, batches of 10, SGD with 0.1; the global model is evaluated on
10,000 images every ten rounds. The plain loop does fewer rounds, without evaluation, and its time is scaled.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace

import torch
from jobs import JOBS, Job, Rounds
from run_plain import run as run_plain
from run_safa import problem, settings

from safa import simulate
from safa.runs.options import SettingsOptions
from safa.tasks.measures import accuracy

TESTED = 10_000


def with_safa(job: Job, device: str, tf32: bool) -> None:
    """All rounds by safa, and what they took."""
    tested = replace(job, clients=TESTED // job.samples, seed=job.seed + 1).data()
    test = tested[0].flatten(0, 1), tested[1].flatten(0, 1)
    ends = [time.perf_counter()]
    found = simulate(
        replace(problem(job), test=test, metrics={"accuracy": accuracy}),
        **(settings(job) | SettingsOptions(eval_every=10, device=device, tf32=tf32)),
        callbacks=[lambda record, server: ends.append(time.perf_counter())],
    )
    spent = ends[-1] - ends[0]
    later = (ends[-1] - ends[1]) / max(1, len(ends) - 2)
    print(
        f"safa, trainer {found.settings.trainer}: {job.rounds} rounds in {spent:.1f} s, evaluation included; "
        f"the first after {ends[1] - ends[0]:.1f} s, then {later * 1e3:.1f} ms a round",
        flush=True,
    )


def with_plain_loop(job: Job, device: str, rounds: int) -> None:
    """Fewer rounds by the plain loop, and what all would take."""
    timed = Rounds(limit_s=300.0)
    run_plain(replace(job, rounds=rounds + 1), timed, device)
    each = timed.report(job)["median_s"]
    print(
        f"plain loop: {each * 1e3:.0f} ms a round (median of {len(timed.ends) - 1}); "
        f"{job.rounds} rounds would take {each * job.rounds:.0f} s without evaluation"
    )


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--plain-rounds", type=int, default=20)
    parser.add_argument("--tf32", action="store_true", help="for both")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arguments.tf32
    warnings.simplefilter("ignore")  # that the loss on random images did not fall
    job = replace(JOBS["pfl"], rounds=arguments.rounds)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}{', TF32' if arguments.tf32 else ''}", flush=True)
    with_safa(job, arguments.device, arguments.tf32)
    with_plain_loop(job, arguments.device, arguments.plain_rounds)


if __name__ == "__main__":
    main()
