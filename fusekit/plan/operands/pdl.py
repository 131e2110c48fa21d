"""Programmatic dependent launch: the launch begins while the one before it in the stream still runs."""

from __future__ import annotations

from fusekit.plan.fields import Field
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Operand

ONLY_FORWARD = "only a forward epilogue begins early; leave it out"
PDL = Field(
    "pdl",
    "bool",
    "Programmatic dependent launch: begins while the launch before it in the stream still runs, and waits for that"
    " before it reads or writes memory. For chains of short launches.",
    default=False,
)


class Pdl(Operand):
    name, order, epilogues = "pdl", 66, (FORWARD,)
    begins_early = True
    field = PDL
    refused = {BACKWARD: ONLY_FORWARD, WGRAD: ONLY_FORWARD}


OPERANDS = (Pdl(),)
