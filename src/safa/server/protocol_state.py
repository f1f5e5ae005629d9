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
_LIKE: dict[type, tuple[type, ...]] = {float: (int, float), int: (int,)}


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
    """Bring a protocol that was made from the same settings to the state that was kept, if it is a state of such."""
    arrays = {name.removeprefix(_PREFIX): t.numpy() for name, t in tensors.items() if name.startswith(_PREFIX)}
    plain = json.loads(values)
    fresh = {name: value for name, value in protocol.snapshot().items() if name not in parameters(type(protocol))}
    wanted = {name: value.dtype for name, value in fresh.items() if isinstance(value, np.ndarray)}
    if {name: array.dtype for name, array in arrays.items()} != wanted:
        raise SafaError(f"the checkpoint does not hold the state of {protocol.name}")
    if {array.shape for array in arrays.values()} != {(len(arrays["sizes"]),)}:
        raise SafaError(f"the checkpoint holds arrays of different lengths for the clients of {protocol.name}")
    for name, value in plain.items():
        if name not in fresh or not isinstance(value, _LIKE.get(type(fresh[name]), type(fresh[name]))):
            raise SafaError(f"the checkpoint holds no usable {name} of {protocol.name}")
    protocol.restore(arrays | plain)
