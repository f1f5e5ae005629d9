"""Learning: applies a stream of round records to a problem. Decides nothing about a round."""

from safa.learning.attempt import Attempt
from safa.learning.evaluation import Evaluator
from safa.learning.layout import Layout
from safa.learning.learner import Learner
from safa.learning.optimiser import Optimiser
from safa.learning.received import Received
from safa.learning.threads import torch_threads
from safa.learning.trainer import BatchedTrainer, SerialTrainer, Trainer, make_trainer

__all__ = [
    "Attempt",
    "BatchedTrainer",
    "Evaluator",
    "Layout",
    "Learner",
    "Optimiser",
    "Received",
    "SerialTrainer",
    "Trainer",
    "make_trainer",
    "torch_threads",
]
