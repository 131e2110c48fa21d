"""index int32 [M]: which row of a tensor of T rows each row of x, or of either factor of a weight gradient, is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.fields import Field
from fusekit.plan.gemm import BIG, GATHERS, GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Broken, Constraint, Dim, Operand, vector
from fusekit.plan.shared import Region, barriers

MOST_ELEMENTS = 2**35  # of a gathered tensor: the device counts units of 16 bytes in 32 bits

# The factor that the two CTAs of a cluster share.
SHARED = {
    WGRAD: {(2, 1): "x", (1, 2): "dy"},
    FORWARD: {(2, 1): "w", (1, 2): "x"},
    BACKWARD: {(2, 1): "w", (1, 2): "x"},
}


class Gather(Operand):
    name, order, epilogues = "gather", 140, (FORWARD, BACKWARD, WGRAD)
    field = Field(
        "gather",
        "choice",
        "The factor whose rows the argument index[M] chooses from a tensor of T rows; -1: a row of zeros.",
        choices=GATHERS,
        default="none",
    )
    words = {"index": "Which row of the gathered factor each row is; outside [0, T): a row of zeros."}

    def rules(self, spec: Any) -> Iterable[Broken]:
        if spec.operands["gather"] == "dy" and spec.epilogue != WGRAD:
            yield "gather", "dy", f'only grouped-wgrad has dy; {spec.op} gathers its rows with gather = "x"'
        elif SHARED[spec.epilogue].get(spec.cluster) == spec.operands["gather"]:
            other = next(cluster for cluster, name in SHARED[spec.epilogue].items() if name != spec.operands["gather"])
            why = f"the CTAs of this cluster share {spec.operands['gather']}, and each gathers its own rows"
            yield "cluster", spec.cluster, f"{why}; say {list(other)} or [1, 1]"

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (vector("index", plan.order_role, "i32", plan.indexed_rows),)

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        return (barriers("landed", *(plan.gather_threads,) * stages),) if plan.relays else ()

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        return (2,) if plan.relays else ()

    def fourth(self, plan: GemmPlan) -> bool:
        return True

    def dims(self, plan: GemmPlan) -> tuple[Dim, ...]:
        from fusekit.abi import Dim

        return (Dim("T", maximum=BIG),)

    def constraints(self, plan: GemmPlan) -> tuple[Constraint, ...]:
        from fusekit.abi import Constraint

        stride = f"{plan.gather}.stride0"
        rule = f"T x {stride} is {MOST_ELEMENTS} elements or more; a gathered tensor has less than 64 GiB"
        return (Constraint(["floordiv", ["mul", "T", stride], MOST_ELEMENTS], rule),)


OPERANDS = (Gather(),)
