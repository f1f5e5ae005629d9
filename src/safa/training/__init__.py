"""Training: the local work of clients, many at once or one after the other. Decides nothing about a round."""

from safa.training.attempt import Attempt
from safa.training.batched import BatchedTrainer
from safa.training.evaluation import Evaluator, Score
from safa.training.layout import Layout
from safa.training.local import LocalTraining
from safa.training.optimiser import Optimiser
from safa.training.serial import SerialTrainer
from safa.training.threads import torch_threads
from safa.training.trainer import Trainer

__all__ = [
    "Attempt",
    "BatchedTrainer",
    "Evaluator",
    "Layout",
    "LocalTraining",
    "Optimiser",
    "Score",
    "SerialTrainer",
    "Trainer",
    "torch_threads",
]
