"""Outputs times the router weight of their row."""

from cutlass import Float32, cute

from fusekit.kernels.gemm.operands.base import Operand


class RowScale(Operand):
    step = 5

    def parameter(self, given):
        return given.row_scale.iterator

    @cute.jit
    def rows(self, rows, work, state, acc):
        """The router weights of this lane's two rows."""
        low = rows.row + (cute.arch.lane_idx() >> 2)
        first = Float32(0.0)
        second = Float32(0.0)
        if low < rows.end:
            first = work.operands.row_scale[low]
        if low + 8 < rows.end:
            second = work.operands.row_scale[low + 8]
        return first, second

    def output(self, value, mine, r: int):
        return value * mine[r]

    def gradient(self, da, value, mine, r: int):
        return da * mine[r], value * mine[r]
