"""The messages between server and device.

    server                                              device
    JoinRequest     who are you?                 ->
                                                 <-     JoinReply      a name, a size n_k, and further details
    TrainRequest    train from this model        ->
                                                 <-     Update         the trained model, or its delta
                                                 <-     ModelMissing   the device does not hold that model

A device that cannot do what it was asked replies with a `Failure`; the transport does so in its stead where the device
or the network has failed. A `TrainRequest` names the base model by its version and its digest. It contains the model
only where the protocol sends one; a client that continues from a model that it holds is sent none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from safa.deploy.exchange.codec import CodecName, EncodedModel, encoded_bytes
from safa.deploy.exchange.screening import Rejected
from safa.deploy.exchange.text import printable

__all__ = [
    "Failure",
    "JoinReply",
    "JoinRequest",
    "Message",
    "ModelMissing",
    "Outgoing",
    "Reply",
    "TrainRequest",
    "Update",
    "digest_of",
]

_LONGEST_WHY = 500


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """The server asks a node who it is."""

    deployment: str
    """The id of the deployment; a device discards the state that it holds for another one."""
    config: str
    """The settings of the run, as TOML."""


@dataclass(frozen=True, kw_only=True)
class JoinReply:
    """A node says who it is."""

    name: str
    size: float
    """n_k."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further facts: `partition`, where its data is that part of the task's."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """The server asks a client to train."""

    deployment: str
    attempt: int
    """Unique among the requests of a deployment."""
    version: int
    """The version of the model to start from."""
    digest: str
    """`digest_of` that model as the device decodes it."""
    own: bool
    """Whether to start from the client's own last update instead (fully local training)."""
    codec: CodecName
    """How the update is to be encoded."""
    config: str
    """The settings of the run, as TOML."""
    client: int
    """The client's number, on which the order of shuffled samples depends."""
    round: int
    """The round by which the learning rate goes: the one after that in which the model was made."""
    work: float = 1.0
    """The share of the full local work that is to be done."""
    model: EncodedModel | None
    """The model, if the client is to be sent it."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """A client's reply: the trained model."""

    attempt: int
    version: int
    seconds: float
    """How long it trained, by its own account."""
    encoded: EncodedModel
    """With float32 the model; otherwise its delta, which loses less."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the encoded numbers."""
        return encoded_bytes(self.encoded)


@dataclass(frozen=True, kw_only=True)
class ModelMissing:
    """A client's reply: it does not hold the base model."""

    attempt: int


@dataclass(frozen=True, kw_only=True)
class Failure:
    """No other reply will come: the device, its app or the network has failed."""

    why: str
    """One printable line of bounded length: it may come from a device, and is written to logs."""
    code: int = 0
    """The error code of the transport; 0 where the device itself replied."""
    unreachable: bool = False
    """Whether the node was merely offline, so that it is worth asking it again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", printable(self.why[:_LONGEST_WHY])[:_LONGEST_WHY])


Reply = JoinReply | Update | ModelMissing | Failure | Rejected
"""What can come back for a message."""
Message = JoinRequest | JoinReply | TrainRequest | Update | ModelMissing | Failure
"""Whatever server and device send each other."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A message to be sent to a node."""

    node: int
    message: JoinRequest | TrainRequest
    client: int | None = None
    """The number of the client behind the node, where it is known."""

    def without_model(self) -> Outgoing:
        """The same without the model, to be kept until the reply comes."""
        if not isinstance(self.message, TrainRequest):
            return self
        return replace(self, message=replace(self.message, model=None))


def digest_of(tensors: Mapping[str, NDArray[Any]]) -> str:
    """A fingerprint of a model, the same on every machine."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name}:{tensor.dtype.name}:{tensor.shape};".encode())
        found.update(np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<")).tobytes())
    return found.hexdigest()
