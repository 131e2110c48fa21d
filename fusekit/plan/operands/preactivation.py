"""z, the input of the activation, stored by a forward epilogue."""

from __future__ import annotations

from fusekit.plan.fields import Field
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Operand, rows


class Preactivation(Operand):
    name, order, epilogues = "preactivation", 40, (FORWARD,)
    field = Field("save_preactivation", "bool", "Also stores z[M, N], the activation's input.", default=False)
    words = {"preactivation": "z, the activation's input, which the backward pass reads; N columns."}
    refused = {
        BACKWARD: "{kind} takes no save_preactivation: it reads z and stores dz; leave it out",
        WGRAD: "{op} takes no save_preactivation: it has no activation whose input could be stored; leave it out",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (rows("preactivation", "output", plan.dtype, plan.z_width),)


OPERANDS = (Preactivation(),)
