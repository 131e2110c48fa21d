"""GEMMs with a backward epilogue: what `kernels.backward_sm90` is traced with, and the launch record in its place."""

from __future__ import annotations

from typing import Any

from fusekit.abi import (
    Argument,
    Dim,
    Expr,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    Parameter,
    PointerParameter,
    ScalarArgument,
    TensorArgument,
)
from fusekit.compiler.hopper import (
    BIG,
    COUNTER_BYTES,
    GLU_SCALARS,
    MOST_GROUPS,
    SUM_BYTES,
    VECTOR,
    box_columns,
    config,
    fake_arguments,
    gemm_tiles,
    grid,
    host_arguments,
    operand_maps,
    ragged_map,
    shared_bytes,
    weights,
)
from fusekit.compiler.plan import TracePlan
from fusekit.spec import KernelSpec

OPERANDS = (
    *("x", "w", "preactivation", "dz", "y", "offsets", "row_scale", *GLU_SCALARS),
    *("dprob", "dbias", "workspace", "scratch"),
)
Z_BOXES, GATED_UNIT, WARPS = 3, 32, 8  # as in kernels/backward_sm90.py
BLOCK = 8  # as in kernels/collect.py


def plan(spec: KernelSpec) -> TracePlan:
    """Trace plan of a GEMM whose activation is a derivative. Imports the DSL."""
    launch = record(spec)
    return TracePlan(_function(spec), fake_arguments(launch, OPERANDS), host_arguments(launch, OPERANDS), launch)


def record(spec: KernelSpec) -> LaunchRecord:
    """The launch record of `spec`, symbol and offsets still open."""
    grouped, gated, dynamic = spec.op == "grouped-gemm", spec.activation.gated, spec.schedule == "dynamic"
    sums = spec.dprob or spec.dbias
    n = "I" if gated else "N"
    divisor = 32 if spec.glu_layout == "interleaved-32" else VECTOR
    dims = [Dim("M", maximum=BIG), *([Dim("E", minimum=1, maximum=MOST_GROUPS)] if grouped else [])]
    dims += [Dim("K", VECTOR, VECTOR, BIG // 2), Dim(n, divisor, divisor, BIG // 2)]
    return LaunchRecord(
        arch=spec.arch,
        arguments=tuple(_arguments(spec, n)),
        dims=tuple(dims),
        parameters=tuple(_parameters(spec, n)),
        grid=(grid(spec, gemm_tiles(spec, n)), 1, 1),
        block=(spec.budget.threads, 1, 1),
        cluster=(spec.cluster[0] * spec.cluster[1], 1, 1),
        dynamic_shared=shared_bytes(spec, slot_bytes=16, barriers=_barriers(spec), sum_bytes=_sum_bytes(spec)),
        workspace=SUM_BYTES if sums else COUNTER_BYTES if dynamic else 0,
        workspace_zeroed=sums or dynamic,
        scratch=_scratch(spec, n) if sums else 0,
        skip_if_zero=() if spec.dbias else ("M",),
    )


def _barriers(spec: KernelSpec) -> int:
    """Of the boxes of z, and two for what each warpgroup leaves of sums: see kernels/backward_sm90.py."""
    return WARPS * Z_BOXES + (4 if spec.dprob or spec.dbias else 0)


def _piece(spec: KernelSpec) -> int:
    """Rows of a warpgroup's tile."""
    return spec.tile[0] if spec.mainloop == "pingpong" else spec.tile[0] // 2


def _sum_bytes(spec: KernelSpec) -> int:
    """Shared memory for what warpgroups leave of sums: see kernels/sums.py."""
    if not (spec.dprob or spec.dbias):
        return 0
    return 2 * 4 * (4 + (_piece(spec) if spec.dprob else 0))


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


def _parameters(spec: KernelSpec, n: str) -> list[Parameter]:
    grouped, gated = spec.op == "grouped-gemm", spec.activation.gated
    unit = GATED_UNIT if gated else box_columns(spec.tile[1], 64)
    concat = spec.glu_layout == "concat"
    columns: tuple[Expr, ...] = (n, 2) if concat else (["mul", 2, n],) if gated else (n,)
    box = unit if concat or not gated else 2 * unit
    # dbias is written without rows too, and a tensor map cannot be empty.
    parameters: list[Parameter] = operand_maps(spec, n, ["max", 1, "M"] if spec.dbias else "M")
    if spec.recompute:
        parameters.append(ragged_map("map_y", "y", spec.out_dtype, (n,), unit))
    depth = 2 if concat else 1
    parameters.append(ragged_map("map_preactivation", "preactivation", spec.dtype, columns, box, depth=depth))
    parameters.append(ragged_map("map_dz", "dz", spec.dtype, columns, box, depth=depth))
    if grouped:
        parameters.append(PointerParameter("offsets_pointer", "offsets"))
    if spec.row_scale:
        parameters.append(PointerParameter("row_scale_pointer", "row_scale"))
    if gated:
        parameters += [FloatParameter(f"{name}_value", name) for name in GLU_SCALARS]
    parameters += [PointerParameter(f"{name}_pointer", name) for name in ("dprob", "dbias") if getattr(spec, name)]
    if spec.schedule == "dynamic" or spec.dprob or spec.dbias:
        parameters.append(PointerParameter("counters", "workspace"))
    if spec.dprob or spec.dbias:
        parameters.append(PointerParameter("scratch", "scratch"))
    integers: list[tuple[str, Expr]] = [("groups", "E")] if grouped else []
    integers += [("rows", "M"), ("columns", n), ("depth", "K")]
    return parameters + [IntegerParameter(name, "i32", value) for name, value in integers]


def _function(spec: KernelSpec) -> Any:
    from fusekit.kernels.backward_sm90 import BackwardSm90

    return BackwardSm90(
        config(spec, z_layout=spec.glu_layout, recompute=spec.recompute, dprob=spec.dprob, dbias=spec.dbias)
    )
