"""GEMMs with a backward epilogue: what `kernels.backward_sm90` is traced with, and what its arguments are."""

from __future__ import annotations

from typing import Any

from fusekit.abi import Argument, Dim, Expr, ScalarArgument, TensorArgument
from fusekit.compiler.hopper import (
    BIG,
    COUNTER_BYTES,
    GLU_SCALARS,
    MOST_GROUPS,
    SUM_BYTES,
    VECTOR,
    config,
    fake_arguments,
    host_arguments,
    weights,
)
from fusekit.compiler.hostfunction import Signature, TracePlan
from fusekit.spec import KernelSpec

OPERANDS = (
    *("x", "w", "preactivation", "dz", "y", "offsets", "row_scale", *GLU_SCALARS),
    *("dprob", "dbias", "workspace", "scratch"),
)
BLOCK = 8  # as in kernels/collect.py


def plan(spec: KernelSpec) -> TracePlan:
    """Trace plan of a GEMM whose activation is a derivative. Imports the DSL."""
    made = signature(spec)
    return TracePlan(_function(spec), fake_arguments(made, OPERANDS), host_arguments(made, OPERANDS), made)


def signature(spec: KernelSpec) -> Signature:
    """What the callers of `spec` pass, and the memory that it needs."""
    grouped, gated, dynamic = spec.op == "grouped-gemm", spec.activation.gated, spec.schedule == "dynamic"
    sums = spec.dprob or spec.dbias
    n = "I" if gated else "N"
    divisor = 32 if spec.glu_layout == "interleaved-32" else VECTOR
    dims = [Dim("M", maximum=BIG), *([Dim("E", minimum=1, maximum=MOST_GROUPS)] if grouped else [])]
    dims += [Dim("K", VECTOR, VECTOR, BIG // 2), Dim(n, divisor, divisor, BIG // 2)]
    return Signature(
        arch=spec.arch,
        arguments=tuple(_arguments(spec, n)),
        dims=tuple(dims),
        workspace=SUM_BYTES if sums else COUNTER_BYTES if dynamic else 0,
        workspace_zeroed=sums or dynamic,
        scratch=_scratch(spec, n) if sums else 0,
        skip_if_zero=() if spec.dbias else ("M",),
    )


def _piece(spec: KernelSpec) -> int:
    """Rows of a warpgroup's tile."""
    return spec.tile[0] if spec.mainloop == "pingpong" else spec.tile[0] // 2


def _scratch(spec: KernelSpec, n: Expr) -> Expr:
    """Bytes of counters and partial sums: see kernels/collect.py."""
    groups: Expr = "E" if spec.op == "grouped-gemm" else 1
    columns: Expr = ["mul", 2, n] if spec.activation.gated else n
    tiles: Expr = ["ceildiv", n, spec.tile[1]]
    pieces: Expr = ["floordiv", "M", _piece(spec)]
    words: list[Expr] = [6]  # both kinds of parts begin at a multiple of four words
    if spec.dprob:
        words += [pieces, groups, 1, ["mul", tiles, "M"]]
    if spec.dbias:
        blocks: Expr = ["floordiv", ["add", pieces, groups], BLOCK]
        words += [["mul", tiles, ["add", blocks, groups, 1, groups]]]
        words += [["mul", ["add", pieces, groups, 1], columns]]
    return ["mul", 4, ["add", *words]]


def _arguments(spec: KernelSpec, n: str) -> list[Argument]:
    grouped, gated = spec.op == "grouped-gemm", spec.activation.gated
    z_width: Expr = ["mul", 2, n] if gated else n

    def rows(name: str, role: str, dtype: str, columns: Expr) -> TensorArgument:
        return TensorArgument(name, role, dtype, ("M", columns), (f"{name}.stride0", 1), VECTOR)

    arguments: list[Argument] = [
        rows("x", "input", spec.dtype, "K"),
        weights(spec, n),
        rows("preactivation", "input", spec.dtype, z_width),
        rows("dz", "output", spec.dtype, z_width),
    ]
    if spec.recompute:
        arguments.append(rows("y", "output", spec.out_dtype, n))
    if grouped:
        arguments.append(TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4))
    if spec.row_scale:
        arguments.append(TensorArgument("row_scale", "input", "f32", ("M",), (1,), alignment=4))
    if spec.dprob:
        arguments.append(TensorArgument("dprob", "output", "f32", ("M",), (1,), alignment=4))
    if spec.dbias and grouped:
        arguments.append(TensorArgument("dbias", "output", "f32", ("E", z_width), (z_width, 1), alignment=4))
    elif spec.dbias:
        arguments.append(TensorArgument("dbias", "output", "f32", (z_width,), (1,), alignment=4))
    if gated:
        arguments += [ScalarArgument(name, "f32") for name in GLU_SCALARS]
    return arguments


def _function(spec: KernelSpec) -> Any:
    from fusekit.kernels.backward_sm90 import BackwardSm90

    return BackwardSm90(
        config(spec, z_layout=spec.glu_layout, recompute=spec.recompute, dprob=spec.dprob, dbias=spec.dbias)
    )
