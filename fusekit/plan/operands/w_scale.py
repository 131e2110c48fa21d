"""Scales of w: one for each group (fp8-tensor), each column of the product (fp8-row), or 128 x 128 of w (fp8-block,
fp8-weights), or 32 of a row (mxfp4-weights).

Those of columns lie in shared memory as bias does, in two rows of float32, one a consumer warpgroup; those of blocks
come with the stages (x_scale.py), or where x is not FP8 from global memory. Those of MXFP4 are bytes, K / 32 for each
row of w, which is no multiple of 4: a warp fetches for each row of a stage the two words that its four are in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.gemm import COLUMNS, WARP, GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, Argument, Broken, Expr, Operand, by_group, tensor, vector
from fusekit.plan.quant import BLOCK, MX_SIDE, NONE, PACKED, ROW, SIDE
from fusekit.plan.shared import Region

SWAPPED, COOPERATIVE = "swap-ab", "cooperative"
TILE = (128, 128)  # of many rows: of two warpgroups, each has 64 columns
EXCHANGE = "exchange"  # set of named barriers: a warpgroup has read what the other has put there
SCALE_BYTES = 8  # of a row of MXFP4 in a stage


class WScale(Operand):
    """What a code of w is multiplied by to get the value back."""

    name, order, epilogues = "w_scale", 25, (FORWARD, BACKWARD)
    named_barriers = (COLUMNS, EXCHANGE)
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
        what = "MXFP4" if quant.mx_weights else "FP8"
        if spec.b_major != "k":
            yield "b_major", spec.b_major, f'{what} weights are contiguous along K: w is [E, N, K]; say b_major = "k"'
        if spec.dtype != "bf16":
            yield "dtype", spec.dtype, f'bf16 is made of {what} weights, as x is; say dtype = "bf16"'
        if quant.out != NONE:
            yield "quant.out", quant.out, f'x is not FP8, and neither is y; say in = "{BLOCK}", or leave out out'
        few, shared = few_rows(spec.plan), quant.mx_weights and spec.tile[1] != TILE[1]
        if spec.mainloop not in (SWAPPED, COOPERATIVE) or shared or (
            spec.mainloop == COOPERATIVE and spec.tile != TILE
        ):  # fmt: skip
            heights = " or ".join(map(str, few)) + " high" + (f" and {TILE[1]} wide" if quant.mx_weights else "")
            yield "tile", spec.tile, f"tiles of {what} weights are {list(TILE)}, or {heights}; say one of these"
        if quant.mx_weights and spec.cluster != (1, 1):
            yield "cluster", spec.cluster, "CTAs do not share tiles of MXFP4 weights; say [1, 1]"

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        if plan.quant.mx_weights:
            along: Expr = ["floordiv", "K", MX_SIDE]
            row: tuple[Expr, ...] = (["mul", plan.n, along], along, 1) if plan.grouped else (along, 1)
            return (tensor("w_s", "input", PACKED, (*plan.leading, plan.n, along), row, alignment=4),)
        if plan.quant.by_block or plan.quant.weights_alone:
            down: Expr = ["ceildiv", plan.n, SIDE]
            across: Expr = ["ceildiv", "K", SIDE]
            strides: tuple[Expr, ...] = (["mul", down, across], across, 1) if plan.grouped else (across, 1)
            return (tensor("w_s", "input", "f32", (*plan.leading, down, across), strides, alignment=4),)
        if plan.quant.inputs == ROW:
            return (by_group("w_s", "input", "f32", plan, plan.n),)
        return (vector("w_s", "input", "f32", "E" if plan.grouped else 1),)

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        if plan.quant.mx_weights:
            return (Region("scales", stages * plan.tile[1] * SCALE_BYTES),)
        if plan.quant.inputs != ROW:
            return ()
        return (Region("w_scale", plan.arch.consumer_warpgroups * plan.tile[1] * 4, 4),)

    def warps(self, plan: GemmPlan) -> tuple[int, ...]:
        return (3,) if plan.quant.mx_weights else ()

    def filling_threads(self, plan: GemmPlan) -> int:
        return WARP if plan.quant.mx_weights else 0


def few_rows(plan: GemmPlan) -> tuple[int, ...]:
    """Heights of tiles of few rows: where both warpgroups share one, its rows are one block of the epilogue at most."""
    heights = plan.arch.tile_rows[SWAPPED]
    return (*heights, plan.arch.mma_rows)


OPERANDS = (WScale(),)
