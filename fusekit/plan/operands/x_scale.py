"""Scales of x: one number (fp8-tensor), one for each row (fp8-row), or one for 128 columns of a row (fp8-block).

Those of blocks lie M-major, [ceil(K / 128), M], and come with the stages: after those of w, two or four, each stage
has one for each row of the tile. A warp of the load warpgroup fetches them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.gemm import SEGMENT, WARP, GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Broken, Expr, Operand, tensor, vector
from fusekit.plan.quant import BLOCK, ROW, SIDE, TENSOR, X_FORMATS
from fusekit.plan.shared import Region


class XScale(Operand):
    """What a code of x is multiplied by to get the value back."""

    name, order, epilogues = "x_scale", 15, (FORWARD, BACKWARD)
    words = {"x_s": "Scales of x: what a code is multiplied by to get the value back."}

    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.coded_inputs)

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.coded_inputs

    def rules(self, spec: Any) -> Iterable[Broken]:
        quant = spec.quant
        if spec.epilogue == WGRAD:
            if not quant.by_block:
                rule = f'the scales of rows are inside the sum of {spec.op}; say "{BLOCK}", or leave quant out'
                yield "quant.in", quant.inputs, rule
            if spec.operands["dbias"]:
                yield (
                    "dbias",
                    True,
                    "FP8 values of dy are scaled by blocks, so their sum is not that of dy; leave it out",
                )
        elif quant.square:
            yield (
                "quant.x_blocks",
                quant.x_blocks,
                "of a weight gradient's x; blocks of other factors are fixed; leave it out",
            )
        if spec.epilogue != WGRAD and spec.b_major != "k":
            yield "b_major", spec.b_major, 'FP8 factors are contiguous along K: w is [E, N, K]; say b_major = "k"'
        if spec.operands["gather"] != "none":
            yield (
                "gather",
                spec.operands["gather"],
                "FP8 values come by TMA alone, with their scales row by row; leave it out",
            )
        if quant.x_format != X_FORMATS[0] and quant.inputs != TENSOR:
            yield "quant.x_format", quant.x_format, f'only in = "{TENSOR}" has it, not {quant.inputs}; leave it out'
        if quant.by_block and not quant.promoted:
            yield "quant.accumulation", quant.accumulation, "scales change along K, so float32 takes over; leave it out"
        if quant.promoted and spec.mainloop != "cooperative":
            rule = 'one warpgroup adds up while the other multiplies; say "cooperative", or accumulation = "fast"'
            yield "mainloop", spec.mainloop, rule
        if quant.by_block and spec.epilogue != WGRAD:
            side = spec.tile[1] // (2 if spec.plan.halved and spec.glu_layout == "concat" else 1)
            if side % SEGMENT:
                what = "a gate half" if side < spec.tile[1] else "tile N"
                rule = f"{what} of {side} columns must be a multiple of {SEGMENT}: half a block has one scale of w"
                yield "tile", spec.tile, rule

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        if plan.quant.by_block:
            return (tensor("x_s", "input", "f32", (["ceildiv", "K", SIDE], "M"), ("x_s.stride0", 1), alignment=4),)
        extent: Expr = "M" if plan.quant.inputs == ROW else 1
        return (vector("x_s", "input", "f32", extent),)

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        return (Region("scales", stages * stage_bytes(plan)),) if plan.quant.by_block else ()

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        return (2,) if plan.quant.by_block else ()

    def filling_threads(self, plan: GemmPlan) -> int:
        return WARP if plan.quant.by_block else 0


def stage_bytes(plan: GemmPlan) -> int:
    """Scales of a stage."""
    return 4 * (w_scales(plan) + plan.tile[0])


def w_scales(plan: GemmPlan) -> int:
    """Places for those of w in a stage: a thread loads them at once."""
    return 2 if plan.tile[1] // SEGMENT <= 2 and not plan.wgrad else 4


OPERANDS = (XScale(),)
