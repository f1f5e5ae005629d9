"""Models of one layout between rows, as a learner holds them, and encoded models, as they are sent."""

from __future__ import annotations

from typing import Any, cast

import torch
from numpy.typing import NDArray

from safa.deploy.exchange.codec import CodecName, EncodedModel, add_delta, decode, encode, encoded_bytes, spec_of
from safa.deploy.exchange.messages import digest_of
from safa.deploy.exchange.screening import Rejected, RejectReason
from safa.training import Layout

__all__ = ["ModelCodec", "Tensors"]

Tensors = dict[str, NDArray[Any]]
"""The tensors of a model by name."""


class ModelCodec:
    """Encodes and decodes the models of one layout with one codec."""

    def __init__(self, layout: Layout, name: CodecName) -> None:
        self.name = name
        self._layout = layout
        self._spec = spec_of(self._tensors(torch.zeros(layout.size, dtype=layout.dtype)))

    @property
    def model_bytes(self) -> int:
        """The size of a whole model in float32."""
        return encoded_bytes(encode(self._tensors(torch.zeros(self._layout.size, dtype=self._layout.dtype)), "float32"))

    def encode(self, row: torch.Tensor) -> tuple[EncodedModel, str]:
        """A model, encoded, and the digest of what is decoded from it."""
        encoded = encode(self._tensors(row), self.name)
        return encoded, digest_of(cast(Tensors, decode(encoded, self._spec)))

    def round_trip(self, row: torch.Tensor) -> Tensors:
        """A model as it is decoded on the other side."""
        return cast(Tensors, decode(encode(self._tensors(row), self.name), self._spec))

    def decode_update(self, encoded: EncodedModel, base: Tensors) -> Tensors | Rejected:
        """The update of a client that started from `base`: with float32 it sends the model itself, else its delta."""
        if encoded.codec != self.name:
            return Rejected(RejectReason.UNREADABLE, f"it is not encoded as {self.name}")
        found = decode(encoded, self._spec)
        return found if isinstance(found, Rejected) or self.name == "float32" else add_delta(found, base)

    def row(self, tensors: Tensors) -> torch.Tensor:
        """A model as a row."""
        return self._layout.row({name: torch.from_numpy(tensor) for name, tensor in tensors.items()})

    def _tensors(self, row: torch.Tensor) -> Tensors:
        return {name: tensor.cpu().numpy() for name, tensor in self._layout.state(row).items()}
