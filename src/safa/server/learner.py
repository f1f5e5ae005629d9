"""The learner: applies a stream of round records to a problem. It trains and sums; it decides nothing about a round.

An update is a function of (client, base version) alone, so it is trained when it is needed and not before. An undrafted
update (Eq. 8) is needed one round later, and only if its client is not picked then; one that is overwritten before any
aggregation sees it, that crashed or that was refused is never trained at all.

Clients may come and go between rounds. One that has left keeps its entry of the cache and the version that it holds,
for its return, but counts for nothing until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.protocol.records import Ids, RoundRecord, Rule, Verdict
from safa.server.inbox import Received
from safa.server.store import Cache, GlobalModels, give_back_memory, rows_that_fit
from safa.training.evaluation import Evaluator
from safa.training.threads import torch_threads
from safa.training.trainer import Trainer

__all__ = ["Learner"]

_ROWS_PER_UPDATE = 6  # what an update takes: its start, itself, and what is made of them on the way


@dataclass(frozen=True, eq=False)
class _Commits:
    """Updates that are yet to be trained, in order of arrival."""

    client: Ids
    base: Ids
    weight: NDArray[np.float64]
    into: Ids

    @classmethod
    def of(cls, record: RoundRecord, verdict: Verdict) -> _Commits:
        chosen = record.verdict == verdict
        return cls(record.client[chosen], record.base[chosen], record.weight[chosen], record.into[chosen])

    def __getitem__(self, part: NDArray[np.bool_] | slice) -> _Commits:
        return _Commits(self.client[part], self.base[part], self.weight[part], self.into[part])

    def __add__(self, other: _Commits) -> _Commits:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Commits(*(np.concatenate(pair) for pair in pairs))

    def __len__(self) -> int:
        return len(self.client)


_NONE = _Commits(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0, np.int64))


class Learner:
    """Holds the global models and brings them up to date, round by round."""

    def __init__(
        self,
        trainer: Trainer,
        evaluator: Evaluator,
        start: Tensor,
        sizes: NDArray[np.float64],
        *,
        rule: Rule,
        epochs: int,
        eval_every: int = 1,
        keep_best: bool = False,
        warm_start: bool = False,
        memory_mb: float = 4096.0,
        threads: int = 0,
    ) -> None:
        """`start` is w(0) as a row, `sizes` are n_k, `rule` is that of the protocol whose records will come.

        `keep_best` sends out the best model so far by *test* loss instead of the latest, and `warm_start` starts the
        cache from models that every client trained for one epoch: both are habits of the paper's experiments.
        `threads` is how many torch computes a round with (0: as many as it has).
        """
        self._trainer, self._evaluator, self._epochs, self._rule = trainer, evaluator, epochs, rule
        self._eval_every, self._keep_best, self._threads = eval_every, keep_best, threads
        self._models = GlobalModels(start, memory_mb=memory_mb)
        self._most = rows_that_fit(start, memory_mb, times=_ROWS_PER_UPDATE)  # updates that are trained at a time
        self._held = np.zeros(len(sizes), dtype=np.int64)  # the version that each client holds
        self._pending = _NONE
        self._cache = Cache(sizes, self._models, memory_mb=memory_mb) if rule in (Rule.CACHE, Rule.OWN) else None
        self._best: tuple[float, float, Tensor] | None = None
        self._closed = 0  # the latest version when the last round closed
        self._early = 0  # updates of the open round that were merged before its close
        self._early_diverged = 0
        self.trained = 0
        """Updates that were trained so far."""
        if warm_start and self._cache is not None:
            everyone = np.arange(len(sizes))
            for part in self._parts(len(sizes)):
                some = everyone[part]
                self._cache.put(some, trainer.train(some, start.expand(len(some), -1), epochs=1))

    @property
    def model(self) -> Tensor:
        """The latest global model, as a row."""
        return self._models[self._models.latest]

    def start_of(self, client: int, version: int) -> Tensor:
        """The model that a client starts from: that version, or its own last one where everyone goes on alone."""
        if self._rule is Rule.OWN and self._cache is not None and client < len(self._held):
            return self._cache.entries(np.array([client]))[0]
        return self._models[version]

    def anticipate(self, client: int, base: int, weight: float, into: int, *, version: int) -> None:
        """Merge an update of a round that is still open, so that all versions up to `version` can be sent out.

        Protocols that answer every arrival make versions in mid-round. Updates are told in order of arrival, each once;
        the record of the round will hold them, too.
        """
        one = _Commits(np.array([client]), np.array([base]), np.array([weight]), np.array([into]))
        self._early += 1
        self._early_diverged += self._make_versions(self._pending + one, version, self._rule)

    def apply(self, record: RoundRecord) -> RoundRecord:
        """Bring the global model up to date with a round; the record comes back with loss and accuracy."""
        with torch_threads(self._threads):
            return self._apply(record)

    def _apply(self, record: RoundRecord) -> RoundRecord:
        self._follow(record)
        self._held[record.sent] = record.sent_version
        rules: dict[Rule, Callable[[RoundRecord], int]] = {
            Rule.CACHE: self._apply_cache,
            Rule.OWN: self._apply_own,
            Rule.AVERAGE: self._apply_merges,
            Rule.DELTA: self._apply_merges,
        }
        before = self._closed
        diverged = rules[record.rule](record)
        loss = accuracy = None
        self._closed = self._models.latest
        if self._models.latest != before and (record.round % self._eval_every == 0 or self._keep_best):
            loss, accuracy = self._evaluate()
        referred = self._cache.references if self._cache else set()
        self._models.forget_all_but({*self._held.tolist(), *self._pending.base.tolist(), *referred})
        return replace(record, diverged=diverged, loss=loss, accuracy=accuracy)

    def _follow(self, record: RoundRecord) -> None:
        """Who came and who left since the last round; a new client holds the latest model."""
        if len(record.joined) or len(record.left):
            new = max(0, int(record.joined.max(initial=-1)) + 1 - len(self._held))
            self._held = np.append(self._held, np.full(new, self._models.latest))
            if self._cache is not None:
                self._cache.follow(record.joined, record.joined_size, record.left)

    def _evaluate(self) -> tuple[float, float]:
        """Loss and accuracy of the latest model; with `keep_best`, of the best, which takes its place."""
        loss, accuracy = self._evaluator.evaluate(self.model)
        if not self._keep_best:
            return loss, accuracy
        if self._best is None or loss < self._best[0]:
            self._best = loss, accuracy, self.model
        loss, accuracy, best = self._best
        self._models.add(self._models.latest, best)
        return loss, accuracy

    def _train(self, clients: Ids, bases: Ids, start: Tensor) -> tuple[Tensor, NDArray[np.bool_]]:
        """The updates of these clients, and which of them are sound."""
        self.trained += len(clients)
        if self._most < len(self._held):
            give_back_memory()
        if isinstance(self._trainer, Received):
            updates = self._trainer.train(clients, start, epochs=self._epochs, bases=bases)
        else:
            updates = self._trainer.train(clients, start, epochs=self._epochs)
        return updates, torch.isfinite(updates).all(dim=1).cpu().numpy()

    def _parts(self, count: int) -> list[slice]:
        """So many updates in parts that fit the memory, one after the other."""
        return [slice(first, first + self._most) for first in range(0, count, self._most)]

    def _put(self, clients: Ids, bases: Ids, start: Callable[[slice], Tensor]) -> int:
        """Train these clients' updates and put them into the cache; how many diverged and were not."""
        assert self._cache is not None
        diverged = 0
        for part in self._parts(len(clients)):
            updates, sound = self._train(clients[part], bases[part], start(part))
            if not sound.all():
                updates = updates[torch.from_numpy(sound).to(updates.device)]
            self._cache.put(clients[part][sound], updates)
            diverged += int(np.count_nonzero(~sound))
        return diverged

    # -- the rules ---------------------------------------------------------------------------------------------------

    def _apply_cache(self, record: RoundRecord) -> int:
        """Eq. 6-8, with the bypass of the round before done first: it makes no difference, and saves dead updates."""
        assert self._cache is not None
        picked = _Commits.of(record, Verdict.PICKED)
        overwritten = np.isin(self._pending.client, np.concatenate([picked.client, record.deprecated]))
        commits = self._pending[~overwritten] + picked
        diverged = self._put(commits.client, commits.base, lambda part: self._models.rows(commits.base[part]))
        self._cache.refer(np.setdiff1d(record.deprecated, picked.client), record.version - 1)
        self._models.add(record.version, self._cache.aggregate())
        # A client that committed counts as up to date (Eq. 3), and if it leaves now, it comes back with this version.
        self._held[record.client[record.verdict != Verdict.REFUSED]] = record.version
        self._pending = _Commits.of(record, Verdict.UNDRAFTED)
        return diverged

    def _apply_own(self, record: RoundRecord) -> int:
        """Everyone goes on from its own model; they are summed when the record makes a version."""
        cache = self._cache
        assert cache is not None
        chosen = record.verdict != Verdict.REFUSED
        taken = record.client[chosen]
        diverged = self._put(taken, record.base[chosen], lambda part: cache.entries(taken[part]))
        if record.version > self._models.latest:
            self._models.add(record.version, cache.aggregate())
        return diverged

    def _apply_merges(self, record: RoundRecord) -> int:
        """Average or delta: make every version that the record has made, in order."""
        picked = _Commits.of(record, Verdict.PICKED)
        new = picked[np.arange(len(picked)) >= self._early]
        diverged = self._early_diverged + self._make_versions(self._pending + new, record.version, record.rule)
        self._early = self._early_diverged = 0
        return diverged

    def _make_versions(self, queue: _Commits, last: int, rule: Rule) -> int:
        """Make all versions up to `last` of a queue of updates; what goes into later ones stays pending."""
        diverged = 0
        while self._models.latest < last:
            ready = (queue.into <= last) & (queue.base <= self._models.latest)
            wave = queue[ready]
            # A base that is made later in this record has to wait, and with it every version from its own on.
            stop = int(queue.into[~ready].min(initial=last + 1))
            wave = wave[wave.into < stop]
            for part, until in self._whole_versions(wave, min(stop - 1, last)):
                diverged += (self._merge if len(part) <= self._most else self._merge_large)(part, until, rule)
            queue = queue[queue.into > self._models.latest]
        self._pending = queue
        return diverged

    def _whole_versions(self, wave: _Commits, last: int) -> Iterator[tuple[_Commits, int]]:
        """A wave in parts that fit the memory, each with the last version that is made of it.

        A version is never parted. One that has more updates than fit is a part by itself.
        """
        if len(wave) > self._most:
            first, size = -1, 0
            for version, count in zip(*np.unique(wave.into, return_counts=True), strict=True):
                if size and size + count > self._most:
                    yield wave[(wave.into >= first) & (wave.into < version)], int(version) - 1
                    first, size = version, 0
                size += count
            wave = wave[wave.into >= first]
        yield wave, last

    def _merge_large(self, wave: _Commits, last: int, rule: Rule) -> int:
        """The same as `_merge` for one version with more updates than fit the memory: a running sum of its parts."""
        self._merge(_NONE, int(wave.into[0]) - 1, rule)
        total, left, diverged = torch.zeros_like(self.model, dtype=torch.float64), 0.0, 0
        for place in self._parts(len(wave)):
            part = wave[place]
            start = self._models.rows(part.base)
            updates, sound = self._train(part.client, part.base, start)
            index = torch.from_numpy(np.flatnonzero(sound)).to(updates.device)
            weight = torch.from_numpy(part.weight[sound]).to(updates)
            total += weight @ (updates[index] - start[index] if rule is Rule.DELTA else updates[index])
            left += float(part.weight[sound].sum())
            diverged += int(np.count_nonzero(~sound))
        asked = float(wave.weight.sum())
        factor = _factor(asked, left, rule)
        kept = 1.0 if rule is Rule.DELTA else 1 - factor * left
        self._models.add(int(wave.into[0]), kept * self.model + (factor * total).to(self.model))
        self._merge(_NONE, last, rule)
        return diverged

    def _merge(self, wave: _Commits, last: int, rule: Rule) -> int:
        """Train a wave of updates and make all versions up to `last` of it."""
        if not len(wave):
            for version in range(self._models.latest + 1, last + 1):
                self._models.add(version, self.model)
            return 0
        start = self._models.rows(wave.base)
        updates, sound = self._train(wave.client, wave.base, start)
        share = wave.weight * sound
        for version in range(self._models.latest + 1, last + 1):
            chosen = wave.into == version
            factor = _factor(wave.weight[chosen].sum(), share[chosen].sum(), rule)
            part = np.flatnonzero(chosen & sound)
            index = torch.from_numpy(part).to(updates.device)
            weight = torch.from_numpy(share[part] * factor).to(updates)
            model = self.model
            if rule is Rule.DELTA:
                model = model + weight @ (updates[index] - start[index])
            elif len(part):
                model = (1 - float(weight.sum())) * model + weight @ updates[index]
            self._models.add(version, model)
        return int(np.count_nonzero(~sound))

    # -- going on later ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on later, as named tensors."""
        versions, models = zip(*self._models.items(), strict=True)
        state = {
            "models.version": torch.tensor(versions),
            "models.rows": torch.stack(models).cpu(),
            "held": torch.from_numpy(self._held.copy()),
            "trained": torch.tensor(self.trained),
            **{f"pending.{name}": torch.from_numpy(np.array(v)) for name, v in vars(self._pending).items()},
        }
        if self._best is not None:
            state["best.score"] = torch.tensor(self._best[:2], dtype=torch.float64)
            state["best.row"] = self._best[2].cpu()
        return state | (self._cache.state() if self._cache else {})

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go on from `state`."""
        device = self.model.device
        for version, row in zip(state["models.version"].tolist(), state["models.rows"], strict=True):
            self._models.add(version, row.to(device, copy=True))
        self._models.forget_all_but(state["models.version"].tolist())
        self._closed = self._models.latest
        self._held = state["held"].numpy().copy()
        self.trained = int(state["trained"])
        self._pending = _Commits(*(state[f"pending.{name}"].numpy().copy() for name in vars(_NONE)))
        if "best.row" in state:
            loss, accuracy = state["best.score"].tolist()
            self._best = loss, accuracy, state["best.row"].to(device)
        if self._cache:
            self._cache.restore(state)


def _factor(asked: float, left: float, rule: Rule) -> float:
    """Where the weights make up the whole, the others stand in for an update that was dropped."""
    return asked / left if left and asked > 1 - 1e-9 and rule is Rule.AVERAGE else 1.0
