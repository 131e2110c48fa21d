"""The rows of a dense weight gradient in parts, for one with few tiles: each part's sums are those of CTAs of its own.

The float32 sums go to scratch memory, part by part: dw [N, K] and, where it is asked for, dbias [N]. A second launch
adds the parts up in the order of their rows. How many there are follows from the problem alone, so every variant gives
the same bits of dw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fusekit.plan.arch import DEFAULT, Architecture
from fusekit.plan.fields import Field
from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Broken, Expr, Operand

# A part has so many rows at least, and there are at most as many parts as give each multiprocessor one tile.
ROWS, TILE = 512, (128, 192)
ONLY_DENSE = "only dense-wgrad takes its rows in parts, not {op}; leave it out"
TILES: Expr = ["mul", ["ceildiv", "N", TILE[0]], ["ceildiv", "K", TILE[1]]]


class Split(Operand):
    """It has no argument of its own: the scratch memory is the launcher's."""

    name, order, epilogues = "split", 32, (WGRAD,)
    in_parts = True
    field = Field(
        "split",
        "bool",
        "dense-wgrad with few tiles: takes the rows in parts at once, and adds up their sums in a fixed order.",
        default=False,
    )
    refused = {FORWARD: ONLY_DENSE, BACKWARD: ONLY_DENSE}

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        if spec.epilogue == WGRAD and spec.grouped:
            yield "split", True, ONLY_DENSE.format(op=spec.op)

    def scratch(self, plan: GemmPlan) -> tuple[Expr, ...]:
        return ["mul", count(plan.arch), "N", "K"], ["mul", count(plan.arch), "N"]


def count(arch: Architecture) -> Expr:
    """How many parts there are."""
    return ["max", 1, ["min", ["floordiv", arch.sms, TILES], ["ceildiv", "M", ROWS]]]


def parts(problem: Mapping[str, int], arch: Architecture = DEFAULT) -> int:
    """In how many parts the rows of a problem M, N, K are taken."""
    from fusekit.abi import evaluate

    return evaluate(count(arch), problem)


OPERANDS = (Split(),)
