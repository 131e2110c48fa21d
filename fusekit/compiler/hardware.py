"""What is asked of the device while a source runs and its host function is traced. There is none.

Persistent kernels ask for their grid: the answer is a number that becomes a variable of the record (see `lift`).
Where a kernel sets how many of its blocks must fit into a multiprocessor, the DSL asks for its shared memory: that is
a fact of the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from fusekit.abi import Expr

MULTIPROCESSORS: Expr = "sm_count"
CLUSTERS: Expr = ("max", 1, ("sub", "active_clusters", "cluster_margin"))


@contextmanager
def answering(value: int, before: Mapping[Expr, int] | None = None) -> Iterator[dict[Expr, int]]:
    """In the block the DSL's `HardwareInfo` answers `value`. What was asked for, now or `before`, is in the table, with
    the size of the cluster. Imports the DSL.
    """
    from cutlass.utils import HardwareInfo

    asked = dict(before or {})

    def multiprocessors(*_: Any, **__: Any) -> int:
        asked[MULTIPROCESSORS] = 1
        return value

    def clusters(_: Any, cluster_size: int, *__: Any, **___: Any) -> int:
        # Of the sizes that are asked for the launch has one; two would be two variables.
        asked[CLUSTERS] = cluster_size if asked.get(CLUSTERS, cluster_size) == cluster_size else 0
        return value

    answers = {
        "__init__": lambda *_, **__: None,
        "get_device_multiprocessor_count": multiprocessors,
        "get_max_active_clusters": clusters,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(HardwareInfo, name, answer))
        yield asked
