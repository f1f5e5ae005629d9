"""The bias between the fastest client A and the slowest client B: theory against simulation (Section III-E, Fig. 5).

The simulation runs the protocols themselves under the paper clock, without a round limit. The fastest 2% of the clients
stand for A, the slowest 2% for B: inside a case each of them follows the law of A or of B by its own crashes alone, so
that one run tells as much as several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from safa.analysis import theory
from safa.analysis.contributions import contributions
from safa.errors import SafaError
from safa.fleet import Faults, Fleet
from safa.paper import printed_theory
from safa.protocol import FedAvg, Safa
from safa.server import Server
from safa.simulation import paper_rounds
from safa.streams import stream

if TYPE_CHECKING:
    import altair

__all__ = ["BiasReport", "Estimate", "Sample", "bias_figure", "bias_report", "describe", "sample_chances", "table"]

Numbers = NDArray[np.float64]

_CLIENTS_PER_LIKE = 50  # 2%
_LIMIT = 3.0  # standard errors
_COLOURS = ("#1b212b", "#c98a00", "#0072b2", "#b5548c", "#009e73", "#3fa2dc", "#d55e00")  # those of safa.report


@dataclass(frozen=True, eq=False)
class Estimate:
    """What was measured, with its standard error."""

    value: Numbers
    error: Numbers

    @classmethod
    def of(cls, values: Numbers) -> Estimate:
        """The mean over the first axis: the repetitions."""
        return cls(values.mean(axis=0), values.std(axis=0, ddof=1) / sqrt(len(values)))

    @classmethod
    def of_ratio(cls, above: Numbers, below: Numbers) -> Estimate:
        """The ratio of two means over the repetitions, its standard error by the delta method."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = above.mean(axis=0) / below.mean(axis=0)
            error = (above - ratio * below).std(axis=0, ddof=1) / below.mean(axis=0) / sqrt(len(above))
        return cls(ratio, error)


@dataclass(frozen=True, eq=False)
class Sample:
    """What became of A's and B's updates in repeated runs: by client (A, B), repetition and round.

    A value is the share of those that stand for the client whose update went into the global model.
    """

    direct: Numbers
    bypass: Numbers
    likes: int
    """How many clients stand for A, and as many for B."""
    eur: float
    """The share of clients picked (Eq. 4), mean over rounds and repetitions."""

    @property
    def total(self) -> Numbers:
        """Directly or through the bypass."""
        return self.direct + self.bypass

    @property
    def estimates(self) -> dict[str, Estimate]:
        """P(A), P(B) and their ratio, the bias, round by round."""
        a, b = self.total
        return {"p_a": Estimate.of(a), "p_b": Estimate.of(b), "bias": Estimate.of_ratio(a, b)}


