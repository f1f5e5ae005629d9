"""The learner: makes the versions of the global model that records call for. It decides nothing about a round.

An update is a function of (client, base version, share of the work), so it is asked for when a version is made of it
and not before. An undrafted update (Eq. 8) is needed one version later, and only if its client is not picked then; one
that is overwritten before any version is made of it, that crashed or that was refused is never asked for.

Where the updates come from, it does not know: simulated clients are trained when they are asked for, deployed ones have
sent theirs. What becomes of the updates is for the aggregator to say.

Clients may come and go between rounds. One that has left keeps its entry and the version that it holds, for its return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation import Aggregator, Step, Updates
from safa.aggregation.rows import RowTable, Versions, give_back_memory
from safa.errors import SafaError
from safa.protocol.records import Ids, RoundRecord, Rule, Verdict
from safa.server.budget import Budget
from safa.training import Score, torch_threads

__all__ = ["Learner", "UpdateSource"]

_NOBODY = np.empty(0, dtype=np.int64)


class UpdateSource(Protocol):
    """Where updates come from."""

    @property
    def train(self) -> Callable[[Ids, Tensor, int], Tensor] | None:
        """Trains clients from these rows for so many epochs, where they are simulated."""

    def updates(
        self,
        clients: Ids,
        bases: Ids,
        start: Tensor,
        *,
        rounds: Ids,
        work: NDArray[np.float64],
        correction: Tensor | None = None,
    ) -> Tensor:
        """The updates [K, d] of these clients from these versions, whose models are the rows of `start`.

        `rounds` are the rounds in which they began, `work` the shares of the full local work that were asked for, and
        `correction` [K, d] is added to every gradient.
        """

    def step_sizes(self, clients: Ids, rounds: Ids, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """For each of these clients, the number of its steps times their learning rate."""

    def discard(self, clients: Ids, bases: Ids) -> None:
        """These updates will never be asked for."""

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue later besides `tables`."""

    def tables(self) -> Mapping[str, RowTable]:
        """What is held in rows, by name."""

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state`; the tables have been restored before."""


@dataclass(frozen=True, eq=False)
class _Commits:
    """Updates that are yet to be asked for, in order of arrival."""

    client: Ids
    base: Ids
    weight: NDArray[np.float64]
    into: Ids
    work: NDArray[np.float64]

    @classmethod
    def of(cls, record: RoundRecord, chosen: NDArray[np.bool_]) -> _Commits:
        return cls(*(getattr(record, item.name)[chosen] for item in fields(cls)))

    def __getitem__(self, part: NDArray[np.bool_] | slice) -> _Commits:
        return _Commits(*(values[part] for values in vars(self).values()))

    def __add__(self, other: _Commits) -> _Commits:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return other if not len(self) else self if not len(other) else _Commits(*map(np.concatenate, pairs))

    def __len__(self) -> int:
        return len(self.client)


_NONE = _Commits(_NOBODY, _NOBODY, np.empty(0), _NOBODY, np.empty(0))


class Learner:
    """Holds the global models and brings them up to date, round by round."""

    def __init__(
        self,
        source: UpdateSource,
        aggregator: Aggregator,
        start: Tensor,
        sizes: NDArray[np.float64],
        *,
        evaluate: Callable[[Tensor], Score],
        trained: int | None = None,
        eval_every: int = 1,
        memory_mb: float = 4096.0,
        threads: int = 0,
    ) -> None:
        """`start` is w(0) as a row, `sizes` are n_k; `evaluate` gives the test loss and metrics of a model.

        The first `trained` numbers of a row are parameters (None: all of them), the others are buffers. `threads` is
        how many torch computes a round with (0: as many as it has).
        """
        self._source, self._aggregator, self._evaluate = source, aggregator, evaluate
        self._eval_every, self._threads = eval_every, threads
        budget = Budget.of(memory_mb, start, len(sizes))
        self.versions = Versions(start, memory_mb=budget.versions_mb, trained=trained)
        self._most = budget.updates  # that are asked for at a time
        self._held = np.zeros(len(sizes), dtype=np.int64)  # the version that each client holds
        self._own_updates = np.zeros(len(sizes), dtype=np.int64)  # of each client, where everyone trains its own model
        self._made_in = {0: 0}  # the round in which a version was made
        self._queue = _NONE  # picked, for versions that are not made yet
        self._undrafted = _NONE  # to be given to the aggregator with the next version
        self._round = 0  # the round that is being applied
        self._applied = 0  # of its picked updates, how many are applied already
        self._diverged = 0
        self._evaluated = 0  # the latest version when a model was last evaluated
        self._scores: list[tuple[Tensor, Score]] = []  # of models, the one asked for last at the end
        self.asked_for = 0
        """Updates that were asked for so far."""
        with torch_threads(threads):
            aggregator.begin(self.versions, sizes, memory_mb=budget.entries_mb)
            aggregator.prepare(evaluate=lambda row: self._score(row).loss, train=source.train)

    @property
    def clients(self) -> int:
        """How many clients there ever were."""
        return len(self._held)

    @property
    def model(self) -> Tensor:
        """The latest global model, as a row."""
        return self.versions.model

    def start_of(self, client: int, version: int) -> Tensor:
        """The model that a client starts from: that version, or its own last one where everyone trains alone."""
        if self._aggregator.trains_own_models and client < len(self._held):
            return self._aggregator.entries(np.array([client]))[0]
        return self.versions[version]

    def round_of(self, client: int, version: int) -> int:
        """The round in which training from a version begins: the one after that in which the version was made.

        Where everyone trains alone, it is the number of the client's next update.
        """
        if self._aggregator.trains_own_models:
            return 1 + (int(self._own_updates[client]) if client < len(self._own_updates) else 0)
        return 1 + self._made_in[version]

    def apply_so_far(self, record: RoundRecord) -> None:
        """Make the versions of a round that is still open, so that they can be sent out."""
        with torch_threads(self._threads):
            self._apply(record)

    def apply(self, record: RoundRecord) -> RoundRecord:
        """Bring the global model up to date with a round; the record comes back with loss and metrics."""
        with torch_threads(self._threads):
            self._apply(record)
            if not self._aggregator.trains_own_models:
                self._keep_undrafted(record)
            score = None
            if self.versions.latest != self._evaluated and record.round % self._eval_every == 0:
                score, self._evaluated = self._score(self.model), self.versions.latest
        diverged, self._diverged, self._applied = self._diverged, 0, 0
        self._forget()
        learnt = replace(record, diverged=diverged)
        return learnt if score is None else replace(learnt, loss=score.loss, metrics=score.metrics)

    def _apply(self, record: RoundRecord) -> None:
        if record.round != self._round:
            self._round = record.round
            self._follow(record)
        self._held[record.sent] = record.sent_version
        if self._aggregator.trains_own_models:
            self._train_own(record)
            return
        picked = _Commits.of(record, record.verdict == Verdict.PICKED.value)
        new = picked[self._applied :]
        self._applied = len(picked)
        self._make_versions(self._queue + new, record)

    def _score(self, row: Tensor) -> Score:
        """Loss and metrics of a model; an aggregator may have asked for those of one of the last two already."""
        for place, (known, score) in enumerate(self._scores):
            if known is row:
                self._scores.append(self._scores.pop(place))
                return score
        score = self._evaluate(row)
        self._scores = [*self._scores[-1:], (row, score)]
        return score

    def _follow(self, record: RoundRecord) -> None:
        """Who came and who left since the last round; a new client holds the latest model."""
        if len(record.joined) or len(record.left):
            new = max(0, int(record.joined.max(initial=-1)) + 1 - len(self._held))
            self._held = np.append(self._held, np.full(new, self.versions.latest))
            self._own_updates = np.append(self._own_updates, np.zeros(new, dtype=np.int64))
            self._aggregator.follow(record.joined, record.joined_size, record.left)

    def _keep_undrafted(self, record: RoundRecord) -> None:
        """Undrafted updates wait for the next version, if the aggregator has a use for them."""
        undrafted = _Commits.of(record, record.verdict == Verdict.UNDRAFTED.value)
        if self._aggregator.keeps_entries:
            overtaken = _among(self._undrafted.client, undrafted.client)
            self._discard(self._undrafted[overtaken])
            self._undrafted = self._undrafted[~overtaken] + undrafted
        else:
            self._discard(undrafted)
        if record.rule is Rule.CACHE:
            # A client that committed counts as up to date (Eq. 3); if it leaves now, it comes back with this version.
            self._held[record.client[record.verdict != Verdict.REFUSED.value]] = record.version

    def _forget(self) -> None:
        """Drop the versions that nobody needs any more."""
        self.versions.forget_all_but(self._needed_versions())
        self._made_in = {version: self._made_in[version] for version in self.versions.numbers.tolist()}

    def _needed_versions(self) -> set[int]:
        """The versions that somebody starts from, or that an entry refers to."""
        held = np.unique(np.concatenate([self._held, self._queue.base, self._undrafted.base]))
        return {*held.tolist(), *self._aggregator.references()}

    def _discard(self, commits: _Commits) -> None:
        if len(commits):
            self._source.discard(commits.client, commits.base)

    # -- updates -----------------------------------------------------------------------------------------------------

    def _updates(self, commits: _Commits, start: Tensor) -> tuple[Updates, Ids]:
        """The updates of these commits, without those that diverged, and the versions that they go into."""
        self.asked_for += len(commits)
        if self._most < len(self._held):
            give_back_memory()
        rows, step_size = self._asked(commits, start)
        low, high = torch.aminmax(rows, dim=1)  # which are not finite where a number is not
        sound = (torch.isfinite(low) & torch.isfinite(high)).cpu().numpy()
        self._diverged += int(np.count_nonzero(~sound))
        picked = commits.into != _UNDRAFTED
        found = Updates(commits.client, commits.base, commits.weight, picked, rows, start, step_size)
        return found.part(sound), commits.into[sound]

    def _asked(self, commits: _Commits, start: Tensor) -> tuple[Tensor, NDArray[np.float64]]:
        """The updates as the source has them, and their step sizes, where the aggregator corrects gradients."""
        rounds, work = self._rounds_of(commits), commits.work
        correction = self._aggregator.correction(commits.client)
        rows = self._source.updates(
            commits.client, commits.base, start, rounds=rounds, work=work, correction=correction
        )
        if correction is None:
            return rows, np.empty(0)
        return rows, self._source.step_sizes(commits.client, rounds, work)

    def _rounds_of(self, commits: _Commits) -> Ids:
        pairs = zip(commits.client.tolist(), commits.base.tolist(), strict=True)
        return np.array([self.round_of(*pair) for pair in pairs], dtype=np.int64)

    def _parts(self, commits: _Commits, start_of: Callable[[_Commits], Tensor]) -> Iterator[Updates]:
        """The updates of these commits in parts that fit the memory, each asked for when the one before is used up."""
        for first in range(0, len(commits), self._most):
            part = commits[first : first + self._most]
            yield self._updates(part, start_of(part))[0]

    def _train_own(self, record: RoundRecord) -> None:
        """Every client trains from its own entry; these are summed when the record makes a version."""
        taken = _Commits.of(record, record.verdict != Verdict.REFUSED.value)
        updates = self._parts(taken, lambda part: self._aggregator.entries(part.client))
        if record.version > self.versions.latest:
            weight = float(taken.weight.sum())
            step = Step(record.version, record.rule, weight, record.deprecated, updates)
            self._add(record.version, self._aggregator.step(step))
        else:
            for part in updates:
                self._aggregator.keep(part)
        self._own_updates[taken.client] += 1

    # -- versions ----------------------------------------------------------------------------------------------------

    def _make_versions(self, queue: _Commits, record: RoundRecord) -> None:
        """Make all versions up to that of the record; updates that go into later ones stay in the queue."""
        last = record.version
        while self.versions.latest < last:
            ready = (queue.into <= last) & (queue.base <= self.versions.latest)
            # A base that is made later in this record has to wait, and with it every version from its own on.
            stop = int(queue.into[~ready].min(initial=last + 1))
            for part, until in self._whole_versions(queue[ready & (queue.into < stop)], min(stop - 1, last)):
                self._make(part, until, record)
            queue = queue[queue.into > self.versions.latest]
        self._queue = queue

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

    def _make(self, wave: _Commits, last: int, record: RoundRecord) -> None:
        """Make all versions up to `last` of the updates of a wave, none of which starts from one of them."""
        first = self.versions.latest + 1
        kept = self._waiting_for(wave[wave.into == first])
        if len(kept) + len(wave) <= self._most:
            steps = self._steps_at_once(kept + wave, first, last)
        else:
            steps = self._steps_in_parts(kept, wave, first, last)
        for version, updates in zip(range(first, last + 1), steps, strict=True):
            picked = wave[wave.into == version]
            forced = record.deprecated if version == record.version else _NOBODY
            forced = forced[~_among(forced, picked.client)]
            step = Step(version, record.rule, float(picked.weight.sum()), forced, updates)
            self._add(version, self._aggregator.step(step))

    def _add(self, version: int, model: Tensor) -> None:
        """Keep the next version, and in which round it was made."""
        self.versions.add(version, model)
        self._made_in[version] = self._round

    def _waiting_for(self, picked: _Commits) -> _Commits:
        """The undrafted updates that count from the next version on; what its picked ones overwrite is dropped."""
        overwritten = _among(self._undrafted.client, picked.client)
        self._discard(self._undrafted[overwritten])
        kept, self._undrafted = self._undrafted[~overwritten], _NONE
        return kept

    def _steps_at_once(self, wave: _Commits, first: int, last: int) -> Iterator[Iterator[Updates]]:
        """For every version from first to last its updates, all of which are asked for at once."""
        if not len(wave):
            yield from (iter(()) for _ in range(first, last + 1))
            return
        updates, into = self._updates(wave, self.versions.rows(wave.base))
        into = np.where(into == _UNDRAFTED, first, into)
        yield from (iter((updates.part(into == version),)) for version in range(first, last + 1))

    def _steps_in_parts(self, kept: _Commits, wave: _Commits, first: int, last: int) -> Iterator[Iterator[Updates]]:
        """The same where they do not fit the memory: part by part, while the aggregator goes through them."""
        for version in range(first, last + 1):
            own = wave[wave.into == version]
            commits = kept + own if version == first else own
            yield self._parts(commits, lambda part: self.versions.rows(part.base))

    # -- to be continued later ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue later besides `tables`, as named tensors. No round is open."""
        commits = {"queue": self._queue, "undrafted": self._undrafted}
        return {
            "latest": torch.tensor(self.versions.latest),
            "evaluated": torch.tensor(self._evaluated),
            "held": torch.from_numpy(self._held.copy()),
            "asked_for": torch.tensor(self.asked_for),
            "round": torch.tensor(self._round),
            "own_updates": torch.from_numpy(self._own_updates.copy()),
            "made_in": torch.tensor(list(self._made_in.items()), dtype=torch.int64),
            **{
                f"{name}.{item}": torch.from_numpy(np.array(values))
                for name, waiting in commits.items()
                for item, values in vars(waiting).items()
            },
            **{f"aggregator.{name}": tensor for name, tensor in self._aggregator.state().items()},
            **{f"source.{name}": tensor for name, tensor in self._source.state().items()},
        }

    def tables(self) -> dict[str, RowTable | Versions]:
        """What is held in rows, by name."""
        return {
            "models": self.versions,
            **{f"aggregator.{name}": table for name, table in self._aggregator.tables().items()},
            **{f"source.{name}": table for name, table in self._source.tables().items()},
        }

    def restore(self, state: Mapping[str, Tensor], tables: Mapping[str, tuple[Ids, Tensor]]) -> None:
        """Continue from a checkpoint; one that lacks what it refers to is an error."""
        for name, table in self.tables().items():
            self._restore_table(name, table, tables)
        if self.versions.latest != int(state["latest"]):
            raise SafaError(f"the checkpoint lacks version {int(state['latest'])} of the model, which is its latest")
        self._evaluated = int(state["evaluated"])
        self._held = state["held"].numpy().copy()
        self.asked_for, self._round = int(state["asked_for"]), int(state["round"])
        self._own_updates = state["own_updates"].numpy().copy()
        self._made_in = dict(state["made_in"].tolist())
        self._queue, self._undrafted = (_restored(state, name) for name in ("queue", "undrafted"))
        self._aggregator.restore(_under("aggregator.", state))
        self._source.restore(_under("source.", state))
        missing = self._needed_versions() - set(self.versions.numbers.tolist())
        if missing:
            raise SafaError(f"the checkpoint lacks version {min(missing)} of the model, which is needed")

    def _restore_table(self, name: str, table: RowTable | Versions, tables: Mapping[str, tuple[Ids, Tensor]]) -> None:
        """Restore a table, if its rows are of this model."""
        if name not in tables:
            raise SafaError(f"the checkpoint holds no {name}")
        numbers, rows = tables[name]
        if rows.shape != (len(numbers), len(self.model)):
            shape = tuple(rows.shape)
            raise SafaError(f"the checkpoint holds {name} of shape {shape}; this model has {len(self.model)} numbers")
        table.restore(numbers, rows)


_UNDRAFTED = -1  # the version that an undrafted update goes into


def _among(some: Ids, others: Ids) -> NDArray[np.bool_]:
    """Which of these clients are among others."""
    return np.isin(some, others) if len(some) and len(others) else np.zeros(len(some), dtype=np.bool_)


def _restored(state: Mapping[str, Tensor], name: str) -> _Commits:
    return _Commits(*(state[f"{name}.{item.name}"].numpy().copy() for item in fields(_Commits)))


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
