"""Secant: updates and a cache of them are moved to where the global model is; the cache is a control variate.

An entry is the latest delta of a client and the version that it was trained from. How far a delta changes when its base
does is estimated from two updates of the same client, for every number j of the model, as the slope of a secant:

    N_j = - sum (D - h)_j (b - b')_j       Q_j = sum (b - b')_j^2
    gamma_j = (N_j + N) / (Q_j + Q), between 0 and 1, where N and Q are the means of N_j and Q_j

for an update D from b and the entry h from b' of its client; older pairs count for less. The means keep a number that
hardly moved from having a slope of noise. With it, products number by number,

    u_i = D_i - gamma (w - b_i)           an update, as it would be from w
    e_k = h_k - gamma (w - b'_k)          an entry, likewise
    H   = the mean of e_k                 over the clients present that have an entry
    w  := w + sum a_i u_i + theta sum a_i (H - e_i)

where a_i are the weights of the record, the second sum is over updates whose clients have an entry, and theta, between
0 and 1, is the slope of the regression of u on e over these (a moving one over the steps). All clients count alike in
H, whatever their n_k, as in FedBuff, MIFA and CA2FL: the delta of a client that makes its epochs over more samples is
larger by itself. With gamma = 1, H is the step of SAFA's cache of models, with gamma = 0 that of MIFA's cache of
updates. Nothing has to be set.

Before all that, a delta that is more than `longest` times as long as usual, and as that of its client before, is
shortened: clients whose training diverges for once must not carry the model off, and one that always has more to say
than others is heard. Usual is the median length of the deltas of a step, as a moving mean over the steps; a step enters
it with at most `longest` times the one before.

A step uses gamma, theta and the usual length of the steps before it, so that its updates can be gone through once, and
a coefficient does not depend on what it is applied to. Buffers of a model, such as the statistics of batch norm, are no
part of lengths and inner products, and are averaged: w := w + sum a_i (x_i - w), which keeps a variance positive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Step, Updates
from safa.aggregation.row_per_client import each_client_once, weighted
from safa.aggregation.rows import Versions, are_stacked, blocks
from safa.aggregation.update_cache import UpdateCache
from safa.errors import SafaError
from safa.protocol.records import Ids, Rule

__all__ = ["Secant"]

_FIRST_GAMMA = 0.5  # before there are two updates of one client
_LONGEST = 2.0  # times the usual length
_KEPT_PER_STEP = 0.9  # of what theta is estimated from, and of the usual length
_LEAST_MEMORY = 10  # pairs that gamma is estimated from, at least; else as many as there are clients

_Rows = Tensor | list[Tensor]
"""Rows as one tensor [K, d], or one by one where they lie."""


@dataclass
class _Tally:
    """What is summed over the updates of a step whose clients have an entry; rows and products in double precision."""

    fresh: Tensor
    """Of u_i."""
    old: Tensor
    """Of e_i."""
    slope: Tensor
    """Of -(D - h) (b - b') and (b - b')^2, number by number, [2, d]."""
    products: Tensor
    """Of <u, e> and <e, e>."""
    count: int = 0
    pairs: int = 0
    """Of them, how many started from another version than their entry."""
    weight: float = 0.0

    @classmethod
    def like(cls, row: Tensor) -> _Tally:
        return cls(torch.zeros_like(row), torch.zeros_like(row), row.new_zeros(2, len(row)), row.new_zeros(2))

    def add(self, fresh: Tensor, old: Tensor, columns: slice) -> None:
        """Some columns of some u_i and e_i."""
        self.fresh[columns] += fresh.sum(0)
        self.old[columns] += old.sum(0)
        self.products[0] += _dot(fresh, old)
        self.products[1] += _dot(old, old)

    def add_pairs(self, change: Tensor, apart: Tensor, columns: slice) -> None:
        """Some columns of some D - h and b - b'."""
        self.slope[0, columns] -= (change * apart).sum(0)
        self.slope[1, columns] += apart.square().sum(0)


