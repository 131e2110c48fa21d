"""Accumulators times the scale of their column of w, or times that of their group and of x."""

from cutlass import Int32, Int64

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import SCALES
from fusekit.kernels.gemm.operands.bias import Columns
from fusekit.plan.quant import ROW, SIDE


class WScale(Columns):
    name, role = "w_scale", SCALES

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.by_column, self.by_block = plan.quant.inputs == ROW, plan.quant.by_block or plan.quant.weights_alone

    def parameter(self, given):
        return given.w_s.iterator

    def begin(self, shared, warpgroup):
        return super().begin(shared, warpgroup) if self.by_column else None

    def prepare(self, tile, work, warp_state) -> None:
        if self.by_column:
            self.fetch(tile, work, warp_state)

    def start(self, tile, work, warp_state):
        return warp_state if self.by_column or self.by_block else self.factor(tile, work)

    def factor(self, tile, work):
        """The scale of x and of the group's w."""
        operands = work.operands
        return operands.x_scale[0] * operands.w_scale[tile.group if self.plan.grouped else 0]

    def begin_of(self, tile, work, column: Int32):
        """Address of the first scale of blocks of w, along K, of the product's column `column`."""
        down, blocks = (ptx.divide(extent + (SIDE - 1), SIDE) for extent in (work.extents.n, work.extents.k))
        side = ptx.minimum_of(ptx.divide(column, SIDE), down - 1)
        place = (Int64(tile.group) * Int64(down) + Int64(side)) * Int64(blocks)
        return work.operands.w_scale.toint() + place * 4

    def chunk(self, chunk: int, state):
        return super().chunk(chunk, state) if self.by_column else None

    def accumulate(self, value, state, chunk, c: int):
        return value if self.by_block else value * (chunk[c] if self.by_column else state)
