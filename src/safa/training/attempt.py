"""One client's local training, an epoch at a time, so that it can be interrupted and resumed.

A device that is switched off in the middle of its work continues where it was: E epochs give the same numbers, to the
last bit, whether or not the attempt was put down in between. That holds wherever training gives the same numbers twice
at all; convolutions on a GPU and models that draw random numbers, such as dropout, do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from safa.errors import SafaError
from safa.training.batched import BatchedTrainer

__all__ = ["Attempt"]


class Attempt:
    """The local training of one client of a trainer, from one start model. It does what `BatchedTrainer.train` does."""

    def __init__(
        self,
        trainer: BatchedTrainer,
        start: Tensor,
        client: int = 0,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        lr: float | None = None,
        base: int = 0,
    ) -> None:
        """`start` is the model to start from, as a row [d]; the proximal term pulls back to it.

        The client makes so many epochs, or mini-batch steps, with the learning rate `lr` (without, the optimiser's).
        `base` is the version that it starts from, on which the order of shuffled samples depends.
        """
        self._group = trainer.alone(client, start, epochs=epochs, steps=steps, lr=lr, base=base)
        self.epochs = self._group.epochs
        """How many epochs there are; where there are steps, the last one may be short."""
        self.done = 0
        """Epochs so far."""

    @property
    def row(self) -> Tensor:
        """The model so far."""
        return self._group.rows[0].clone()

    def epoch(self) -> None:
        """Go through the client's samples once, or through as many as are left to do."""
        self._group.epoch(self.done)
        self.done += 1

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue later, save the start model."""
        kept = {name: tensor.to("cpu", copy=True) for name, tensor in self._moving().items()}
        return kept | {"done": torch.tensor(self.done)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from `state`, in an attempt that was made with the same start; one that does not fit is an error."""
        if _kinds(state) != _kinds(self.state()):
            raise SafaError("this is not the state of an attempt with this model and this optimiser")
        for name, tensor in self._moving().items():
            tensor.copy_(state[name])
        self.done = int(state["done"])

    def _moving(self) -> dict[str, Tensor]:
        """The tensors that an epoch changes, by name."""
        optimiser = self._group.optimiser
        remembered = {f"optimiser.{name}": tensor for name, tensor in optimiser.state().items()} if optimiser else {}
        return {"row": self._group.rows[0]} | remembered


def _kinds(state: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
