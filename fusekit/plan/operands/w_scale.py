"""Scales of w: one for each group (fp8-tensor), each column of the product (fp8-row), or 128 x 128 of w (fp8-block).

Those of columns lie in shared memory as bias does, in two rows of float32, one a consumer warpgroup; those of blocks
come with the stages (x_scale.py).
"""

from __future__ import annotations

from typing import Any

from fusekit.plan.gemm import COLUMNS, GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, Argument, Expr, Operand, by_group, tensor, vector
from fusekit.plan.quant import ROW, SIDE
from fusekit.plan.shared import Region


class WScale(Operand):
    """What a code of w is multiplied by to get the value back."""

    name, order, epilogues = "w_scale", 25, (FORWARD, BACKWARD)
    named_barriers = (COLUMNS,)
    words = {"w_s": "Scales of w: what a code is multiplied by to get the value back."}

    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.coded_inputs)

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.coded_inputs

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        if plan.quant.by_block:
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
