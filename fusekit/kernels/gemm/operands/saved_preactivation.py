"""z as a forward pass stored it, and dz. The backward driver streams both through the same boxes."""

from fusekit.kernels import ptx
from fusekit.kernels.dsl import descriptor_address
from fusekit.kernels.gemm.operands.base import STREAMED, DeviceOperand


class SavedPreactivation(DeviceOperand):
    role = STREAMED

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.first = plan.first_barrier(operand.name)

    def parameter(self, given):
        return self.kit.z_map(self.kit.load_op(), given.preactivation, self.plan)

    def view(self, parameter):
        return descriptor_address(parameter)

    def barrier(self, shared, warp, slot):
        """The barrier of box `slot` of a consumer warp."""
        place = warp * self.plan.z_boxes + slot
        return shared.barriers + (self.first + place if self.first else place)

    def load(self, operands, box, barrier, where) -> None:
        """Starts loading a box; one lane of a consumer warp."""
        ptx.tma_load(operands.saved_preactivation, box, barrier, where)


class Dz(DeviceOperand):
    def parameter(self, given):
        return self.kit.z_map(self.kit.store_op(), given.dz, self.plan)

    def view(self, parameter):
        return descriptor_address(parameter)

    def z_box(self, box, where, work) -> None:
        ptx.tma_store(work.operands.dz, box, where)
