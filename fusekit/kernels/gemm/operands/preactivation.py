"""z, the activation's input: stored as soon as the accumulators of a box are final."""

from fusekit.kernels import ptx
from fusekit.kernels.dsl import descriptor_address
from fusekit.kernels.gemm.operands.base import DeviceOperand
from fusekit.plan.gemm import GATED_UNIT


class Preactivation(DeviceOperand):
    step = 3

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.concat = plan.halved and plan.glu_layout == "concat"
        final = plan.result_box(plan.out_tile_n)  # neighbours in y whose accumulators are final together
        if plan.glu_layout == "interleaved" or (plan.glu_layout == "interleaved-32" and final >= GATED_UNIT):
            final *= 2
        width = plan.tile[1] // 2 if self.concat else plan.tile[1]
        self.columns = plan.box(width, min(final, plan.epilogue_box))

    def parameter(self, given):
        return self.kit.ragged_map(
            self.kit.store_op(), given.preactivation, (self.columns, self.plan.arch.warp_rows), self.concat
        )

    def view(self, parameter):
        return descriptor_address(parameter)

    def stored_boxes(self) -> int:
        return self.plan.tile[1] // self.columns

    def box(self, acc, base: int, sources, number: int, rows, work, boxes) -> int:
        stored = 0
        for box in range(self.stored_boxes()):
            if box * self.columns // 8 in sources:
                packed = self.registers(acc, base, box)
                where = self.place(box, rows)
                boxes.store(number + stored, self.columns, packed, work.operands.preactivation, where, work.staging)
                stored += 1
        return stored

    def registers(self, acc, base: int, box: int):
        """Packed accumulators of a box, (chunk, r) in order."""
        chunks = range(box * self.columns // 8, (box + 1) * self.columns // 8)
        indices = [base + chunk * 4 + r * 2 for chunk in chunks for r in range(2)]
        return [ptx.pack_pair(acc[index], acc[index + 1], self.dtype) for index in indices]

    def place(self, box: int, rows):
        """Where a box goes, in the order of the weights' columns."""
        first, tile_n = box * self.columns, self.plan.tile[1]
        if self.concat:
            half = tile_n // 2
            side = first // half
            column = rows.n_tile * half + first - side * half
            return self.kit.ragged_place(column, rows.end - rows.row, rows.end, side)
        return self.kit.ragged_place(rows.n_tile * tile_n + first, rows.end - rows.row, rows.end)
