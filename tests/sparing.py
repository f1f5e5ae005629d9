"""The protocol of docs/own-protocol.md that asks slow clients for a part of their work, as if it was installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_DOCS = Path(__file__).parents[1] / "docs" / "own-protocol.md"


def install_sparing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the protocol `sparing` known by its entry point."""
    examples = re.findall(r"```python\n(.*?)```", _DOCS.read_text(encoding="utf-8"), re.DOTALL)
    metadata = place / "sparing-1.0.dist-info"
    metadata.mkdir(parents=True)
    (place / "sparing_protocol.py").write_text(examples[1])
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sparing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[safa.protocols]\nsparing = sparing_protocol:Sparing\n")
    monkeypatch.syspath_prepend(place)
