"""An arena: many protocols in many worlds, all tuned by the same rule and budget, then judged on fresh seeds.

Tuning, in every world and for every protocol: each learning rate of the world's grid with each value of the protocol's
own knob, on the tuning seeds. The best is the one with the shortest times to the targets (the mean of their logarithms
over targets and seeds; a target that is not reached counts as twice the horizon); of equal ones, that with the highest
mean of the metric over time. What the plan says an earlier tuning chose is taken instead.

Judging: every protocol as tuned, on the judging seeds. All runs of a world last the same simulated time, its horizon.

Every step is a sweep (`safa.experiments.sweep`), which resumes and has workers: `OUT/WORLD/tuning` and `judged`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from safa.analysis import Curve
from safa.errors import SafaError
from safa.experiments.arena_plan import Choice, Plan, World
from safa.experiments.engines import Engine, LocalEngine
from safa.experiments.results import load_sweep
from safa.experiments.sweep import run_sweep
from safa.runs.folder import SWEEP
from safa.runs.settings import Settings
from safa.runs.storage import write_atomically, writing
from safa.runs.sweep_folder import SweepFolder

__all__ = ["PLAN", "STAGES", "Arena", "Judged", "Row", "Run", "Tuned"]

STAGES = ("tune", "judge", "report")
PLAN = "plan.toml"
"""The plan, in the folder of its results."""
_UNREACHED = 2.0  # a target that is not reached counts, when protocols are tuned, as so many times the horizon

Row = dict[str, Any]
Watch = Callable[[str, Iterable[Row], int], Iterable[Row]]
"""Passes the rows of a sweep on, given what it is of and how many there will be: for progress."""


def _unwatched(_: str, rows: Iterable[Row], __: int) -> Iterable[Row]:
    return rows


@dataclass(frozen=True)
class Run:
    """A run of an arena: what it was, and what it came to."""

    choice: Choice
    seed: int
    row: Row
    curve: Curve
    """The main metric over time."""


@dataclass(frozen=True)
class Tuned:
    """What tuning came to in a world."""

    world: World
    targets: Sequence[float]
    best: Mapping[str, Choice]
    """The choice for every protocol."""
    runs: int
    """How many runs it took; none for a protocol of which the plan says what an earlier tuning chose."""


@dataclass(frozen=True)
class Judged:
    """What the runs on the judging seeds came to in a world, by protocol, in the order of the seeds."""

    tuned: Tuned
    runs: Mapping[str, Sequence[Run]]


class Arena:
    """A plan and the folder of its results, which holds those of no other plan."""

    def __init__(self, plan: Plan, folder: Path, *, stack: int = 1, watch: Watch = _unwatched) -> None:
        self.plan, self.folder = plan, folder
        self._stack, self._watch = stack, watch
        if (folder / PLAN).exists():
            if Plan.read(folder / PLAN).digest != plan.digest:
                raise SafaError(f"{folder} holds the results of another plan; choose another folder")
        elif folder.exists() and any(folder.iterdir()):
            raise SafaError(f"{folder} holds something else than an arena; choose another folder")
        else:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / PLAN, plan.text)

    def run(self, worlds: Sequence[World], stages: Iterable[str], engine: Engine) -> None:
        """Make what is missing of these stages; processes are kept from one sweep to the next."""
        with engine if isinstance(engine, LocalEngine) else nullcontext():
            for world in worlds:
                tuned = self.tune(world, engine) if "tune" in stages else None
                if "judge" in stages:
                    self.judge(tuned or self._tuned(world), engine)

    # -- the stages --------------------------------------------------------------------------------------------------

    def tune(self, world: World, engine: Engine | None = None) -> Tuned:
        """Tune all protocols in a world. Without an engine, what is there is read, and must be complete."""
        choices = self.plan.choices(world)
        runs = self._runs(world, "tuning", choices, world.tuning_seeds, engine) if choices else []
        targets = list(world.targets) or self._targets(world, runs)
        best = {**_best(world, targets, self.plan.targets.held, runs), **self.plan.tuned.get(world.name, {})}
        return Tuned(world, targets, {name: best[name] for name in self.plan.entries}, len(runs))

    def judge(self, tuned: Tuned, engine: Engine | None = None) -> Judged:
        """Run all protocols of a world as tuned, on its judging seeds; the same without an engine."""
        runs = self._runs(tuned.world, "judged", list(tuned.best.values()), tuned.world.seeds, engine)
        found = {name: [run for run in runs if run.choice.entry == name] for name in tuned.best}
        return Judged(tuned, found)

    def judged(self) -> list[Judged]:
        """What is there of all worlds that have been judged."""
        there = [world for world in self.plan.worlds.values() if _is_begun(self.folder / world.name / "judged")]
        return [self.judge(self._tuned(world)) for world in there]

    def _tuned(self, world: World) -> Tuned:
        if self.plan.choices(world) and not _is_begun(self.folder / world.name / "tuning"):
            raise SafaError(f"the protocols have not been tuned in world {world.name} yet; begin with stage tune")
        return self.tune(world)

    def _targets(self, world: World, runs: Sequence[Run]) -> list[float]:
        """The targets by the rule: of the best mean, over the tuning seeds, that the named protocol ends with."""
        ends = _by_choice(run for run in runs if run.choice.entry == self.plan.targets.of)
        means = [fmean(_end(run.curve, world) for run in alike) for alike in ends.values()]
        known = [mean for mean in means if math.isfinite(mean)]
        if not known:
            raise SafaError(f"world {world.name}: {self.plan.targets.of} ends with no {world.metric}; name its targets")
        return self.plan.targets.from_best((max if world.higher else min)(known), higher=world.higher)

    # -- sweeps ------------------------------------------------------------------------------------------------------

    def _runs(
        self, world: World, step: str, choices: Sequence[Choice], seeds: Sequence[int], engine: Engine | None
    ) -> list[Run]:
        """These choices on these seeds, as a sweep."""
        settings = self.plan.runs(world, choices, seeds, judged=step == "judged")
        rows = self._rows(settings, self.folder / world.name / step, engine, f"{world.name}, {step}")
        which = [(choice, seed) for choice in choices for seed in seeds]
        return [
            Run(choice, seed, row, Curve.parse(row["curve"], higher=world.higher))
            for (choice, seed), row in zip(which, rows, strict=True)
        ]

    def _rows(self, runs: Sequence[Settings], folder: Path, engine: Engine | None, words: str) -> list[Row]:
        if engine is not None:
            rows = run_sweep(runs, folder, engine=engine, stack=self._stack, keep="curves")
            return list(self._watch(words, rows, len(runs)))
        sweep = load_sweep(folder)
        if sweep.place != SweepFolder.of(folder, runs, "curves"):
            raise SafaError(f"{folder} holds the results of another plan, or of other tuning runs")
        return sweep.rows


def _is_begun(folder: Path) -> bool:
    return (folder / SWEEP).exists()


def _by_choice(runs: Iterable[Run]) -> dict[Choice, list[Run]]:
    groups: dict[Choice, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.choice, []).append(run)
    return groups


def _end(curve: Curve, world: World) -> float:
    """The metric at the horizon; NaN where no model was evaluated until then."""
    value = curve.at(world.horizon_s)
    return math.nan if value is None else value


def _best(world: World, targets: Sequence[float], held: float, runs: Iterable[Run]) -> dict[str, Choice]:
    """The best choice for every protocol; the first of equal ones."""
    scores = {choice: _score(world, targets, held, alike) for choice, alike in _by_choice(runs).items()}
    best: dict[str, Choice] = {}
    for choice, score in scores.items():
        if choice.entry not in best or score < scores[best[choice.entry]]:
            best[choice.entry] = choice
    return best


def _score(world: World, targets: Sequence[float], held: float, runs: Sequence[Run]) -> tuple[float, float]:
    """What is compared when protocols are tuned, less being better: times to the targets, then the metric over time."""
    end, held_s = world.horizon_s, held * world.horizon_s
    times = [run.curve.time_to(target, held_s=held_s, until_s=end) for run in runs for target in targets]
    logs = fmean(math.log(_UNREACHED * end if time is None else time) for time in times)
    mean = fmean(run.curve.mean(end) for run in runs)
    return logs, -mean if world.higher else mean
