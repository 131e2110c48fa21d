"""y once more: the activation's value, staged next to z and stored with dz."""

from fusekit.kernels import ptx
from fusekit.kernels.dsl import descriptor_address
from fusekit.kernels.gemm.operands.base import DeviceOperand
from fusekit.plan.gemm import OUTPUT_BOXES


class Recompute(DeviceOperand):
    step = 6

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.columns = plan.epilogue_box
        self.staging = kit.StagingBoxes(plan)

    def parameter(self, given):
        return self.kit.ragged_map(self.kit.store_op(), given.y, (self.columns, self.plan.arch.warp_rows))

    def view(self, parameter):
        return descriptor_address(parameter)

    def pack(self, values):
        return ptx.pack_pair(*values, self.out_dtype)

    def stage(self, number, outputs, work):
        box = work.staging + (self.plan.z_bytes + (number & (OUTPUT_BOXES - 1)) * self.staging.bytes)
        self.staging.write(box, self.columns, outputs)
        return box

    def send(self, staged, unit: int, rows, work) -> None:
        column = rows.n_tile * self.plan.tile[1] + unit * self.columns
        where = self.kit.ragged_place(column, rows.end - rows.row, rows.end)
        ptx.tma_store(work.operands.recompute, staged, where)
