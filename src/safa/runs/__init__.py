"""What a run is made of on paper and on the disk: its settings, and its folder with records, model and checkpoints."""

from safa.runs.folder import (
    ROSTER,
    Checkpoint,
    Run,
    RunWriter,
    has_checkpoint,
    load_run,
    new_folder,
    next_folder,
    plain,
    write_config,
)
from safa.runs.settings import Settings
from safa.runs.storage import write_atomically

__all__ = [
    "ROSTER",
    "Checkpoint",
    "Run",
    "RunWriter",
    "Settings",
    "has_checkpoint",
    "load_run",
    "new_folder",
    "next_folder",
    "plain",
    "write_atomically",
    "write_config",
]
