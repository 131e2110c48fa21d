"""indices int32 [T, K]: the experts that few tokens chose, put into the order of rows inside the launch itself.

Every CTA does it, so that none waits for another; then offsets, index and inverse are outputs. In decoding this saves
the launch of moe-index.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.fields import Field
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import FORWARD, Argument, Broken, Constraint, Operand, tensor
from fusekit.plan.shared import Region

MOST = 64  # choices of a launch


class Choices(Operand):
    name, order, epilogues = "choices", 65, (FORWARD,)
    field = Field(
        "choices",
        "int",
        f"Experts of a token, K: the launch makes offsets, index and inverse itself, from indices [T, K]. T K is"
        f" {MOST} at most. 0: offsets and index are given.",
        default=0,
    )
    words = {
        "indices": "The experts that each token chose; outside [0, E): none.",
        "inverse": "Which row each choice has, -1 for none.",
    }

    def rules(self, spec: Any) -> Iterable[Broken]:
        value = spec.operands["choices"]
        if value > MOST:
            yield "choices", value, f"a launch has {MOST} choices at most"
        if not spec.grouped:
            yield "choices", value, f"{spec.op} has no groups; leave it out"
        elif spec.operands["gather"] != "x":
            yield "choices", value, 'rows are those of tokens; say gather = "x"'
        elif not spec.plan.swapped:
            yield "choices", value, "only tiles of 16 or 32 rows put choices in order; say tile = [16, 128]"

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        topk = plan.spec.operands["choices"]
        return (
            tensor("indices", "input", "i32", ("T", topk), (topk, 1), alignment=4),
            tensor("inverse", "output", "i32", ("T", topk), (topk, 1), alignment=4),
        )

    def constraints(self, plan: GemmPlan) -> tuple[Constraint, ...]:
        from fusekit.abi import Constraint

        topk = plan.spec.operands["choices"]
        most = MOST // topk
        return (
            Constraint(["floordiv", "T", most + 1], f"T is above {most}; a launch has {MOST} choices at most"),
            Constraint(
                ["floordiv", ["mul", topk, "T"], ["add", "M", 1]], f"M is less than {topk} T; each choice has a row"
            ),
        )  # fmt: skip

    def regions(self, plan: GemmPlan, stages: int) -> tuple[Region, ...]:
        return (Region("choices", 4 * MOST + 16, 16),)  # and the number of those that have an expert


OPERANDS = (Choices(),)
