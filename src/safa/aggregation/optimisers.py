"""Server optimisers: what an aggregator makes of a step is taken for a gradient, and an optimiser follows it.

Reddi et al. 2021, Algorithm 2: D = (the model that the aggregator inside would make) - (the model that there is), and
then a step of an adaptive method. As in the paper there is no correction of bias, and v begins with tau^2, the least
that the paper allows. Moments are held and computed in double precision, one or two rows in all, and the new model is
rounded to the model's type once.

A step without updates has D = 0 around a mean: momentum then moves the model on.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step
from safa.aggregation.rows import Versions
from safa.aggregation.wrapper import Wrapper
from safa.errors import SafaError

__all__ = ["Adagrad", "Adam", "Momentum", "ServerOptimiser", "Yogi"]


class ServerOptimiser(Wrapper):
    """An optimiser around another aggregator, which it resembles in everything but the step."""

    def __init__(self, inner: Aggregator, *, server_optimiser_lr: float, server_momentum: float) -> None:
        """`server_optimiser_lr` is eta of the paper, `server_momentum` beta_1."""
        if inner.trains_own_models:
            raise SafaError(f"a server optimiser has no effect around {inner.name}, whose clients train alone")
        if not 0 < server_optimiser_lr < float("inf"):
            raise SafaError(f"server_optimiser_lr must be above 0 and finite, not {server_optimiser_lr!r}")
        super().__init__(inner)
        self.lr = server_optimiser_lr
        self.momentum = _checked_decay("server_momentum", server_momentum)

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin with moments of zero."""
        super().begin(versions, sizes, memory_mb=memory_mb)
        self._moments = {"m": torch.zeros_like(versions.model, dtype=torch.float64)}

    def step(self, step: Step) -> Tensor:
        """The model moved by a step of the optimiser."""
        model = self.versions.model.double()
        change = self._direction(self.inner.step(step).double() - model)
        return (model + self.lr * change).to(self.versions.model.dtype)

    @abstractmethod
    def _direction(self, delta: Tensor) -> Tensor:
        """Renew the moments, never in place, by a pseudo-gradient; the change of the model for a learning rate of 1."""

    def kept(self) -> dict[str, Tensor]:
        """The moments."""
        return {name: moment.cpu() for name, moment in self._moments.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        super().restore(state)
        device = self.versions.model.device
        self._moments = {name: state[name].to(device, copy=True) for name in self._moments}


class Momentum(ServerOptimiser):
    """FedAvgM (Hsu et al. 2019): m := beta_1 m + D; w := w + eta m.

    A lasting direction is followed eta / (1 - beta_1) times as fast as without momentum: by default, as fast.
    """

    name = "momentum"

    def __init__(self, inner: Aggregator, *, server_optimiser_lr: float = 0.1, server_momentum: float = 0.9) -> None:
        super().__init__(inner, server_optimiser_lr=server_optimiser_lr, server_momentum=server_momentum)

    def _direction(self, delta: Tensor) -> Tensor:
        self._moments = {"m": self.momentum * self._moments["m"] + delta}
        return self._moments["m"]


class _Adaptive(ServerOptimiser):
    """m := beta_1 m + (1 - beta_1) D; v by the method; w := w + eta m / (sqrt(v) + tau)."""

    def __init__(
        self,
        inner: Aggregator,
        *,
        server_optimiser_lr: float = 0.1,
        server_momentum: float = 0.9,
        server_epsilon: float = 1e-3,
    ) -> None:
        """`server_epsilon` is tau of the paper, the degree of adaptivity."""
        super().__init__(inner, server_optimiser_lr=server_optimiser_lr, server_momentum=server_momentum)
        if not 0 < server_epsilon < float("inf"):
            raise SafaError(f"server_epsilon must be above 0 and finite, not {server_epsilon!r}")
        self.epsilon = server_epsilon

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin with v = tau^2."""
        super().begin(versions, sizes, memory_mb=memory_mb)
        self._moments["v"] = torch.full_like(self._moments["m"], self.epsilon**2)

    def _direction(self, delta: Tensor) -> Tensor:
        first = self.momentum * self._moments["m"] + (1 - self.momentum) * delta
        second = self._second(self._moments["v"], delta**2)
        self._moments = {"m": first, "v": second}
        return first / (second.sqrt() + self.epsilon)

    @abstractmethod
    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        """The next v, from the one before and D^2."""


class Adagrad(_Adaptive):
    """FedAdagrad (Reddi et al. 2021): v := v + D^2. The paper's experiments had it without momentum (beta_1 = 0)."""

    name = "adagrad"

    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        return before + square


class _Decaying(_Adaptive):
    """Adaptive methods that forget: they have a beta_2."""

    def __init__(
        self,
        inner: Aggregator,
        *,
        server_optimiser_lr: float = 0.1,
        server_momentum: float = 0.9,
        server_beta2: float = 0.99,
        server_epsilon: float = 1e-3,
    ) -> None:
        super().__init__(
            inner,
            server_optimiser_lr=server_optimiser_lr,
            server_momentum=server_momentum,
            server_epsilon=server_epsilon,
        )
        self.beta2 = _checked_decay("server_beta2", server_beta2)


class Adam(_Decaying):
    """FedAdam (Reddi et al. 2021): v := beta_2 v + (1 - beta_2) D^2."""

    name = "adam"

    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * before + (1 - self.beta2) * square


class Yogi(_Decaying):
    """FedYogi (Reddi et al. 2021): v := v - (1 - beta_2) D^2 sign(v - D^2)."""

    name = "yogi"

    def _second(self, before: Tensor, square: Tensor) -> Tensor:
        return before - (1 - self.beta2) * square * torch.sign(before - square)


def _checked_decay(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise SafaError(f"{name} must be at least 0 and below 1, not {value!r}")
    return value
