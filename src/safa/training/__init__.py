"""Training: the local work of clients, many at once or one after the other. Decides nothing about a round."""

from safa.training.attempt import Attempt
from safa.training.evaluation import Evaluator, Score
from safa.training.layout import Layout
from safa.training.local import LocalTraining
from safa.training.optimiser import Optimiser
from safa.training.threads import torch_threads
from safa.training.trainer import BatchedTrainer, SerialTrainer, Trainer, make_trainer

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
    "make_trainer",
    "torch_threads",
]
