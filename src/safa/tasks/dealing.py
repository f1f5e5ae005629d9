"""Which client holds which training samples: the ways of this package to deal them.

A partition is a function `(samples, rng, *parameters)` that returns, for every client, the indices of its samples. The
parameters are texts, as they stand behind the name: `dirichlet:0.3`. `safa.tasks.partitions` finds them by name.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.errors import SafaError

__all__ = [
    "PARAMETERS",
    "Partition",
    "Samples",
    "checked_parts",
    "column",
    "contiguous",
    "decides_sizes",
    "dirichlet",
    "iid",
    "natural",
    "quantity",
    "rare",
    "shards",
]

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]

_BINS = 10
_MOST_LABELS = 20  # floating targets with more values than this are continuous

_RARE_ALPHA = 0.3  # how unevenly labels are dealt within the two parts of `rare`
_LARGEST_ALPHA = 1e9  # beyond this all clients draw the same proportions anyway, and numbers overflow


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """The training samples that a partition deals, and what is known of them and of the clients."""

    targets: NDArray[Any]
    sizes: _Floats
    """How much data the clients hold relative to each other; all 1 for a partition that decides that itself."""
    columns: Mapping[str, ArrayLike] = field(default_factory=dict)
    """Further facts about the samples, one value for each, by name."""
    inputs: Any = None
    """An array or a tensor, where it is known."""
    shards: Sequence[_Ints] | None = None
    """For every client of the data, which samples are its own, where the data come in such parts."""
    speeds: _Floats | None = None
    """How fast the clients are, in mini-batches per second, where it is known."""

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.sizes)

    def labels(self, kind: str) -> NDArray[Any]:
        """The targets, if there is one for each sample."""
        if self.targets.size != len(self.targets):
            shape = list(self.targets.shape[1:])
            raise SafaError(f"{kind} needs one label per sample, not targets of shape {shape}")
        return self.targets.reshape(-1)

    def column(self, name: str) -> NDArray[Any]:
        """The column of that name, or of that number among the inputs, counted from 0."""
        if name in self.columns:
            return np.asarray(self.columns[name])
        inputs = self.inputs
        if inputs is not None and inputs.ndim == 2 and name.isdecimal() and int(name) < inputs.shape[1]:
            return np.asarray(inputs[:, int(name)])
        named = ", ".join(self.columns) or "none by name"
        numbers = f", and 0 to {inputs.shape[1] - 1}" if inputs is not None and inputs.ndim == 2 else ""
        raise SafaError(f"there is no column {name!r} of the training data; there are {named}{numbers}")


Partition = Callable[..., Sequence[_Ints]]
"""A function (samples, rng, *parameters); `rng` is seeded by the run."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


def decides_sizes(function: _Function) -> _Function:
    """Mark a partition that decides itself how many samples every client holds; the fleet then follows it."""
    function.decides_sizes = True  # type: ignore[attr-defined]
    return function


def contiguous(samples: Samples, rng: np.random.Generator) -> list[_Ints]:
    """Slices in the order of the file, as in the paper's experiments."""
    return _cut(np.arange(len(samples.targets)), samples.sizes)


def iid(samples: Samples, rng: np.random.Generator) -> list[_Ints]:
    """Slices of a random order."""
    return _cut(rng.permutation(len(samples.targets)), samples.sizes)


def dirichlet(samples: Samples, rng: np.random.Generator, alpha: str) -> list[_Ints]:
    """Every client draws the proportions of its labels; the smaller ALPHA, the fewer it holds.

    The draw is Dirichlet(ALPHA) where labels are equally frequent, and its mean is their frequency where they are not
    (Hsu, Qi and Brown, 2019). Continuous targets are binned by deciles. Sizes are met exactly, so that clients who come
    late in a random order take what is left of a label and not always what they drew.
    """
    labels = _classes(samples.labels(f"dirichlet:{alpha}"))
    return _dirichlet(labels, _ends(samples.sizes, len(labels)), _positive(alpha), rng)


