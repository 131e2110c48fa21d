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
from fusekit.compiler.cubin import RESERVED_SHARED

MULTIPROCESSORS: Expr = "sm_count"
CLUSTERS: Expr = ("max", 1, ("sub", "active_clusters", "cluster_margin"))


@contextmanager
def target(arch: str) -> Iterator[None]:
    """In the block the DSL takes `arch` for the device's architecture, and the shared memory of a multiprocessor from
    it. Imports the DSL.
    """
    from cuda.bindings.driver import CUdevice_attribute
    from cutlass.base_dsl.runtime import cuda
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.memory import get_smem_capacity_in_bytes

    asked, environment = cuda.get_device_attribute, CuTeDSL._get_dsl().envar

    def answer(attribute: Any, *rest: Any, **named: Any) -> Any:
        if attribute == CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
            # One block may have all of it but for what the driver keeps of every block.
            return get_smem_capacity_in_bytes(arch.rstrip("af")) + RESERVED_SHARED
        return asked(attribute, *rest, **named)

    # Else the DSL asks the driver. Where that sees no GPU, the message of its error asks again, a hundred times over:
    # a minute, where a driver is there and many processes wait for its lock.
    with patch.object(cuda, "get_device_attribute", answer), patch.object(environment, "_arch", arch):
        yield


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
