"""The tasks: what is learnt, on which data, and with which settings by default.

`Problem`, `Data` and `from_dataset` are loaded on first use, because they bring torch along and rounds alone need none.
"""

from typing import TYPE_CHECKING, Any

from safa.tasks.catalogue import TASKS, UNNAMED, Task, find_task, given_task, load_problem, problem_of, task_of
from safa.tasks.partition import check_partition, partition

if TYPE_CHECKING:
    from safa.tasks.own import from_dataset
    from safa.tasks.problem import Data, Problem
else:

    def __getattr__(name: str) -> Any:
        if name in ("Data", "Problem", "from_dataset"):
            from safa.tasks import own

            return getattr(own, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "TASKS",
    "UNNAMED",
    "Data",
    "Problem",
    "Task",
    "check_partition",
    "find_task",
    "from_dataset",
    "given_task",
    "load_problem",
    "partition",
    "problem_of",
    "task_of",
]
