"""What FLGo asks of a benchmark of one's own: a generator, a pipe and a calculator."""

from __future__ import annotations

import json
import os

from flgo.benchmark.partition import BasicPartitioner
from flgo.benchmark.toolkits.cv.classification import FromDatasetGenerator, FromDatasetPipe, GeneralCalculator
from jobs import Job
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

JOB = "PEERS_JOB"
"""The environment variable that holds the job, as JSON."""

job = Job(**json.loads(os.environ[JOB]))
samples = TensorDataset(*(part.flatten(0, 1) for part in job.data()))


class InTurn(BasicPartitioner):
    """The first samples are the first client's, and so on."""

    def __call__(self, data):
        """For every client the indices of its samples."""
        return [list(range(k * job.samples, (k + 1) * job.samples)) for k in range(job.clients)]


class TaskGenerator(FromDatasetGenerator):
    """The samples that are dealt out."""

    def __init__(self):
        super().__init__(benchmark="flgo_job", train_data=samples)


class Shard(Dataset):
    """A client's samples, in place of FLGo's own class, which this torch refuses (`Subset` without `__getitems__`)."""

    def __init__(self, dataset, indices, perturbation=None):
        self.parts = [tensor[indices[0] : indices[-1] + 1] for tensor in dataset.tensors]

    def __len__(self):
        return len(self.parts[0])

    def __getitem__(self, batch):
        return [part[batch[0] : batch[-1] + 1] for part in self.parts]


class TaskPipe(FromDatasetPipe):
    """The samples that clients load."""

    TaskDataset = Shard

    def __init__(self, task_path):
        super().__init__(task_path, train_data=samples)


class TaskCalculator(GeneralCalculator):
    """The job's loss; batches are read as a whole and in order, which is faster than sample by sample."""

    def __init__(self, device, optimizer_name="sgd"):
        super().__init__(device, optimizer_name)
        self.criterion = job.kind.loss

    def get_dataloader(self, dataset, batch_size=64, **options):
        """The batches of a client."""
        return DataLoader(
            dataset, batch_size=None, sampler=BatchSampler(SequentialSampler(dataset), int(batch_size), False)
        )
