"""The GEMM family: what `kernels.gemm_sm90` is traced with, and what its arguments are."""

from __future__ import annotations

from typing import Any

from fusekit.abi import Argument, Dim, Expr, ScalarArgument, TensorArgument
from fusekit.compiler.hopper import (
    BIG,
    COUNTER_BYTES,
    ELEMENT,
    GLU_SCALARS,
    MOST_GROUPS,
    VECTOR,
    config,
    fake_arguments,
    host_arguments,
    weights,
)
from fusekit.compiler.hostfunction import Signature, TracePlan
from fusekit.spec import KernelSpec

OPERANDS = ("x", "w", "y", "preactivation", "offsets", "bias", "row_scale", "alpha", *GLU_SCALARS, "workspace")


def plan(spec: KernelSpec) -> TracePlan:
    """Trace plan of a dense or grouped GEMM. Imports the DSL."""
    made = signature(spec)
    return TracePlan(_function(spec), fake_arguments(made, OPERANDS), host_arguments(made, OPERANDS), made)


def signature(spec: KernelSpec) -> Signature:
    """What the callers of `spec` pass, and the memory that it needs."""
    gated = spec.activation.gated
    n: Expr = ["mul", 2, "I"] if gated else "N"
    grouped = spec.op == "grouped-gemm"
    widths = {"I" if gated else "N": 32 if spec.glu_layout == "interleaved-32" else VECTOR}
    dims = [Dim("M", maximum=BIG), *([Dim("E", minimum=1, maximum=MOST_GROUPS)] if grouped else [])]
    dims += [Dim(name, divisor, divisor, BIG // 2) for name, divisor in {"K": VECTOR, **widths}.items()]
    return Signature(
        arch=spec.arch,
        arguments=tuple(_arguments(spec, n)),
        dims=tuple(dims),
        skip_if_zero=("M",),
        workspace=COUNTER_BYTES if spec.schedule == "dynamic" else 0,
        workspace_zeroed=spec.schedule == "dynamic",
    )


def _arguments(spec: KernelSpec, n: Expr) -> list[Argument]:
    grouped = spec.op == "grouped-gemm"
    leading: tuple[Expr, ...] = ("E",) if grouped else ()
    width: Expr = "I" if spec.activation.gated else "N"

    def rows(name: str, role: str, dtype: str, columns: Expr) -> TensorArgument:
        return TensorArgument(name, role, dtype, ("M", columns), (f"{name}.stride0", 1), VECTOR)

    arguments: list[Argument] = [
        rows("x", "input", spec.dtype, "K"),
        weights(spec, n),
        rows("y", "output", spec.out_dtype, width),
    ]
    if spec.save_preactivation:
        arguments.append(rows("preactivation", "output", spec.dtype, n))
    if grouped:
        arguments.append(TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4))
    if spec.bias:
        strides: tuple[Expr, ...] = (n, 1) if grouped else (1,)
        arguments.append(TensorArgument("bias", "input", spec.dtype, (*leading, n), strides, alignment=ELEMENT))
    if spec.row_scale:
        arguments.append(TensorArgument("row_scale", "input", "f32", ("M",), (1,), alignment=4))
    if spec.alpha == "group":
        arguments.append(TensorArgument("alpha", "input", "f32", ("E",), (1,), alignment=4))
    elif spec.alpha == "scalar":
        arguments.append(ScalarArgument("alpha", "f32"))
    if spec.activation.gated:
        arguments += [ScalarArgument(name, "f32") for name in GLU_SCALARS]
    return arguments


def _function(spec: KernelSpec) -> Any:
    from fusekit.kernels.gemm_sm90 import GemmSm90

    return GemmSm90(
        config(
            spec,
            alpha=spec.alpha,
            bias=spec.bias,
            save_preactivation=spec.save_preactivation,
            glu_layout=spec.glu_layout,
        )
    )
