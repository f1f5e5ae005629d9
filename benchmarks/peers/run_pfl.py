"""pfl: FederatedAveraging on its simulated backend, one process per core, as its documentation starts them."""

from __future__ import annotations

import os
import sys

import torch
from jobs import Job, Rounds, main
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor


class Timer(TrainingProcessCallback):
    """Notes the ends of rounds."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        """Whether to stop, and no metrics; all processes stop together."""
        enough = torch.tensor(self.rounds.done())
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(enough, 0)
        return bool(enough), Metrics()


def with_loss(job: Job) -> torch.nn.Module:
    """The job's model with the two methods that pfl asks for."""
    model = job.start_model()

    def loss(inputs: Tensor, targets: Tensor, eval: bool = False) -> Tensor:  # noqa: A002
        """The loss of a batch."""
        model.eval() if eval else model.train()
        return job.kind.loss(model(inputs), targets)

    model.loss, model.metrics = loss, lambda inputs, targets: {}
    return model


def run(job: Job, rounds: Rounds) -> dict[str, Tensor]:
    """Rounds of FedAvg."""
    rounds.how = f"{os.environ.get('WORLD_SIZE', 1)} process(es) of 1 thread"
    inputs, targets = job.data()
    sampler = get_user_sampler("minimize_reuse", list(range(job.clients)))
    users = FederatedDataset(lambda user: Dataset((inputs[user], targets[user]), user_id=user), sampler)
    module = with_loss(job)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    # Evaluation cannot be switched off: the round that warms up has one.
    params = NNAlgorithmParams(job.rounds, job.rounds + 1, job.cohort, 0)
    train = NNTrainHyperParams(job.batch_size, job.epochs, job.lr)
    backend = SimulatedBackend(training_data=users, val_data=users)
    FederatedAveraging().run(
        params, backend, model, train, NNEvalHyperParams(None), [Timer(rounds)], send_metrics_to_platform=False
    )
    return module.state_dict()


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ and torch.get_num_threads() > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={torch.get_num_threads()}"]
        os.execv(sys.executable, [sys.executable, *launch, *sys.argv])
    main(run, "pfl")
