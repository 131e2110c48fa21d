"""The run-time scalars of a gated activation."""

from fusekit.kernels.gemm import maths
from fusekit.kernels.gemm.operands.base import DeviceOperand
from fusekit.plan.operands.activation import SCALARS


class Activation(DeviceOperand):
    def parameter(self, given):
        return tuple(getattr(given, name) for name in SCALARS)

    def scalars(self, operands) -> tuple:
        return (maths.GluScalars(*operands.activation),)
