"""The paper: its presets and printed tables."""

from safa.paper.presets import PRESETS

__all__ = ["PRESETS"]
