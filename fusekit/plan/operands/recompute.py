"""y once more, from z: what the second weight gradient takes as x, so that the forward pass need not keep it."""

from __future__ import annotations

from fusekit.plan.fields import Field
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Operand, rows

ONLY_BACKWARD = 'only a backward activation such as "dswiglu" has it, not {kind}; leave it out'


class Recompute(Operand):
    name, order, parameter, epilogues = "recompute", 60, 30, (BACKWARD,)
    field = Field(
        "recompute",
        "bool",
        "Backward activations: also stores y, the activation of z, times row_scale.",
        default=False,
    )
    words = {"y": "The activation of z once more, times row_scale: what the second weight gradient takes as x."}
    refused = {FORWARD: ONLY_BACKWARD, WGRAD: ONLY_BACKWARD}

    def present(self, plan: GemmPlan) -> bool:
        return super().present(plan) and (plan.quant.wide or not plan.turning)

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (rows("y", "output", plan.out_dtype, plan.width),)


OPERANDS = (Recompute(),)
