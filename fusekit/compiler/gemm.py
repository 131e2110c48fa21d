"""The GEMM family: what `kernels.gemm_sm90` is traced with, and the launch record that replaces its host function.

The record states in data what the kernel's host function computes: the four tensor maps, the integers and the grid. The
proof holds the two against each other, so a change on one side alone fails the build.
"""

from __future__ import annotations

from typing import Any

from fusekit.abi import (
    Argument,
    Constraint,
    Dim,
    Expr,
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    Parameter,
    PointerParameter,
    ScalarArgument,
    TensorArgument,
    TensorMapParameter,
)
from fusekit.compiler.plan import HostArgument, HostInteger, HostPointer, HostScalar, HostStream, HostTensor, TracePlan
from fusekit.spec import KernelSpec

ELEMENT = 2  # bytes of bf16 and fp16
VECTOR = 8  # elements in 16 bytes, the granule of TMA addresses and strides
BIG, LARGEST, WRAP = 2**30, 2**31 - 1, 2**34  # the clipping dims of an output map; see kernels/epilogue.py
COUNTER_BYTES = 8  # two int32 of the dynamic schedule
MOST_GROUPS = 2**16
L2_PROMOTION = "128B"  # what the DSL asks for
GLU_SCALARS = ("act_alpha", "act_limit", "act_up_offset")


def plan(spec: KernelSpec) -> TracePlan:
    """Trace plan of a dense or grouped GEMM. Imports the DSL."""
    return TracePlan(
        function=_function(spec),
        arguments=_fake_arguments(spec),
        host_arguments=tuple(_host_arguments(spec)),
        record=record(spec),
    )


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
        grid=(_grid(spec, n), 1, 1),
        block=(budget.threads, 1, 1),
        cluster=(spec.cluster[0] * spec.cluster[1], 1, 1),
        dynamic_shared=_shared_bytes(spec),
        constraints=tuple(_constraints(spec)),
        skip_if_zero=("M",),
        workspace=COUNTER_BYTES if spec.schedule == "dynamic" else 0,
        workspace_zeroed=spec.schedule == "dynamic",
    )


