"""The page of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import ArrayLike, NDArray

from safa.analysis import Metrics, all_metrics
from safa.analysis.client_map import Turnarounds, lag
from safa.analysis.client_totals import ClientTotals
from safa.protocol.records import Ids, RoundRecord, Rule, Verdict
from safa.report import figures
from safa.report.clients import Clients, client_figure, clients_of, spread
from safa.report.figures import Axis
from safa.report.headline import headline
from safa.report.page import Block, Cell, Column, Fact, Facts, Figure, Folded, Section, Table, Words, render
from safa.report.words import capital, counted, duration, label, number, protocol_name, time_unit, value_of
from safa.runs import Run, plain
from safa.runs.settings import Settings
from safa.runs.values import shown

__all__ = ["run_heading", "run_page", "run_sections"]

_POINTS, _BARS, _GROUPS = 500, 500, 100
_CHARTED = 4
"""The most metrics that have charts, the main one first; the loss has one, too."""
_ROUND = Axis("round", "round", "~d", whole=True)


def run_page(run: Run, speeds: ArrayLike | None = None) -> str:
    """The page of a run, finished or not. `speeds` orders the clients, the fastest first.

    Without speeds, clients are ordered by the time that their updates took, as the records show it.
    """
    return render(*run_heading(run), run_sections(run, speeds))


def run_sections(run: Run, speeds: ArrayLike | None = None) -> list[Section]:
    """The sections of a run's page, for pages that contain more."""
    seen = _Seen.of(run.records(), Metrics(run.settings.metrics, run.settings.target))
    state = Words(_state(run, seen))
    if not seen.rows:
        return [Section("Result", [state]), Section("More", [_settings(run)])]
    values = plain(seen.metrics.values() | (run.summary or {}))
    clients = clients_of(run, seen.metrics.merged, seen.totals, seen.turnarounds.medians(), speeds)
    time = "virtual time" if run.roster() is None else "time"
    main = _main_figure(seen.rows, run.settings, values, time)
    numbers = headline(run.settings, values, clients, finished=run.summary is not None)
    return [
        Section("Result", [state, numbers, main], headed=False),
        Section("Clients", [client_figure(run.records(), clients, len(seen.rows))], headed=False),
        Section("More", [
            Folded("All numbers", [Facts(_facts(values, all_metrics(run.settings.metrics)))]),
            Folded("Learning: every metric and the loss", _learning(seen.rows, run.settings, time)),
            Folded("Rounds: how long they took", [_lengths(seen.rows)]),
            Folded("Versions: how far behind updates were", _versions(seen)),
            Folded("Contributions: whose updates were merged", [_contributions(clients)]),
            *_devices(run),
            _settings(run),
        ]),
    ]  # fmt: skip


def run_heading(run: Run) -> tuple[str, str]:
    """The title of a run's page, and what was run, in one line."""
    settings, roster = run.settings, run.roster()
    clients = f"{settings.clients:,} clients" if roster is None else f"{len(roster):,} devices"
    values = [clients, f"{'at most ' * bool(settings.until)}{settings.rounds:,} rounds"]
    values += [] if settings.unmet("fraction") else [f"C = {settings.fraction:g}"]
    values += [f"crash rate {settings.crash_rate:g}"] if roster is None else []
    values += [] if settings.unmet("lag_tolerance") else [f"tau = {settings.lag_tolerance}"]
    values += [f"{settings.clock} clock"] if roster is None else []
    words = ", ".join([*values, f"seed {settings.seed}"])
    title = f"{protocol_name(settings.protocol)} on {settings.task}"
    return title, words.replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}") + "."


