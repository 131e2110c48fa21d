"""row_scale [M]: the router weight of each row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.fields import Field
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Broken, Operand, vector


class RowScale(Operand):
    name, order, epilogues = "row_scale", 90, (FORWARD, BACKWARD)
    field = Field(
        "row_scale",
        "bool",
        "Multiplies row m of y by row_scale[m]; not with a bias that no activation follows.",
        default=False,
    )
    words = {
        "row_scale": "Factor of each row of y, such as its router weight.",
        "backward.row_scale": "Factor of each row in the forward pass, such as its router weight.",
    }
    refused = {
        WGRAD: "{op} takes no row_scale: its rows are those of a weight, not of tokens; scale dy or x where they are "
        "made; leave it out",
    }

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        if spec.epilogue == FORWARD and spec.operands["bias"] and spec.activation.kind == "identity":
            # y = p (x w + b): dprob of the backward kernels lacks dy . b, and dbias is not weighted.
            rule = (
                "a bias that row_scale multiplies has no right gradient, and neither has row_scale; leave row_scale out"
                " and let moe-unpermute multiply: weighted = true"
            )
            yield "row_scale", True, rule

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return (vector("row_scale", "input", "f32", "M"),)


OPERANDS = (RowScale(),)
