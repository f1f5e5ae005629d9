"""The results of an arena as people read them: tables, in Markdown and for the page.

`write_results` writes `judged.csv` (a row a run), `ratios.csv`, `tuned.csv`, `curves.csv`, `arena.md`, and
`tables.json`, of which `safa.report` makes the page.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean

from safa.analysis.statistics import Interval
from safa.errors import SafaError
from safa.experiments.arena import Arena
from safa.experiments.arena_results import Ratio, Results, Standing, as_csv
from safa.runs.folder import ARENA, ARENA_FORMAT
from safa.runs.storage import write_atomically

__all__ = ["Part", "arena_markdown", "arena_parts", "write_results"]

Cell = tuple[str, float | None]
"""A text, and the number that it is sorted by."""
_NONE: Cell = ("", None)
_SHOWN = {"futility": "futility", "starved": "starved", "worst_tenth": "worst tenth", "bytes": "GB"}


@dataclass(frozen=True)
class Part:
    """A part of the report: a title, sentences, and a table."""

    title: str
    words: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    world: str = field(default="")
    """The world that it is about, if it is about one."""


def write_results(arena: Arena) -> Results:
    """Write everything that the worlds judged so far came to into the arena's folder."""
    results = Results(arena)
    if not results.worlds:
        raise SafaError(f"no world has been judged in {arena.folder} yet, so there is nothing to report")
    parts, lead = arena_parts(results), _lead(results)
    page = {"format": ARENA_FORMAT, "lead": lead, "parts": list(map(asdict, parts)), "curves": results.curve_rows()}
    files = {
        "judged.csv": as_csv(results.run_rows()),
        "ratios.csv": as_csv(results.ratio_rows()),
        "tuned.csv": as_csv(results.tuned_rows()),
        "curves.csv": as_csv(results.curve_rows()),
        "arena.md": arena_markdown(lead, parts).encode(),
        ARENA: (json.dumps(page) + "\n").encode(),
    }
    for name, content in files.items():
        write_atomically(arena.folder / name, content)
    return results


def arena_markdown(lead: str, parts: Sequence[Part]) -> str:
    """The parts as Markdown."""
    return "\n".join([f"{lead}\n", *map(_markdown, parts)])


