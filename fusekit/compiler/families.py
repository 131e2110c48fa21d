"""Which module builds which operation. A family module has ``plan(spec) -> TracePlan`` and ``signature(spec)``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fusekit.errors import BuildError
from fusekit.plan.operations import OPERATIONS
from fusekit.spec import KernelSpec

if TYPE_CHECKING:
    from fusekit.compiler.hostfunction import TracePlan
    from fusekit.spec import Spec


def family(spec: Spec) -> str:
    """The dotted name of the module that builds `spec`; importing it imports the compiler."""
    if spec.op in OPERATIONS:
        return OPERATIONS[spec.op].planner
    from fusekit.spec.family import outside

    found = outside(spec.op)
    if found is None:
        raise BuildError(f"op {spec.op!r} has no kernels; it must be one of {', '.join(sorted(OPERATIONS))}")
    return found.planner


def modules(spec: Spec) -> tuple[str, ...]:
    """What else a key follows: the modules of a GEMM's plan, or of the operation's kernel."""
    if isinstance(spec, KernelSpec):
        return spec.plan.modules
    kernel = OPERATIONS[spec.op].kernel if spec.op in OPERATIONS else ""
    return (kernel.partition(":")[0],) if kernel else ()


def plan(spec: Spec) -> TracePlan:
    """What to trace for `spec`. Imports the DSL."""
    result: TracePlan = import_module(family(spec)).plan(spec)
    return result