@decides_sizes
def quantity(samples: Samples, rng: np.random.Generator, alpha: str) -> list[_Ints]:
    """Every client draws its share of all samples; the smaller ALPHA, the less equal they are."""
    shares = rng.dirichlet(np.full(samples.clients, min(_positive(alpha), _LARGEST_ALPHA)))
    return _cut(rng.permutation(len(samples.targets)), shares)


def shards(samples: Samples, rng: np.random.Generator, n: str) -> list[_Ints]:
    """Sorted by label and cut into equal shards, of which every client gets N at random.

    McMahan et al., 2017. All clients then hold the same number of samples, up to rounding, whatever their sizes.
    """
    return _shards(samples.labels(f"shards:{n}"), samples.clients, _whole(n), rng)


@decides_sizes
def rare(samples: Samples, rng: np.random.Generator, classes: str, overlap: str = "0") -> list[_Ints]:
    """The slowest clients alone hold the last CLASSES classes; the share OVERLAP of these samples goes to the others.

    The slowest are those at the lower speed where there are two speeds, else a fifth of the clients. They hold nothing
    but these classes. Labels are dealt as dirichlet:0.3 does, to the slowest and to the others by themselves, of whom
    each has as many samples as the next.
    """
    labels = _classes(samples.labels(f"rare:{classes}"))
    first_rare = int(labels.max()) + 1 - _count(classes)
    if first_rare < 1:
        raise SafaError(f"rare:{classes} leaves no class to the other clients: there are {labels.max() + 1}")
    kept = _choice(np.flatnonzero(labels >= first_rare), 1 - _share(overlap), rng)
    slow = _slowest(samples)
    dealt: dict[int, _Ints] = {}
    for clients, some in (slow, kept), (_others(slow, samples.clients), _others(kept, len(labels))):
        dealt |= zip(clients.tolist(), _skewed(labels, some, len(clients), rng), strict=True)
    return [dealt[client] for client in range(samples.clients)]


@decides_sizes
def column(samples: Samples, rng: np.random.Generator, name: str) -> list[_Ints]:
    """A client for every value of a column of the data; fewer clients hold several values each.

    Values are then dealt in random order, each to the client that holds the fewest samples so far.
    """
    values = samples.column(name)
    if values.shape != (len(samples.targets),):
        raise SafaError(f"the column {name!r} needs one value per sample, not the shape {list(values.shape)}")
    found, of_sample, counts = np.unique(values, return_inverse=True, return_counts=True)
    if samples.clients > len(found):
        raise SafaError(
            f"the column {name!r} has {len(found)} values, too few for {samples.clients} clients; set clients"
        )
    owner = _owners(counts, samples.clients, rng)[of_sample]
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])


@decides_sizes
def natural(samples: Samples, rng: np.random.Generator) -> list[_Ints]:
    """The clients that the data come from; fewer clients are a random choice of them."""
    if samples.shards is None:
        raise SafaError("partition = natural needs data that come in shards, a part for each client")
    there = len(samples.shards)
    if samples.clients > there:
        raise SafaError(f"the data are those of {there} clients, and not of {samples.clients}")
    chosen = np.sort(rng.choice(there, samples.clients, replace=False))
    return [np.asarray(samples.shards[shard]) for shard in chosen]


def checked_parts(parts: Sequence[ArrayLike], samples: int, *, what: str) -> list[_Ints]:
    """Indices of samples for every client, each sample at most once and nobody without; `what` calls a part."""
    if not isinstance(parts, Iterable):
        raise SafaError(f"there must be a list of {what}s, an array of indices for each client, not {parts!r}")
    arrays = [_indices(part, f"{what} {number}", samples) for number, part in enumerate(parts)]
    if not arrays:
        raise SafaError(f"there must be a {what} at least")
    seen = np.bincount(np.concatenate(arrays), minlength=samples)
    if seen.max() > 1:
        raise SafaError(f"sample {int(seen.argmax())} is in a {what} more than once; a sample has one owner")
    return arrays


