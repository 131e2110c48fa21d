"""dbias [E, columns of z] after a backward activation: each group's sum of the rows of dz.

Consumer warps leave sums over their rows of a tile in shared memory, in the staging boxes of y, and which tile it is in
a note; an idle warp adds those of a warpgroup's four warps up and takes them to scratch memory, [pieces, columns of
z]. A piece is what a warpgroup has of a group's rows, a tile's or half of it. A second launch adds up those of each
group in their order.
"""

from __future__ import annotations

from fusekit.plan.fields import Field
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, Argument, Expr, Operand, by_group
from fusekit.plan.operands.recompute import ONLY_BACKWARD
from fusekit.plan.shared import Region

NOTE_BYTES = 16  # first row of the warpgroup, end row of the group, tile along N, group
FIELD = Field(
    "dbias",
    "bool",
    "Also stores a float32 sum over each group's rows; backward activations: of dz, dbias[E, columns of z]; "
    "weight gradients: of dy, dbias[E, N].",
    default=False,
)


class Dbias(Operand):
    name, order, epilogues = "dbias", 120, (BACKWARD,)
    field = FIELD
    needs_registers = blocks_in_turn = True
    words = {"dbias": "The gradient of the first projection's bias: dz summed over the rows of a group."}
    refused = {FORWARD: ONLY_BACKWARD}

    def present(self, plan: GemmPlan) -> bool:
        return not plan.turning and self.asked(plan.spec)  # else it is block_sums

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return dbias(plan)

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        return (Region("notes", plan.arch.consumer_warpgroups * NOTE_BYTES),)

    def barriers(self, plan: GemmPlan) -> tuple[int, ...]:
        return (4,) * plan.arch.consumer_warpgroups + (1,) * plan.arch.consumer_warpgroups

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        """The other one fetches scales of blocks."""
        return (3,) if plan.quant.by_block else (2,)

    def scratch(self, plan: GemmPlan) -> tuple[Expr, ...]:
        groups: Expr = "E" if plan.grouped else 1
        return (["mul", ["add", ["floordiv", "M", plan.warpgroup_rows], groups], plan.z_width],)


def dbias(plan: GemmPlan) -> tuple[Argument, ...]:
    """What a launch passes for it."""
    return (by_group("dbias", "output", "f32", plan, plan.z_width),)


OPERANDS = (Dbias(),)
