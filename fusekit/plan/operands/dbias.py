"""dbias [E, columns of z] behind a backward activation: each group's sum of the rows of dz."""

from __future__ import annotations

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.keys import Key
from fusekit.plan.operands.base import FORWARD, Argument, Expr, by_group
from fusekit.plan.operands.recompute import ONLY_BACKWARD
from fusekit.plan.operands.sums import Summed, groups, pieces, tiles

BLOCK = 8  # pieces whose columns are added up at once: few, since consumers may wait meanwhile
KEY = Key(
    "dbias",
    "bool",
    "Also stores a float32 sum over each group's rows; backward activations: of dz, dbias[E, columns of z]; "
    "weight gradients: of dy, dbias[E, N].",
    default=False,
)


class Dbias(Summed):
    """Of dz; a warp's sums of columns lie in its staging boxes of y."""

    name, order, warp = "dbias", 120, 2
    key = KEY
    needs_registers = blocks_in_turn = True
    words = {"dbias": "The gradient of the first projection's bias: dz summed over the rows of a group."}
    refused = {FORWARD: ONLY_BACKWARD}

    def present(self, plan: GemmPlan) -> bool:
        return not plan.turning and self.asked(plan.spec)  # else it is block_sums

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return dbias(plan)

    def scratch(self, plan: GemmPlan) -> tuple[Expr, ...]:
        each, many = pieces(plan), groups(plan)
        blocks: Expr = ["floordiv", ["add", each, many], BLOCK]
        counters: Expr = ["mul", tiles(plan), ["add", blocks, many, 1, many]]
        return counters, ["mul", ["add", each, many, 1], plan.z_width]


def dbias(plan: GemmPlan) -> tuple[Argument, ...]:
    """What a launch passes for it."""
    return (by_group("dbias", "output", "f32", plan, plan.z_width),)


OPERANDS = (Dbias(),)
