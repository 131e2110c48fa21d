"""The wait for the launch before, before anything else; see fusekit.kernels.pdl."""

from fusekit.kernels import pdl
from fusekit.kernels.gemm.operands.base import DeviceOperand


class Pdl(DeviceOperand):
    step = -1  # before an operand reads memory

    def opening(self, operands, shared, extents) -> None:
        pdl.begin()
