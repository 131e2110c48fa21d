"""What every GEMM has: the two factors, the result, and the groups' end rows."""

from __future__ import annotations

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import (
    BACKWARD,
    FORWARD,
    WGRAD,
    Argument,
    Expr,
    Operand,
    factor,
    rows,
    tensor,
    vector,
)
from fusekit.plan.quant import MX_SIDE


class X(Operand):
    """x [M, K]; [T, K] gathered."""

    name, order, epilogues = "x", 10, (FORWARD, BACKWARD)
    words = {
        "x": "The rows to multiply. In a gradient through a layer, dY: the gradient of what the layer gave.",
        "backward.x": "dY, the gradient of what the second projection gave.",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (factor("x", plan, "K"),)


class W(Operand):
    """w [E, N, K] or [E, K, N], of MXFP4 values [E, N, K / 32, 16] bytes; dense without E."""

    name, order, epilogues = "w", 20, (FORWARD, BACKWARD)
    words = {
        "w": "The weights; b_major says which of N and K is contiguous.",
        "backward.w": "The second projection's weights, those of the forward pass.",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        shape: tuple[Expr, ...] = (plan.n, "K") if plan.b_major == "k" else ("K", plan.n)
        strides: tuple[Expr, ...] = (*(f"w.stride{index}" for index in range(len(plan.leading) + 1)), 1)
        divisor = plan.vector
        if plan.quant.mx_weights:
            divisor = MX_SIDE // 2
            shape, strides = (plan.n, ["floordiv", "K", MX_SIDE], divisor), (*strides[:-1], divisor, 1)
        return (tensor("w", "input", plan.factors[1], (*plan.leading, *shape), strides, divisor),)


class Y(Operand):
    """y [M, N], or [M, N/2] after a gated activation."""

    name, order, epilogues = "y", 30, (FORWARD,)
    words = {
        "y": "The result: the activation of z, times row_scale. In a gradient through a layer, dX.",
    }

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.wide

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (rows("y", "output", plan.out_dtype, plan.width),)


class Offsets(Operand):
    """offsets int32 [E]."""

    name, order, epilogues = "offsets", 70, (FORWARD, BACKWARD, WGRAD)
    words = {
        "offsets": "End row of each group, cumulative, without a leading 0; rows from the last end on are spare.",
    }

    def present(self, plan: GemmPlan) -> bool:
        return plan.grouped

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (vector("offsets", plan.order_role, "i32", "E"),)


OPERANDS = (X(), W(), Y(), Offsets())
