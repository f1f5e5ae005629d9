"""The runs of a sweep, and single runs, as rows: settings, metrics, and how the model did over time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from safa.analysis import METRICS, TARGET_METRICS, Curve, Metrics
from safa.errors import SafaError
from safa.runs import Run, load_run
from safa.runs.folder import SWEEP, TABLE
from safa.runs.settings import Settings
from safa.runs.sweep_folder import SweepFolder
from safa.runs.table import parsed_row, read_cells, row_of

__all__ = ["DIRECTION", "EVALUATIONS", "SCORES", "Row", "is_setting", "is_sweep", "read_sweep", "read_table", "run_row"]

Row = Mapping[str, Any]

SCORES = ("best_", "last_", "client_")
"""How the columns of a model's scores begin; behind that comes the name of a metric."""
DIRECTION = "metric."
"""How the columns begin that say of a metric whether higher or lower is better."""
EVALUATIONS = "evaluations"
"""Under this name a row has the times at which models were evaluated, with their loss and metrics by name."""
_CURVE = "curve"
_KINDS = {item.name: str(item.type) for item in fields(Settings)}


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a `results.csv`, numbers as numbers; an incomplete last row is ignored."""
    (_, names), *lines = read_cells(path) or [("", [])]
    return [_row(names, cells, where) for where, cells in lines]


def _row(names: Sequence[str], cells: Sequence[str], where: str) -> dict[str, Any]:
    values = parsed_row(names, cells)
    for name, value in values.items():
        _check_kind(name, value, where)
    return values


def _check_kind(name: str, value: Any, where: str) -> None:
    """Refuse a value that the column cannot hold; a metric may be missing, since not every run has all of them."""
    kind = _KINDS.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "bool" and not isinstance(value, bool):
        raise SafaError(f"{where}: {name} must be True or False, not {value!r}")
    if kind in ("int", "float") and not is_number:
        raise SafaError(f"{where}: {name} must be a number, not {value!r}")
    if _is_metric(name) and not is_number and value is not None:
        raise SafaError(f"{where}: {name} must be a number or nothing, not {value!r}")
    if name in ("task", "protocol") and value is None:
        raise SafaError(f"{where}: there is no {name}")


def _is_metric(name: str) -> bool:
    """Whether a column holds what a run came to, and no setting."""
    return name in METRICS or name in TARGET_METRICS or name.startswith(SCORES)


def is_setting(name: str) -> bool:
    """Whether a column holds a setting."""
    return not _is_metric(name) and not name.startswith(DIRECTION) and name not in (EVALUATIONS, _CURVE)


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep of which a run is finished."""
    return (folder / TABLE).is_file() and not (folder / "config.toml").is_file()


def read_sweep(folder: Path) -> list[dict[str, Any]]:
    """The rows of the sweep in a folder, finished or not, with evaluations where the sweep kept these."""
    rows = read_table(folder / TABLE)
    if not (folder / SWEEP).is_file():
        return [_with_curve(row) for row in rows]
    plan = SweepFolder.read(folder)
    kept = [row | {EVALUATIONS: _kept(plan.run_path(number))} for number, row in enumerate(rows) if plan.keeps_runs]
    return _as_planned(kept or [_with_curve(row) for row in rows], plan.varied)


def _kept(folder: Path) -> list[tuple[float, dict[str, float]]]:
    """The evaluations of a run that a sweep kept; a run that is finished does not change."""
    return (
        _read_once(folder, (folder / "rounds.jsonl").stat().st_mtime_ns) if (folder / "rounds.jsonl").exists() else []
    )


@functools.lru_cache(maxsize=10_000)
def _read_once(folder: Path, _stamp: int) -> list[tuple[float, dict[str, float]]]:
    return list(load_run(folder).evaluations())


def _with_curve(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose curve, where it has one, is given as evaluations of the main metric."""
    main = next((name.removeprefix(DIRECTION) for name in row if name.startswith(DIRECTION) and row[name]), "loss")
    text = row.pop(_CURVE, None)
    curve = Curve.parse(str(text)) if text is not None else Curve()
    return row | {EVALUATIONS: [(at_s, {main: v}) for at_s, v in zip(curve.times_s, curve.values, strict=True)]}


def _as_planned(rows: Sequence[dict[str, Any]], plan: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of a sweep with values as its plan calls them.

    A learning rate that was found may differ by seed: the row has what was asked for.
    """
    rates = {row.get("task"): {one.get("lr") for one in rows if one.get("task") == row.get("task")} for row in rows}
    return [
        row | {"lr": varied.get("lr", "auto")} if "lr" in varied or len(rates[row.get("task")]) > 1 else row
        for row, varied in zip(rows, plan, strict=False)
    ]


def run_row(run: Run) -> dict[str, Any]:
    """The row of a run, finished or not, with its evaluations."""
    metrics = Metrics(run.settings.metrics, run.settings.target)
    for record in run.records():
        metrics.add(record)
    return run.settings.values() | metrics.values() | row_of(run) | {EVALUATIONS: list(run.evaluations())}
