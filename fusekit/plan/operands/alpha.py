"""alpha: the accumulators times a float32 number, or times alpha[e]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.fields import Field
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Broken, Operand, scalar, vector


class Alpha(Operand):
    name, order, epilogues = "alpha", 100, (FORWARD,)
    field = Field("alpha", "choice", "float32 accumulator scale.", choices=("none", "scalar", "group"), default="none")
    words = {"alpha": "Factor of the product before the bias: one number, or one for each group."}
    refused = {
        BACKWARD: "{kind} takes no alpha: da is the plain product; leave it out",
        WGRAD: "{op} takes no alpha: it has no epilogue: dw is the plain sum; leave it out",
    }

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        if spec.operands["alpha"] == "group" and spec.op == "dense-gemm":
            rule = 'dense-gemm has no groups to scale apart; say "scalar", or op = "grouped-gemm"'
            yield "alpha", spec.operands["alpha"], rule

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        if plan.spec.operands["alpha"] == "group":
            return (vector("alpha", "input", "f32", "E"),)
        return (scalar("alpha"),)


OPERANDS = (Alpha(),)
