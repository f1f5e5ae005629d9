"""The charts: what is in their specifications, and that they can be written to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pytest

from safa.analysis.client_map import client_map
from safa.protocol import registry
from safa.report import figures
from safa.report.figures import PROTOCOLS, RECOLOURED, STATES, THEMES, Axis, save, specification
from tests.report.making import simulated

ROWS = [
    {"round": number, "loss": number / (2 + place), "protocol": name}
    for place, name in enumerate(PROTOCOLS)
    for number in (1, 2)
]
X, Y = Axis("round", "round"), Axis("loss", "loss")


def found(spec: Any, name: str) -> list[Any]:
    """Every value of that name in a specification."""
    if isinstance(spec, list):
        return [value for part in spec for value in found(part, name)]
    if not isinstance(spec, dict):
        return []
    own = [spec[name]] if name in spec else []
    return own + [value for part in spec.values() for value in found(part, name)]


def test_every_protocol_has_a_look_of_its_own() -> None:
    assert PROTOCOLS.keys() <= registry.available().keys()
    assert len(PROTOCOLS) == 9
    for what in ("colour", "dash", "shape"):
        assert len({getattr(style, what) for style in PROTOCOLS.values()}) == len(PROTOCOLS)


def test_every_colour_is_known_in_the_dark() -> None:
    colours = [*(style.colour for style in PROTOCOLS.values()), *(colour for _, colour in STATES.values())]
    assert set(colours) <= RECOLOURED.keys()
    text = json.dumps([specification(figures.lines(ROWS, X, Y, series="protocol", points=True)), THEMES["light"]])
    assert all(colour in RECOLOURED for colour in found(json.loads(text), "range")[0])


def test_lines_tell_protocols_apart_without_colour() -> None:
    spec = specification(figures.lines(ROWS, X, Y, series="protocol", points=True))
    dash, shape = found(spec, "strokeDash")[0], found(spec, "shape")[0]
    assert dash["scale"]["range"] == [list(style.dash) for style in PROTOCOLS.values()]
    assert shape["scale"]["range"] == [style.shape for style in PROTOCOLS.values()]


def test_a_series_that_is_no_protocol_has_a_look_too() -> None:
    looks = figures.styles(["of my own", "safa", "another", "fedavg"])
    assert looks["safa"] == PROTOCOLS["safa"]
    assert len(set(looks.values())) == 4
    many = figures.styles([*PROTOCOLS, *(str(number) for number in range(40))])
    assert len({(style.colour, style.dash) for style in many.values()}) == len(many) == len(PROTOCOLS) + 40
    assert list(figures.styles(["fedavg", "safa"])) == ["safa", "fedavg"]


def test_what_is_not_finite_is_missing() -> None:
    spec = specification(figures.lines([{"round": 1, "loss": float("nan")}], X, Y))
    assert json.dumps(spec, allow_nan=False)


def test_the_map_holds_its_cells_in_texts() -> None:
    cells = client_map(simulated(rounds=5).held_records)
    spec = specification(figures.client_map(cells, [str(client) for client in cells.clients]))
    params = {param["name"]: param.get("value") for param in spec["params"]}
    assert params["map_states_text"] == ",".join(str(state) for state in cells.state.ravel())
    assert params["map_bases_text"].split(",")[3] == str(cells.base[0, 3])
    assert spec["data"]["sequence"]["stop"] == cells.state.size
    shown = {STATES[state][0] for state in STATES if np.any(cells.state == state)}
    assert set(found(spec, "fill")[0]["scale"]["domain"]) == shown


def test_a_map_of_many_clients_stays_small() -> None:
    cells = client_map(simulated("kdd99", rounds=20).held_records)
    spec = specification(figures.client_map(cells, [str(client) for client in cells.clients]))
    assert len(json.dumps(spec)) < 12 * cells.state.size


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lines", "bars", "dots", "map"])
def test_charts_are_written_as_svg_and_png(kind: str, tmp_path: Path) -> None:
    cells = client_map(simulated(rounds=5).held_records)
    charts: dict[str, Callable[[], alt.TopLevelMixin]] = {
        "lines": lambda: figures.lines(ROWS, X, Y, series="protocol", points=True),
        "bars": lambda: figures.bars(ROWS[:2], X, Y),
        "dots": lambda: figures.dots(ROWS[::2], "protocol", Y),
        "map": lambda: figures.client_map(cells, [str(client) for client in cells.clients]),
    }
    svg, png = save(charts[kind](), tmp_path / "a.chart")
    assert [svg.name, png.name] == ["a.chart.svg", "a.chart.png"]
    text = svg.read_text()
    assert text.startswith("<svg")
    assert ("fedavg" if kind in ("lines", "dots") else "round") in text
    assert "NaN" not in text
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == [png.name, svg.name]