def _how(run: Run) -> str:
    """How long a round may be, and what a client does for an update."""
    settings, roster = run.settings, run.roster()
    endless = settings.round_limit_s == float("inf")
    limit = "has no time limit" if endless else f"takes {number(settings.round_limit_s)} s at most"
    samples = "" if settings.decides_sizes else f", about {settings.mean_size:,.0f} samples,"
    if roster is not None:
        samples = f", about {float(np.mean([member['size'] for member in roster])):,.0f} samples,"
    rate = settings.lr if isinstance(settings.lr, str) else f"{settings.lr:g}"
    rate += "" if settings.schedule == "constant" else f" (schedule {settings.schedule})"
    return (
        f"A round {limit}. For one update a client makes {_work(settings)} its data{samples} in mini-batches of "
        f"{settings.batch_size}, with a learning rate of {rate}."
    )


def _work(settings: Settings) -> str:
    """What a client does with its data for one update."""
    if settings.local_steps:
        return f"{settings.local_steps:,} {'step' if settings.local_steps == 1 else 'steps'} on"
    return f"{settings.epochs:,} {'pass' if settings.epochs == 1 else 'passes'} over"


def _state(run: Run, seen: _Seen) -> str:
    """Whether the run is finished, and trained a model."""
    rounds = len(seen.rows)
    words = f"Finished after {counted(rounds, 'round')}."
    if run.summary is None:
        words = f"This run is not finished: {rounds} of {run.settings.rounds} rounds are there."
        words += "" if rounds else " There is nothing to show yet."
    return words if run.settings.train else words + " No model was trained: the rounds were simulated only."


@dataclass
class _Seen:
    """What one pass over the records collects."""

    metrics: Metrics
    totals: ClientTotals = field(default_factory=ClientTotals)
    turnarounds: Turnarounds = field(default_factory=Turnarounds)
    rows: list[dict[str, Any]] = field(default_factory=list)
    lags: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    own: bool = False
    """Whether clients train their own models, so that versions have no meaning."""

    @classmethod
    def of(cls, records: Iterator[RoundRecord], metrics: Metrics) -> _Seen:
        seen = cls(metrics)
        for record in records:
            seen.metrics.add(record)
            seen.totals.add(record)
            seen.turnarounds.add(record)
            taken = record.verdict != Verdict.REFUSED.value
            lags = np.bincount(lag(record)[taken])
            seen.lags = np.pad(seen.lags, (0, max(0, len(lags) - len(seen.lags))))
            seen.lags[: len(lags)] += lags
            seen.rows.append(_row(record, record.base[taken]))
            seen.own = record.rule is Rule.OWN
        return seen


def _row(record: RoundRecord, bases: Ids) -> dict[str, Any]:
    """A round as a row of the charts' tables."""
    low, middle, high = np.percentile(bases, [0, 50, 100]).tolist() if len(bases) else (None, None, None)
    return {
        "round": record.round, "closed_s": record.closed_s, "length_s": round(record.length_s, 3),
        "t_dist_s": round(record.distribution_s, 3), "ended by": str(record.ended_by), "version": record.version,
        "low": low, "middle": middle, "high": high,
        "scores": {} if record.loss is None else {**record.metrics, "loss": record.loss},
    }  # fmt: skip


