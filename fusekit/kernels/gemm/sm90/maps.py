"""Tensor maps.

A row box ends where its group ends, which the host does not know. The maps of such tensors therefore describe memory
through two extra dimensions whose strides sum to 2^35 bytes, so that coordinates (BIG - rows_left, BIG, end) reach
row end - rows_left with the address wrapping modulo 2^64, and the hardware's own bounds check at BIG clips what lies
beyond the group (the idea: Triton's ragged TMA descriptors).
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import BIG, GemmPlan

LARGEST = 2**31 - 1
WRAP = 2**35  # bytes


def load_op():
    """From global to shared memory."""
    return cpasync.CopyBulkTensorTileG2SOp()


def store_op():
    """From shared to global memory."""
    return cpasync.CopyBulkTensorTileS2GOp()


def ragged_place(column, left, end, side=None) -> tuple:
    """Coordinates in a ragged map of a box that begins at `column`, `left` rows before `end`. side: of a split one."""
    return (column, BIG - left, BIG, end) if side is None else (column, BIG - left, side, BIG, end)


def z_map(op, tensor, plan: GemmPlan):
    """Tensor map of z or dz."""
    return ragged_map(op, tensor, (plan.z_columns, WARP_ROWS), split=plan.glu_layout == "concat", both=True)


def z_place(plan: GemmPlan, left, end, n_tile, unit) -> tuple:
    """Coordinates of a unit's box of z or dz, of 16 rows that begin `left` rows before `end`."""
    column, rows = n_tile * plan.tile[1] + unit * plan.epilogue_box, BIG - left
    if plan.glu_layout == "concat":
        return (column, rows, 0, BIG, end)
    return (column * plan.sides, rows, BIG, end)


def not_empty(tensor):
    """A matrix with one row at least, for a kernel that is launched without rows too: no tensor map can be empty."""
    shape = (cutlass.max(tensor.shape[0], 1), tensor.shape[1])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=tensor.stride))


def load_map(tensor, box, atom):
    """Tensor map for boxes of `tensor` that are to be loaded."""
    layout = cute.tile_to_shape(atom, box, order=tuple(range(len(box))))
    copy, _ = cpasync.make_tiled_tma_atom(load_op(), tensor, layout, box)
    return copy


def ragged_map(op, tensor, box: tuple[int, int], split: bool = False, both: bool = False):
    """Tensor map of a row-major [M, N] tensor that clips rows at a group's end.

    box: (columns, rows). With `split` the columns are two halves with a bound each, so that a box of gates never
    runs into the ups; with `both` a box is one of gates and, after it, one of ups.
    """
    ld, wrap = tensor.stride[0], WRAP * 8 // tensor.element_type.width
    if split:
        half = tensor.shape[1] // 2
        shape, stride = (half, BIG, 2, LARGEST, LARGEST), (1, ld, half, wrap - ld, ld)
    else:
        shape, stride = (tensor.shape[1], BIG, LARGEST, LARGEST), (1, ld, wrap - ld, ld)
    view = cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
    return box_map(op, view, (*box, 2) if split and both else box)


def box_map(op, tensor, box: tuple[int, ...]):
    """Tensor map of boxes of box[0] elements of mode 0, contiguous, by box[1] of mode 1 and so on; swizzled."""
    shape = (*box, *(1 for _ in range(cute.rank(tensor) - len(box))))
    stride = (1, box[0], *(box[0] * box[1] if index < len(box) else 0 for index in range(2, len(shape))))
    atom = swizzled(tensor.element_type, box[0], n_major=True)
    layout = cute.make_composed_layout(atom.inner, atom.offset, cute.make_layout(shape, stride=stride))
    copy, _ = cpasync.make_tiled_tma_atom(op, tensor, layout, shape)
    return copy


def swizzled(dtype, columns: int, n_major: bool = False):
    """Shared-memory layout atom whose contiguous side is `columns` elements: 128, 64 or 32 bytes."""
    kind = {128: "SW128", 64: "SW64", 32: "SW32"}[columns * dtype.width // 8]
    name = f"{'MN' if n_major else 'K'}_{kind}"
    return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind[name], dtype)
