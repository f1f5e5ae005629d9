"""Figures 3 to 8 of the paper from measured data, and the two that show what holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from safa.paper.bias import BiasReport, bias_figure
from safa.paper.collect import Results
from safa.paper.grid import CRASH_RATES, LAG_CRASH_RATES, LAG_FRACTIONS, LAGS, PROTOCOLS, TASKS, TRACED_FRACTION
from safa.report.figures import Axis, lines, save
from safa.report.page import Figure

__all__ = ["PaperFigure", "all_figures"]

_PANEL = {"width": 330, "height": 210}
_LAG_METRICS = {
    "best_loss": "best loss",
    "sync_ratio": "SR",
    "effective_update_ratio": "EUR",
    "version_variance": "VV",
    "futility": "futility",
    "starved": "starved clients",
}


@dataclass(frozen=True)
class PaperFigure:
    """A figure of one or more panels."""

    name: str
    """What its files are called."""
    title: str
    caption: str
    panels: Sequence[tuple[str, alt.LayerChart]]

    def blocks(self) -> list[Figure]:
        """The panels for a page, side by side where there is room."""
        wide = len(self.panels) == 1
        return [
            Figure(chart, f"{self.title}: {title}" if title else self.title, self.caption if not nth else "",
                   f"{self.title}. {title}", wide=wide)
            for nth, (title, chart) in enumerate(self.panels)
        ]  # fmt: skip

    def save(self, folder: Path) -> None:
        """Write the figure as SVG and PNG."""
        whole: Any = self.panels[0][1]
        if len(self.panels) > 1:
            panels = [chart.properties(title=title, **_PANEL) for title, chart in self.panels]
            whole = alt.concat(*panels, columns=2, spacing=36).resolve_scale(
                color="shared", strokeDash="shared", shape="shared"
            )
        save(whole, folder / self.name)


def all_figures(results: Results, bias: Sequence[BiasReport]) -> list[PaperFigure]:
    """Every figure for which there are results, those of the paper first."""
    figures = [
        _lag_figure(results, "figure-3", "Figure 3", "as printed", "boston", ("best_loss", "sync_ratio")),
        _lag_figure(
            results, "figure-4", "Figure 4", "as printed", "boston", ("effective_update_ratio", "version_variance")
        ),
        _bias_figure(bias),
        *(_loss_figure(results, task, number) for number, task in enumerate(TASKS, start=6)),
        *(_accuracy_figure(results, task) for task in TASKS),
        *(
            _lag_figure(
                results, f"corrected-lag-{task}", f"Lag tolerance, corrected, {task}", "corrected", task,
                ("futility", "starved", "sync_ratio", "version_variance"),
            )
            for task in TASKS
        ),
    ]  # fmt: skip
    return [figure for figure in figures if figure is not None]


def _lag_figure(
    results: Results, name: str, title: str, accounting: str, task: str, metrics: Sequence[str]
) -> PaperFigure | None:
    """SAFA over the lag tolerance: a panel for each metric, a curve for each fraction and crash rate."""
    rows = []
    for fraction in LAG_FRACTIONS:
        for crash_rate in LAG_CRASH_RATES:
            for lag in LAGS:
                found = results.lag(accounting, task, lag, crash_rate=crash_rate, fraction=fraction)
                row: dict[str, Any] = {"tau": lag, "setting": f"C = {fraction:g}, cr = {crash_rate:g}"}
                for metric in metrics if found else ():
                    row[metric] = statistics.fmean(each["summary"][metric] for each in found)
                rows.append(row)
    if any(metric not in row for row in rows for metric in metrics):
        return None
    x = Axis("tau", "lag tolerance tau", "~d", whole=True, ticks=LAGS)
    panels = [
        (_LAG_METRICS[metric], lines(rows, x, Axis(metric, " "), series="setting", points=True)) for metric in metrics
    ]
    counted = "as the paper counts it, one less than in its Eq. 3" if accounting == "as printed" else "as in Eq. 3"
    caption = f"SAFA on {task}, mean over worlds; tau {counted}. Accounting: {accounting}."
    return PaperFigure(name, title, caption, panels)


def _bias_figure(bias: Sequence[BiasReport]) -> PaperFigure | None:
    if not bias:
        return None
    caption = (
        "Bias P(A)/P(B) of the fastest client A and the slowest B; all crash rates 0.3. Full lines: the recurrence, "
        "dashed: Eq. 16 as printed, points: simulation with one standard error. The printed form turns both "
        "conclusions around: in case 2 it is B that loses, in case 3 A."
    )
    chart = bias_figure(bias).properties(width="container", height=320)
    return PaperFigure("figure-5", "Figure 5", caption, [("", chart)])


def _traces(results: Results, accounting: str, task: str, crash_rate: float) -> dict[str, list[dict[str, Any]]]:
    """The runs that were kept round by round, by protocol."""
    return {
        protocol: results.cell(accounting, task, protocol, crash_rate=crash_rate, fraction=TRACED_FRACTION, train=True)
        for protocol in PROTOCOLS
    }


def _loss_figure(results: Results, task: str, number: int) -> PaperFigure | None:
    """The loss of the global model, round by round: mean over worlds and all that they span."""
    panels = []
    for crash_rate in CRASH_RATES:
        rows = [
            {
                "round": place + 1,
                "protocol": protocol,
                "loss": statistics.fmean(at),
                "lowest": min(at),
                "highest": max(at),
            }
            for protocol, runs in _traces(results, "as printed", task, crash_rate).items()
            if protocol != "local"  # its models meet in the last round only
            for place, at in enumerate(zip(*(run["loss"] for run in runs), strict=True))
            if None not in at
        ]
        if not rows:
            return None
        chart = lines(rows, Axis("round", "round", "~d"), Axis("loss", "loss", log=True), series="protocol",
                      band=("lowest", "highest"))  # fmt: skip
        panels.append((f"cr = {crash_rate:g}", chart))
    caption = (
        f"Test loss of the global model on {task}, C = {TRACED_FRACTION:g}: mean over worlds, and the range of them. "
        "The best model so far is what is shown and sent out, as in the paper."
    )
    return PaperFigure(f"figure-{number}", f"Figure {number}", caption, panels)


def _accuracy_figure(results: Results, task: str) -> PaperFigure | None:
    """The accuracy over virtual time with the accounting put right, in one world."""
    panels = []
    for crash_rate in CRASH_RATES:
        rows = [
            {"hours": at_s / 3600, "protocol": protocol, "accuracy": accuracy}
            for protocol, runs in _traces(results, "corrected", task, crash_rate).items()
            for at_s, accuracy in (zip(runs[0]["closed_s"], runs[0]["accuracy"], strict=True) if runs else ())
            if accuracy is not None and protocol != "local"
        ]
        if not rows:
            return None
        x = Axis("hours", "virtual time, hours", log=True)
        panels.append((f"cr = {crash_rate:g}", lines(rows, x, Axis("accuracy", "accuracy"), series="protocol")))
    caption = (
        f"Accuracy of the global model on {task} over virtual time, C = {TRACED_FRACTION:g}, one world (seed 0), with "
        "the accounting put right. A run ends after the paper's number of rounds, or later if the target was not "
        "reached by then."
    )
    return PaperFigure(f"corrected-accuracy-{task}", f"Accuracy over time, corrected, {task}", caption, panels)
