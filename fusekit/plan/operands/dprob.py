"""dprob [M], the gradient of row_scale: each row's sum of da * y, before da is scaled.

Each tile leaves the sums over its columns in scratch memory, [tiles along N, M]. A second launch adds them up in the
order of the columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.fields import Field
from fusekit.plan.gemm import VECTOR_BYTES, GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Broken, Expr, Operand, vector
from fusekit.plan.operands.recompute import ONLY_BACKWARD

VECTOR = VECTOR_BYTES // 4  # a part begins at a multiple of so many numbers


class Dprob(Operand):
    name, order, epilogues = "dprob", 110, (BACKWARD,)
    field = Field(
        "dprob", "bool", "Backward activations with row_scale: also stores its gradient dprob[M].", default=False
    )
    words = {"dprob": "The gradient of row_scale."}
    refused = {FORWARD: ONLY_BACKWARD, WGRAD: ONLY_BACKWARD}

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        if spec.epilogue == BACKWARD and not spec.operands["row_scale"]:
            yield "dprob", True, "it is the gradient of row_scale, which is false; say row_scale = true"

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (vector("dprob", "output", "f32", "M"),)

    def scratch(self, plan: GemmPlan) -> tuple[Expr, ...]:
        return (["mul", ["ceildiv", plan.n, plan.tile[1]], VECTOR, ["ceildiv", "M", VECTOR]],)


OPERANDS = (Dprob(),)
