"""What a weight gradient has: its two factors, whose rows the reduction runs over, and the result."""

from __future__ import annotations

from fusekit.dtypes import DTYPES
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import WGRAD, Argument, Expr, Operand, factor, tensor


def turned(name: str, dtype: str, columns: str, vector: int) -> Argument:
    """A tensor with a column for each token."""
    return tensor(name, "input", dtype, (columns, "P"), (f"{name}.stride0", 1), vector)


class TokenRows(Operand):
    """dy [M, N] and x [M, K] of a weight gradient, whose reduction runs over their rows."""

    name, order, epilogues = "token_rows", 10, (WGRAD,)
    words = {
        "dy": "The gradient of what the layer gave.",
        "x": "What the layer was given in the forward pass.",
        "dy_t": "The transpose of dy as FP8 values, tokens contiguous, each group from a multiple of 128 on.",
        "x_t": "The transpose of x as FP8 values, tokens contiguous, each group from a multiple of 128 on.",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        if plan.quant.coded_inputs:
            factors = zip(("dy_t", "x_t"), plan.factors, ("N", "K"), strict=True)
            return tuple(turned(name, dtype, columns, plan.vector) for name, dtype, columns in factors)
        return factor("dy", plan, "N"), factor("x", plan, "K")


class Dw(Operand):
    """dw [E, N, K]; dense without E."""

    name, order, epilogues = "dw", 30, (WGRAD,)
    words = {
        "dw": "The gradient of the weights, dy^T . x of each group; with accumulate it is added to what is there.",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        strides = tuple(f"dw.stride{index}" for index in range(len(plan.leading) + 1))
        shape: tuple[Expr, ...] = (*plan.leading, "N", "K")
        vector = 16 // DTYPES[plan.out_dtype].bytes
        return (tensor("dw", plan.added_to, plan.out_dtype, shape, (*strides, 1), vector),)


OPERANDS = (TokenRows(), Dw())
