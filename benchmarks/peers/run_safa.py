"""safa: `simulate` with a problem of one's own, FedAvg, clients that never fail, the default trainer."""

from __future__ import annotations

import math
import warnings

import numpy as np
from jobs import Job, Rounds, main
from torch import Tensor

from safa import simulate
from safa.runs.options import SettingsOptions
from safa.tasks.problem import Problem


def problem(job: Job) -> Problem:
    """The job's data and model."""
    inputs, targets = (part.flatten(0, 1) for part in job.data())
    return Problem(
        model=job.kind.make,
        loss=job.kind.loss,
        train=(inputs, targets),
        test=(inputs[:1000], targets[:1000]),
        shards=list(np.arange(len(inputs)).reshape(job.clients, job.samples)),
        kernel=job.kind.kernel,
    )


def settings(job: Job) -> SettingsOptions:
    """FedAvg with clients that never fail."""
    return {
        "protocol": "fedavg",
        "fraction": job.cohort / job.clients,
        "crash_rate": 0.0,
        "round_limit_s": math.inf,
        "rounds": job.rounds,
        "epochs": job.epochs,
        "batch_size": job.batch_size,
        "lr": job.lr,
        "seed": job.seed,
    }


def run(job: Job, rounds: Rounds) -> dict[str, Tensor]:
    """Rounds of FedAvg."""
    warnings.simplefilter("ignore")  # that the loss did not fall: it is measured once
    found = simulate(
        problem(job),
        **(settings(job) | SettingsOptions(eval_every=job.rounds)),
        callbacks=[lambda record, server: rounds.done()],
    )
    rounds.how = f"trainer {found.settings.trainer}, {found.settings.threads} torch thread(s)"
    return found.model()


if __name__ == "__main__":
    main(run)
