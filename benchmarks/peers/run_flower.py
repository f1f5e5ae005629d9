"""Flower's simulation engine: Ray actors with one core each, message API, FedAvg."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import torch
from flower_apps import JOB, client_app, server_app
from flwr.simulation import run_simulation
from jobs import Job, Rounds, main
from torch import Tensor


def run(job: Job, rounds: Rounds) -> dict[str, Tensor]:
    """Rounds of FedAvg."""
    os.environ[JOB] = json.dumps(asdict(job))
    latest: dict[str, Tensor] = {}
    cores = torch.get_num_threads()
    rounds.how = f"{cores} Ray actors of 1 thread"
    config = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "logging_level": "ERROR", "log_to_driver": False},
    }
    try:
        run_simulation(server_app(job, rounds, latest), client_app, num_supernodes=job.clients, backend_config=config)
    except Exception:
        if not latest:  # else time was up
            raise
    return latest


if __name__ == "__main__":
    main(run, "flwr", "ray")
