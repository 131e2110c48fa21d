"""What dprob and dbias of a backward epilogue share: boxes in shared memory, counters, the workspace.

Consumer warps leave what they added up in a box, of which each warpgroup has one; idle warps take it to scratch memory
(fusekit/kernels/gemm/operands/sums.py). A box holds which tile it is, then whatever the operands want.
"""

from __future__ import annotations

from typing import ClassVar

from fusekit.plan.gemm import CONSUMER_WARPGROUPS, GemmPlan
from fusekit.plan.operands.base import BACKWARD, Expr, Operand
from fusekit.plan.shared import Region

NOTE_WORDS = 4  # first row of the warpgroup, end row of the group, tile along N, group
WORKSPACE = 20  # bytes: two words of the scheduler, then TICKET, READY and FINISHED
ALIGNMENT_WORDS = 6  # both kinds of parts begin at a multiple of four words


class Summed(Operand):
    """An operand that is a sum of what the epilogue makes. warp: adds it up, if free. box_words: its part of a box."""

    warp: ClassVar[int]
    epilogues = (BACKWARD,)
    requires = ("sums",)

    def box_words(self, plan: GemmPlan) -> int:
        return 0


class Sums(Operand):
    """There where another operand requires it."""

    name, order, epilogues = "sums", 105, (BACKWARD,)

    def present(self, plan: GemmPlan) -> bool:
        return False

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        return (Region("sums", CONSUMER_WARPGROUPS * box_bytes(plan)),)

    def barriers(self, plan: GemmPlan) -> tuple[int, ...]:
        return (4,) * CONSUMER_WARPGROUPS + (len(summed(plan)),) * CONSUMER_WARPGROUPS

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        """One does all where the other fetches scales of blocks."""
        return (3,) if plan.quant.by_block else tuple(sorted({operand.warp for operand in summed(plan)}))

    def workspace(self, plan: GemmPlan) -> int:
        return WORKSPACE

    def scratch(self, plan: GemmPlan) -> tuple[Expr, ...]:
        return (ALIGNMENT_WORDS,)


def summed(plan: GemmPlan) -> tuple[Summed, ...]:
    """The operands of the kernel that are sums."""
    return tuple(operand for operand in plan.operands if isinstance(operand, Summed))


def box_bytes(plan: GemmPlan) -> int:
    """Of what a warpgroup leaves of a tile."""
    return 4 * (NOTE_WORDS + sum(operand.box_words(plan) for operand in summed(plan)))


def pieces(plan: GemmPlan) -> Expr:
    """The rows as warpgroups' tiles, but for a last one of each group."""
    return ["floordiv", "M", plan.warpgroup_rows]


def tiles(plan: GemmPlan) -> Expr:
    """Tiles along N."""
    return ["ceildiv", plan.n, plan.tile[1]]


def groups(plan: GemmPlan) -> Expr:
    """How many groups there are."""
    return "E" if plan.grouped else 1


OPERANDS = (Sums(),)
