"""Quantise: what `kernels.quantise` is traced with, and what its arguments are."""

from __future__ import annotations

from fusekit.abi import Constraint, Dim, Expr, TensorArgument
from fusekit.compiler.hostfunction import Signature, TracePlan, token_wise
from fusekit.dtypes import DTYPES
from fusekit.plan.quantise import AMAX, MX_SIDE, MXFP8, ROW, SIDE, SQUARE, SWIZZLED
from fusekit.spec.quantise import VECTOR, QuantiseSpec

MOST_ROWS = 2**30
MOST_COLUMNS = 2**24
MOST_GROUPS = 2**16
PADDED: Expr = ["add", "M", ["mul", SIDE - 1, "E"]]  # rows, of which each group begins at a multiple of SIDE
OPERANDS = ("x", "index", "offsets", "x_q", "x_s", "x_t", "x_ts")


def plan(spec: QuantiseSpec) -> TracePlan:
    """Trace plan of quantise. Imports the DSL."""
    from fusekit.kernels.quantise.amax import Amax
    from fusekit.kernels.quantise.mx import MxTiles
    from fusekit.kernels.quantise.rows import QuantiseRows
    from fusekit.kernels.quantise.tiles import QuantiseTiles

    interface = signature(spec)
    if spec.out == ROW:
        return token_wise(QuantiseRows(spec.scales), ("x", "x_q", "x_s"), interface)
    if spec.out == AMAX:
        return token_wise(Amax(spec.rht_amax), ("x", "offsets", "x_amax", "x_rht_amax"), interface)
    if spec.out == MXFP8:
        return token_wise(MxTiles(spec.transpose, spec.scale_layout), OPERANDS, interface)
    names = OPERANDS
    if spec.blocks == SQUARE:
        names = ("w", "index", "offsets", "w_q", "w_s", "w_t", "w_ts")
    if spec.topk:
        names = ("x", "inverse", *OPERANDS[2:])
    keys = (
        spec.dtype,
        spec.blocks,
        spec.scales,
        spec.transpose,
        spec.transpose_blocks,
        spec.rows,
        spec.groups,
        spec.gather,
        spec.topk,
    )
    return token_wise(QuantiseTiles(*keys), names, interface)


def signature(spec: QuantiseSpec) -> Signature:
    """What the callers of `spec` pass."""
    if spec.blocks == SQUARE:
        return _squares(spec)
    rows, columns = Dim("M", maximum=MOST_ROWS), Dim("K", VECTOR, VECTOR, MOST_COLUMNS)
    if spec.out == MXFP8:
        return Signature(spec.arch, tuple(_mx(spec)), (rows, columns), skip_if_zero=("M",))
    if spec.out == AMAX:
        return Signature(spec.arch, tuple(_largest(spec)), (rows, columns, Dim("E", minimum=1, maximum=MOST_GROUPS)))
    grouped = spec.transpose and spec.groups
    groups = [Dim("E", minimum=1, maximum=MOST_GROUPS), Dim("P", SIDE, SIDE)] if grouped else []
    tokens = [Dim("T", maximum=MOST_ROWS)] if spec.gather or spec.topk else []
    room = Constraint(["max", 0, ["sub", PADDED, "P"]], f"x_t must have room for M + {SIDE - 1} E tokens")
    return Signature(
        spec.arch,
        tuple(_rows(spec)),
        (rows, columns, *groups, *tokens),
        constraints=(room,) if grouped else (),
        skip_if_zero=(("T",) if spec.topk else ("M",)) if spec.groups else (),
    )


def _rows(spec: QuantiseSpec) -> list[TensorArgument]:
    blocks: Expr = ["ceildiv", "K", SIDE]
    arguments = [_matrix("x", "input", spec.dtype, ("T" if spec.gather or spec.topk else "M", "K"), _divisor(spec))]
    if spec.gather:
        arguments.append(TensorArgument("index", "input", "i32", ("M",), (1,), alignment=4))
    if spec.topk:
        arguments.append(TensorArgument("inverse", "input", "i32", ("T", spec.topk), (spec.topk, 1), alignment=4))
    if spec.transpose and spec.groups:
        arguments.append(TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4))
    if spec.rows:
        arguments.append(_matrix("x_q", "output", "e4m3", ("M", "K"), VECTOR))
    if spec.out == ROW:
        arguments.append(TensorArgument("x_s", "output", "f32", ("M",), (1,), alignment=4))
    elif spec.rows:
        arguments.append(TensorArgument("x_s", "output", "f32", (blocks, "M"), ("x_s.stride0", 1), alignment=4))
    if spec.transpose:
        token_blocks: Expr = ["floordiv", "P", SIDE] if spec.groups else ["max", 1, ["ceildiv", "M", SIDE]]
        padded: Expr = "P" if spec.groups else ["mul", SIDE, token_blocks]
        arguments.append(_matrix("x_t", "output", "e4m3", ("K", padded), VECTOR))
        scaled: Expr = blocks if spec.transpose_blocks == SQUARE else "K"
        alignment = 4 if spec.transpose_blocks == SQUARE else 16
        arguments.append(
            TensorArgument("x_ts", "output", "f32", (token_blocks, scaled), (scaled, 1), alignment=alignment)
        )
    return arguments


