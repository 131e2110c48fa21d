"""arrivals: the header and flags of a rank's window, where the gathered rows of x come from other ranks meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.exchange import CHUNK, HEADER
from fusekit.plan.fields import Field
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Argument, Broken, Operand, tensor


class Arrivals(Operand):
    name, order, epilogues = "arrivals", 145, (FORWARD, BACKWARD)
    local_rows_first = True
    field = Field(
        "awaits",
        "bool",
        "The gathered rows of x come from other ranks while the kernel runs: it waits for each, and begins with those"
        " of its own rank.",
        default=False,
    )
    words = {
        "arrivals": "The window whose rows x is, from its first byte on: moe-dispatch tells there what has come.",
    }
    refused = {WGRAD: "{op} reads all rows in turn; launch it when they have come; leave it out"}

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        if spec.epilogue != WGRAD and not spec.grouped:
            yield "awaits", True, "the rows that come are those of experts; leave it out, or take grouped-gemm"
        elif spec.epilogue != WGRAD and spec.operands["gather"] != "x":
            yield "awaits", True, 'rows that come are chosen by an index; say gather = "x", or leave it out'

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        flags = ("add", HEADER // 4, ("ceildiv", "T", CHUNK))
        return (tensor("arrivals", "inout", "i32", (flags,), (1,), alignment=16),)


OPERANDS = (Arrivals(),)
