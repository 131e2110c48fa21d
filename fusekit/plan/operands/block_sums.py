"""dbias [E, columns of dz] where a fourth warpgroup quantises the transpose of dz.

It reads every column of a tile, 128 tokens of a group, and adds them up as they were stored, rounded. The sums of the
blocks go to scratch memory, [blocks, columns of dz]. A second launch adds those of each group up in their order, so
every variant gives the same bits.
"""

from __future__ import annotations

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, Argument, Expr, Operand
from fusekit.plan.operands.dbias import FIELD, dbias
from fusekit.plan.quant import SIDE


class BlockSums(Operand):
    name, order, epilogues = "block_sums", 120, (BACKWARD,)
    field = FIELD

    def present(self, plan: GemmPlan) -> bool:
        return plan.turning and self.asked(plan.spec)

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return dbias(plan)

    def scratch(self, plan: GemmPlan) -> tuple[Expr, ...]:
        """A group may end in part of a block, also where groups should begin at blocks and do not."""
        groups: Expr = "E" if plan.grouped else 1
        return (["mul", ["add", ["floordiv", "M", SIDE], groups], plan.z_width],)


OPERANDS = (BlockSums(),)
