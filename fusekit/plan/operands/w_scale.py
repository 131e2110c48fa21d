"""Scales of w: one for each group (fp8-tensor), each column of the product (fp8-row), or 128 x 128 of w (fp8-block,
fp8-weights).

Those of columns lie in shared memory as bias does, in two rows of float32, one a consumer warpgroup; those of blocks
come with the stages (x_scale.py), or where x is not FP8 from global memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.gemm import COLUMNS, GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, Argument, Broken, Expr, Operand, by_group, tensor, vector
from fusekit.plan.quant import BLOCK, NONE, ROW, SIDE
from fusekit.plan.shared import Region

SWAPPED, COOPERATIVE = "swap-ab", "cooperative"
TILE = (128, 128)  # of many rows: of two warpgroups, each has 64 columns


class WScale(Operand):
    """What a code of w is multiplied by to get the value back."""

    name, order, epilogues = "w_scale", 25, (FORWARD, BACKWARD)
    named_barriers = (COLUMNS,)
    words = {"w_s": "Scales of w: what a code is multiplied by to get the value back."}

    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.coded_inputs or spec.quant.weights_alone)

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.coded_inputs or plan.quant.weights_alone

    def rules(self, spec: Any) -> Iterable[Broken]:
        quant = spec.quant
        if not quant.weights_alone:
            return
        if spec.epilogue != FORWARD:
            rule = f'a gradient reads weights of dtype; say in = "{BLOCK}", or leave quant out'
            yield "quant.in", quant.inputs, rule
            return
        if spec.b_major != "k":
            yield "b_major", spec.b_major, 'FP8 weights are contiguous along K: w is [E, N, K]; say b_major = "k"'
        if spec.dtype != "bf16":
            yield "dtype", spec.dtype, 'bf16 is made of FP8 weights, as x is; say dtype = "bf16"'
        if quant.out != NONE:
            yield "quant.out", quant.out, f'x is not FP8, and neither is y; say in = "{BLOCK}", or leave out out'
        few = spec.plan.arch.tile_rows[SWAPPED]
        if spec.mainloop not in (SWAPPED, COOPERATIVE) or (spec.mainloop == COOPERATIVE and spec.tile != TILE):
            heights = " or ".join(map(str, few))
            yield "tile", spec.tile, f"tiles of FP8 weights are {list(TILE)}, or {heights} high; say one of these"

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        if plan.quant.by_block or plan.quant.weights_alone:
            down: Expr = ["ceildiv", plan.n, SIDE]
            across: Expr = ["ceildiv", "K", SIDE]
            strides: tuple[Expr, ...] = (["mul", down, across], across, 1) if plan.grouped else (across, 1)
            return (tensor("w_s", "input", "f32", (*plan.leading, down, across), strides, alignment=4),)
        if plan.quant.inputs == ROW:
            return (by_group("w_s", "input", "f32", plan, plan.n),)
        return (vector("w_s", "input", "f32", "E" if plan.grouped else 1),)

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        if plan.quant.inputs != ROW:
            return ()
        return (Region("w_scale", plan.arch.consumer_warpgroups * plan.tile[1] * 4, 4),)


OPERANDS = (WScale(),)