def _thinned(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most so many rows, evenly spread, the first and the last among them."""
    return [rows[place] for place in spread(np.arange(len(rows)), _POINTS)]


def _facts(values: dict[str, Any], meanings: Mapping[str, str]) -> list[Fact]:
    """The metrics, and what was refused."""
    return [
        Fact(label(name), value_of(name, value), capital(meanings.get(name, "")), name)
        for name, value in values.items()
        if value is not None and not isinstance(value, dict)
    ] + [
        Fact(f"{label(name)}: {reason}", number(count), "updates refused before the protocol saw them", name)
        for name, value in values.items()
        if isinstance(value, dict)
        for reason, count in value.items()
    ]


def _devices(run: Run) -> list[Block]:
    """The clients of a deployment with their numbers in the records."""
    roster = run.roster()
    if roster is None:
        return []
    rows: list[list[str | Cell]] = [
        [Cell(str(n), n), member["name"], Cell(number(member["size"]), member["size"])]
        for n, member in enumerate(roster)
    ]
    table = Table(["client", "name", Column("samples", "n_k")], rows, caption="The clients, in order of enrolment")
    return [Folded("Devices", [table])]


def _learning(rows: Sequence[dict[str, Any]], settings: Settings, time_word: str) -> list[Block]:
    """The main metric, some others and the loss as charts; what has no chart as a number of the last model."""
    scored = [row for row in rows if row["scores"]]
    if not scored:
        reason = "No model has been evaluated yet" if settings.train else "No model was trained"
        return [Words(f"{reason}, so there is nothing to show.")]
    drawn = [*list(settings.metrics)[:_CHARTED], "loss"]
    rest = {name: value for name, value in scored[-1]["scores"].items() if name not in drawn}
    blocks = [_curve(scored, what, time_word, over_time=over_time) for what in drawn for over_time in (False, True)]
    more = _facts(plain(rest), dict.fromkeys(rest, "of the last model, on the test set"))
    return [*blocks, Facts(more)] if more else blocks


def _main_figure(rows: Sequence[dict[str, Any]], settings: Settings, values: Mapping[str, Any], time: str) -> Block:
    """The main metric, or that of the target, over time; the length of the rounds where no model was trained."""
    scored = [row for row in rows if row["scores"]]
    if not scored:
        return Words("No model has been evaluated yet.") if settings.train else _lengths(rows)
    if settings.target is None:
        return _curve(scored, next(iter(settings.metrics), "loss"), time, over_time=True, wide=True)
    target = settings.target.value, values["time_to_target_s"]
    return _curve(scored, settings.target.metric, time, over_time=True, wide=True, target=target)


def _curve(
    scored: Sequence[dict[str, Any]], what: str, time_word: str, *, over_time: bool, wide: bool = False,
    target: tuple[float, float | None] | None = None,
) -> Block:  # fmt: skip
    """A metric over rounds or time, where it is a finite number; with the target, and when it was reached."""
    found = [row for row in scored if np.isfinite(row["scores"].get(what, np.nan))]
    if not found:
        return Words(f"The {what} of the global model was never a finite number.")
    size, unit = time_unit(found[-1]["closed_s"])
    time = Axis("time", f"{time_word}, {unit}", ".4~r", zero=True)
    points = [
        {"round": row["round"], "time": row["closed_s"] / size, "score": row["scores"][what]} for row in _thinned(found)
    ]
    first, last = found[0]["scores"][what], found[-1]["scores"][what]
    x, also, over = (time, _ROUND, time_word) if over_time else (_ROUND, time, "rounds")
    reached = "" if target is None or target[1] is None else f"reached after {duration(target[1])}"
    goal = target and (target[0], target[1] and target[1] / size, f"target {target[0]:g}, {reached or 'not reached'}")
    y = Axis("score", what, ".4~r")
    chart = figures.lines(points, x, y, also=[also], target=goal, height=180 if wide else 210)
    said = f"{capital(what)} of the global model on the test set over {over}."
    said += f" The dashed line is the target, {target[0]:g}, {reached or 'not reached'}." if target else ""
    ends = f"It goes from {first:.3g} to {last:.3g}."
    return Figure(chart, f"{capital(what)} over {over}", said, f"{said} {ends}", wide=wide)


def _lengths(rows: Sequence[dict[str, Any]]) -> Figure:
    points = [
        {"round": row["round"], "what": what, "seconds": row[name], "ended by": row["ended by"]}
        for row in _thinned(rows)
        for what, name in (("length of the round", "length_s"), ("T_dist", "t_dist_s"))
    ]
    seconds = Axis("seconds", "seconds", ",.3~f", zero=True)
    chart = figures.lines(points, _ROUND, seconds, series="what", also=[Axis("ended by", "ended by", "")])
    reasons = [row["ended by"] for row in rows]
    ended = ", ".join(f"{reasons.count(reason):,} by {reason}" for reason in dict.fromkeys(reasons))
    caption = (
        "Length of the rounds (Eq. 17), and T_dist (Eq. 19), how long the server's link is busy with sending. "
        f"Rounds ended: {ended}."
    )
    longest = max(row["length_s"] for row in rows)
    return Figure(chart, "Length of the rounds", caption, f"{caption} The longest lasts {longest:,.0f} s.")


def _versions(seen: _Seen) -> list[Block]:
    if seen.own:
        return [Words("In fully local training no versions are exchanged before the last round.")]
    total = int(seen.lags.sum())
    fresh = f"{number(float(100 * seen.lags[0] / total))}% were trained from the latest version." if total else ""
    over = (
        "The global version after each round, and the versions that its updates were trained from: median, and "
        "lowest to highest."
    )
    behind = f"Updates that came in and were kept, by how many versions they lag behind. {fresh}"
    return [
        Figure(_version_chart(seen.rows), "Versions over the rounds", over, over, wide=False),
        Figure(_lag_chart(seen.lags), "How far behind updates are", behind, behind, wide=False),
    ]


def _version_chart(rows: Sequence[dict[str, Any]]) -> alt.LayerChart:
    points = []
    for row in _thinned(rows):
        made = row["version"]
        points.append({"round": row["round"], "what": "global", "version": made, "low": made, "high": made})
        if row["middle"] is not None:
            points.append(row | {"what": "trained from", "version": row["middle"]})
    names = ("round", "what", "version", "low", "high")
    return figures.lines(
        [{name: point[name] for name in names} for point in points],
        _ROUND,
        Axis("version", "version", ",~d", whole=True),
        series="what",
        band=("low", "high"),
        also=[Axis("low", "lowest", ",~d"), Axis("high", "highest", ",~d")],
        height=210,
    )


def _lag_chart(lags: NDArray[np.int64]) -> alt.Chart:
    """Updates by lag, in at most forty bars."""
    wide = max(1, -(-len(lags) // 40))
    rows = [
        {
            "lag": start,
            "lags": f"{start}" if wide == 1 else f"{start} to {start + wide - 1}",
            "updates": int(lags[start : start + wide].sum()),
        }
        for start in range(0, max(1, len(lags)), wide)
    ]
    x, y = Axis("lag", "versions behind", "~d", whole=True), Axis("updates", "updates", ",~d", whole=True)
    return figures.bars(rows, x, y, also=[Axis("lags", "lag", "")], height=210)


def _contributions(clients: Clients) -> Figure:
    """Updates merged per client, the fastest on the left; clients are grouped if there are too many."""
    merged, order = clients.merged, clients.order
    single = len(order) <= _BARS
    groups = np.array_split(order, len(order) if single else _GROUPS)
    starts = np.cumsum([1, *map(len, groups)]).tolist()
    rows = [
        {
            "place": place,
            "client": clients.names[group[0]] if single else f"{len(group):,} clients from place {starts[place - 1]:,}",
            "merged": round(float(merged[group].mean()), 2),
        }
        for place, group in enumerate(groups, 1)
    ]
    x = Axis(
        "place", f"{'clients' if single else 'groups of clients'} by {clients.by}, fastest first", "~d", whole=True
    )
    y = Axis("merged", "updates merged" if single else "updates merged, mean", ".3~r")
    chart = figures.bars(rows, x, y, also=[Axis("client", "client", "")], colour="#009e73")
    never = int(np.count_nonzero(merged == 0))
    said = f"Updates of each client that reached the global model; {never:,} of {len(merged):,} never reached it."
    if not single:
        said += f" The clients are put into {len(groups)} groups of similar speed."
    return Figure(chart, "Updates merged per client", said, said)


def _settings(run: Run) -> Folded:
    """All settings, with the help text of each."""
    meanings = {item.name: item.metadata.get("help", "") for item in fields(Settings)}
    rows: list[list[str | Cell]] = [
        [name, Cell(number(shown(value)), value if isinstance(value, int | float) else None), meanings.get(name, "")]
        for name, value in run.settings.values().items()
        if value is not None
    ]
    words = f"{_how(run)} Everything needed to run it again is in `config.toml`: `safa run --config config.toml`."
    table = Table(["setting", "value", "meaning"], rows, caption="All settings of the run")
    return Folded("Settings: how it was run", [Words(words), table])
