"""Outputs times the router weight of their row."""

from fusekit.kernels.gemm.operands.base import DeviceOperand, row_pair


class RowScale(DeviceOperand):
    step = 5

    def parameter(self, given):
        return given.row_scale.iterator

    def rows(self, rows, work, state, acc):
        """The router weights of this lane's two rows."""
        return row_pair(work.operands.row_scale, rows)

    def output(self, value, row_state, r: int):
        return value * row_state[r]

    def gradient(self, da, value, row_state, r: int):
        return da * row_state[r], value * row_state[r]
