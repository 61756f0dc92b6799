"""What KL does not tell: whether a mode still finds what stands in its context, calculates, and writes the same text.

::

    run = run_task(TASKS["copy"], subject, [parse_mode("none"), parse_mode("int4")], [], calibration=text, length=1024, count=20)
    for result in run.results:
        print(result.mode, result.label, result.n, result.value, result.difference)
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kvq_core.evaluation.tasks.arithmetic import Arithmetic
from kvq_core.evaluation.tasks.copying import Copying
from kvq_core.evaluation.tasks.generation import Generation
from kvq_core.evaluation.tasks.passkey import Passkey
from kvq_core.evaluation.tasks.run import TaskResult, TaskRun, run_task
from kvq_core.evaluation.tasks.task import Item, Task

TASKS: Final[Mapping[str, Task]] = MappingProxyType({task.name: task for task in (Copying(), Passkey(), Arithmetic(), Generation())})

__all__ = ["TASKS", "Item", "Task", "TaskResult", "TaskRun", "run_task"]
