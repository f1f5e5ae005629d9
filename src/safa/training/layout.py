"""Models as rows: the parameters and buffers of a module, end to end in one vector of length d."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

__all__ = ["Layout"]


class Layout:
    """Where each parameter and buffer of a module is in a row: parameters first, then buffers."""

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
        return {name: self._as_own_type(name, view[0]) for name, view in self.views(row.unsqueeze(0)).items()}

    def copied_buffers(self, rows: Tensor) -> dict[str, Tensor]:
        """The buffers of rows [K, d] as stacked tensors of their own types, which share no memory with the rows."""
        views = self.views(rows)
        return {name: self._as_own_type(name, views[name]).clone() for name in self.buffers}

    def load(self, module: nn.Module, row: Tensor) -> None:
        """Copy a row into the parameters and buffers of a module, in place."""
        views = self.views(row.unsqueeze(0))
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                tensor.copy_(self._as_own_type(name, views[name][0]))

    def _as_own_type(self, name: str, values: Tensor) -> Tensor:
        dtype = self._kinds[name][1]
        return (values if dtype.is_floating_point else values.round()).to(dtype)
