"""bias [E, N]: added to every row of a group, in two rows of float32 in shared memory, one a consumer warpgroup."""

from __future__ import annotations

from fusekit.dtypes import DTYPES
from fusekit.plan.fields import Field
from fusekit.plan.gemm import COLUMNS, GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Operand, by_group
from fusekit.plan.shared import Region


class Bias(Operand):
    name, order, epilogues = "bias", 80, (FORWARD,)
    named_barriers = (COLUMNS,)
    field = Field("bias", "bool", "Adds bias[E, N].", default=False)
    words = {"bias": "Added to every row of a group before the activation."}
    refused = {
        BACKWARD: "{kind} takes no bias: the bias took part in z, which the forward pass saved; its gradient is dbias; "
        "leave it out",
        WGRAD: "{op} takes no bias: it has no epilogue: dw is the plain sum; leave it out",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (by_group("bias", "input", plan.dtype, plan, plan.n, DTYPES[plan.dtype].bytes),)

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        return (Region("bias", plan.arch.consumer_warpgroups * plan.tile[1] * 4, 4),)


OPERANDS = (Bias(),)
