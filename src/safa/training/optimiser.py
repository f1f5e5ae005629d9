"""The clients' optimiser, for one model or for many at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from safa.errors import SafaError
from safa.vocabulary import OPTIMISERS

__all__ = ["Optimiser", "RowOptimiser"]


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """What a client does with a gradient. Plain SGD by default, as in the paper."""

    kind: str = "sgd"
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal: float = 0.0
    """mu of FedProx (Li et al. 2020): pulls a client back to the model that it started from."""

    def __post_init__(self) -> None:
        if self.kind not in OPTIMISERS:
            raise SafaError(f"optimiser must be one of {', '.join(OPTIMISERS)}, not {self.kind!r}")

    @property
    def is_plain(self) -> bool:
        """Whether a step is the learning rate times the gradient and nothing else."""
        return self.kind == "sgd" and not (self.momentum or self.weight_decay or self.proximal)

    def of(self, module: nn.Module) -> torch.optim.Optimizer:
        """Torch's own optimiser for one module; the proximal term is the caller's."""
        if self.kind == "adam":
            return torch.optim.Adam(module.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(module.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


class RowOptimiser:
    """The same for rows [K, d]: every row has an optimiser of its own, all take their step together."""

    _BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8  # torch's defaults

    def __init__(self, optimiser: Optimiser, start: Tensor, decayed: Tensor | None = None) -> None:
        """`decayed` is 1 for the numbers of a row that weight decay concerns and 0 for others; without, all of them."""
        self._optimiser = optimiser
        self._decayed = decayed
        self._start = start.clone() if optimiser.proximal else start
        has_first = optimiser.kind == "adam" or optimiser.momentum
        self._first = torch.zeros_like(start) if has_first else None
        self._second = torch.zeros_like(start) if optimiser.kind == "adam" else None
        self._steps = start.new_zeros(len(start), 1)  # a client that has less data takes fewer

    def step(self, rows: Tensor, gradients: Tensor) -> None:
        """Move the first rows, in place; the others sit this step out."""
        count, o = len(rows), self._optimiser
        if o.proximal:
            gradients.add_(rows - self._start[:count], alpha=o.proximal)
        if o.weight_decay:
            gradients.add_(rows if self._decayed is None else rows * self._decayed, alpha=o.weight_decay)
        if self._second is not None and self._first is not None:
            first, second, steps = self._first[:count], self._second[:count], self._steps[:count].add_(1)
            first.lerp_(gradients, 1 - self._BETA1)
            second.mul_(self._BETA2).addcmul_(gradients, gradients, value=1 - self._BETA2)
            root = (second / (1 - self._BETA2**steps)).sqrt_().add_(self._EPSILON)
            rows.addcdiv_(first / (1 - self._BETA1**steps), root, value=-o.lr)
            return
        if self._first is not None:
            gradients = self._first[:count].mul_(o.momentum).add_(gradients)
        rows.add_(gradients, alpha=-o.lr)

    def state(self) -> dict[str, Tensor]:
        """What it remembers from step to step, by name: the very tensors, not copies."""
        kept = {"first": self._first, "second": self._second, "steps": self._steps}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}
