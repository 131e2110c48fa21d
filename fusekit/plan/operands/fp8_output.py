"""FP8 values of the rows of y or dz in blocks of 128 columns, with their scales, stored instead of it or next to it.

What is quantised is what would be stored, rounded to bf16; see fusekit/plan/quantise.py. The scales lie M-major,
[ceil(N / 128), M], as those of the x that the next product reads. MXFP8 is in mxfp8_output.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Broken, Expr, Operand, rows, tensor
from fusekit.plan.quant import E4M3, SIDE


class Quantised(Operand):
    """What is made of y or dz as it would be stored, rounded to bf16."""

    def rules(self, spec: Any) -> Iterable[Broken]:
        out = spec.quant.out
        if spec.epilogue == WGRAD and FORWARD in self.epilogues:
            rule = "dw is added up in its own dtype; leave it out, and take the operation quantise"
            yield "quant.out", out, rule
        if spec.epilogue in self.epilogues and (spec.dtype, spec.out_dtype) != ("bf16", "bf16"):
            yield (
                "quant.out",
                out,
                f'FP8 output is quantised from bf16, and out_dtype is "{spec.out_dtype}"; say "bf16"',
            )


class Fp8Output(Quantised):
    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.by_blocks)

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.by_blocks

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        if spec.epilogue not in self.epilogues:
            return
        if spec.operands["gather"] != "none" and spec.quant.transpose:
            yield (
                "gather",
                spec.operands["gather"],
                "gathered rows have FP8 values along their columns alone; leave it or transpose out",
            )
        yield from whole_blocks(spec)


class YFp8(Fp8Output):
    name, order, epilogues = "y_fp8", 31, (FORWARD,)
    words = {
        "y_q": "FP8 values of y, along its rows.",
        "y_s": "Scales of those FP8 values: of 128 columns of a row, the rows side by side; mxfp8: of 32, row by row.",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return coded_rows("y", plan.width)


class DzFp8(Fp8Output):
    name, order, epilogues = "dz_fp8", 51, (BACKWARD,)
    words = {
        "dz_q": "FP8 values of dz, along its rows.",
        "dz_s": "Scales of those FP8 values: of 128 columns of a row, the rows side by side; mxfp8: of 32, row by row.",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return coded_rows("dz", plan.z_width)


def whole_blocks(spec: Any) -> Iterator[Broken]:
    """The rules of tiles whose outputs are blocks."""
    plan = spec.plan
    what = f"{SIDE} columns have {'scales that are stored together' if plan.quant.mx else 'one scale'}"
    if plan.out_tile_n % SIDE:
        least = SIDE * (2 if plan.halved else 1)
        gated = f", gate and up {least}" if plan.halved else ""
        yield "tile", spec.tile, f"{what}{gated}, so tile N is a multiple of {least}; say {least}"
    if spec.quant.transpose:
        if spec.mainloop != "cooperative":
            yield "mainloop", spec.mainloop, 'both warpgroups share a block of 128 tokens; say "cooperative"'
        elif spec.tile[0] != SIDE:
            yield "tile", spec.tile, f"a tile is one block of {SIDE} tokens of the transpose; say {SIDE} rows"


def coded_rows(name: str, columns: Expr) -> tuple[Argument, ...]:
    """FP8 values [M, columns] and scales [ceil(columns / 128), M] of the rows of a result."""
    scales = tensor(f"{name}_s", "output", "f32", (["ceildiv", columns, SIDE], "M"), (f"{name}_s.stride0", 1), 1, 4)
    return rows(f"{name}_q", "output", E4M3, columns), scales


OPERANDS = (YFp8(), DzFp8())