def _mx(spec: QuantiseSpec) -> list[TensorArgument]:
    """FP8 values as x lies; scales of whole tiles of 128 x 128."""
    tall, wide = (["mul", ["ceildiv", name, SIDE], SIDE] for name in ("M", "K"))
    arguments = [
        _matrix("x", "input", "bf16", ("M", "K"), 8),
        _matrix("x_q", "output", "e4m3", ("M", "K"), VECTOR),
        _bytes("x_s", tall, "K"),
    ]
    if spec.transpose:
        arguments.append(_matrix("x_t", "output", "e4m3", ("M", "K"), VECTOR))
        swizzled = _bytes("x_ts", wide, "M")
        arguments.append(swizzled if spec.scale_layout == SWIZZLED else _bytes("x_ts", _blocks("M"), wide))
    return arguments


def _largest(spec: QuantiseSpec) -> list[TensorArgument]:
    names = ["x_amax", *(["x_rht_amax"] if spec.rht_amax else [])]
    offsets = TensorArgument("offsets", "input", "i32", ("E",), (1,), alignment=4)
    arguments = [TensorArgument(name, "output", "f32", ("E",), (1,), alignment=4) for name in names]
    return [_matrix("x", "input", "bf16", ("M", "K"), 8), offsets, *arguments]


def _squares(spec: QuantiseSpec) -> Signature:
    down, across = (["ceildiv", name, SIDE] for name in ("N", "K"))
    groups: tuple[Expr, ...] = ("E",) if spec.groups else ()
    arguments = [_matrix("w", "input", spec.dtype, (*groups, "N", "K"), _divisor(spec))]
    if spec.rows:
        arguments.append(_matrix("w_q", "output", "e4m3", (*groups, "N", "K"), VECTOR))
        arguments.append(_compact("w_s", groups, down, across))
    if spec.transpose:
        arguments.append(_matrix("w_t", "output", "e4m3", (*groups, "K", "N"), VECTOR))
        arguments.append(_compact("w_ts", groups, across, down))
    step = VECTOR if spec.transpose else 1
    rows, columns = Dim("N", step, step, MOST_COLUMNS), Dim("K", VECTOR, VECTOR, MOST_COLUMNS)
    return Signature(
        spec.arch, tuple(arguments), (*(Dim("E", minimum=1, maximum=MOST_GROUPS) for _ in groups), rows, columns)
    )


def _blocks(name: str) -> Expr:
    """Blocks of MXFP8 along a dim, of whole tiles."""
    return ["mul", ["ceildiv", name, SIDE], SIDE // MX_SIDE]


def _bytes(name: str, rows: Expr, columns: Expr) -> TensorArgument:
    """Scales of MXFP8, compact. columns: a dim, whose blocks they are; or how many there are."""
    count = _blocks(columns) if isinstance(columns, str) else columns
    return TensorArgument(name, "output", "e8m0", (rows, count), (count, 1), alignment=4)


def _divisor(spec: QuantiseSpec) -> int:
    """Elements in 16 bytes of what is quantised."""
    return 16 // DTYPES[spec.dtype].bytes


def _matrix(name: str, role: str, dtype: str, shape: tuple[Expr, ...], divisor: int) -> TensorArgument:
    strides = tuple(f"{name}.stride{index}" for index in range(len(shape) - 1))
    return TensorArgument(name, role, dtype, shape, (*strides, 1), divisor)


def _compact(name: str, groups: tuple[Expr, ...], down: Expr, across: Expr) -> TensorArgument:
    strides: tuple[Expr, ...] = (["mul", down, across], across, 1)[-2 - len(groups) :]
    return TensorArgument(name, "output", "f32", (*groups, down, across), strides, alignment=4)