def _arguments(spec: KernelSpec, n: Expr) -> list[Argument]:
    grouped = spec.op == "grouped-gemm"
    leading: tuple[Expr, ...] = ("E",) if grouped else ()
    outer: tuple[Expr, ...] = ("w.stride0", "w.stride1") if grouped else ("w.stride0",)
    w_shape: tuple[Expr, ...] = (n, "K") if spec.b_major == "k" else ("K", n)
    width: Expr = "I" if spec.activation.gated else "N"

    def rows(name: str, role: str, dtype: str, columns: Expr) -> TensorArgument:
        return TensorArgument(name, role, dtype, ("M", columns), (f"{name}.stride0", 1), VECTOR)

    arguments: list[Argument] = [
        rows("x", "input", spec.dtype, "K"),
        TensorArgument("w", "input", spec.dtype, (*leading, *w_shape), (*outer, 1), VECTOR),
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
    tile_m, tile_n = spec.tile
    halves = spec.cluster[0] > 1 or spec.glu_layout == "concat"
    width: Expr = "I" if gated else "N"
    w_outer: tuple[Expr, ...] = ("w.stride1", "w.stride0") if grouped else ("w.stride0",)
    w_dims: tuple[Expr, Expr]
    if spec.b_major == "k":
        w_dims, w_box = ("K", n), (64, tile_n // 2 if halves else tile_n)
    else:
        w_dims, w_box = (n, "K"), (64, 64)
    parameters: list[Parameter] = [
        TensorMapParameter(
            "map_x", "x", dtype=spec.dtype, dims=("K", "M"), strides=(_bytes("x.stride0"),),
            box=(64, tile_m // spec.cluster[1]), swizzle="128B",
            l2_promotion=L2_PROMOTION,
        ),
        TensorMapParameter(
            "map_w", "w", dtype=spec.dtype, dims=(*w_dims, *(["E"] if grouped else [])),
            strides=tuple(_bytes(stride) for stride in w_outer), box=(*w_box, *([1] if grouped else [])),
            swizzle="128B", l2_promotion=L2_PROMOTION,
        ),
        _store_map("map_y", "y", spec.out_dtype, (width,), _box(tile_n // 2 if gated else tile_n, spec)),
    ]  # fmt: skip
    if spec.save_preactivation:
        split = spec.glu_layout == "concat"
        columns: tuple[Expr, ...] = ("I", 2) if split else (n,)
        box = _box(tile_n // 2 if split else tile_n, spec)
        parameters.append(_store_map("map_preactivation", "preactivation", spec.dtype, columns, box))
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


def _bytes(elements: Expr) -> Expr:
    return ["mul", ELEMENT, elements]


def _box(width: int, spec: KernelSpec) -> int:
    """Columns of an epilogue box; the kernel's `box_columns` says the same."""
    return next(columns for columns in (64, 32, 16) if columns <= spec.budget.epilogue_box and width % columns == 0)


def _store_map(name: str, argument: str, dtype: str, columns: tuple[Expr, ...], box: int) -> TensorMapParameter:
    """Map of a row-major output whose rows the kernel clips at a group's end."""
    ld = f"{argument}.stride0"
    half: tuple[Expr, ...] = (2,) if len(columns) == 2 else ()
    half_stride: tuple[Expr, ...] = (_bytes(columns[0]),) if len(columns) == 2 else ()
    return TensorMapParameter(
        name,
        argument,
        dtype=dtype,
        dims=(columns[0], BIG, *half, LARGEST, LARGEST),
        strides=(_bytes(ld), *half_stride, _bytes(["sub", WRAP, ld]), _bytes(ld)),
        box=(box, 16, *(1 for _ in half), 1, 1),
        swizzle={64: "128B", 32: "64B", 16: "32B"}[box],
        l2_promotion=L2_PROMOTION,
    )


def _grid(spec: KernelSpec, n: Expr) -> Expr:
    """CTAs: one cluster for each cluster tile there can be at most, or as many as the SMs less the margin hold."""
    tile_m, tile_n = spec.tile[0] * spec.cluster[0], spec.tile[1] * spec.cluster[1]
    size = spec.cluster[0] * spec.cluster[1]
    m_tiles: Expr = ["ceildiv", "M", tile_m]
    if spec.op == "grouped-gemm":
        m_tiles = ["add", m_tiles, "E"]  # every group may begin a tile of its own
    tiles: Expr = ["mul", ["ceildiv", n, tile_n], m_tiles]
    resident: Expr = ["sub", ["floordiv", "sm_count", size], "cluster_margin"]
    return ["mul", size, ["max", 1, ["min", resident, tiles]]]


def _constraints(spec: KernelSpec) -> list[Constraint]:
    if spec.b_major == "n" and spec.activation.gated and spec.glu_layout == "interleaved-32":
        return [Constraint(["mod", "I", 32], "I must be a multiple of 32: gate and up lie in blocks of 32 columns")]
    return []


def _shared_bytes(spec: KernelSpec) -> int:
    """Dynamic shared memory: the allocations of the kernel in order, each at its alignment."""
    tile_m, tile_n = spec.tile
    stages = spec.budget.stages
    ring = 2 if spec.schedule == "dynamic" else 4
    allocations = [
        (stages * tile_m * 64 * ELEMENT, 1024),
        (stages * tile_n * 64 * ELEMENT, 1024),
        (spec.budget.epilogue_bytes, 1024),
        (stages * 8, 8),
        (stages * 8, 8),
        (ring * 16, 16),
        (ring * 8, 8),
        (ring * 8, 8),
        *([(2 * tile_n * 4, 4)] if spec.bias else []),
    ]
    end = 0
    for size, alignment in allocations:
        end = -(-end // alignment) * alignment + size
    return end


def _function(spec: KernelSpec) -> Any:
    from fusekit.kernels.config import GemmConfig
    from fusekit.kernels.gemm_sm90 import GemmSm90

    kind, approximate = spec.activation.kind, spec.activation.approximate
    return GemmSm90(
        GemmConfig(
            grouped=spec.op == "grouped-gemm",
            dtype=spec.dtype,
            out_dtype=spec.out_dtype,
            b_major=spec.b_major,
            alpha=spec.alpha,
            bias=spec.bias,
            save_preactivation=spec.save_preactivation,
            activation=kind if approximate == "none" else f"{kind}:{approximate}",
            glu_layout=spec.glu_layout,
            row_scale=spec.row_scale,
            tile=spec.tile,
            cluster=spec.cluster,
            pingpong=spec.mainloop == "pingpong",
            stages=spec.budget.stages,
            epilogue_box=spec.budget.epilogue_box,
            dynamic=spec.schedule == "dynamic",
        )
    )


def _fake_arguments(spec: KernelSpec) -> tuple[Any, ...]:
    """One entry for each parameter of the kernel's host function; None where the spec has no such operand."""
    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    types = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "f32": cutlass.Float32, "i32": cutlass.Int32}
    launch = record(spec)
    divisors = {dim.name: dim.divisor for dim in launch.dims}
    tensors = {tensor.name: tensor for tensor in launch.tensors}
    scalars = {scalar.name for scalar in launch.scalars}

    def fake(name: str) -> Any:
        if name in scalars:
            return cutlass.Float32(1.0)
        if name not in tensors:
            return None
        tensor = tensors[name]
        shape = tuple(
            cute.sym_int(divisibility=divisors[extent] if isinstance(extent, str) else 2 * divisors["I"])
            for extent in tensor.shape
        )
        strides = tuple(
            1 if stride == 1 else cute.sym_int64(divisibility=VECTOR if tensor.reads_stride(index) else 1)
            for index, stride in enumerate(tensor.strides)
        )
        return make_fake_tensor(types[tensor.dtype], shape, strides, assumed_align=tensor.alignment)

    operands = ("x", "w", "y", "preactivation", "offsets", "bias", "row_scale", "alpha", *GLU_SCALARS)
    counters = None
    if launch.workspace:
        counters = make_fake_tensor(cutlass.Int32, (2,), (1,), assumed_align=8)
    return (*(fake(name) for name in operands), counters, cutlass.Int32(132), cutlass.Int32(0), CUstream(0))


def _host_arguments(spec: KernelSpec) -> list[HostArgument]:
    launch = record(spec)
    tensors = {tensor.name for tensor in launch.tensors}
    scalars = {scalar.name for scalar in launch.scalars}
    arguments: list[HostArgument] = []
    for name in ("x", "w", "y", "preactivation", "offsets", "bias", "row_scale", "alpha", *GLU_SCALARS):
        if name in tensors:
            arguments.append(HostTensor(name))
        elif name in scalars:
            arguments.append(HostScalar(name))
    if launch.workspace:
        arguments.append(HostPointer("workspace"))
    return [*arguments, HostInteger("sm_count"), HostInteger("cluster_margin"), HostStream()]
