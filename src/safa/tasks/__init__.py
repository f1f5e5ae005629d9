"""The tasks: what is learnt, on which data, and with which settings by default."""

from safa.tasks.catalogue import TASKS, Task, find_task

__all__ = ["TASKS", "Task", "find_task"]
