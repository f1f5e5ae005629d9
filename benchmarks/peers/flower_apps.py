"""Flower's two apps; in a module of their own so that Ray's actors import them by name and keep their data."""

from __future__ import annotations

import json
import logging
import os
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from jobs import Job, Rounds
from run_plain import train

JOB = "PEERS_JOB"
"""The environment variable that tells the actors the job, as JSON."""

client_app = ClientApp()


@cache
def own() -> tuple[Job, torch.Tensor, torch.Tensor, torch.nn.Module]:
    """The job, all data and a model: made once by every actor."""
    torch.set_num_threads(1)
    job = Job(**json.loads(os.environ[JOB]))
    return job, *job.data(), job.start_model()


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    """A client's epochs, from the global model to its own."""
    job, inputs, targets, model = own()
    client = int(context.node_config["partition-id"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(job, model, inputs[client], targets[client])
    metrics = MetricRecord({"num-examples": job.samples})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class TimeUpError(Exception):
    """The only way to end a strategy before its last round."""


def server_app(job: Job, rounds: Rounds, latest: dict[str, torch.Tensor]) -> ServerApp:
    """A server that runs FedAvg, notes when its rounds end and puts the global model into `latest`."""
    app = ServerApp()
    logging.getLogger("flwr").setLevel(logging.WARNING)

    def after_round(number: int, arrays: ArrayRecord) -> None:
        """Called by the strategy before the first round and after each."""
        if number:
            enough = rounds.done()
            if enough or number == job.rounds:
                latest.update(arrays.to_torch_state_dict())
            if enough:
                raise TimeUpError

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        """All rounds."""
        strategy = FedAvg(
            fraction_train=job.cohort / job.clients,
            fraction_evaluate=0.0,
            min_train_nodes=job.cohort,  # the first round begins before all nodes are there
            min_available_nodes=job.clients,
        )
        start = ArrayRecord(job.start_model().state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=job.rounds, evaluate_fn=after_round)

    return app
