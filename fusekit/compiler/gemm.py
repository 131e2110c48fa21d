"""The GEMM family: what `kernels.gemm_sm90` is traced with, and the launch record that replaces its host function.

The record states in data what the kernel's host function computes: the four tensor maps, the integers and the grid. The
proof holds the two against each other, so a change on one side alone fails the build.
"""

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
    ELEMENT,
    GLU_SCALARS,
    MOST_GROUPS,
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

OPERANDS = ("x", "w", "y", "preactivation", "offsets", "bias", "row_scale", "alpha", *GLU_SCALARS, "workspace")


def plan(spec: KernelSpec) -> TracePlan:
    """Trace plan of a dense or grouped GEMM. Imports the DSL."""
    launch = record(spec)
    return TracePlan(_function(spec), fake_arguments(launch, OPERANDS), host_arguments(launch, OPERANDS), launch)


def record(spec: KernelSpec) -> LaunchRecord:
    """The launch record of `spec`, symbol and offsets still open."""
    gated = spec.activation.gated
    n: Expr = ["mul", 2, "I"] if gated else "N"
    grouped = spec.op == "grouped-gemm"
    widths = {"I" if gated else "N": 32 if spec.glu_layout == "interleaved-32" else VECTOR}
    dims = [Dim("M", maximum=BIG), *([Dim("E", minimum=1, maximum=MOST_GROUPS)] if grouped else [])]
    dims += [Dim(name, divisor, divisor, BIG // 2) for name, divisor in {"K": VECTOR, **widths}.items()]
    budget = spec.budget
    return LaunchRecord(
        arch=spec.arch,
        arguments=tuple(_arguments(spec, n)),
        dims=tuple(dims),
        parameters=tuple(_parameters(spec, n)),
        grid=(grid(spec, gemm_tiles(spec, n)), 1, 1),
        block=(budget.threads, 1, 1),
        cluster=(spec.cluster[0] * spec.cluster[1], 1, 1),
        dynamic_shared=shared_bytes(spec, slot_bytes=16),
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


def _parameters(spec: KernelSpec, n: Expr) -> list[Parameter]:
    grouped, gated = spec.op == "grouped-gemm", spec.activation.gated
    tile_n = spec.tile[1]
    limit = spec.budget.epilogue_box
    width: Expr = "I" if gated else "N"
    parameters = operand_maps(spec, n)
    parameters.append(
        ragged_map("map_y", "y", spec.out_dtype, (width,), box_columns(tile_n // 2 if gated else tile_n, limit))
    )
    if spec.save_preactivation:
        split = spec.glu_layout == "concat"
        columns: tuple[Expr, ...] = ("I", 2) if split else (n,)
        box = box_columns(tile_n // 2 if split else tile_n, limit)
        parameters.append(ragged_map("map_preactivation", "preactivation", spec.dtype, columns, box))
    if grouped:
        parameters.append(PointerParameter("offsets_pointer", "offsets"))
    if spec.bias:
        parameters.append(PointerParameter("bias_pointer", "bias"))
    if spec.row_scale:
        parameters.append(PointerParameter("row_scale_pointer", "row_scale"))
    if spec.alpha == "group":
        parameters.append(PointerParameter("alpha_pointer", "alpha"))
    elif spec.alpha == "scalar":
        parameters.append(FloatParameter("alpha_value", "alpha"))
    if gated:
        parameters += [FloatParameter(f"{name}_value", name) for name in GLU_SCALARS]
    if spec.schedule == "dynamic":
        parameters.append(PointerParameter("counters", "workspace"))
    integers: list[tuple[str, Expr]] = [("groups", "E")] if grouped else []
    integers += [("rows", "M"), ("columns", n), ("depth", "K")]
    parameters += [IntegerParameter(name, "i32", value) for name, value in integers]
    return parameters


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