def sample_chances(
    protocol: Literal["safa", "fedavg"],
    crash_a: float,
    crash_b: float,
    fraction: float,
    crash_rate: float,
    *,
    rounds: int,
    clients: int,
    repetitions: int,
    seed: int,
) -> Sample:
    """Run `safa` or `fedavg` so many times from round 1 and note what went into the global model."""
    likes = max(1, clients // _CLIENTS_PER_LIKE)
    watched = np.concatenate([np.arange(likes), np.arange(clients - likes, clients)])
    rates = np.full(clients, crash_rate)
    rates[:likes], rates[-likes:] = crash_a, crash_b
    fleet = _fleet(clients)
    picked = 0
    seen = np.zeros((2, 2, repetitions, rounds))
    for nth, own_seed in enumerate(stream(seed, "bias").integers(2**63, size=repetitions).tolist()):
        world = replace(fleet, faults=Faults(clients, seed=own_seed, crash_rate=rates, model="round"))
        rules = {"safa": Safa, "fedavg": FedAvg}[protocol](fleet.sizes, fraction=fraction)
        records = list(paper_rounds(Server(rules, seed=own_seed, rounds=rounds), world))
        picked += sum(len(record.picked) for record in records)
        found = contributions(records, watched)
        for way, hits in enumerate((found.direct, found.bypass)):
            seen[way, :, nth] = hits.reshape(rounds, 2, likes).mean(axis=2).T
    return Sample(seen[0], seen[1], likes, picked / (clients * rounds * repetitions))


def _fleet(clients: int) -> Fleet:
    """Clients of falling speed, all else equal."""
    return Fleet.assemble(
        speeds=np.arange(clients, 0, -1.0),
        sizes=np.ones(clients),
        epochs=1,
        batch_size=1,
        down_mbps=1.0,
        up_mbps=1.0,
        server_mbps=1.0,
        model_size_mb=0.0,
        faults=Faults(clients, seed=0, crash_rate=0.0),
    )


@dataclass(frozen=True, eq=False)
class BiasReport:
    """Everything that theory and simulation say about the bias in one setting; arrays start with round 1."""

    crash_a: float
    crash_b: float
    fraction: float
    crash_rate: float
    rounds: int
    clients: int
    repetitions: int
    seed: int
    case: theory.Case
    case_as_in_appendix: theory.Case
    boundaries: tuple[str, ...]
    """A sentence for each boundary between cases that is too near for the theory."""
    eur_safa: float
    eur_fedavg: float
    recurrence: theory.Pair
    closed_form: theory.Pair
    as_printed: theory.Pair
    fedavg: theory.Pair
    safa_sample: Sample
    fedavg_sample: Sample
    improper: dict[str, list[int]]
    """Where the printed formula that applies here is no probability: name -> rounds."""

    @cached_property
    def deviations(self) -> Numbers:
        """Measured less right, in standard errors: a row for P(A), P(B) and the bias, a column for each round."""
        a, b = self.safa_sample.total
        right = np.clip([self.recurrence.a.total, self.recurrence.b.total], 0, 1)
        units = a.shape[0] * self.safa_sample.likes
        chances = _in_errors(np.stack([a.mean(axis=0), b.mean(axis=0)]) - right, np.sqrt(right * (1 - right) / units))
        bias = np.where(right[1] > 0, self.recurrence.bias, 0.0)
        apart = Estimate.of(np.where(right[1] > 0, a - bias * b, 0.0))
        return np.vstack([chances, _in_errors(apart.value, apart.error)])

    @cached_property
    def pooled(self) -> dict[str, tuple[float, float, float]]:
        """P(A), P(B) and the bias over the last half of the rounds: right, measured, standard error."""
        last = slice(self.rounds - self.rounds // 2, None)
        right = [client.total[last].mean() for client in (self.recurrence.a, self.recurrence.b)]
        a, b = self.safa_sample.total[:, :, last].mean(axis=2)
        found = (Estimate.of(a), Estimate.of(b), Estimate.of_ratio(a, b))
        rights = (*right, right[0] / right[1] if right[1] else np.inf)
        return {
            name: (float(value), float(each.value), float(each.error))
            for name, value, each in zip(("P(A)", "P(B)", "bias"), rights, found, strict=True)
        }

    @cached_property
    def joint(self) -> tuple[float, int, float]:
        """Hotelling's test of P(A) and P(B) in all rounds from 2 on: chi-square, degrees of freedom, p-value."""
        values = np.concatenate(list(self.safa_sample.total[:, :, 1:]), axis=1)
        right = np.concatenate([self.recurrence.a.total[1:], self.recurrence.b.total[1:]])
        variances, axes = np.linalg.eigh(np.cov(values, rowvar=False))
        varies = variances > 1e-9
        runs, free = len(values), int(varies.sum())
        along = (axes.T @ (values.mean(axis=0) - right))[varies]
        chi_square = float((runs - free) / (runs - 1) * runs * np.sum(along**2 / variances[varies]))
        return chi_square, free, _chi_square_tail(chi_square, free)

    @property
    def outside(self) -> int:
        """How many of the comparisons of P(A), P(B) and the bias, round by round from 2 on, are off by more than 3."""
        return int(np.count_nonzero(np.abs(self.deviations[:, 1:]) > _LIMIT))

    @property
    def agrees(self) -> bool:
        """Whether theory is within three standard errors, pooled over the last rounds and for all rounds jointly."""
        off = [_in_errors(value - right, error) for right, value, error in self.pooled.values() if np.isfinite(right)]
        return bool(np.all(np.abs(off) <= _LIMIT)) and self.joint[2] > 1 - NormalDist().cdf(_LIMIT)

    def to_rows(self) -> list[dict[str, float]]:
        """A row a round: each of P(A), P(B) and bias by recurrence, closed form, as printed, measured, with error."""
        pairs = {"": self.recurrence, "_closed_form": self.closed_form, "_as_printed": self.as_printed}
        columns: dict[str, NDArray[Any]] = {"round": np.arange(1, self.rounds + 1)}
        for place, (name, estimate) in enumerate(self.safa_sample.estimates.items()):
            for suffix, pair in pairs.items():
                columns[name + suffix] = (pair.a.total, pair.b.total, pair.bias)[place]
            columns |= {f"{name}_measured": estimate.value, f"{name}_error": estimate.error}
            columns[f"{name}_deviation"] = self.deviations[place]
        fedavg = self.fedavg_sample.estimates["bias"]
        columns |= {"fedavg": self.fedavg.bias, "fedavg_measured": fedavg.value, "fedavg_error": fedavg.error}
        return [{name: column[now].item() for name, column in columns.items()} for now in range(self.rounds)]


def bias_report(
    crash_a: float,
    crash_b: float,
    fraction: float,
    crash_rate: float,
    *,
    rounds: int = 12,
    clients: int = 200,
    repetitions: int = 300,
    seed: int = 0,
) -> BiasReport:
    """Theory and simulation of the bias for cr_A, cr_B, C and R."""
    _check(rounds, clients, repetitions, crash_a=crash_a, crash_b=crash_b, crash_rate=crash_rate)
    case = theory.case_of(fraction, crash_rate)
    known = case, crash_a, crash_b, rounds
    setting = crash_a, crash_b, fraction, crash_rate
    size = {"rounds": rounds, "clients": clients, "seed": seed}
    sample = sample_chances("safa", *setting, **size, repetitions=repetitions)
    # Rounds of FedAvg do not depend on each other, so fewer repetitions are enough.
    fedavg = sample_chances("fedavg", *setting, **size, repetitions=max(2, repetitions // 3))
    printed_for = {theory.Case.MIXED: crash_b, theory.Case.PRIORITY: crash_a}.get(case)
    return BiasReport(
        *setting,
        **size,
        repetitions=repetitions,
        case=case,
        case_as_in_appendix=theory.case_as_in_appendix(fraction, crash_rate),
        boundaries=tuple(theory.near_boundaries(fraction, crash_rate, clients, apart=sample.likes)),
        eur_safa=theory.eur_safa(fraction, crash_rate),
        eur_fedavg=theory.eur_fedavg(fraction, crash_rate),
        recurrence=theory.chances_by_recurrence(*known),
        closed_form=theory.chances_in_closed_form(*known),
        as_printed=printed_theory.chances(*known),
        fedavg=theory.chances_fedavg(fraction, crash_a, crash_b, rounds),
        safa_sample=sample,
        fedavg_sample=fedavg,
        improper={} if printed_for is None else printed_theory.improper(printed_for, rounds),
    )


def _check(rounds: int, clients: int, repetitions: int, **rates: float) -> None:
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise SafaError(f"{name} must be at least 0 and below 1, not {rate}")
    least = {"rounds": (rounds, 2), "clients": (clients, 3), "repetitions": (repetitions, max(100, 10 * rounds))}
    for name, (given, needed) in least.items():
        if given < needed:
            raise SafaError(f"{name} must be at least {needed}, not {given}")


def _in_errors(deviation: Any, error: Any) -> Any:
    """A deviation in standard errors; where nothing varies, 0 if it is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.abs(deviation) < 1e-9, 0.0, np.divide(deviation, error))


def _chi_square_tail(value: float, free: int) -> float:
    """The chance of a chi-square above a value, by Wilson and Hilferty's cube root."""
    if not free:
        return 1.0
    spread = 2 / (9 * free)
    return 1 - NormalDist().cdf(((value / free) ** (1 / 3) - (1 - spread)) / sqrt(spread))


# -- for the reader ----------------------------------------------------------------------------------------------------


def describe(report: BiasReport) -> list[str]:
    """What the report says, in sentences."""
    chi_square, free, p = report.joint
    right, value, error = report.pooled["bias"]
    lines = [
        f"case {report.case:d} of SAFA" + _about_appendix(report),
        f"EUR of SAFA {report.eur_safa:.3f} (measured {report.safa_sample.eur:.3f}), "
        f"of FedAvg {report.eur_fedavg:.3f} (measured {report.fedavg_sample.eur:.3f})",
        f"bias over the last {report.rounds // 2} rounds: SAFA {right:.3f} (measured {value:.3f} ± {error:.3f}), "
        f"FedAvg {report.fedavg.bias[-1]:.3f}",
        f"theory and simulation {'agree' if report.agrees else 'DISAGREE'}: chi-square {chi_square:.1f} for {free} "
        f"degrees of freedom (p = {p:.2f}); {report.outside} of {3 * (report.rounds - 1)} values are more than three "
        "standard errors off (by chance, one in 370 is)",
        *report.boundaries,
    ]
    if report.improper:
        places = (_where(name, improper, report.rounds) for name, improper in report.improper.items())
        lines.append("as printed, no probability: " + "; ".join(places))
    return lines


def _about_appendix(report: BiasReport) -> str:
    other = report.case_as_in_appendix
    return "" if other == report.case else f" (by the appendix's condition case {other:d}, which is not Algorithm 1)"


def _where(name: str, improper: Sequence[int], rounds: int) -> str:
    """Such as: P in every round from 2 on."""
    if not improper:
        return f"{name} in no round"
    if len(improper) == rounds - 1:
        return f"{name} in every round from 2 on"
    return f"{name} in round{'s' * (len(improper) > 1)} {', '.join(map(str, improper))}"


def table(report: BiasReport) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, a row for each round from 2 on, where the paper's proposition begins.

    What is printed is shown where it is not the right value.
    """
    rows = report.to_rows()[1:]
    columns = [[f"{row['round']:g}" for row in rows]]
    headings = ["round"]
    for name, heading in (("p_a", "P(A)"), ("p_b", "P(B)"), ("bias", "bias")):
        right, printed = ([f"{row[name + suffix]:.3f}" for row in rows] for suffix in ("", "_as_printed"))
        measured = [f"{row[name + '_measured']:.3f} ± {row[name + '_error']:.3f}" for row in rows]
        columns += [right, measured] if printed == right else [right, printed, measured]
        headings += [heading, "measured"] if printed == right else [heading, "printed", "measured"]
    return headings, [list(cells) for cells in zip(*columns, strict=True)]


def bias_figure(reports: BiasReport | Sequence[BiasReport]) -> altair.LayerChart:
    """Fig. 5 put right: the bias over rounds, right and as printed, and as measured with one standard error."""
    import altair as alt

    several = [reports] if isinstance(reports, BiasReport) else list(reports)
    rows = _figure_rows(several)
    names = list(dict.fromkeys(row["who"] for row in rows))
    colour = alt.Color("who:N", title=None, scale=alt.Scale(domain=names, range=list(_COLOURS[: len(names)])))
    shape = alt.Shape("who:N", title=None, scale=alt.Scale(domain=names))
    dash = alt.StrokeDash("line:N", title=None, scale=alt.Scale(domain=["right", "as printed"], range=[[1, 0], [5, 4]]))
    width = alt.condition("datum.who == 'FedAvg'", alt.value(6), alt.value(2))  # case 1 may lie on top of it
    scale = alt.Scale(type="log", nice=False, padding=10)
    bias = alt.Y("bias:Q", title="bias P(A) / P(B)", scale=scale)
    base = alt.Chart(alt.InlineData(values=rows)).encode(x=alt.X("round:Q", axis=alt.Axis(tickMinStep=1)), color=colour)
    lines = base.transform_filter("datum.line != 'measured'").mark_line()
    measured = base.transform_filter("datum.line == 'measured'")
    bars = measured.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", title="", scale=scale), y2="high:Q")
    points = measured.mark_point(filled=True, size=40, opacity=1).encode(y=bias, shape=shape)
    parts = [lines.encode(y=bias, strokeDash=dash, strokeWidth=width), bars, points]
    return alt.LayerChart(layer=parts).properties(width=520, height=320)


def _figure_rows(reports: Sequence[BiasReport]) -> list[dict[str, Any]]:
    """The points of all lines, from round 2 on; FedAvg's are those of the first report."""
    rows = []
    for nth, report in enumerate(reports):
        who = f"SAFA, case {report.case:d} (C = {report.fraction:g})"
        for row in report.to_rows()[1:]:
            if not nth:
                rows += _points("FedAvg", row["round"], row["fedavg"], row["fedavg_measured"], row["fedavg_error"])
            rows += _points(who, row["round"], row["bias"], row["bias_measured"], row["bias_error"])
            rows.append({"who": who, "line": "as printed", "round": row["round"], "bias": row["bias_as_printed"]})
    return [row for row in rows if np.isfinite(row["bias"]) and row["bias"] > 0]


def _points(who: str, number: float, right: float, measured: float, error: float) -> list[dict[str, Any]]:
    ends = {"low": max(measured - error, measured / 10), "high": measured + error}  # the axis is logarithmic
    return [
        {"who": who, "line": "right", "round": number, "bias": right},
        {"who": who, "line": "measured", "round": number, "bias": measured, **ends},
    ]
