"""Amax of each group of y or dz, next to it: scales of NVFP4 and of tensors are made from it.

They are those of what is stored, bf16; a NaN does not count. With `rht_amax` also those after a rotation of 16 tokens
of a column, counted from the group's first row; see fusekit/plan/quantise.py. Of dz, gates and ups have one each. A
launch before the kernel's sets them to 0.
"""

from __future__ import annotations

from typing import Any

from fusekit.plan.gemm import GemmPlan
from fusekit.plan.operands.base import BACKWARD, FORWARD, Argument, Operand, by_group, vector
from fusekit.plan.operands.fp8_output import Quantised


class Amax(Quantised):
    def asked(self, spec: Any) -> bool:
        return bool(spec.quant.largest)

    def present(self, plan: GemmPlan) -> bool:
        return plan.quant.largest


class YAmax(Amax):
    name, order, epilogues = "y_amax", 35, (FORWARD,)
    words = {
        "y_amax": "The largest abs(y) of each group; NaN does not count.",
        "y_rht_amax": "The same of y after the rotation of 16 tokens, rounded to bf16.",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return tuple(vector(name, "output", "f32", "E" if plan.grouped else 1) for name in names("y", plan))


class DzAmax(Amax):
    name, order, epilogues = "dz_amax", 55, (BACKWARD,)
    blocks_in_turn = True
    words = {
        "dz_amax": "The largest abs(dz) of each group, of gates and of ups where the activation is gated.",
        "dz_rht_amax": "The same of dz after the rotation of 16 tokens, rounded to bf16.",
    }

    def arguments(self, plan: GemmPlan) -> tuple[Argument, ...]:
        return tuple(by_group(name, "output", "f32", plan, plan.sides) for name in names("dz", plan))


def names(result: str, plan: GemmPlan) -> tuple[str, ...]:
    """Names of the operand's arguments."""
    return f"{result}_amax", *([f"{result}_rht_amax"] if plan.quant.rht_amax else [])


OPERANDS: tuple[Operand, ...] = (YAmax(), DzAmax())
