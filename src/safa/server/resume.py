"""Which checkpoint a run is resumed from."""

from __future__ import annotations

from safa.errors import SafaError
from safa.runs import Checkpoint, Run

__all__ = ["find_checkpoint"]


def find_checkpoint(run: Run) -> Checkpoint:
    """The newest checkpoint of a run that was stopped that can be used; there may be none."""
    if run.summary is not None:
        raise SafaError(f"the run in {run.folder} is finished; there is nothing to resume")
    found = run.load_checkpoint(most=run.finished_rounds())
    if found.other_settings:
        raise SafaError(found.problems[-1])
    return found
