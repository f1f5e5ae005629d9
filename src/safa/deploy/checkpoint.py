"""A protocol's state as tensors and plain values, so that it can be kept on the disk without pickle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from safa.errors import SafaError
from safa.protocol import Protocol
from safa.protocol.registry import parameters

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["protocol_state", "restore_protocol"]

_PREFIX = "protocol."
_PLAIN = (bool, int, float, str, type(None))


def protocol_state(protocol: Protocol) -> tuple[dict[str, Tensor], str]:
    """What a protocol knows between two rounds: its arrays as named tensors, and its plain values as JSON.

    What its settings decide is left out: on resumption they say it anew.
    """
    import torch

    arrays: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, value in protocol.snapshot().items():
        if name in parameters(type(protocol)):
            continue
        if isinstance(value, np.ndarray):
            arrays[_PREFIX + name] = torch.from_numpy(value)
        elif isinstance(value, _PLAIN) or value == []:
            values[name] = value
        elif isinstance(value, list | tuple | dict | set):
            raise SafaError(f"{protocol.name} cannot be deployed: its {name} is not an array or a plain value")
    return arrays, json.dumps(values)


def restore_protocol(protocol: Protocol, tensors: dict[str, Tensor], values: str) -> None:
    """Bring a protocol that was made from the same settings to the state that was kept."""
    arrays = {name.removeprefix(_PREFIX): t.numpy() for name, t in tensors.items() if name.startswith(_PREFIX)}
    protocol.restore(arrays | json.loads(values))
