"""Which module builds which operation. A family module has one public function, ``plan(spec) -> TracePlan``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fusekit.errors import BuildError

if TYPE_CHECKING:
    from fusekit.compiler.plan import TracePlan
    from fusekit.spec import KernelSpec

FAMILIES = {
    "dense-gemm": "fusekit.compiler.gemm",
    "grouped-gemm": "fusekit.compiler.gemm",
    "grouped-wgrad": "fusekit.compiler.wgrad",
}


def family(op: str) -> str:
    """The dotted name of the module that builds `op`; importing it imports the compiler."""
    try:
        return FAMILIES[op]
    except KeyError:
        raise BuildError(f"op {op!r} has no kernels; it must be one of {', '.join(sorted(FAMILIES))}") from None


def plan(spec: KernelSpec) -> TracePlan:
    """What to trace for `spec`. Imports the DSL."""
    result: TracePlan = import_module(family(spec.op)).plan(spec)
    return result