class Secant(UpdateCache):
    """Control variates of all clients, moved along with the global model; nothing has to be set."""

    name = "secant"
    rules = frozenset({Rule.AVERAGE, Rule.DELTA})

    def __init__(
        self,
        *,
        gamma: float | None = None,
        theta: float | None = None,
        one_gamma: bool = False,
        longest: float = _LONGEST,
    ) -> None:
        """`gamma` and `theta` are estimated, unless they are given; with theta = 0 entries do not move the model.

        With `one_gamma` it is N / Q for all numbers of the model. A delta is at most `longest` times as long as usual,
        or as the one before of its client; with infinity, none is shortened.
        """
        super().__init__()
        if not longest >= 1:
            raise SafaError(f"longest must be at least 1 times the usual length, or inf, not {longest!r}")
        self.longest = longest
        self._one_gamma = one_gamma
        self._fixed_gamma, self._fixed_theta = _checked("gamma", gamma), _checked("theta", theta)
        self.theta = 0.0 if theta is None else theta
        """How much of the difference between the mean entry and its own is added to an update, in the next step."""

    def begin(self, versions: Versions, sizes: NDArray[np.float64], *, memory_mb: float) -> None:
        """Begin without an entry."""
        super().begin(versions, np.ones_like(sizes), memory_mb=memory_mb)
        self._base = np.zeros(len(sizes), dtype=np.int64)  # the version that an entry was trained from
        self._base_sum = torch.zeros_like(self._sum)  # of that version's model, of who is present
        self._slope = self._sum.new_zeros(2, versions.trained)  # numerators and denominators of gamma
        self._fit = np.zeros(2)  # and of theta
        self._length = np.zeros(len(sizes))  # of every client's entry
        self._usual = 0.0  # length of a delta; 0 before there was one
        first = _FIRST_GAMMA if self._fixed_gamma is None else self._fixed_gamma
        self._gamma = torch.full_like(versions.model[: versions.trained], first)

    @property
    def gamma(self) -> float:
        """How far a delta changes when its base does, for the next step: the mean over the numbers of the model."""
        return float(self._gamma.mean())

    def follow(self, joined: Ids, sizes: NDArray[np.float64], left: Ids) -> None:
        """Clients have joined or left; all count alike."""
        super().follow(joined, np.ones_like(sizes), left)

    def keep(self, updates: Updates) -> None:
        """Entries of these clients := what their training changed, and the versions that they started from."""
        for some in each_client_once(updates):
            self._keep(*self._shortened(some, self._lengths(some)))

    def _keep(self, updates: Updates, lengths: NDArray[np.float64]) -> None:
        """The same for shortened updates, which have these lengths now; every client has one."""
        clients, share = updates.client, self._shares()[updates.client]
        known = self._has_row[clients]
        replaced = np.append(updates.base, self._base[clients[known]])
        self._add_bases(replaced, np.append(share, -share[known]))
        self._base[clients], self._length[clients] = updates.base, lengths
        super().keep(updates)

    def references(self) -> set[int]:
        """The versions that entries were trained from."""
        return set(np.unique(self._base[self._has_row]).tolist())

    def _direction(self, step: Step) -> tuple[Tensor, float]:
        mean, direction = self._mean_entry(), torch.zeros_like(self._sum)
        tally, lengths = _Tally.like(direction[: self.versions.trained]), [np.empty(0)]
        for part in step.updates:
            for whole in each_client_once(part):
                lengths.append(self._lengths(whole))
                some, allowed = self._shortened(whole, lengths[-1])
                self._add_fresh(some, direction)
                self._compare(some.part(some.picked & self._has_row[some.client]), direction, tally)
                self._keep(some, allowed)
        self._update_usual(np.concatenate(lengths))
        direction[: self.versions.trained].add_(mean, alpha=self.theta * tally.weight)
        self._estimate(tally)
        return direction, 1.0

    def _mean_entry(self) -> Tensor:
        """H, of the trained numbers; zero without entries."""
        trained, whole = self.versions.trained, float(self._shares()[self._has_row].sum())
        if not whole:
            return torch.zeros_like(self._sum[:trained])
        away = torch.sub(self._base_sum[:trained], self.versions.model[:trained], alpha=whole)
        return torch.addcmul(self._sum[:trained], away, self._gamma.double()).div_(whole)

    def _lengths(self, updates: Updates) -> NDArray[np.float64]:
        """The lengths of the deltas."""
        model = self.versions.model[: self.versions.trained]
        squares = torch.zeros(len(updates), dtype=torch.float64, device=model.device)
        for rows, columns in blocks(len(updates), model):
            squares[rows] += updates.deltas_in(rows, columns).square_().sum(1)
        return squares.sqrt_().cpu().numpy()

    def _shortened(self, updates: Updates, lengths: NDArray[np.float64]) -> tuple[Updates, NDArray[np.float64]]:
        """Updates with deltas of these lengths, the deltas that are too long shortened, and their lengths then."""
        most = self.longest * np.maximum(self._length[updates.client], self._usual or math.inf)
        allowed = np.minimum(lengths, most)
        too_long = lengths > allowed
        if not np.any(too_long):
            return updates, lengths
        return replace(updates, share=np.divide(allowed, lengths, out=np.ones_like(lengths), where=too_long)), allowed

    def _update_usual(self, lengths: NDArray[np.float64]) -> None:
        """The usual length, after a step of deltas of these."""
        if len(lengths):
            now = float(np.median(lengths))
            before = self._usual or now
            self._usual = _KEPT_PER_STEP * before + (1 - _KEPT_PER_STEP) * min(now, self.longest * before)

    def _add_fresh(self, updates: Updates, direction: Tensor) -> None:
        """Add a_i u_i, and a_i (x_i - w) in the buffers."""
        model, trained = self.versions.model, self.versions.trained
        for rows, columns in blocks(len(updates), model[:trained]):
            moved = self._moved(updates.deltas_in(rows, columns), updates.start[rows, columns], columns)
            direction[columns].add_(weighted(updates.weight[rows], moved))
        if trained < len(model):
            direction[trained:].add_(weighted(updates.weight, updates.rows[:, trained:] - model[trained:]))

    def _moved(self, deltas: Tensor, bases: Tensor, columns: slice) -> Tensor:
        """What these deltas would be from where the model is now."""
        return torch.addcmul(deltas, bases - self.versions.model[columns], self._gamma[columns])

    def _compare(self, updates: Updates, direction: Tensor, tally: _Tally) -> None:
        """Subtract theta a_i e_i, and sum up what gamma and theta are estimated from. All clients have an entry."""
        clients = updates.client
        if not len(clients):
            return
        entries, bases = self._entries_and_bases(clients)
        for rows, columns in blocks(len(updates), direction[: self.versions.trained]):
            delta, start = updates.deltas_in(rows, columns), updates.start[rows, columns]
            entry, base = _cut(entries, rows, columns), _cut(bases, rows, columns)
            fresh, old = self._moved(delta, start, columns), self._moved(entry, base, columns)
            direction[columns].sub_(weighted(updates.weight[rows], old), alpha=self.theta)
            tally.add(fresh, old, columns)
            tally.add_pairs(delta - entry, start - base, columns)
        tally.count += len(clients)
        tally.pairs += int(np.count_nonzero(updates.base != self._base[clients]))
        tally.weight += float(updates.weight.sum())

    def _entries_and_bases(self, clients: Ids) -> tuple[_Rows, _Rows]:
        """The entries of these clients, and the models that they were trained from; long rows are not copied."""
        base = self._base[clients]
        if are_stacked(self._sum):
            return self._rows_of(clients), self.versions.rows(base)
        return self._views_of(clients), [self.versions[version] for version in base.tolist()]

    def _estimate(self, tally: _Tally) -> None:
        """Gamma and theta for the next step."""
        if tally.pairs and self._fixed_gamma is None:
            memory = max(int(np.count_nonzero(self._active)), _LEAST_MEMORY)
            self._slope.mul_((1 - 1 / memory) ** tally.pairs).add_(tally.slope)
            self._gamma = self._slope_gamma()
        if tally.count > 1 and self._fixed_theta is None:
            means = torch.stack([tally.fresh @ tally.old, tally.old @ tally.old]).cpu().numpy() / tally.count
            self._fit = _KEPT_PER_STEP * self._fit + tally.products.cpu().numpy() - means
            self.theta = _ratio(self._fit, self.theta)

    def _slope_gamma(self) -> Tensor:
        """Gamma by number; as it was where no base has moved."""
        means = self._slope.mean(1, keepdim=True)
        upper, lower = means.expand_as(self._slope) if self._one_gamma else self._slope + means
        return torch.where(lower > 0, upper / lower, self._gamma.double()).clamp_(0.0, 1.0).to(self._gamma)

    # -- the sum of bases --------------------------------------------------------------------------------------------

    def _add_bases(self, versions: Ids, weight: NDArray[np.float64]) -> None:
        """Add the models of these versions to the sum of bases, so many times each."""
        distinct, group = np.unique(versions, return_inverse=True)
        together = np.bincount(group, weights=weight, minlength=len(distinct))
        for version, times in zip(distinct.tolist(), together.tolist(), strict=True):
            self._base_sum.add_(self.versions[version], alpha=times)

    def _reweigh(self, clients: Ids, change: NDArray[np.float64]) -> None:
        super()._reweigh(clients, change)
        self._add_bases(self._base[clients], change[clients])

    def _refresh(self) -> None:
        super()._refresh()
        known = np.flatnonzero(self._has_row)
        self._base_sum.zero_()
        self._add_bases(self._base[known], self._shares()[known])

    def _make_room(self, count: int) -> None:
        new = max(0, count - len(self._base))
        self._base = np.append(self._base, np.zeros(new, dtype=np.int64))
        self._length = np.append(self._length, np.zeros(new))
        super()._make_room(count)

    # -- to be continued later ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Also the bases and lengths of entries, the sum of bases, and the estimates with what they come from."""
        return super().state() | {
            "base": torch.from_numpy(self._base.copy()),
            "base_sum": self._base_sum.to("cpu", copy=True),
            "slope": self._slope.to("cpu", copy=True),
            "gamma": self._gamma.to("cpu", copy=True),
            "theta": torch.tensor([self.theta, *self._fit], dtype=torch.float64),
            "length": torch.from_numpy(self._length.copy()),
            "usual": torch.tensor(self._usual, dtype=torch.float64),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`."""
        super().restore(state)
        self._base = state["base"].numpy().copy()
        self._base_sum = state["base_sum"].to(self._base_sum.device, copy=True)
        self._slope = state["slope"].to(self._slope.device, copy=True)
        self._gamma = state["gamma"].to(self._gamma.device, copy=True)
        self.theta, *fit = state["theta"].tolist()
        self._fit = np.array(fit)
        self._length = state["length"].numpy().copy()
        self._usual = float(state["usual"])


def _checked(name: str, share: float | None) -> float | None:
    if share is not None and not 0 <= share <= 1:
        raise SafaError(f"{name} must be from 0 to 1, or left out to be estimated, not {share!r}")
    return share


def _cut(rows: _Rows, some: slice, columns: slice) -> Tensor:
    """Some rows and columns."""
    return rows[some, columns] if isinstance(rows, Tensor) else torch.stack([row[columns] for row in rows[some]])


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """The sum of the inner products of every row of one with that of the other."""
    return torch.dot(one.flatten(), other.flatten())


def _ratio(parts: NDArray[np.float64], otherwise: float) -> float:
    """Numerator by denominator, between 0 and 1; `otherwise` where there is nothing to divide by."""
    return float(np.clip(parts[0] / parts[1], 0.0, 1.0)) if parts[1] > 0 else otherwise
