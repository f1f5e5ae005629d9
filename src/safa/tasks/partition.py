"""Which client holds which training samples.

Four kinds: `contiguous`, `iid`, `dirichlet:ALPHA` and `shards:N`. Whatever the kind, every sample is dealt exactly once
and every client holds at least one.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError

__all__ = ["check_partition", "partition"]

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

_BINS = 10
_MOST_LABELS = 20  # floating targets with more values than this are continuous

_LARGEST_ALPHA = 1e9  # beyond this all clients draw the same proportions anyway, and numbers overflow


def partition(kind: str, targets: ArrayLike, sizes: ArrayLike, rng: np.random.Generator) -> list[_Ints]:
    """For every client the indices of its training samples.

    `sizes` says how much data the clients hold relative to each other; `shards:N` alone does not heed it.

    - `contiguous`: slices in the order of the file, as in the paper's experiments.
    - `iid`: the same slices of a random order.
    - `dirichlet:ALPHA`: every client draws the proportions of its labels; the smaller ALPHA, the fewer labels it holds.
      The draw is Dirichlet(ALPHA) where labels are equally frequent, and its mean is their frequency where they are
      not (Hsu, Qi and Brown, 2019). Continuous targets are binned by deciles. Sizes are met exactly, so that clients
      who come late in a random order take what is left of a label and not always what they drew.
    - `shards:N`: sorted by label, cut into equal shards, and N shards dealt to each client at random (McMahan et al.,
      2017). All clients then hold the same number of samples, up to rounding.
    """
    name, parameter = _parsed(kind)
    labels, wanted = np.asarray(targets), np.asarray(sizes, dtype=np.float64)
    if len(wanted) > len(labels):
        raise SafaError(
            f"{len(labels)} training samples cannot be dealt to {len(wanted)} clients, one at least to each"
        )
    if name == "shards":
        return _shards(_one_per_sample(labels, kind), len(wanted), int(parameter), rng)
    ends = _ends(wanted, len(labels))
    if name == "dirichlet":
        return _dirichlet(_classes(_one_per_sample(labels, kind)), ends, parameter, rng)
    order = rng.permutation(len(labels)) if name == "iid" else np.arange(len(labels))
    return np.split(order, ends[:-1])


def check_partition(kind: str) -> None:
    """Refuse a kind of partition that does not exist."""
    _parsed(kind)


def _parsed(kind: str) -> tuple[str, float]:
    """The kind's name and its parameter, 0 where it has none."""
    try:
        match str(kind).split(":"):
            case ["contiguous" | "iid" as name]:
                return name, 0
            case ["dirichlet", alpha] if 0 < float(alpha) < math.inf:
                return "dirichlet", float(alpha)
            case ["shards", count] if int(count) >= 1:
                return "shards", int(count)
    except ValueError:
        pass
    forms = "contiguous, iid, dirichlet:ALPHA (a number above 0) or shards:N (a whole number of at least 1)"
    raise SafaError(f"a partition must be {forms}, not {kind!r}")


def _ends(sizes: _Floats, count: int) -> _Ints:
    """Where the clients' slices of `count` samples end, in proportion to their sizes and with none of them empty."""
    ends = np.rint(np.cumsum(sizes) / sizes.sum() * count).astype(np.int64)
    ends[-1] = count
    least = np.arange(1, len(ends) + 1)
    spare = np.minimum(np.maximum.accumulate(np.maximum(ends - least, 0)), count - len(ends))
    return np.asarray(spare + least, dtype=np.int64)


def _one_per_sample(targets: NDArray[np.generic], kind: str) -> NDArray[np.generic]:
    if targets.size != len(targets):
        raise SafaError(f"{kind} needs one label per sample, not targets of shape {list(targets.shape[1:])}")
    return targets.reshape(-1)


def _classes(targets: NDArray[np.generic]) -> _Ints:
    """Labels numbered from 0; targets that are continuous are binned by deciles."""
    values, labels = np.unique(targets, return_inverse=True)
    if np.issubdtype(targets.dtype, np.floating) and len(values) > _MOST_LABELS:
        edges = np.quantile(targets.astype(np.float64), np.arange(1, _BINS) / _BINS)
        labels = np.unique(np.searchsorted(edges, targets, side="right"), return_inverse=True)[1]
    return np.asarray(labels, dtype=np.int64)


def _shards(labels: NDArray[np.generic], clients: int, each: int, rng: np.random.Generator) -> list[_Ints]:
    if clients * each > len(labels):
        raise SafaError(f"{len(labels)} training samples cannot be cut into {clients * each} shards")
    shards = np.array_split(np.argsort(labels, kind="stable"), clients * each)
    hands = rng.permutation(clients * each).reshape(clients, each)
    return [rng.permutation(np.concatenate([shards[shard] for shard in hand])) for hand in hands]


def _dirichlet(labels: _Ints, ends: _Ints, alpha: float, rng: np.random.Generator) -> list[_Ints]:
    left = np.bincount(labels)
    concentration = min(alpha, _LARGEST_ALPHA) * len(left) * left / left.sum()
    shares = rng.dirichlet(concentration, len(ends))
    sizes = np.diff(ends, prepend=0)
    taken = np.zeros(shares.shape, dtype=np.int64)
    for client in rng.permutation(len(ends)):
        taken[client] = _hand(int(sizes[client]), shares[client], left)
        left -= taken[client]
    return _dealt(labels, taken, ends, rng)


def _hand(size: int, shares: _Floats, left: _Ints) -> _Ints:
    """How many samples of each label a client takes: by its shares, as long as there are some left."""
    hand = np.zeros_like(left)
    while size > 0:
        weights = np.where(left > hand, shares, 0.0)
        if weights.sum() <= 0:
            weights = (left - hand).astype(np.float64)
        more = np.diff(np.rint(np.cumsum(weights) / weights.sum() * size).astype(np.int64), prepend=0)
        more = np.minimum(more, left - hand)
        hand += more
        size -= int(more.sum())
    return hand


def _dealt(labels: _Ints, taken: _Ints, ends: _Ints, rng: np.random.Generator) -> list[_Ints]:
    """The samples, in random order, dealt so that client k gets taken[k, label] of every label."""
    order = rng.permutation(len(labels))
    by_label = order[np.argsort(labels[order], kind="stable")]
    clients, kinds = taken.shape
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label] = np.repeat(np.tile(np.arange(clients), kinds), taken.T.ravel())
    return np.split(order[np.argsort(owner[order], kind="stable")], ends[:-1])
