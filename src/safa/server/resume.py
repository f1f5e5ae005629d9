"""Which checkpoint a run is resumed from."""

from __future__ import annotations

from safa.errors import SafaError
from safa.runs import Checkpoint, Run

__all__ = ["find_checkpoint"]


def find_checkpoint(run: Run, *, needed: bool = False) -> Checkpoint:
    """The newest checkpoint that can be used of a run that was stopped; there may be none.

    With `needed`, that there are rounds and no checkpoint is an error: they cannot be simulated again.
    """
    if run.summary is not None:
        raise SafaError(f"the run in {run.folder} is finished; there is nothing to resume")
    finished = run.finished_rounds()
    found = run.load_checkpoint(most=finished)
    if found.other_settings:
        raise SafaError(found.problems[-1])
    if needed and not found.state and (finished or found.problems):
        newest = run.load_checkpoint().rounds
        if newest > finished:
            made = f"a checkpoint made after round {newest}"
            raise SafaError(f"{run.folder} holds {finished} rounds, but {made}: restore both from one backup")
        why = "".join(f"{fault}; " for fault in found.problems)
        raise SafaError(
            f"{why}{run.folder} holds {finished} rounds and no checkpoint that can be used: restore its folder "
            "checkpoint from a backup, or begin in another folder, or here with --force"
        )
    return found
