"""Weight gradients: what `kernels.wgrad_sm90` is traced with, and what its arguments are."""

from __future__ import annotations

from typing import Any

from fusekit.abi import Dim, TensorArgument
from fusekit.compiler.hopper import BIG, COUNTER_BYTES, MOST_GROUPS, VECTOR, config, fake_arguments, host_arguments
from fusekit.compiler.hostfunction import Signature, TracePlan
from fusekit.dtypes import DTYPES
from fusekit.spec import KernelSpec

OPERANDS = ("dy", "x", "dw", "offsets", "dbias", "workspace")


def plan(spec: KernelSpec) -> TracePlan:
    """Trace plan of a grouped weight gradient. Imports the DSL."""
    made = signature(spec)
    return TracePlan(_function(spec), fake_arguments(made, OPERANDS), host_arguments(made, OPERANDS), made)


def signature(spec: KernelSpec) -> Signature:
    """What the callers of `spec` pass, and the memory that it needs."""

    def rows(name: str, columns: str) -> TensorArgument:
        return TensorArgument(name, "input", spec.dtype, ("M", columns), (f"{name}.stride0", 1), VECTOR)

    role = "inout" if spec.accumulate else "output"
    vector = 16 // DTYPES[spec.out_dtype].bytes
    dynamic = spec.schedule == "dynamic"
    sums = [TensorArgument("dbias", role, "f32", ("E", "N"), ("N", 1), alignment=4)] if spec.dbias else []
    return Signature(
        arch=spec.arch,
        arguments=(
            rows("dy", "N"),
            rows("x", "K"),
            TensorArgument("dw", role, spec.out_dtype, ("E", "N", "K"), ("dw.stride0", "dw.stride1", 1), vector),
            TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4),
            *sums,
        ),
        dims=(
            Dim("M", maximum=BIG),
            Dim("E", minimum=1, maximum=MOST_GROUPS),
            *(Dim(name, VECTOR, VECTOR, BIG // 2) for name in ("N", "K")),
        ),
        workspace=COUNTER_BYTES if dynamic else 0,
        workspace_zeroed=dynamic,
        skip_if_zero=("M",) if spec.accumulate else (),
    )


def _function(spec: KernelSpec) -> Any:
    from fusekit.kernels.wgrad_sm90 import WgradSm90

    own = {"grouped": True, "b_major": "n", "wgrad": True, "accumulate": spec.accumulate, "dbias": spec.dbias}
    return WgradSm90(config(spec, **own))
