"""The factors of a weight gradient, both with a row for each token, or (codes) with a column, and its result."""

from typing import NamedTuple

import cutlass
from cutlass import cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Operand, dtype_of, struct
from fusekit.kernels.gemm.sm90.boxes import Boxes
from fusekit.kernels.gemm.sm90.maps import box_map, load_map, load_op, ragged_map, store_op, swizzled
from fusekit.plan.gemm import BOX, WARP_ROWS


class Factors(NamedTuple):
    """Tensor maps."""

    dy: cute.CopyAtom
    x: cute.CopyAtom


class TokenRows(Operand):
    """Columns of dy and of x, in boxes of 64 columns by 64 tokens that end with the group."""

    def parameter(self, given):
        if self.plan.quant:
            atoms = [swizzled(dtype_of(dtype), self.plan.tile_k) for dtype in self.plan.factors]
            boxes = [(tile // self.plan.cluster_size, self.plan.tile_k) for tile in self.plan.tile]
            pairs = zip((given.dy_t, given.x_t), boxes, atoms, strict=True)
            return Factors(*[load_map(tensor, box, atom) for tensor, box, atom in pairs])
        box = (BOX, self.plan.tile_k)
        if self.plan.gathers:
            other = "x" if self.plan.gather == "dy" else "dy"
            return struct("Factor", [(other, ragged_map(load_op(), getattr(given, other), box))])
        return Factors(ragged_map(load_op(), given.dy, box), ragged_map(load_op(), given.x, box))

    def view(self, parameter):
        return None

    def boxes(self, descriptor, destination, barrier, column, width: int, rows) -> Boxes:
        """A stage of `width` columns from `column` on; rows: coordinates behind that of the column."""
        starts = [column + first for first in range(0, width, BOX)]
        return Boxes(descriptor, destination, barrier, starts, BOX * self.plan.tile_k, lambda start: (start, *rows))

    def blocks(self, descriptor, destination, barrier, column, width: int, token) -> Boxes:
        """A stage of `width` columns from `column` on, of codes from token `token` on."""
        height = width // self.plan.cluster_size
        starts = [column + first for first in range(0, width, height)]
        return Boxes(descriptor, destination, barrier, starts, height * self.plan.tile_k, lambda start: (token, start))


class Dw(Operand):
    """Boxes of dw[group], or of dw; its parts are stored without a tensor map, whose address had to be known."""

    def __init__(self, plan, told) -> None:
        super().__init__(plan, told)
        self.single = self.out_dtype is cutlass.Float32
        self.columns = plan.box(plan.tile[1], plan.epilogue_box // 2 if self.single else plan.epilogue_box)

    def parameter(self, given):
        if self.plan.has("split"):
            return None
        view = cute.make_tensor(
            given.dw.iterator, cute.select(given.dw.layout, [2, 1, 0] if self.plan.grouped else [1, 0])
        )
        return box_map(store_op(), view, (self.columns, WARP_ROWS))

    def view(self, parameter):
        return ptx.descriptor_address(parameter)

    def place(self, column, row, group):
        """Coordinates of a box."""
        return (column, row, group) if self.plan.grouped else (column, row)
