"""Scales of the factors of a weight gradient by blocks of 128 tokens of a column; they come with the stages.

Of each stage, those of the tile's columns of dy, then those of x; where x has squares, its few scales come first. A
warp of the load warpgroup fetches them.
"""

from __future__ import annotations

from typing import Any

from fusekit.plan.gemm import WARP, GemmPlan
from fusekit.plan.operands import x_scale
from fusekit.plan.operands.base import WGRAD, Argument, Expr, Operand, tensor
from fusekit.plan.quant import SIDE
from fusekit.plan.shared import Region


class TokenScales(Operand):
    """What FP8 values of dy and x are multiplied by."""

    name, order, epilogues = "token_scales", 20, (WGRAD,)
    words = {
        "dy_ts": "Scales of dy_t: of 128 tokens of a column.",
        "x_ts": "Scales of x_t: of 128 tokens of a column, or of 128 columns.",
    }

    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.coded_inputs)

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.coded_inputs

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        of_x: Expr = ["ceildiv", "K", SIDE] if plan.quant.square else "K"
        return tuple(
            tensor(name, "input", "f32", (["floordiv", "P", SIDE], columns), (columns, 1), alignment=alignment)
            for name, columns, alignment in (("dy_ts", "N", 16), ("x_ts", of_x, 4 if plan.quant.square else 16))
        )

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        return (Region("scales", stages * stage_bytes(plan)),)

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        return (2,)

    def filling_threads(self, plan: GemmPlan) -> int:
        return WARP


def stage_bytes(plan: GemmPlan) -> int:
    """Scales of a stage."""
    return x_scale.stage_bytes(plan) if plan.quant.square else 4 * sum(plan.tile)


OPERANDS = (TokenScales(),)
