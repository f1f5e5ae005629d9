"""Write the tables of the two worlds with the paper's CNN into docs/arena.md, from docs/arena/cnn-worlds*.csv.

python docs/gpu_worlds.py
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from safa.experiments.arena_plan import Plan
from safa.experiments.arena_results import Times, joint_times, ratio_of_times

HERE = Path(__file__).parent
PLAN = Plan.read(HERE / "arena" / "cnn-worlds.toml")
TIMES = ("time_to_target_1_s", "time_to_target_2_s")
BEGIN, END = "<!-- gpu worlds -->\n", "<!-- end of gpu worlds -->\n"

Runs = Sequence[dict[str, str]]


def runs_of(world: str) -> dict[str, Runs]:
    """The runs in a world by protocol, in the order of their seeds."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted((HERE / "arena").glob("cnn-worlds*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in sorted(csv.DictReader(file), key=lambda row: int(row["seed"])):
                if row["world"] == world:
                    found.setdefault(row["protocol"], []).append(row)
    return dict(found)


def times(runs: Runs) -> Times:
    """When the runs reached each target."""
    return [[float(run[column]) if run[column] else None for run in runs] for column in TIMES]


def horizon(runs: Runs) -> float:
    """How long the runs lasted."""
    return PLAN.worlds[runs[0]["world"]].horizon_s


def mean_log_time(runs: Runs) -> float:
    """The mean logarithm of the times to the targets, with the horizon where one was missed."""
    return fmean(map(math.log, joint_times(times(runs), horizon(runs))))


def end(runs: Runs) -> float:
    """The mean accuracy at the end."""
    return fmean(float(run["metric_at_end"]) for run in runs)


def ratio(runs: Runs, others: Runs) -> str:
    """How many times as long as others these take; nothing if neither reached any target."""
    assert [run["seed"] for run in runs] == [run["seed"] for run in others]
    return "1" if runs is others else str(ratio_of_times(times(runs), times(others), horizon(runs)) or "")


def reached(of_target: Sequence[float | None]) -> str:
    """The geometric mean of the times to a target, or how many runs reached it."""
    known = [time for time in of_target if time is not None]
    if len(known) < len(of_target):
        return f"{len(known)} of {len(of_target)}"
    return f"{math.exp(fmean(map(math.log, known))):,.0f}"


def row(name: str, runs: Runs, world: dict[str, Runs]) -> str:
    """What a protocol came to."""
    ends = [float(run["metric_at_end"]) for run in runs]
    rest = [fmean(float(run[column]) for run in runs) for column in ("futility", "starved", "worst_tenth", "bytes")]
    rest[-1] /= 1e9
    against = [ratio(runs, world[baseline]) for baseline in PLAN.baselines]
    cells = [name, *map(reached, times(runs)), *against, *(f"{value:.3f}" for value in (fmean(ends), min(ends), *rest))]
    return f"| {' | '.join(cells)} |\n"


def tables() -> str:
    """A table for each world, the fastest protocol first, of equally fast ones the most accurate."""
    text = ""
    for name, settings in PLAN.worlds.items():
        world = runs_of(name)
        order = sorted(world, key=lambda protocol: (mean_log_time(world[protocol]), -end(world[protocol])))
        best = next(protocol for protocol in order if protocol != "fedsecant")
        head = ["protocol", *(f"to {target}, s" for target in settings.targets)]
        head += [f"times {baseline}" for baseline in PLAN.baselines]
        head += ["accuracy at the end", "its lowest", "futility", "starved", "worst tenth", "GB"]
        text += f"\n`{name}`: `fedsecant` takes {ratio(world['fedsecant'], world[best])} times as long as the best "
        text += f"rival, {best}.\n\n"
        text += f"| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}\n"
        text += "".join(row(protocol, world[protocol], world) for protocol in order)
    return text + "\n"


def with_tables(page: str) -> str:
    """The page with these tables in place of those that it has."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    path = HERE / "arena.md"
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
