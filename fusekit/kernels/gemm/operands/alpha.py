"""The accumulators times alpha."""

from fusekit.kernels.gemm.operands.base import DeviceOperand


class Alpha(DeviceOperand):
    step = 1

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.by_group = plan.spec.operands["alpha"] == "group"

    def parameter(self, given):
        return given.alpha.iterator if self.by_group else given.alpha

    def start(self, tile, work, warp_state):
        return work.operands.alpha[tile.group] if self.by_group else work.operands.alpha

    def accumulate(self, value, state, chunk, c: int):
        return value * state
