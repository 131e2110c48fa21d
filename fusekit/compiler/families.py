"""Which module builds which operation. A family module has ``plan(spec) -> TracePlan`` and ``signature(spec)``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fusekit.errors import BuildError
from fusekit.spec import KernelSpec

if TYPE_CHECKING:
    from fusekit.compiler.hostfunction import TracePlan
    from fusekit.spec import Spec

FAMILIES = {
    "dense-gemm": "fusekit.compiler.gemm",
    "extern": "fusekit.compiler.extern",
    "grouped-gemm": "fusekit.compiler.gemm",
    "grouped-wgrad": "fusekit.compiler.wgrad",
    "moe-aux-loss": "fusekit.compiler.router",
    "moe-aux-loss-bwd": "fusekit.compiler.router",
    "moe-check": "fusekit.compiler.check",
    "moe-index": "fusekit.compiler.permutation",
    "moe-permute": "fusekit.compiler.permutation",
    "moe-unpermute": "fusekit.compiler.permutation",
    "moe-permute-bwd": "fusekit.compiler.permutation",
    "moe-unpermute-bwd": "fusekit.compiler.permutation",
    "router-topk": "fusekit.compiler.router",
    "router-topk-bwd": "fusekit.compiler.router",
    "router-aux-score": "fusekit.compiler.router",
    "router-aux-score-bwd": "fusekit.compiler.router",
}
BACKWARD = "fusekit.compiler.backward"  # of a GEMM whose activation is a derivative


def family(spec: Spec) -> str:
    """The dotted name of the module that builds `spec`; importing it imports the compiler."""
    if spec.op not in FAMILIES:
        raise BuildError(f"op {spec.op!r} has no kernels; it must be one of {', '.join(sorted(FAMILIES))}")
    derivative = isinstance(spec, KernelSpec) and spec.activation.backward
    return BACKWARD if derivative else FAMILIES[spec.op]


def plan(spec: Spec) -> TracePlan:
    """What to trace for `spec`. Imports the DSL."""
    result: TracePlan = import_module(family(spec)).plan(spec)
    return result
