"""Trackers: a run is followed in TensorBoard, MLflow, Weights & Biases, or what another package brings.

`Tracking` is a callback (`safa.experiments.callbacks`) that gives all trackers of a run its settings, the values of
every round, its summary and its page. A tracker that fails is given up with a warning; the run goes on.
"""

from safa.trackers.place import Place
from safa.trackers.registry import available, find_trackers
from safa.trackers.tracker import TrackedRun, Tracker
from safa.trackers.tracking import Tracking, track_folder

__all__ = ["Place", "TrackedRun", "Tracker", "Tracking", "available", "find_trackers", "track_folder"]
