"""How long a build will take, by the times of past builds in the store."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from fusekit.compiler.memory import bound

if TYPE_CHECKING:
    from fusekit.compiler.build import Task
    from fusekit.store import Store


@dataclass(frozen=True, slots=True)
class Estimate:
    """seconds: expected for each task, by name; processes: that compile at once."""

    seconds: dict[str, float]
    processes: int

    @property
    def whole(self) -> float:
        """Seconds for all: a kernel is compiled by one process."""
        return max(sum(self.seconds.values()) / self.processes, max(self.seconds.values()))


def estimate(store: Store, tasks: Sequence[Task], jobs: int | None = None) -> Estimate | None:
    """The time for `tasks`: each takes as long as the last build of its name, else the median of its operation, else of
    all. None if there are no tasks or no past build.
    """
    past: dict[tuple[str, str], float] = {}
    of_op: dict[str, list[float]] = defaultdict(list)
    for listed in store.names() if tasks else ():
        record = listed.record
        if (seconds := record.summary.get("seconds")) is not None:
            past[record.name, record.arch] = seconds
            of_op[record.spec.get("op", "")].append(seconds)
    if not past:
        return None
    typical = {op: median(seconds) for op, seconds in of_op.items()}
    overall = median(past.values())
    expected = {
        task.name: past.get((task.name, task.specs[0].arch), typical.get(task.specs[0].op, overall)) for task in tasks
    }
    return Estimate(expected, bound(min(len(tasks), jobs or len(os.sched_getaffinity(0)))).workers)
