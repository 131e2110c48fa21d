"""Codes of the transpose of y in blocks of 128 tokens, with their scales: a factor of a weight gradient.

A tile has the 128 tokens of one block: tiles begin at the first row of their group, and group e of the transpose at
the next multiple of 128 behind group e - 1. Consumer warps leave y in shared memory, bf16 and already transposed; an
idle warp makes the codes from it, while the next tile is multiplied. Tokens behind a group's last row have code 0.
"""

from __future__ import annotations

from typing import Any

from fusekit.plan.gemm import CONSUMER_WARPS, GemmPlan
from fusekit.plan.operands.base import FORWARD, Argument, Constraint, Dim, Expr, Operand, tensor
from fusekit.plan.quant import CODES, SIDE, quant
from fusekit.plan.shared import Region


class YTurned(Operand):
    name, order, epilogues = "y_turned", 61, (FORWARD,)
    needs_registers = True
    words = {
        "y_t": "Codes of the transpose of y, along the tokens; each group begins at a multiple of 128.",
        "y_ts": "Scales of those codes: of 128 tokens of a column.",
    }

    def asked(self, spec: Any) -> bool:
        return quant(spec.quant).transpose

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.coded and plan.quant.transpose

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        scales: tuple[Expr, ...] = ["floordiv", "P", SIDE], plan.width
        return (
            tensor("y_t", "output", CODES, (plan.width, "P"), ("y_t.stride0", 1), 16),
            tensor("y_ts", "output", "f32", scales, (plan.width, 1)),
        )

    def dims(self, plan: GemmPlan) -> tuple[Dim, ...]:
        from fusekit.abi import Dim
        from fusekit.plan.gemm import BIG

        return (Dim("P", SIDE, SIDE, BIG),)

    def constraints(self, plan: GemmPlan) -> tuple[Constraint, ...]:
        from fusekit.abi import Constraint

        if plan.grouped:
            need: Expr = ["add", "M", ["mul", SIDE - 1, "E"]]
            rule = f"y_t must have room for M + {SIDE - 1} E tokens"
        else:
            need, rule = ["mul", SIDE, ["ceildiv", "M", SIDE]], f"y_t must have room for M tokens, in blocks of {SIDE}"
        return (Constraint(["max", 0, ["sub", need, "P"]], rule),)

    def regions(self, plan: GemmPlan) -> tuple[Region, ...]:
        return Region("turned", plan.out_tile_n * SIDE * 2, 1024), Region("turned_codes", SIDE * SIDE, 1024)

    def reserved(self, plan: GemmPlan) -> int:
        return sum(region.bytes for region in self.regions(plan))

    def barriers(self, plan: GemmPlan) -> tuple[int, ...]:
        return CONSUMER_WARPS, 1

    def following_warps(self, plan: GemmPlan) -> int:
        return 1


OPERANDS = (YTurned(),)
