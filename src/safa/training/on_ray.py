"""The clients of one run, spread over the machines of a Ray cluster."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.cluster import Workers, connect
from safa.errors import SafaError
from safa.tasks.problem import Problem
from safa.training.batched import BatchedTrainer
from safa.training.batches import Batches, Ids, Shards
from safa.training.layout import Layout
from safa.training.threads import torch_threads
from safa.training.trainer import Amount

__all__ = ["RayTrainer"]

Packed = tuple[NDArray[np.uint8], torch.dtype, torch.Size]
"""A tensor as bytes, which the processes of a machine share."""


_PART = {"cpu": 8, "cuda": 32}
_MOST_PARTS = 64


class RayTrainer:
    """Clients in small parts, each of which some worker trains like the batched trainer trains it.

    The last bits of an update can depend on with whom a client is trained. So the parts depend on the clients and the
    kind of device only, and the updates are the same with any workers. A worker has one GPU where that is the device,
    or else as many cores as torch has threads here.
    """

    def __init__(self, problem: Problem, shards: Shards, *, device: torch.device, **how: Any) -> None:
        """`how` is what a batched trainer is made with."""
        ray = connect()
        self.layout = Layout(problem.start_model(0))
        self._batches = Batches(shards, how["batch_size"])
        threads, on_gpu = torch.get_num_threads(), device.type == "cuda"
        self._part = _PART.get(device.type, _PART["cpu"])
        how |= {"device": torch.device(device.type)}  # a worker sees its own GPU only
        self._workers = Workers(
            ray,
            _training,
            *_shared(ray, problem, shards),
            how,
            threads,
            torch.backends.cuda.matmul.allow_tf32,
            cores=1 if on_gpu else threads,
            gpus=int(on_gpu),
        )

    def train(self, clients: Ids, start: Tensor, **amount: Unpack[Amount]) -> Tensor:
        """The updates [K, d] of these K clients, who start from the rows of `start` [K, d]."""
        steps = amount.get("steps")
        parts = self._parts(self._batches.per_epoch(clients) if steps is None else steps)
        calls = {name: (clients[part], _packed(start[part]), _part_of(amount, part)) for name, part in parts.items()}
        updates = torch.empty_like(start)
        for name, rows in self._workers.answers(calls):
            updates[parts[name]] = _unpacked(rows).to(start.device)
        return updates

    def _parts(self, steps: Ids) -> dict[str, Ids]:
        """Who is trained together, of clients with so many steps: parts with about as much to do, by their names."""
        order = np.argsort(-steps, kind="stable")
        count = min(-(-len(order) // self._part), _MOST_PARTS)
        return {f"part {k + 1} of {count} of the clients": order[k::count] for k in range(count)}


def _part_of(amount: Amount, part: Ids) -> dict[str, Any]:
    """What some of the clients have to do."""
    given: dict[str, Any] = {name: value for name, value in amount.items() if value is not None}
    if "correction" in given:
        given["correction"] = _packed(given["correction"][part])
    return given | {name: given[name][part] for name in ("steps", "lr", "bases") if name in given}


def _shared(ray: Any, problem: Problem, shards: Shards) -> tuple[Any, ...]:
    """What all workers need of a problem, and the clients' samples, put into Ray's store once."""
    inputs, targets = problem.train
    some = inputs[:1].clone(), targets[:1].clone()
    bare = replace(problem, train=some, test=some, shards=None, columns={}, metrics={})
    ends = np.cumsum([len(shard) for shard in shards])
    try:
        sent = ray.put(bare)
    except TypeError as error:
        reason = str(error).strip().splitlines()[0]
        raise SafaError(f"the problem cannot be sent to the workers of Ray: {reason}") from None
    return (sent, *(ray.put(_packed(part)) for part in (inputs, targets)), ray.put(np.concatenate(shards)), ends)


def _training(
    bare: Problem, inputs: Packed, targets: Packed, samples: Ids, ends: Ids, how: dict[str, Any], threads: int,
    tf32: bool,
) -> Callable[[Ids, Packed, dict[str, Any]], Packed]:  # fmt: skip
    """A function that trains clients; made by a worker, in its own process."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    problem = replace(bare, train=(_unpacked(inputs), _unpacked(targets)))
    device = how["device"]

    with torch_threads(threads):
        trainer = BatchedTrainer(problem, np.split(samples, ends[:-1]), **how)

    def train(clients: Ids, start: Packed, amount: dict[str, Any]) -> Packed:
        if "correction" in amount:
            amount = amount | {"correction": _unpacked(amount["correction"])}
        with torch_threads(threads):
            return _packed(trainer.train(clients, _unpacked(start).to(device), **amount))

    return train


def _packed(tensor: Tensor) -> Packed:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _unpacked(packed: Packed) -> Tensor:
    """The tensor, to be read only: it shares the memory of the bytes."""
    flat, dtype, shape = packed
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(flat).view(dtype).view(shape)
