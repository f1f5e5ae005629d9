"""The world: how fast clients are, what they hold, how they are linked and how they fail. Knows no protocol."""

from safa.fleet.draws import SIZE_DISTRIBUTIONS, SPEED_DISTRIBUTIONS, draw_sizes, draw_speeds
from safa.fleet.faults import FAULT_MODELS, Faults
from safa.fleet.files import read_column, read_links, read_trace
from safa.fleet.fleet import Fleet
from safa.fleet.streams import stream

__all__ = [
    "FAULT_MODELS",
    "SIZE_DISTRIBUTIONS",
    "SPEED_DISTRIBUTIONS",
    "Faults",
    "Fleet",
    "draw_sizes",
    "draw_speeds",
    "read_column",
    "read_links",
    "read_trace",
    "stream",
]
