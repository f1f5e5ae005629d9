"""The page of an arena: protocols side by side in many worlds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safa.errors import SafaError
from safa.report import figures
from safa.report.figures import Axis
from safa.report.page import Block, Cell, Figure, Section, Table, Words, render
from safa.report.words import time_unit
from safa.runs.folder import ARENA, ARENA_FORMAT
from safa.runs.storage import read_json

__all__ = ["arena_page"]


def arena_page(folder: Path) -> str:
    """The page of the results that `safa arena` wrote into a folder."""
    found = read_json(folder / ARENA)
    if not isinstance(found, dict) or found.get("format") != ARENA_FORMAT:
        raise SafaError(f"{folder / ARENA} is of a format that this version cannot read")
    sections = [Section(part["title"], _blocks(part, found["curves"])) for part in found["parts"]]
    return render("Arena", found["lead"], sections)


def _blocks(part: Mapping[str, Any], curves: Sequence[Mapping[str, Any]]) -> list[Block]:
    rows = [[Cell(text.replace("\\*", "*"), value) for text, value in row] for row in part["rows"]]
    blocks: list[Block] = [Words(part["words"]), Table(part["columns"], rows, filterable=len(rows) > 8)]
    points = [point for point in curves if point["world"] == part["world"]]
    return [*blocks, _curves(part["world"], points)] if points else blocks


def _curves(world: str, points: Sequence[Mapping[str, Any]]) -> Figure:
    """The mean of the metric over the seeds by time."""
    length_s, unit = time_unit(max(point["time_s"] for point in points))
    rows = [{**point, "time": point["time_s"] / length_s} for point in points]
    x, y = Axis("time", f"simulated time, {unit}", zero=True), Axis("mean", "metric, mean over the seeds", ",.3~r")
    last = max(points, key=lambda point: (point["time_s"], point["mean"]))
    said = f"At the end, {last['protocol']} is highest in {world}: {last['mean']:.3g}."
    caption = "A value holds until the model is evaluated again; a curve begins when all seeds have one."
    return Figure(figures.lines(rows, x, y, series="protocol"), f"The metric over time in {world}", caption, said)