def _indices(part: ArrayLike, name: str, samples: int) -> _Ints:
    array = np.asarray(part)
    if array.ndim != 1 or not len(array):
        raise SafaError(f"{name} must be a list of one sample at least, not of shape {list(array.shape)}")
    if not np.issubdtype(array.dtype, np.integer):
        raise SafaError(f"{name} must hold whole numbers, the indices of samples, not {array.dtype}")
    if array.min() < 0 or array.max() >= samples:
        wrong = int(array.min() if array.min() < 0 else array.max())
        raise SafaError(f"{name} names sample {wrong}, but the samples are 0 to {samples - 1}")
    return array.astype(np.int64)


# -- parameters ------------------------------------------------------------------------------------------------------


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SafaError(f"ALPHA must be a number above 0, not {text!r}")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise SafaError(f"N must be a whole number of at least 1, not {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise SafaError(f"CLASSES must be a whole number of at least 1, not {text!r}")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise SafaError(f"OVERLAP must be a number of at least 0 and below 1, not {text!r}")
    return value


def _named(text: str) -> str:
    if not text:
        raise SafaError("NAME must be that of a column, or its number")
    return text


PARAMETERS: dict[str, Callable[[str], object]] = {
    "alpha": _positive,
    "classes": _count,
    "n": _whole,
    "name": _named,
    "overlap": _share,
}
"""What checks a parameter of the partitions above, by its name."""

# -- how it is done --------------------------------------------------------------------------------------------------


def _cut(order: _Ints, sizes: _Floats) -> list[_Ints]:
    """Slices of an order in proportion to sizes."""
    return np.split(order, _ends(sizes, len(order))[:-1])


def _owners(counts: _Ints, clients: int, rng: np.random.Generator) -> _Ints:
    """For every value of a column, given how many samples have it, the client that gets these samples."""
    if clients == len(counts):
        return np.arange(clients)
    owners, held = np.empty(len(counts), dtype=np.int64), [(0, client) for client in range(clients)]
    for value in rng.permutation(len(counts)):
        samples, client = held[0]
        owners[value] = client
        heapq.heapreplace(held, (samples + int(counts[value]), client))
    return owners


def _slowest(samples: Samples) -> _Ints:
    """The clients at the lower one of two speeds, else the slowest fifth; of equally slow ones the first."""
    speeds = samples.speeds
    if speeds is None:
        raise SafaError("the partition rare needs the speeds of the clients, which are not known here")
    if samples.clients < 2:
        raise SafaError("the partition rare needs two clients at least")
    slow = np.flatnonzero(speeds == speeds.min())
    if len(np.unique(speeds)) != 2:
        slow = np.argsort(speeds, kind="stable")[: max(1, round(samples.clients / 5))]
    return np.sort(slow)


def _choice(samples: _Ints, share: float, rng: np.random.Generator) -> _Ints:
    """A random choice of these samples."""
    return rng.permutation(samples)[: round(share * len(samples))]


def _others(some: _Ints, count: int) -> _Ints:
    """Those of the numbers from 0 that are not among these."""
    return np.setdiff1d(np.arange(count), some)


def _skewed(labels: _Ints, samples: _Ints, clients: int, rng: np.random.Generator) -> list[_Ints]:
    """These samples, dealt to so many clients with Dirichlet labels and in equal numbers."""
    if len(samples) < clients:
        raise SafaError(f"the partition rare has {len(samples)} samples for {clients} clients, one at least for each")
    own = np.unique(labels[samples], return_inverse=True)[1]
    return [samples[part] for part in _dirichlet(own, _ends(np.ones(clients), len(samples)), _RARE_ALPHA, rng)]


def _ends(sizes: _Floats, count: int) -> _Ints:
    """Where the clients' slices of `count` samples end, in proportion to their sizes and with none of them empty."""
    ends = np.rint(np.cumsum(sizes) / sizes.sum() * count).astype(np.int64)
    ends[-1] = count
    least = np.arange(1, len(ends) + 1)
    spare = np.minimum(np.maximum.accumulate(np.maximum(ends - least, 0)), count - len(ends))
    return np.asarray(spare + least, dtype=np.int64)


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
