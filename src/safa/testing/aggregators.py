"""The contract of an aggregator, as checks that drive it with random steps while clients join, leave and return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from safa.aggregation.aggregator import Aggregator, Step, Updates
from safa.aggregation.rows import RowTable, Versions
from safa.errors import MisuseError, SafaError
from safa.protocol.records import Ids, Rule

__all__ = [
    "TakenStep",
    "check_aggregator",
    "check_arrival_order",
    "check_formula",
    "check_memory",
    "check_parts",
    "check_refused",
    "check_return",
    "check_saving",
    "check_step",
]

Make = Callable[[], Aggregator]
"""Makes the aggregator under test, each time a new one."""


@dataclass(frozen=True, eq=False)
class TakenStep:
    """A step that an aggregator was given, with all numbers in double precision: what a literal formula needs."""

    version: int
    rule: Rule
    present: Mapping[int, float]
    """n_k of the clients that are there."""
    deprecated: Ids
    client: Ids
    base: Ids
    weight: NDArray[np.float64]
    picked: NDArray[np.bool_]
    rows: NDArray[np.float64]
    """The updates [K, d]."""
    start: NDArray[np.float64]
    """The models that they were trained from [K, d]."""
    step_size: NDArray[np.float64]
    """The number of steps of each times their learning rate."""
    before: NDArray[np.float64]
    """The global model before the step."""
    makes_version: bool
    """Whether there was a version to be made of it, or the updates were to be kept only (`Rule.OWN`)."""


Naive = Callable[[Sequence[TakenStep]], NDArray[np.float64]]
"""What the model must be after the last of these steps, all there were, by a literal formula."""


def check_aggregator(
    make: Make, *, naive: Naive | None = None, refused: Iterable[Make] = (), scripts: int = 10, seed: int = 0
) -> None:
    """Put an aggregator through all checks, with this many random scripts each.

    With `naive` it is compared with a literal formula, too. Each of `refused` makes one with parameters that must be
    refused.
    """
    check_refused(refused)
    checks = [check_step, check_arrival_order, check_parts, check_saving, check_return, check_memory]
    for number in range(scripts):
        for check in checks:
            with _named(check.__name__, seed + number):
                check(make, seed=seed + number)
        if naive is not None:
            with _named("check_formula", seed + number):
                check_formula(make, naive, seed=seed + number)


def check_step(make: Make, *, seed: int) -> None:
    """A step makes a sound model of the right kind and changes nothing that was lent to it."""
    plan = _Plan(make(), seed)
    run = _Run(make(), plan, dtype=torch.float32)
    for planned in [*plan.steps, plan.empty_step()]:
        model = run.versions.model
        copy = model.clone()
        new = run.take(planned)
        assert torch.equal(model, copy), "a step has changed the model before it in place"
        assert new.shape == copy.shape, f"the model has the shape {list(new.shape)}, not {list(copy.shape)}"
        assert new.dtype == copy.dtype, f"the model is of {new.dtype}, not of {copy.dtype}"
        assert bool(torch.isfinite(new).all()), "the model is not finite, although all updates are"
        _check_entries(run.aggregator, planned.client, copy)


def check_arrival_order(make: Make, *, seed: int) -> None:
    """In which order the updates of a step came makes no difference but that of rounding."""
    rng = np.random.default_rng(seed)
    _compare(make, seed, lambda updates: iter([_shuffled(updates, rng)]), "another order of arrival")


def check_parts(make: Make, *, seed: int) -> None:
    """Updates that come in parts make the same model as all at once, but for rounding."""
    rng = np.random.default_rng(seed)
    _compare(make, seed, lambda updates: _pieces(updates, rng), "updates in parts")


def check_saving(make: Make, *, seed: int) -> None:
    """One that is continued from what was saved, in mid-course, makes the very same models.

    What is saved are `state` and those rows of the tables that have changed since they were last saved.
    """
    plan = _Plan(make(), seed)
    rng = np.random.default_rng(seed)
    steady, resumed = (_Run(make(), plan, dtype=torch.float32) for _ in range(2))
    saved, models = _Saved(resumed), [steady.take(planned) for planned in plan.steps]
    place = 0
    while place < len(models):
        model = resumed.take(plan.steps[place])
        assert torch.equal(model, models[place]), f"after a restart step {place + 1} made another model"
        place += 1
        if rng.random() < 0.4:
            saved.save(resumed, place)
        if rng.random() < 0.3:
            resumed = _Run(make(), plan, dtype=torch.float32)
            place = saved.restore(resumed)


def check_return(make: Make, *, seed: int) -> None:
    """A client that left and came back between two steps, with the same n_k, counts as if it had never left."""
    plan = _Plan(make(), seed)
    stayed = _Run(make(), plan, dtype=torch.float64)
    returned = _Run(make(), plan, dtype=torch.float64, leave_and_return=True)
    for planned in plan.steps:
        _check_close(returned.take(planned), stayed.take(planned), "a client that left and came back at once")


def check_memory(make: Make, *, seed: int) -> None:
    """With next to no memory for rows the models are the same, to the last bit."""
    plan = _Plan(make(), seed)
    ample = _Run(make(), plan, dtype=torch.float32)
    scarce = _Run(make(), plan, dtype=torch.float32, memory_mb=1e-4)
    for planned in plan.steps:
        same = torch.equal(scarce.take(planned), ample.take(planned))
        assert same, f"with little memory version {planned.version} is another model"


def check_formula(make: Make, naive: Naive, *, seed: int) -> None:
    """Every model is what a literal formula makes of all steps so far, but for rounding."""
    plan = _Plan(make(), seed)
    run = _Run(make(), plan, dtype=torch.float64)
    for planned in plan.steps:
        model = run.take(planned)
        if planned.makes_version:
            _check_close(model, torch.from_numpy(naive(run.taken)), "the literal formula")


def check_refused(refused: Iterable[Make]) -> None:
    """Parameters that make no sense are refused with a sentence."""
    for number, make in enumerate(refused):
        assert _refusal(make), f"parameters that make no sense were not refused with a sentence (number {number})"


def _refusal(make: Make) -> str:
    try:
        make()
    except SafaError as refusal:
        return str(refusal)
    return ""


# -- random steps ----------------------------------------------------------------------------------------------------

_LENGTH, _STEPS, _OLDEST = 5, 25, 3
_NOBODY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _PlannedStep:
    """A step that is to come.

    The updates are what they started from plus `noise`, less what the aggregator's correction makes of that.
    """

    version: int
    rule: Rule
    joined: Ids
    sizes: NDArray[np.float64]
    left: Ids
    present: Mapping[int, float]
    deprecated: Ids
    client: Ids
    base: Ids
    weight: NDArray[np.float64]
    picked: NDArray[np.bool_]
    noise: Tensor
    step_size: NDArray[np.float64]
    makes_version: bool


class _Plan:
    """Steps that suit an aggregator, drawn at random."""

    def __init__(self, aggregator: Aggregator, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._step_sizes = np.random.default_rng([seed, 1])  # apart: plans are the same for all who do not use them
        self._oldest = 1 if aggregator.corrects else _OLDEST
        self._undrafted = aggregator.keeps_entries and not aggregator.trains_own_models
        rules = sorted(aggregator.rules)
        assert rules, "it can work with no rule"
        self._rule = rules[seed % len(rules)]
        self.sizes = self._some_sizes(int(self._rng.integers(3, 9)))
        self.start = torch.from_numpy(self._rng.normal(size=_LENGTH))
        self._present = dict(enumerate(self.sizes.tolist()))
        self._known = len(self.sizes)
        self.steps: list[_PlannedStep] = []
        version = 0
        while len(self.steps) < _STEPS:
            self.steps.append(self._step(version))
            version += self.steps[-1].makes_version

    def empty_step(self) -> _PlannedStep:
        """A step without updates, behind all others."""
        last = self.steps[-1].version + self.steps[-1].makes_version
        return self._planned(last, (_NOBODY, np.empty(0), _NOBODY), _NOBODY, _NOBODY, _NOBODY, makes_version=True)

    def _some_sizes(self, count: int) -> NDArray[np.float64]:
        return self._rng.integers(1, 100, size=count).astype(np.float64)

    def _step(self, latest: int) -> _PlannedStep:
        fleet = self._change_fleet()
        there = np.array(sorted(self._present), dtype=np.int64)
        picked = self._some(there, least=0 if self._rng.random() < 0.1 else 1)
        others = np.setdiff1d(np.arange(self._known), picked)
        undrafted = self._some(others, least=0) if self._undrafted and self._rng.random() < 0.7 else _NOBODY
        idle = np.setdiff1d(there, undrafted)
        deprecated = self._some(idle, least=0) if self._rule is Rule.CACHE and self._rng.random() < 0.4 else _NOBODY
        makes_version = self._rule is not Rule.OWN or self._rng.random() < 0.7
        return self._planned(latest, fleet, undrafted, picked, deprecated, makes_version=makes_version)

    def _some(self, of: Ids, *, least: int) -> Ids:
        count = int(self._rng.integers(min(least, len(of)), len(of) + 1))
        return self._rng.permutation(of)[:count]

    def _change_fleet(self) -> tuple[Ids, NDArray[np.float64], Ids]:
        """Now and then clients join, leave, come back or have another n_k; somebody always stays."""
        present, rng = self._present, self._rng
        joined, left = [], []
        if rng.random() < 0.5:
            joined += [self._known] if rng.random() < 0.5 else []
            joined += [k for k in range(self._known) if k not in present and rng.random() < 0.5]
            changed = [k for k in present if rng.random() < 0.1]
            gone = [k for k in present if k not in changed and rng.random() < 0.2][: len(present) - 1]
            joined, left = joined + changed, gone + changed
        sizes = self._some_sizes(len(joined))
        self._present = {k: n for k, n in present.items() if k not in left} | dict(
            zip(joined, sizes.tolist(), strict=True)
        )
        self._known = max([self._known, *(k + 1 for k in joined)])
        return np.array(joined, dtype=np.int64), sizes, np.array(left, dtype=np.int64)

    def _planned(
        self,
        latest: int,
        fleet: tuple[Ids, NDArray[np.float64], Ids],
        undrafted: Ids,
        picked: Ids,
        deprecated: Ids,
        *,
        makes_version: bool,
    ) -> _PlannedStep:
        client = np.concatenate([undrafted, picked])
        lag = self._rng.integers(0, self._oldest, size=len(client))
        return _PlannedStep(
            latest + makes_version,
            self._rule,
            *fleet,
            present=dict(self._present),
            deprecated=deprecated,
            client=client,
            base=np.maximum(latest - lag, 0),
            weight=np.concatenate([np.zeros(len(undrafted)), self._weights(picked)]),
            picked=np.arange(len(client)) >= len(undrafted),
            noise=torch.from_numpy(self._rng.normal(size=(len(client), _LENGTH))),
            step_size=self._step_sizes.uniform(0.1, 1.0, size=len(client)),
            makes_version=makes_version,
        )

    def _weights(self, picked: Ids) -> NDArray[np.float64]:
        sizes = np.array([self._present[int(k)] for k in picked], dtype=np.float64)
        everybody = float(sum(self._present.values()))
        if self._rule is Rule.AVERAGE:  # of the participants, or of a larger whole
            whole = float(sizes.sum()) if self._rng.random() < 0.5 else everybody
            return sizes / whole if len(sizes) else sizes
        if self._rule is Rule.DELTA:
            return self._rng.uniform(0.1, 1.0, size=len(sizes)) / max(1, len(sizes))
        return sizes / everybody


# -- taking steps ----------------------------------------------------------------------------------------------------

Arrange = Callable[[Updates], Iterator[Updates]]


class _Run:
    """An aggregator that is given planned steps, as a server would."""

    def __init__(
        self,
        aggregator: Aggregator,
        plan: _Plan,
        *,
        dtype: torch.dtype,
        memory_mb: float = 64.0,
        arrange: Arrange = lambda updates: iter([updates]),
        leave_and_return: bool = False,
    ) -> None:
        self.aggregator, self._arrange, self._leave_and_return = aggregator, arrange, leave_and_return
        self.versions = Versions(plan.start.to(dtype), memory_mb=memory_mb)
        self.taken: list[TakenStep] = []
        aggregator.begin(self.versions, plan.sizes.copy(), memory_mb=memory_mb)

    def take(self, planned: _PlannedStep) -> Tensor:
        """Take a step; the model after it."""
        self._follow(planned)
        updates = self._updates(planned)
        self.taken.append(_as_taken(planned, updates, self.versions.model))
        lent = updates.rows.clone(), updates.start.clone()
        self._aggregate(planned, updates)
        same = torch.equal(lent[0], updates.rows) and torch.equal(lent[1], updates.start)
        assert same, "a step has changed the updates that it was given"
        recent = range(max(0, self.versions.latest - _OLDEST), self.versions.latest)
        self.versions.forget_all_but({*recent, *self.aggregator.references()})
        return self.versions.model

    def _follow(self, planned: _PlannedStep) -> None:
        if not len(planned.joined) and not len(planned.left):
            return
        self.aggregator.follow(planned.joined, planned.sizes, planned.left)
        if self._leave_and_return:
            client = np.array([min(planned.present)])
            size = np.array([planned.present[int(client[0])]])
            self.aggregator.follow(_NOBODY, np.empty(0), client)
            self.aggregator.follow(client, size, _NOBODY)
            self.aggregator.follow(client, size, client)

    def _updates(self, planned: _PlannedStep) -> Updates:
        if self.aggregator.trains_own_models and len(planned.client):
            start = self.aggregator.entries(planned.client)
        else:
            start = self.versions.get(planned.base)
        rows = start + planned.noise.to(start)
        correction = self.aggregator.correction(planned.client) if len(planned.client) else None
        if correction is not None:
            assert correction.shape == rows.shape, f"the correction has the shape {list(correction.shape)}"
            rows -= torch.from_numpy(planned.step_size).to(rows).unsqueeze(1) * correction
        named = (planned.client, planned.base, planned.weight, planned.picked)
        return Updates(*named, rows, start, planned.step_size)

    def _aggregate(self, planned: _PlannedStep, updates: Updates) -> None:
        parts = self._arrange(updates) if len(updates) else iter([])
        if not planned.makes_version:
            for part in parts:
                self.aggregator.keep(part)
            return
        weight = float(planned.weight.sum())
        step = Step(planned.version, planned.rule, weight, planned.deprecated, parts)
        self.versions.add(planned.version, self.aggregator.step(step))


def _as_taken(planned: _PlannedStep, updates: Updates, before: Tensor) -> TakenStep:
    return TakenStep(
        version=planned.version,
        rule=planned.rule,
        present=planned.present,
        deprecated=planned.deprecated,
        client=planned.client,
        base=planned.base,
        weight=planned.weight,
        picked=planned.picked,
        rows=updates.rows.double().numpy().copy(),
        start=updates.start.double().numpy().copy(),
        step_size=planned.step_size,
        before=before.double().numpy().copy(),
        makes_version=planned.makes_version,
    )


def _chosen(updates: Updates, which: NDArray[np.int64]) -> Updates:
    arrays = (updates.client[which], updates.base[which], updates.weight[which], updates.picked[which])
    index = torch.from_numpy(which)
    return Updates(*arrays, updates.rows[index], updates.start[index], updates.step_size[which])


def _shuffled(updates: Updates, rng: np.random.Generator) -> Updates:
    """Another order; those that were undrafted in the round before still come first."""
    order = rng.permutation(len(updates))
    return _chosen(updates, order[np.argsort(updates.picked[order], kind="stable")])


def _pieces(updates: Updates, rng: np.random.Generator) -> Iterator[Updates]:
    first = 0
    while first < len(updates):
        last = first + int(rng.integers(1, len(updates) - first + 1))
        yield _chosen(updates, np.arange(first, last))
        first = last


# -- saving ----------------------------------------------------------------------------------------------------------


class _Saved:
    """What a checkpoint holds of an aggregator: its state, and the rows that have changed since the last one."""

    def __init__(self, run: _Run) -> None:
        self._rows: dict[str, dict[int, Tensor]] = {}
        self.save(run, 0)

    def save(self, run: _Run, place: int) -> None:
        """Bring what is held up to date; `place` is how many steps were taken."""
        tables: dict[str, RowTable | Versions] = {"versions": run.versions, **_tables(run.aggregator)}
        for name, table in tables.items():
            rows, changed = self._rows.setdefault(name, {}), table.take_changed()
            rows.update(zip(changed.tolist(), table.get(changed), strict=True))
            self._rows[name] = {number: rows[number] for number in table.numbers.tolist()}
        self._state, self._place = run.aggregator.state(), place
        assert all(value.device.type == "cpu" for value in self._state.values()), "part of its state is not on the CPU"

    def restore(self, run: _Run) -> int:
        """Bring an aggregator that has only begun to where the other was saved; how many steps that one had taken."""
        run.versions.restore(*self._of("versions"))
        for name, table in _tables(run.aggregator).items():
            if self._rows[name]:
                table.restore(*self._of(name))
        run.aggregator.restore({name: value.clone() for name, value in self._state.items()})
        return self._place

    def _of(self, name: str) -> tuple[Ids, Tensor]:
        return np.array(sorted(self._rows[name])), torch.stack([row for _, row in sorted(self._rows[name].items())])


def _tables(aggregator: Aggregator) -> dict[str, RowTable]:
    return {f"aggregator.{name}": table for name, table in aggregator.tables().items()}


# -- comparing -------------------------------------------------------------------------------------------------------


@contextmanager
def _named(check: str, seed: int) -> Iterator[None]:
    """What fails inside says in which check, and with which seed."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{check}, seed {seed}: {error}") from error


def _compare(make: Make, seed: int, arrange: Arrange, what: str) -> None:
    """The same steps with updates as they are, and arranged in another way."""
    plan = _Plan(make(), seed)
    plain = _Run(make(), plan, dtype=torch.float64)
    arranged = _Run(make(), plan, dtype=torch.float64, arrange=arrange)
    for planned in plan.steps:
        _check_close(arranged.take(planned), plain.take(planned), what)


def _check_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal but for rounding; both are in double precision."""
    apart = float((found - expected).abs().max())
    limit = 1e-9 * max(1.0, float(expected.abs().max()))
    assert apart <= limit, f"{what}: the models are {apart:.3g} apart"


def _check_entries(aggregator: Aggregator, clients: Ids, like: Tensor) -> None:
    if aggregator.keeps_entries:
        entries = aggregator.entries(clients)
        expected = (len(clients), like.numel())
        assert tuple(entries.shape) == expected, f"the entries of {len(clients)} clients are {list(entries.shape)}"
        return
    try:
        aggregator.entries(clients)
    except MisuseError:
        return
    raise AssertionError("it holds no entry per client, but gave some")
