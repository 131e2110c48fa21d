"""FP8 values of y or dz along the tokens as MXFP8: a byte of scale for 32 tokens of a column. The FP8 values lie as y
does.

Idle warps make them from a tile in shared memory, as those of turned.py do; groups begin at multiples of 128.
"""

from __future__ import annotations

from typing import Any

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import Argument, Constraint, Dim, Expr, Operand, rows
from fusekit.plan.operands.mxfp8_output import blocks, scales, whole
from fusekit.plan.operands.turned import DzTurned, YTurned
from fusekit.plan.quant import E4M3


class MxTurned(Operand):
    """What differs from FP8 values of 128 tokens: they lie as the result does, and no group is padded."""

    words = {}

    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.transpose and spec.quant.mx)

    def dims(self, plan: GemmPlan) -> tuple[Dim, ...]:
        return ()

    def constraints(self, plan: GemmPlan) -> tuple[Constraint, ...]:
        return ()


class YMxTurned(MxTurned, YTurned):
    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.mx and plan.quant.transpose and (not plan.backward or plan.spec.operands["recompute"])

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return mx_columns("y", plan.width, plan)


class DzMxTurned(MxTurned, DzTurned):
    def present(self, plan: GemmPlan) -> bool:
        return plan.turning and plan.quant.mx

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return mx_columns("dz", plan.z_width, plan)


def mx_columns(name: str, columns: Expr, plan: GemmPlan) -> tuple[Argument, ...]:
    """FP8 values [M, columns], and their scales: of columns in atoms, or of a block of tokens in a row."""
    turned = (whole(columns), blocks("M")) if plan.quant.swizzled else (blocks("M"), whole(columns))
    return rows(f"{name}_t", "output", E4M3, columns), scales(f"{name}_ts", *turned)


OPERANDS = (YMxTurned(), DzMxTurned())
