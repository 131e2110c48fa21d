"""The run-time scalars of a gated activation; the drivers hand them to it (`maths.scalars`)."""

from fusekit.kernels.gemm.operands.base import Operand
from fusekit.plan.operands.activation import SCALARS


class Activation(Operand):
    def parameter(self, given):
        return tuple(getattr(given, name) for name in SCALARS)
