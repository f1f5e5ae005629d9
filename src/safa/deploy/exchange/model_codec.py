"""Models between a learner and the wire: a row there, named tensors and parcels here."""

from __future__ import annotations

from typing import Any, cast

import torch
from numpy.typing import NDArray

from safa.deploy.exchange.codec import Kind, Parcel, after, bytes_of, like, pack, unpack
from safa.deploy.exchange.messages import digest_of
from safa.deploy.exchange.screening import Reason, Refused
from safa.training import Layout

__all__ = ["Tensors", "Travel"]

Tensors = dict[str, NDArray[Any]]
"""The tensors of a model by name."""


class Travel:
    """How the models of one layout travel as one kind."""

    def __init__(self, layout: Layout, kind: Kind) -> None:
        self.kind = kind
        self._layout = layout
        self._like = like(self._tensors(torch.zeros(layout.size, dtype=layout.dtype)))

    @property
    def model_bytes(self) -> int:
        """The size of a whole model in float32."""
        return bytes_of(pack(self._tensors(torch.zeros(self._layout.size, dtype=self._layout.dtype)), "float32"))

    def packed(self, row: torch.Tensor) -> tuple[Parcel, str]:
        """A model as it travels, and the digest of what arrives."""
        parcel = pack(self._tensors(row), self.kind)
        return parcel, digest_of(cast(Tensors, unpack(parcel, self._like)))

    def arrived(self, row: torch.Tensor) -> Tensors:
        """A model as it looks after its travel."""
        return cast(Tensors, unpack(pack(self._tensors(row), self.kind), self._like))

    def update(self, parcel: Parcel, base: Tensors) -> Tensors | Refused:
        """The update that a client sent, who started from `base`: with float32 the model itself, else its change."""
        if parcel.kind != self.kind:
            return Refused(Reason.UNREADABLE, f"it did not travel as {self.kind}")
        found = unpack(parcel, self._like)
        return found if isinstance(found, Refused) or self.kind == "float32" else after(found, base)

    def row(self, tensors: Tensors) -> torch.Tensor:
        """A model as a row."""
        return self._layout.row({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})

    def _tensors(self, row: torch.Tensor) -> Tensors:
        return {name: tensor.cpu().numpy() for name, tensor in self._layout.state(row).items()}
