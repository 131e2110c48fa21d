"""The activation's run-time scalars: slope of the gate's sigmoid, clamp limit (inf: none), offset of up."""

from __future__ import annotations

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, Argument, Operand, scalar

SCALARS = ("act_alpha", "act_limit", "act_up_offset")


class Activation(Operand):
    """The scalars of gated activations; every kernel with an activation has the device half."""

    name, order, parameter, epilogues = "activation", 130, 105, (FORWARD, BACKWARD)
    words = {
        "act_alpha": "alpha of the activation; left out: the spec's.",
        "act_limit": "limit of the activation, infinity for no clamp; left out: the spec's.",
        "act_up_offset": "up_offset of the activation; left out: the spec's.",
    }

    def present(self, plan: GemmPlan) -> bool:
        return plan.kind.gated

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return tuple(scalar(name) for name in SCALARS)


OPERANDS = (Activation(),)
