"""FLGo: its FedAvg on a task generated from a benchmark of one's own (`flgo_job`)."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict

import flgo
import flgo.algorithm.fedavg as fedavg
import torch
import torchvision_operators  # noqa: F401
from flgo.experiment.logger import BasicLogger
from jobs import Job, Rounds, main
from torch import Tensor


def logger(rounds: Rounds) -> type[BasicLogger]:
    """A logger that logs nothing and notes the ends of rounds."""

    class Timer(BasicLogger):
        """Asked after every round whether to stop."""

        def early_stop(self) -> bool:
            """Whether time is up."""
            return rounds.done()

    return Timer


def run(job: Job, rounds: Rounds) -> dict[str, Tensor]:
    """Rounds of FedAvg."""
    job.use_threads()
    os.environ["PEERS_JOB"] = json.dumps(asdict(job))
    import flgo_job
    from flgo_job.core import InTurn

    parallel = torch.get_num_threads()
    rounds.how = f"{parallel} thread(s) of clients"
    option = {
        "num_rounds": job.rounds,
        "num_epochs": job.epochs,
        "batch_size": job.batch_size,
        "learning_rate": job.lr,
        "proportion": job.cohort / job.clients,
        "sample": "uniform",
        "train_holdout": 0.0,
        "eval_interval": 0,
        "seed": job.seed,
        "torch_num_threads": 1,
        "num_parallels": parallel,
        "parallel_type": "t",
        "no_log_console": True,
        "no_tqdm": True,
    }
    with tempfile.TemporaryDirectory() as folder:
        task = flgo.gen_task_by_(flgo_job, InTurn(), os.path.join(folder, "task"))
        model = flgo.convert_model(lambda: job.start_model())
        server = flgo.init(task, fedavg, option, model=model, Logger=logger(rounds))
        server.run()
    return server.model.model.state_dict()


if __name__ == "__main__":
    main(run, "flgo", "torchvision")
