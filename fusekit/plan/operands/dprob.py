"""dprob [M], the gradient of row_scale: each row's sum of da * y, before da is scaled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.keys import Key
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Broken, Expr, vector
from fusekit.plan.operands.recompute import ONLY_BACKWARD
from fusekit.plan.operands.sums import Summed, groups, pieces, tiles


class Dprob(Summed):
    name, order, warp = "dprob", 110, 3
    key = Key("dprob", "bool", "Backward activations with row_scale: also stores its gradient dprob[M].", default=False)
    words = {"dprob": "The gradient of row_scale."}
    refused = {FORWARD: ONLY_BACKWARD, WGRAD: ONLY_BACKWARD}

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        if spec.epilogue == BACKWARD and not spec.row_scale:
            yield "dprob", True, "it is the gradient of row_scale, which is false; say row_scale = true"

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (vector("dprob", "output", "f32", "M"),)

    def box_words(self, plan: GemmPlan) -> int:
        return plan.warpgroup_rows

    def scratch(self, plan: GemmPlan) -> tuple[Expr, ...]:
        return pieces(plan), groups(plan), 1, ["mul", tiles(plan), "M"]


OPERANDS = (Dprob(),)
