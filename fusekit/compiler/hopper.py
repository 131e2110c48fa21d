"""What the Hopper families share: tensor maps, grid, shared memory of a record; the fake arguments of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusekit.abi import Expr, LaunchRecord, Parameter, TensorArgument, TensorMapParameter
from fusekit.abi.arguments import DTYPE_BYTES
from fusekit.compiler.plan import HostArgument, HostInteger, HostPointer, HostScalar, HostStream, HostTensor
from fusekit.spec import KernelSpec

ELEMENT = 2  # bytes of bf16 and fp16
VECTOR = 8  # elements in 16 bytes, the granule of TMA addresses and strides
BIG, LARGEST, WRAP = 2**30, 2**31 - 1, 2**34  # the clipping dims of a ragged map; see kernels/epilogue.py
MOST_GROUPS = 2**16
COUNTER_BYTES = 8  # two int32 of the dynamic schedule
SUM_BYTES = 20  # the same, and three int32 of the sums of gradients
L2_PROMOTION = "128B"  # what the DSL asks for
BOX_ROWS = 16  # of an epilogue box: a warp's rows
GLU_SCALARS = ("act_alpha", "act_limit", "act_up_offset")
SWIZZLES = {128: "128B", 64: "64B", 32: "32B"}


def in_bytes(elements: Expr, dtype: str = "bf16") -> Expr:
    """An extent or stride in bytes."""
    return ["mul", DTYPE_BYTES[dtype], elements]


def box_columns(width: int, limit: int) -> int:
    """Columns of an epilogue box; the kernels' `box_columns` says the same."""
    return next(columns for columns in (64, 32, 16) if columns <= limit and width % columns == 0)


def ragged_map(
    name: str, argument: str, dtype: str, columns: tuple[Expr, ...], box: int, rows: int = BOX_ROWS, depth: int = 1
) -> TensorMapParameter:
    """Map of a row-major tensor whose rows the kernel clips at a group's end; two `columns` are (half, 2).

    depth: halves in a box.
    """
    ld = f"{argument}.stride0"
    half: tuple[Expr, ...] = (2,) if len(columns) == 2 else ()
    half_stride: tuple[Expr, ...] = (in_bytes(columns[0], dtype),) if len(columns) == 2 else ()
    return TensorMapParameter(
        name,
        argument,
        dtype=dtype,
        dims=(columns[0], BIG, *half, LARGEST, LARGEST),
        strides=(in_bytes(ld, dtype), *half_stride, in_bytes(["sub", WRAP, ld], dtype), in_bytes(ld, dtype)),
        box=(box, rows, *(depth for _ in half), 1, 1),
        swizzle=SWIZZLES[box * DTYPE_BYTES[dtype]],
        l2_promotion=L2_PROMOTION,
    )


def weights(spec: KernelSpec, n: Expr) -> TensorArgument:
    """The argument w, [E, N, K] or [E, K, N]; dense without E."""
    shape: tuple[Expr, ...] = (n, "K") if spec.b_major == "k" else ("K", n)
    if spec.op == "grouped-gemm":
        return TensorArgument("w", "input", spec.dtype, ("E", *shape), ("w.stride0", "w.stride1", 1), VECTOR)
    return TensorArgument("w", "input", spec.dtype, shape, ("w.stride0", 1), VECTOR)


