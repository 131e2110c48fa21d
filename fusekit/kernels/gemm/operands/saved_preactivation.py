"""z as a forward pass stored it, and dz. The backward driver streams both through the same boxes."""

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import Operand
from fusekit.kernels.gemm.sm90.maps import load_op, ragged_map, store_op
from fusekit.plan.gemm import BIG, WARP_ROWS, GemmPlan


def z_columns(plan: GemmPlan) -> int:
    """Columns of a box of z; where gates and ups lie apart, of one of its two halves."""
    return plan.epilogue_box * (1 if plan.glu_layout == "concat" else plan.sides)


def z_map(op, tensor, plan: GemmPlan):
    """Tensor map of z or dz."""
    return ragged_map(op, tensor, (z_columns(plan), WARP_ROWS), split=plan.glu_layout == "concat", both=True)


def z_place(plan: GemmPlan, left, end, n_tile, unit):
    """Coordinates of a unit's box of z or dz, of 16 rows that begin `left` rows before `end`."""
    column, rows = n_tile * plan.tile[1] + unit * plan.epilogue_box, BIG - left
    if plan.glu_layout == "concat":
        return (column, rows, 0, BIG, end)
    return (column * plan.sides, rows, BIG, end)


class SavedPreactivation(Operand):
    def parameter(self, given):
        return z_map(load_op(), given.preactivation, self.plan)

    def view(self, parameter):
        return ptx.descriptor_address(parameter)


class Dz(Operand):
    def parameter(self, given):
        return z_map(store_op(), given.dz, self.plan)

    def view(self, parameter):
        return ptx.descriptor_address(parameter)
