"""fluke: its FedAVG with its own data loaders, run by its own loop."""

from __future__ import annotations

import logging

import torch
import torchvision_operators  # noqa: F401
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader
from fluke.server import EarlyStopping
from fluke.utils import FederationObserver
from jobs import Job, Rounds, main
from torch import Tensor


class Timer(FederationObserver):
    """Notes the ends of rounds."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def end_round(self, round: int) -> None:  # noqa: A002
        """Called after every round."""
        if self.rounds.done():
            raise EarlyStopping(round)


def splitter(job: Job) -> DataSplitter:
    """The clients' data in the form of a data set whose parts are given."""
    inputs, targets = job.data()
    shards = [
        FastDataLoader(x, y, num_labels=job.kind.classes, batch_size=job.batch_size, skip_singleton=False)
        for x, y in zip(inputs, targets, strict=True)
    ]
    held = DummyDataContainer(shards, [None] * job.clients, None, job.kind.classes)
    return DataSplitter(dataset=held)


def loss(job: Job) -> type[torch.nn.Module]:
    """The job's loss as the class that fluke asks for."""

    class Loss(torch.nn.Module):
        """A loss without parameters."""

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            """The loss of a batch."""
            return job.kind.loss(output, target)

    return Loss


def run(job: Job, rounds: Rounds) -> dict[str, Tensor]:
    """Rounds of FedAvg."""
    job.use_threads()
    logging.disable(logging.INFO)
    FlukeENV().set_eval_cfg(server=False, locals=False, pre_fit=False, post_fit=False)
    client = {
        "batch_size": job.batch_size,
        "local_epochs": job.epochs,
        "loss": loss(job),
        "optimizer": {"name": "SGD", "lr": job.lr},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
        "persistency": False,
    }
    params = DDict(client=client, server={"weighted": True}, model=job.start_model())
    algorithm = FedAVG(job.clients, splitter(job), params)
    algorithm.set_callbacks(Timer(rounds))
    algorithm.run(n_rounds=job.rounds, eligible_perc=job.cohort / job.clients, finalize=False)
    return algorithm.server.model.state_dict()


if __name__ == "__main__":
    main(run, "fluke-fl", "torchvision")
