"""FedLab: its standalone pipeline with the FedAvg handler and the serial trainer."""

from __future__ import annotations

import logging

import torchvision_operators  # noqa: F401
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from jobs import Job, Rounds, main
from torch import Tensor


class Shards(FedDataset):
    """The clients' data, cut into batches."""

    def __init__(self, job: Job) -> None:
        self.inputs, self.targets = job.data()

    def get_dataloader(self, id, batch_size, type="train"):  # noqa: A002
        """The batches of a client; its trainer only iterates over them."""
        return list(zip(self.inputs[id].split(batch_size), self.targets[id].split(batch_size), strict=True))


class Pipeline(StandalonePipeline):
    """Notes the ends of rounds, where the documentation has users evaluate."""

    def __init__(self, handler: FedAvgServerHandler, trainer: FedAvgSerialClientTrainer, rounds: Rounds) -> None:
        super().__init__(handler, trainer)
        self.rounds = rounds

    def evaluate(self) -> None:
        """Called after every round."""
        if self.rounds.done():
            self.handler.global_round = self.handler.round


def run(job: Job, rounds: Rounds) -> dict[str, Tensor]:
    """Rounds of FedAvg."""
    job.use_threads()
    logging.disable(logging.INFO)
    trainer = FedAvgSerialClientTrainer(job.start_model(), job.clients, cuda=False)
    trainer.setup_dataset(Shards(job))
    trainer.setup_optim(job.epochs, job.batch_size, job.lr)
    trainer.criterion = job.kind.loss
    handler = FedAvgServerHandler(job.start_model(), job.rounds, job.cohort / job.clients, cuda=False)
    Pipeline(handler, trainer, rounds).main()
    return handler.model.state_dict()


if __name__ == "__main__":
    main(run, "fedlab", "torchvision")
