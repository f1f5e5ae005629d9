"""The learning side of a run, from its settings: start model, aggregator, source of updates, evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation import Aggregator, registry
from safa.analysis import client_metrics, higher_is_better
from safa.errors import SafaError
from safa.protocol import Protocol
from safa.runs import Settings
from safa.server.budget import Budget
from safa.server.inbox import Inbox
from safa.server.learner import Learner, UpdateSource
from safa.training import Evaluator, Layout, torch_threads
from safa.training.setup import TrainerOf, find_device, local_training, memory_for, trainer_of

if TYPE_CHECKING:
    from safa.tasks.problem import Problem

__all__ = ["Learning", "make_aggregator"]


def make_aggregator(settings: Settings, protocol: Protocol) -> Aggregator:
    """The aggregator that the settings ask for, inside the server's optimiser; what makes no sense is refused."""
    name = protocol.aggregator if settings.aggregator == "auto" else settings.aggregator
    kind = registry.find(name)
    registry.check(
        kind,
        protocol.rule,
        protocol=protocol.name,
        several=not protocol.one_by_one,
        from_latest=not protocol.answers_arrivals,
    )
    if kind.corrects:
        _check_plain_mean(settings, name)
    aggregator = registry.build(name, settings.values(), settings.aggregator_options)
    if settings.server_optimiser == "none":
        return aggregator
    return registry.build_optimiser(settings.server_optimiser, aggregator, settings.values())


def _check_plain_mean(settings: Settings, name: str) -> None:
    """Complain about steps that are not gradient times learning rate (weight decay is a gradient), and other means."""
    if settings.optimiser != "sgd" or settings.momentum or settings.proximal or settings.clip:
        unfit = "another optimiser, momentum, a proximal term or clipping"
        raise SafaError(f"the aggregator {name} needs clients that take plain SGD steps, without {unfit}")
    if settings.averaging != "participants":
        raise SafaError(f"the aggregator {name} averages over the participants; leave averaging = population out")


class Learning:
    """What a server learns with. It computes with as many threads as the settings say; where 0, as torch has."""

    def __init__(
        self,
        settings: Settings,
        problem: Problem,
        protocol: Protocol,
        *,
        shards: Sequence[NDArray[np.int64]] | None = None,
        trainer_of: TrainerOf = trainer_of,
    ) -> None:
        """Clients are simulated and train on `shards`, or, without, deployed and send their updates to the `inbox`."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = settings.tf32
        device = find_device(settings.device)
        settings = replace(settings, memory_mb=memory_for(settings, device))
        self._threads, self._shards, self._directions = settings.threads, shards or (), problem.directions
        module = problem.start_model(settings.seed)
        self.layout = Layout(module)
        start = self.layout.row(dict(module.named_parameters()) | dict(module.named_buffers())).to(device)
        with torch_threads(settings.threads):
            self.aggregator = make_aggregator(settings, protocol)
            self.inbox = Inbox(start, memory_mb=settings.memory_mb)
            source: UpdateSource = self.inbox
            if shards is not None:
                own = self.aggregator.trains_own_models
                budget = Budget.of(settings.memory_mb, start, len(shards))
                training = replace(settings, memory_mb=budget.training_mb)
                source = local_training(training, problem, shards, device, own_models=own, trainer_of=trainer_of)
            self._evaluator = Evaluator(problem, device=device)
            self.learner = Learner(
                source,
                self.aggregator,
                start,
                np.asarray(protocol.sizes, dtype=np.float64),
                evaluate=self._evaluator.evaluate,
                trained=self.layout.trained,
                eval_every=settings.eval_every,
                memory_mb=settings.memory_mb,
                threads=settings.threads,
            )
        if settings.eval_clients and shards is not None:
            self.per_client()  # a metric that fails on the data of a client is refused before the first round

    def model(self) -> dict[str, Tensor]:
        """The latest global model, as a module's state."""
        return {name: tensor.contiguous().cpu() for name, tensor in self.layout.state(self.learner.model).items()}

    def per_client(self) -> dict[str, float]:
        """How the last model serves the clients: mean, spread, and the mean of the worst tenth of the main metric."""
        with torch_threads(self._threads):
            scores = np.sort(self._evaluator.per_client(self.learner.model, self._shards))
        scores = scores[~np.isnan(scores)]  # a client's own data may not define the metric
        main = next(iter(self._directions), "loss")
        ordered = scores if higher_is_better(main, self._directions) else scores[::-1]
        worst = ordered[: max(1, len(ordered) // 10)]
        found = (scores.mean(), scores.std(), worst.mean()) if len(scores) else (math.nan,) * 3
        return dict(zip(client_metrics(self._directions), map(float, found), strict=True))