def operand_maps(spec: KernelSpec, n: Expr, rows: Expr = "M") -> list[Parameter]:
    """The maps of x, of `rows` rows, and of w."""
    grouped = spec.op == "grouped-gemm"
    tile_m, tile_n = spec.tile
    gated_product = spec.glu_layout == "concat" and not spec.activation.backward
    pair = spec.cluster[0] * spec.cluster[1]
    halves = pair > 1 or gated_product
    outer = ("w.stride1", "w.stride0") if grouped else ("w.stride0",)
    dims: tuple[Expr, ...] = ("K", n) if spec.b_major == "k" else (n, "K")
    w_box = (64, tile_n // 2 if halves else tile_n) if spec.b_major == "k" else (64, 64)
    return [
        TensorMapParameter(
            "map_x", "x", dtype=spec.dtype, dims=("K", rows), strides=(in_bytes("x.stride0"),),
            box=(64, tile_m // pair), swizzle="128B", l2_promotion=L2_PROMOTION,
        ),
        TensorMapParameter(
            "map_w", "w", dtype=spec.dtype, dims=(*dims, *(["E"] if grouped else [])),
            strides=tuple(in_bytes(stride) for stride in outer), box=(*w_box, *([1] if grouped else [])),
            swizzle="128B", l2_promotion=L2_PROMOTION,
        ),
    ]  # fmt: skip


def gemm_tiles(spec: KernelSpec, n: Expr) -> Expr:
    """Cluster tiles of a GEMM at most."""
    tile_m, tile_n = spec.tile[0] * spec.cluster[0], spec.tile[1] * spec.cluster[1]
    m_tiles: Expr = ["ceildiv", "M", tile_m]
    if spec.op == "grouped-gemm":
        m_tiles = ["add", m_tiles, "E"]  # every group may begin a tile of its own
    return ["mul", ["ceildiv", n, tile_n], m_tiles]


def grid(spec: KernelSpec, cluster_tiles: Expr) -> Expr:
    """CTAs: a cluster for each cluster tile there can be at most, or as many as the SMs less the margin hold."""
    size = spec.cluster[0] * spec.cluster[1]
    resident: Expr = ["sub", ["floordiv", "sm_count", size], "cluster_margin"]
    return ["mul", size, ["max", 1, ["min", resident, cluster_tiles]]]


def shared_bytes(spec: KernelSpec, slot_bytes: int, barriers: int = 0, sum_bytes: int = 0) -> int:
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
        (ring * slot_bytes, 16),
        (ring * 8, 8),
        (ring * 8, 8),
        (barriers * 8, 8),
        (sum_bytes, 16),
        *([(2 * tile_n * 4, 4)] if spec.bias else []),
    ]
    end = 0
    for size, alignment in allocations:
        end = -(-end // alignment) * alignment + size
    return end


def config(spec: KernelSpec, **own: Any) -> Any:
    """What the kernel is traced for: a `GemmConfig` of what all families have, and of a family's `own` fields. Imports
    the DSL.
    """
    from fusekit.kernels.config import GemmConfig

    kind, approximate = spec.activation.kind, spec.activation.approximate
    fields: dict[str, Any] = {
        "grouped": spec.op == "grouped-gemm",
        "dtype": spec.dtype,
        "out_dtype": spec.out_dtype,
        "b_major": spec.b_major,
        "activation": kind if approximate == "none" else f"{kind}:{approximate}",
        "row_scale": spec.row_scale,
        "tile": spec.tile,
        "cluster": spec.cluster,
        "pingpong": spec.mainloop == "pingpong",
        "stages": spec.budget.stages,
        "epilogue_box": spec.budget.epilogue_box,
        "dynamic": spec.schedule == "dynamic",
    }
    return GemmConfig(**(fields | own))


def fake_arguments(record: LaunchRecord, operands: Sequence[str]) -> tuple[Any, ...]:
    """What the kernel's host function is traced with: its operands (None where the record has none; `workspace` and
    `scratch` are operands too), SM count, cluster margin, stream. Imports the DSL."""
    import cutlass
    from cuda.bindings.driver import CUstream
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    types = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "f32": cutlass.Float32, "i32": cutlass.Int32}
    divisors = {dim.name: dim.divisor for dim in record.dims}
    tensors = {tensor.name: tensor for tensor in record.tensors}
    scalars = {scalar.name for scalar in record.scalars}

    def fake(name: str) -> Any:
        if name in scalars:
            return cutlass.Float32(1.0)
        if name in ("workspace", "scratch") and getattr(record, name) != 0:
            return make_fake_tensor(cutlass.Int32, (1,), (1,), assumed_align=16)  # its address is all that is taken
        if name not in tensors:
            return None
        tensor = tensors[name]
        shape = tuple(
            cute.sym_int(divisibility=divisors[extent] if isinstance(extent, str) else 2 * divisors["I"])
            for extent in tensor.shape
        )
        strides = tuple(
            1
            if stride == 1
            else cute.sym_int64(divisibility=tensor.stride_divisor if tensor.reads_stride(index) else 1)
            for index, stride in enumerate(tensor.strides)
        )
        return make_fake_tensor(types[tensor.dtype], shape, strides, assumed_align=tensor.alignment)

    return (*(fake(name) for name in operands), cutlass.Int32(132), cutlass.Int32(0), CUstream(0))


def host_arguments(record: LaunchRecord, operands: Sequence[str]) -> tuple[HostArgument, ...]:
    """What each of the traced arguments is at run time; those that are None have no entry."""
    tensors = {tensor.name for tensor in record.tensors}
    scalars = {scalar.name for scalar in record.scalars}
    arguments: list[HostArgument] = []
    for name in operands:
        if name in tensors:
            arguments.append(HostTensor(name))
        elif name in scalars:
            arguments.append(HostScalar(name))
        elif name in ("workspace", "scratch") and getattr(record, name) != 0:
            arguments.append(HostPointer(name))
    return (*arguments, HostInteger("sm_count"), HostInteger("cluster_margin"), HostStream())
