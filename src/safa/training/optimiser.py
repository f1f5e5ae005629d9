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
    nesterov: bool = False
    weight_decay: float = 0.0
    """Added to the gradient; `adamw` shrinks the parameters themselves instead (Loshchilov and Hutter 2019)."""
    proximal: float = 0.0
    """mu of FedProx (Li et al. 2020): pulls a client back to the model that it started from."""
    clip: float = 0.0
    """The largest norm of a gradient, the proximal term included and weight decay not; 0: any."""

    def __post_init__(self) -> None:
        if self.kind not in OPTIMISERS:
            raise SafaError(f"optimiser must be one of {', '.join(OPTIMISERS)}, not {self.kind!r}")
        if self.nesterov and not (self.kind == "sgd" and self.momentum > 0):
            raise SafaError("nesterov needs the optimiser sgd with a momentum above 0")

    @property
    def is_plain(self) -> bool:
        """Whether a step is the learning rate times the gradient and nothing else."""
        return self.kind == "sgd" and not (self.momentum or self.weight_decay or self.proximal or self.clip)

    def of(self, module: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
        """Torch's own optimiser for one module; the proximal term and clipping are the caller's."""
        lr = self.lr if lr is None else lr
        if self.kind == "adam":
            return torch.optim.Adam(module.parameters(), lr=lr, weight_decay=self.weight_decay)
        if self.kind == "adamw":
            return torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(
            module.parameters(),
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
        )


class RowOptimiser:
    """The same for rows [K, d]: every row has an optimiser of its own, all take their step together."""

    _BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8  # torch's defaults
    _CLIP_EPSILON = 1e-6  # torch's, too

    def __init__(
        self,
        optimiser: Optimiser,
        start: Tensor,
        moved: Tensor | None = None,
        *,
        lr: Tensor | None = None,
        correction: Tensor | None = None,
    ) -> None:
        """Every row has the optimiser's learning rate, or its own of `lr` [K, 1]; `correction` [K, d] goes on top.

        `moved` is 1 for the numbers of a row that have a gradient and 0 for those that torch leaves alone; without,
        all have one.
        """
        self._optimiser, self._moved, self._lr = optimiser, moved, lr
        self._correction = correction if correction is None or moved is None else correction * moved
        self._start = start.clone() if optimiser.proximal else start
        has_second = optimiser.kind in ("adam", "adamw")
        self._first = torch.zeros_like(start) if has_second or optimiser.momentum else None
        self._second = torch.zeros_like(start) if has_second else None
        self._steps = start.new_zeros(len(start), 1)  # a client that has less data takes fewer

    def step(self, rows: Tensor, gradients: Tensor) -> None:
        """Move the first rows, in place; the others sit this step out."""
        count, o = len(rows), self._optimiser
        if o.proximal:
            gradients.add_(rows - self._start[:count], alpha=o.proximal)
        if self._correction is not None:
            gradients.add_(self._correction[:count])
        if o.clip:
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_((o.clip / (norms + self._CLIP_EPSILON)).clamp_(max=1.0))
        if o.weight_decay:
            decay = rows if self._moved is None else rows * self._moved
            if o.kind == "adamw":
                self._add(rows, decay * o.weight_decay)
            else:
                gradients.add_(decay, alpha=o.weight_decay)
        if self._second is not None:
            self._adam(rows, gradients)
            return
        if self._first is not None:
            buffer = self._first[:count].mul_(o.momentum).add_(gradients)
            gradients = gradients.add_(buffer, alpha=o.momentum) if o.nesterov else buffer
        self._add(rows, gradients)

    def _adam(self, rows: Tensor, gradients: Tensor) -> None:
        assert self._first is not None
        assert self._second is not None
        count = len(rows)
        first, second, steps = self._first[:count], self._second[:count], self._steps[:count].add_(1)
        first.lerp_(gradients, 1 - self._BETA1)
        second.mul_(self._BETA2).addcmul_(gradients, gradients, value=1 - self._BETA2)
        root = (second / (1 - self._BETA2**steps)).sqrt_().add_(self._EPSILON)
        mean = first / (1 - self._BETA1**steps)
        if self._lr is None:
            rows.addcdiv_(mean, root, value=-self._optimiser.lr)
        else:
            rows.addcdiv_(mean.mul_(self._lr[:count]), root, value=-1)

    def _add(self, rows: Tensor, direction: Tensor) -> None:
        """Move rows against a direction, by the learning rate."""
        if self._lr is None:
            rows.add_(direction, alpha=-self._optimiser.lr)
        else:
            rows.addcmul_(direction, self._lr[: len(rows)], value=-1)

    def state(self) -> dict[str, Tensor]:
        """What it remembers from step to step, by name: the very tensors, not copies."""
        kept = {"first": self._first, "second": self._second, "steps": self._steps}
        return {name: tensor for name, tensor in kept.items() if tensor is not None}
