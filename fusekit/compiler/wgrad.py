"""Weight gradients: what `kernels.wgrad_sm90` is traced with, and the launch record that replaces its host function."""

from __future__ import annotations

from typing import Any

from fusekit.abi import (
    Dim,
    Expr,
    IntegerParameter,
    LaunchRecord,
    Parameter,
    PointerParameter,
    TensorArgument,
    TensorMapParameter,
)
from fusekit.abi.arguments import DTYPE_BYTES
from fusekit.compiler.hopper import (
    BIG,
    BOX_ROWS,
    COUNTER_BYTES,
    L2_PROMOTION,
    MOST_GROUPS,
    SWIZZLES,
    VECTOR,
    box_columns,
    config,
    fake_arguments,
    grid,
    host_arguments,
    in_bytes,
    ragged_map,
    shared_bytes,
)
from fusekit.compiler.plan import TracePlan
from fusekit.spec import KernelSpec

OPERANDS = ("dy", "x", "dw", "offsets", "dbias", "workspace")


def plan(spec: KernelSpec) -> TracePlan:
    """Trace plan of a grouped weight gradient. Imports the DSL."""
    launch = record(spec)
    return TracePlan(_function(spec), fake_arguments(launch, OPERANDS), host_arguments(launch, OPERANDS), launch)


def record(spec: KernelSpec) -> LaunchRecord:
    """The launch record of `spec`, symbol and offsets still open."""

    def rows(name: str, columns: str) -> TensorArgument:
        return TensorArgument(name, "input", spec.dtype, ("M", columns), (f"{name}.stride0", 1), VECTOR)

    role = "inout" if spec.accumulate else "output"
    vector = 16 // DTYPE_BYTES[spec.out_dtype]
    dynamic = spec.schedule == "dynamic"
    sums = [TensorArgument("dbias", role, "f32", ("E", "N"), ("N", 1), alignment=4)] if spec.dbias else []
    return LaunchRecord(
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
        parameters=_parameters(spec),
        grid=(grid(spec, _tiles(spec)), 1, 1),
        block=(spec.budget.threads, 1, 1),
        cluster=(spec.cluster[0] * spec.cluster[1], 1, 1),
        dynamic_shared=shared_bytes(spec, slot_bytes=32),
        workspace=COUNTER_BYTES if dynamic else 0,
        workspace_zeroed=dynamic,
        skip_if_zero=("M",) if spec.accumulate else (),
    )


def _tiles(spec: KernelSpec) -> Expr:
    """Cluster tiles at most."""
    tile_m, tile_n = spec.tile[0] * spec.cluster[0], spec.tile[1] * spec.cluster[1]
    return ["mul", ["ceildiv", "N", tile_m], ["ceildiv", "K", tile_n], "E"]


def _parameters(spec: KernelSpec) -> tuple[Parameter, ...]:
    out = spec.out_dtype
    limit = spec.budget.epilogue_box // 2 if out == "f32" else spec.budget.epilogue_box
    box = box_columns(spec.tile[1], limit)
    parameters: list[Parameter] = [
        ragged_map("map_dy", "dy", spec.dtype, ("N",), 64, rows=64),
        ragged_map("map_x", "x", spec.dtype, ("K",), 64, rows=64),
        TensorMapParameter(
            "map_dw",
            "dw",
            dtype=out,
            dims=("K", "N", "E"),
            strides=(in_bytes("dw.stride1", out), in_bytes("dw.stride0", out)),
            box=(box, BOX_ROWS, 1),
            swizzle=SWIZZLES[box * DTYPE_BYTES[out]],
            l2_promotion=L2_PROMOTION,
        ),
        PointerParameter("offsets_pointer", "offsets"),
    ]
    if spec.dbias:
        parameters.append(PointerParameter("dbias_pointer", "dbias"))
    if spec.schedule == "dynamic":
        parameters.append(PointerParameter("counters", "workspace"))
    integers = (("groups", "E"), ("rows", "M"), ("columns", "K"), ("gradient_rows", "N"))
    return (*parameters, *(IntegerParameter(name, "i32", value) for name, value in integers))


def _function(spec: KernelSpec) -> Any:
    from fusekit.kernels.wgrad_sm90 import WgradSm90

    own = {"grouped": True, "b_major": "n", "wgrad": True, "accumulate": spec.accumulate, "dbias": spec.dbias}
    return WgradSm90(config(spec, **own))
