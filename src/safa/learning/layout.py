"""Models as rows: the parameters and buffers of a module, end to end in one vector of length d."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

__all__ = ["Layout"]


class Layout:
    """Where each parameter and buffer of a module stands in a row: parameters first, then buffers."""

    def __init__(self, module: nn.Module) -> None:
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        buffers = dict(module.named_buffers())
        self.dtype = next(iter(parameters.values())).dtype
        self.parameters = list(parameters)
        self.buffers = list(buffers)
        self._kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in (parameters | buffers).items()}
        self.trained = sum(p.numel() for p in parameters.values())
        self.size = self.trained + sum(b.numel() for b in buffers.values())

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        places, start = {}, 0
        for name, (shape, _) in self._kinds.items():
            places[name] = start, start + shape.numel()
            start += shape.numel()
        return places

    def row(self, state: Mapping[str, Tensor]) -> Tensor:
        """A module's state as one row."""
        return torch.cat([state[name].detach().reshape(-1).to(self.dtype) for name in self._kinds])

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows [K, d] as stacked tensors [K, *shape] that share their memory (parameters and floating buffers)."""
        count = rows.shape[0]
        return {
            name: rows[:, start:end].view(count, *self._kinds[name][0]) for name, (start, end) in self._places.items()
        }

    def state(self, row: Tensor) -> dict[str, Tensor]:
        """One row as a module's state; whole numbers, such as the counters of batch norm, are rounded."""
        return {
            name: (row[start:end].view(shape) if dtype.is_floating_point else row[start:end].round().view(shape)).to(
                dtype
            )
            for (name, (shape, dtype)), (start, end) in zip(self._kinds.items(), self._places.values(), strict=True)
        }
