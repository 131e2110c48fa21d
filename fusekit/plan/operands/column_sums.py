"""dbias [E, N] next to a weight gradient: each group's sum of the rows of dy, by idle warps that read the stages."""

from __future__ import annotations

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import WGRAD, Argument, Operand, by_group
from fusekit.plan.operands.dbias import FIELD


class ColumnSums(Operand):
    name, order, epilogues = "column_sums", 120, (WGRAD,)
    field = FIELD
    needs_registers = True
    words = {"dbias": "The gradient of the bias: dy summed over the rows of a group."}

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (by_group("dbias", plan.added_to, "f32", plan, "N"),)

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        return 2, 3

    def reading_warps(self, plan: GemmPlan) -> int:
        return len(self.warps(plan))


OPERANDS = (ColumnSums(),)
