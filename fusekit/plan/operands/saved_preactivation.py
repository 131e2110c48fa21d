"""z that a forward pass stored, and its gradient dz, which takes its place box by box."""

from __future__ import annotations

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, Argument, Operand, rows

Z, DZ = "preactivation", "dz"


class SavedPreactivation(Operand):
    """z; every consumer warp has some boxes of it, with a barrier each."""

    name, order, epilogues = "saved_preactivation", 41, (BACKWARD,)
    words = {Z: "z, as the forward pass stored it."}

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (rows(Z, "input", plan.dtype, plan.z_width),)

    def barriers(self, plan: GemmPlan) -> tuple[int, ...]:
        return (1,) * (plan.consumer_warps * plan.z_boxes)


class Dz(Operand):
    """The gradient of z, which takes its place box by box."""

    name, order, epilogues = DZ, 50, (BACKWARD,)
    words = {DZ: "The gradient of z, in the layout of z; may be the memory of z itself."}

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.wide

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (rows(DZ, "output", plan.dtype, plan.z_width, in_place_of=Z),)


OPERANDS = (SavedPreactivation(), Dz())
