"""The paper: its presets and printed tables."""

from safa.paper.presets import PRESETS
from safa.paper.printed import Cell, printed

__all__ = ["PRESETS", "Cell", "printed"]