def _markdown(part: Part) -> str:
    lines = [
        part.columns,
        ["---", *["---:"] * (len(part.columns) - 1)],
        *([text for text, _ in row] for row in part.rows),
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"### {part.title}\n\n{part.words}\n\n{table}"


def arena_parts(results: Results) -> list[Part]:
    """All parts, the answer first."""
    first = results.plan.baselines[0]
    return [
        *_outcome(results),
        _against(results),
        _by_world(results, first),
        *(_world(results, name) for name in results.worlds),
        _tuning(results),
    ]


def _lead(results: Results) -> str:
    plan = results.plan
    tuned = sorted({len(plan.worlds[name].tuning_seeds) for name in results.worlds})
    seeds = sorted({len(standing.runs) for standings in results.worlds.values() for standing in standings.values()})
    worlds = "one world" if len(results.worlds) == 1 else f"{len(results.worlds)} worlds"
    missing = f" Not judged yet: {', '.join(results.missing)}." if results.missing else ""
    return (
        f"{len(plan.entries)} protocols in {worlds}, tuned on {' or '.join(map(str, tuned))} seeds and "
        f"judged on {' or '.join(map(str, seeds))} others. Worlds, targets, grids, seeds and what counts as a win are "
        f"in the plan with the checksum `{plan.digest[:16]}`; a folder holds results of one plan only. The history of "
        f"the plan's repository shows whether it was committed before the first run on the judging seeds."
        f"{_tuned_before(results)}{missing}"
    )


def _tuned_before(results: Results) -> str:
    """A sentence on what was not tuned again, if anything."""
    known = sorted({name for world in results.worlds for name in results.plan.tuned.get(world, {})})
    again = [name for name in results.plan.entries if name not in known]
    if not known:
        return ""
    words = f"; only {', '.join(again)} and worlds that it does not name were tuned anew" if again else ""
    return f" What an earlier tuning chose for {len(known)} of the protocols is in the plan{words}."


# -- the parts ---------------------------------------------------------------------------------------------------------


def _outcome(results: Results) -> Iterator[Part]:
    win = results.plan.win
    if win is None:
        return
    verdicts = results.verdicts()
    count, within = len(verdicts), sum(one.is_within for one in verdicts)
    ahead, serves = sum(one.is_ahead for one in verdicts), sum(one.serves for one in verdicts)
    words = (
        f"`{win.protocol}` against the best of all others in each world, chosen afterwards by these very seeds. Aim: "
        f"at most {win.within:g} times its time to the targets everywhere (met in {within} of {count} worlds), clearly "
        f"ahead in {math.ceil(win.ahead * count)} (in {ahead}), and a worst-served tenth at most {win.worst_tenth:g} "
        f"below the best everywhere (met in {serves} of {count})."
    )
    for first, second, beyond in results.equal_worlds():
        how = "unknown" if beyond is None else f"{beyond:+.3f}"
        words += f" Its metric at the end of {first}, less the best of {second}: {how} (aim: at least -{win.metric:g})."
    rows = [
        [
            (verdict.world, None),
            (verdict.rival, None),
            _ratio(verdict.ratio),
            _yes(verdict.is_within),
            _yes(verdict.is_ahead),
            _signed(verdict.worst_tenth),
            _yes(verdict.serves),
        ]
        for verdict in verdicts
    ]
    head = ["world", "best rival", "times as long", "within", "clearly ahead", "worst tenth, better by", "serves"]
    yield Part("The outcome", words, head, rows)


def _against(results: Results) -> Part:
    words = (
        "How many times as long each protocol takes to the targets as a baseline, the geometric mean over the worlds, "
        "and in how many worlds the 95% interval says faster, neither, slower."
    )
    rows = [
        [(name, None), *(_overall(results, name, baseline) for baseline in results.plan.baselines)]
        for name in results.plan.entries
    ]
    return Part("Against the baselines", words, ["protocol", *results.plan.baselines], rows)


def _overall(results: Results, name: str, baseline: str) -> Cell:
    if name == baseline:
        return "1", 1.0
    ratios = [standings[name].ratio(standings[baseline]) for standings in results.worlds.values()]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return _NONE
    mean = math.exp(fmean(math.log(ratio.interval.mean) for ratio in known))
    counts = Counter(ratio.verdict if ratio else "" for ratio in ratios)
    inexact = "~" if any(ratio.bound for ratio in known) else ""
    return f"{inexact}{mean:.2f} ({counts['faster']}, {counts['']}, {counts['slower']})", mean


def _by_world(results: Results, baseline: str) -> Part:
    words = (
        f"Times as long as `{baseline}` to the targets, with 95% intervals over the seeds, compared seed by seed. "
        "Where a target was missed, the horizon stands for its time: ≤ if the baseline missed some, ≥ if the protocol "
        "did, ~ if both did; empty if neither reached any."
    )
    rows = [
        [(name, None), *(_ratio(standings[name].ratio(standings[baseline])) for standings in results.worlds.values())]
        for name in results.plan.entries
        if name != baseline
    ]
    return Part("World by world", words, ["protocol", *results.worlds], rows)


def _world(results: Results, name: str) -> Part:
    standings = results.worlds[name]
    one = next(iter(standings.values()))
    world, targets = one.judged.tuned.world, one.judged.tuned.targets
    settings = ", ".join(_setting(key, value) for key, value in world.settings.items())
    words = (
        f"Task {world.task}{f', {settings}' if settings else ''}; horizon {world.horizon_s:,.0f} s, {len(one.runs)} "
        f"seeds. Targets: {world.metric} {' and '.join(f'{target:g}' for target in targets)}."
    )
    ordered = sorted(standings.values(), key=lambda standing: standing.rank)
    head = [
        "protocol",
        *(f"to {target:g}, s" for target in targets),
        *(f"times {baseline}" for baseline in results.plan.baselines),
        f"{world.metric} at the end",
        *_SHOWN.values(),
    ]
    rows = [_world_row(results, standing) for standing in ordered]
    return Part(f"World {name}", words, head, rows, name)


def _setting(name: str, value: object) -> str:
    """A setting of a world, in words; what is as long as a trace is in the plan."""
    return f"{name} of {len(value)} entries" if isinstance(value, list) else f"{name} {value}"


def _world_row(results: Results, standing: Standing) -> list[Cell]:
    targets = standing.judged.tuned.targets
    others = results.worlds[standing.judged.tuned.world.name]
    ratios = [
        ("1", 1.0) if name == standing.name else _ratio(standing.ratio(others[name])) for name in results.plan.baselines
    ]
    shares = [_mean(standing.mean(name)) for name in ("futility", "starved")]
    return [
        (standing.name, None),
        *(_seconds(standing, target) for target in targets),
        *ratios,
        _mean(standing.metric, spread=True),
        *shares,
        _mean(standing.worst_tenth),
        _mean(standing.mean("bytes"), scale=1e-9),
    ]


def _tuning(results: Results) -> Part:
    words = (
        "What tuning chose: the learning rate and the value of the protocol's own knob. A star marks a learning rate "
        "at an end of its grid: a wider grid might have served the protocol better."
    )
    rows = [
        [
            (name, None),
            (results.plan.entries[name].knob, None),
            *(_chosen(results, name, world) for world in results.worlds),
        ]
        for name in results.plan.entries
    ]
    return Part("Tuning", words, ["protocol", "knob", *results.worlds], rows)


def _chosen(results: Results, name: str, world: str) -> Cell:
    standing = results.worlds[world][name]
    choice = standing.judged.tuned.best[name]
    star = "\\*" if results.is_at_end(standing) else ""
    return f"{choice.lr:g}{star}{'' if choice.value is None else f', {choice.value}'}", None


# -- cells -------------------------------------------------------------------------------------------------------------


def _ratio(ratio: Ratio | None) -> Cell:
    return _NONE if ratio is None else (str(ratio), ratio.interval.mean)


def _seconds(standing: Standing, target: float) -> Cell:
    seconds, times = standing.seconds(target), standing.times(target)
    if seconds is None:
        reached = sum(time is not None for time in times)
        return f"{reached} of {len(times)}", None
    return f"{seconds:,.0f}", seconds


def _mean(interval: Interval | None, *, scale: float = 1.0, spread: bool = False) -> Cell:
    if interval is None:
        return _NONE
    half = f" ± {(interval.high - interval.mean) * scale:.3f}" if spread and interval.high is not None else ""
    return f"{interval.mean * scale:.3f}{half}", interval.mean * scale


def _signed(value: float | None) -> Cell:
    return _NONE if value is None else (f"{value:+.3f}", value)


def _yes(value: bool) -> Cell:
    return ("yes" if value else "no"), None
