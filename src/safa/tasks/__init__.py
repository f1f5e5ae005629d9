"""The tasks: what is learnt, on which data, and with which settings by default.

`Problem`, `Metric`, `Data` and `from_dataset` are loaded on first use, because they bring torch along and
rounds alone need none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from safa.tasks.catalogue import TASKS, UNNAMED, Task, find_task, given_task, load_problem, problem_of, task_of
from safa.tasks.dealing import Samples, decides_sizes
from safa.tasks.partitions import check_partition, partition, sizes_decided

if TYPE_CHECKING:
    from safa.tasks.datasets import Data, from_dataset
    from safa.tasks.problem import Metric, Problem
else:
    _WHERE = {
        "Data": "safa.tasks.datasets",
        "Metric": "safa.tasks.problem",
        "Problem": "safa.tasks.problem",
        "from_dataset": "safa.tasks.datasets",
    }

    def __getattr__(name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_WHERE[name]), name)


__all__ = [
    "TASKS",
    "UNNAMED",
    "Data",
    "Metric",
    "Problem",
    "Samples",
    "Task",
    "check_partition",
    "decides_sizes",
    "find_task",
    "from_dataset",
    "given_task",
    "load_problem",
    "partition",
    "problem_of",
    "sizes_decided",
    "task_of",
]
