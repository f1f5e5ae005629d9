"""The world: how fast clients are, what they hold, how they are linked and how they fail. Knows no protocol."""

from safa.fleet.draws import draw_sizes, draw_speeds
from safa.fleet.faults import Faults
from safa.fleet.files import read_column, read_links, read_trace
from safa.fleet.fleet import Fleet
from safa.fleet.world import check_sizes, client_speeds, make_fleet

__all__ = [
    "Faults",
    "Fleet",
    "check_sizes",
    "client_speeds",
    "draw_sizes",
    "draw_speeds",
    "make_fleet",
    "read_column",
    "read_links",
    "read_trace",
]
