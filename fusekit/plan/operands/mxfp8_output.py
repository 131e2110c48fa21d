"""y or dz as MXFP8: FP8 values of rows, with a byte of scale for 32 columns. Those of 32 tokens are in mx_turned.py.

What is quantised is what would be stored, rounded to bf16; see fusekit/plan/quantise.py, which also defines how
swizzled scales lie. No kernel of fusekit multiplies MXFP8: what is made here is for others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, Argument, Broken, Expr, rows, tensor
from fusekit.plan.operands.fp8_output import Fp8Output
from fusekit.plan.quant import E4M3, SIDE
from fusekit.plan.quantise import MX_SIDE

E8M0 = "e8m0"


class Mxfp8Output(Fp8Output):
    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.mx)

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.mx

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        quant = spec.quant
        if spec.epilogue not in self.epilogues:
            return
        if quant.group_alignment not in (1, SIDE):
            yield "quant.group_alignment", quant.group_alignment, f"must be 1, or {SIDE} where every group begins there"
        elif spec.grouped and quant.group_alignment == 1 and (quant.transpose or quant.swizzled):
            field = "transpose" if quant.transpose else "scale_layout"
            rule = f"its blocks begin at multiples of {SIDE} rows; say group_alignment = {SIDE}, and keep to it"
            yield f"quant.{field}", getattr(quant, field), rule


class YMxfp8(Mxfp8Output):
    name, order, epilogues = "y_fp8", 31, (FORWARD,)

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return mx_rows("y", plan.width)


class DzMxfp8(Mxfp8Output):
    name, order, epilogues = "dz_fp8", 51, (BACKWARD,)

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return mx_rows("dz", plan.z_width)


def mx_rows(name: str, columns: Expr) -> tuple[Argument, ...]:
    """FP8 values [M, columns], and their scales."""
    return rows(f"{name}_q", "output", E4M3, columns), scales(f"{name}_s", whole("M"), blocks(columns))


def scales(name: str, down: Expr, across: Expr) -> Argument:
    """Scales of MXFP8, compact, of whole tiles."""
    return tensor(name, "output", E8M0, (down, across), (across, 1), alignment=4)


def whole(extent: Expr) -> Expr:
    """The extent with its last tile filled."""
    return ["mul", SIDE, ["ceildiv", extent, SIDE]]


def blocks(extent: Expr) -> Expr:
    """Blocks of 32 of whole tiles."""
    return ["mul", SIDE // MX_SIDE, ["ceildiv", extent, SIDE]]


OPERANDS = (YMxfp8(), DzMxfp8())
