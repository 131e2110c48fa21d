"""A weight gradient is added to what its outputs hold: main gradients in float32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fusekit.plan.fields import Field
from fusekit.plan.operands.base import BACKWARD, FORWARD, WGRAD, Broken, Operand

ONLY_WGRAD = "only a weight gradient adds to what is there, not {op}; leave it out"


class Accumulate(Operand):
    """It has no argument: dw and dbias are read as well as written."""

    name, order, epilogues = "accumulate", 31, (WGRAD,)
    on_device = False
    field = Field("accumulate", "bool", "Weight gradients in f32: adds to what dw and dbias hold.", default=False)
    refused = {FORWARD: ONLY_WGRAD, BACKWARD: ONLY_WGRAD}

    def rules(self, spec: Any) -> Iterable[Broken]:
        yield from super().rules(spec)
        if spec.epilogue == WGRAD and spec.out_dtype != "f32":
            rule = f'main gradients are float32, and out_dtype is "{spec.out_dtype}"; say out_dtype = "f32"'
            yield "accumulate", True, rule


OPERANDS = (Accumulate(),)
