"""FP8 values of the transpose of y or dz in blocks of 128 tokens, with their scales: factors of weight gradients.

A tile has the 128 tokens of one block: tiles begin at the first row of their group, and group e of the transpose at
the next multiple of 128 after group e - 1. Consumer warps leave the result in shared memory, bf16 and already
transposed; idle warps make the FP8 values from it, while the next tile is multiplied. Tokens after a group's last row
have code 0. Forward, one warp of the load warpgroup does it. Backward there are three times as many columns, and a
fourth warpgroup does it: in the boxes of z, which it then fills with the next tile's.

In a block a column has one scale, or 128 columns have, which `x_blocks` of a weight gradient asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.gemm import FOURTH, GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, Argument, Broken, Constraint, Dim, Expr, Operand, tensor
from fusekit.plan.quant import E4M3, SIDE
from fusekit.plan.shared import Region

TURNERS = 4  # warps of the fourth warpgroup


class YTurned(Operand):
    """Backward there where y is computed once more; dz_turned does the work."""

    name, order, epilogues = "y_turned", 61, (FORWARD, BACKWARD)
    needs_registers = True
    words = {
        "y_t": "FP8 values of the transpose of y, along the tokens; each group begins at a multiple of 128. mxfp8: "
        "as y lies.",
        "y_ts": "Scales of those FP8 values: of 128 tokens of a column, or of 128 columns; mxfp8: of 32 tokens.",
    }

    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.transpose and spec.quant.by_blocks)

    def present(self, plan: GemmPlan) -> bool:
        quant = plan.quant
        return quant.by_blocks and quant.transpose and (not plan.backward or plan.spec.operands["recompute"])

    def rules(self, spec: Any) -> Iterable[Broken]:
        quant = spec.quant
        if quant.turned_square("y") and spec.epilogue == BACKWARD and not spec.operands["recompute"]:
            yield "quant.y_blocks", quant.y_blocks, "y is stored where it is computed again; say recompute = true"

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return turned("y", plan.width, plan)

    def dims(self, plan: GemmPlan) -> tuple[Dim, ...]:
        return () if plan.backward else tokens()

    def constraints(self, plan: GemmPlan) -> tuple[Constraint, ...]:
        return () if plan.backward else room("y_t", plan)

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        if plan.backward:
            return ()
        return Region("turned", plan.out_tile_n * SIDE * 2, 1024), Region("turned_values", SIDE * SIDE, 1024)

    def barriers(self, plan: GemmPlan) -> tuple[int, ...]:
        return () if plan.backward else (plan.consumer_warps, 1)

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        return () if plan.backward else (3,)

    def following_warps(self, plan: GemmPlan) -> int:
        return len(self.warps(plan))


class DzTurned(Operand):
    name, order, epilogues = "dz_turned", 56, (BACKWARD,)
    named_barriers = (FOURTH,)
    words = {
        "dz_t": "FP8 values of the transpose of dz, along the tokens; each group begins at a multiple of 128. mxfp8: "
        "as dz lies.",
        "dz_ts": "Scales of those FP8 values: of 128 tokens of a column, or of 128 columns; mxfp8: of 32 tokens.",
    }

    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.transpose and spec.quant.by_blocks)

    def present(self, plan: GemmPlan) -> bool:
        return plan.turning and plan.quant.by_blocks

    def rules(self, spec: Any) -> Iterable[Broken]:
        if spec.epilogue == BACKWARD and spec.tile[1] != SIDE:
            yield "tile", spec.tile, f"shared memory has room for {SIDE} columns of da; say {SIDE}"
        quant = spec.quant
        if quant.turned_square("dz") and spec.epilogue != BACKWARD:
            rule = f"only backward activations make dz, not {spec.activation.kind}; leave it out"
            yield "quant.dz_blocks", quant.dz_blocks, rule

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return turned("dz", plan.z_width, plan)

    def dims(self, plan: GemmPlan) -> tuple[Dim, ...]:
        return tokens()

    def constraints(self, plan: GemmPlan) -> tuple[Constraint, ...]:
        return room("dz_t", plan)

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        squares = any(map(plan.quant.turned_square, ("dz", "y")))
        return (Region("largest", 4 * TURNERS * (plan.sides + 1)),) if squares else ()

    def barriers(self, plan: GemmPlan) -> tuple[int, ...]:
        return plan.consumer_warps, TURNERS

    def fourth(self, plan: GemmPlan) -> bool:
        return True

    def following_warps(self, plan: GemmPlan) -> int:
        return TURNERS


def turned(name: str, columns: Expr, plan: GemmPlan) -> tuple[Argument, ...]:
    """FP8 values [columns, P] and scales [P / 128, columns], or those of squares, of the transpose of a result."""
    scaled: Expr = ["ceildiv", columns, SIDE] if plan.quant.turned_square(name) else columns
    scales: tuple[Expr, ...] = ["floordiv", "P", SIDE], scaled
    return (
        tensor(f"{name}_t", "output", E4M3, (columns, "P"), (f"{name}_t.stride0", 1), 16),
        tensor(f"{name}_ts", "output", "f32", scales, (scaled, 1)),
    )


def tokens() -> tuple[Dim, ...]:
    """P, the tokens of a transpose."""
    from fusekit.abi import Dim
    from fusekit.plan.gemm import BIG

    return (Dim("P", SIDE, SIDE, BIG),)


def room(name: str, plan: GemmPlan) -> tuple[Constraint, ...]:
    """P has room for the padded groups."""
    from fusekit.abi import Constraint

    if plan.grouped:
        need: Expr = ["add", "M", ["mul", SIDE - 1, "E"]]
        rule = f"{name} must have room for M + {SIDE - 1} E tokens"
    else:
        need, rule = ["mul", SIDE, ["ceildiv", "M", SIDE]], f"{name} must have room for M tokens, in blocks of {SIDE}"
    return (Constraint(["max", 0, ["sub", need, "P"]], rule),)


OPERANDS = (YTurned(), DzTurned())
