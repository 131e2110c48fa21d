"""The factors of a weight gradient, both with a row for each token, or (FP8 values) with a column, and its result."""

from typing import NamedTuple

from cutlass import cute

from fusekit.kernels import ptx
from fusekit.kernels.dsl import descriptor_address
from fusekit.kernels.gemm.operands.base import BOTH, DeviceOperand, dtype_of, struct


class Factors(NamedTuple):
    """Tensor maps."""

    dy: cute.CopyAtom
    x: cute.CopyAtom


class TokenRows(DeviceOperand):
    """Columns of dy and of x, in boxes of 64 columns by 64 tokens that end with the group."""

    role = BOTH

    def parameter(self, given):
        if self.plan.quant.coded_inputs:
            atoms = [self.kit.swizzled(dtype_of(dtype), self.plan.tile_k) for dtype in self.plan.factors]
            boxes = [(tile // self.plan.cluster_size, self.plan.tile_k) for tile in self.plan.tile]
            pairs = zip((given.dy_t, given.x_t), boxes, atoms, strict=True)
            return Factors(*[self.kit.load_map(tensor, box, atom) for tensor, box, atom in pairs])
        box = (self.plan.arch.box, self.plan.tile_k)
        if self.plan.gathers:
            other = "x" if self.plan.gather == "dy" else "dy"
            return struct("Factor", [(other, self.ragged_map(getattr(given, other), box))])
        return Factors(self.ragged_map(given.dy, box), self.ragged_map(given.x, box))

    def ragged_map(self, tensor, box):
        return self.kit.ragged_map(self.kit.load_op(), tensor, box)

    def extents(self, given) -> tuple:
        """Tokens, columns and rows of dw."""
        if self.plan.quant.coded_inputs:
            return given.dy_t.shape[1], given.x_t.shape[0], given.dy_t.shape[0]
        return (given.index if self.plan.gathers else given.dy).shape[0], given.x.shape[1], given.dy.shape[1]

    def descriptors(self, operands) -> list:
        """Addresses of the tensor maps of dy and x; None for the one that is gathered."""
        names, maps = ("dy", "x"), operands.token_rows
        return [None if name == self.plan.gather else descriptor_address(getattr(maps, name)) for name in names]

    def view(self, parameter):
        return None

    def boxes(self, descriptor, destination, barrier, column, width: int, rows):
        """A stage of `width` columns from `column` on; rows: coordinates after that of the column."""
        starts = [column + first for first in range(0, width, self.plan.arch.box)]
        return self.kit.Boxes(
            descriptor,
            destination,
            barrier,
            starts,
            self.plan.arch.box * self.plan.tile_k,
            lambda start: (start, *rows),
        )

    def blocks(self, descriptor, destination, barrier, column, width: int, token):
        """A stage of `width` columns from `column` on, of FP8 values from token `token` on."""
        height = width // self.plan.cluster_size
        starts = [column + first for first in range(0, width, height)]
        return self.kit.Boxes(
            descriptor, destination, barrier, starts, height * self.plan.tile_k, lambda start: (token, start)
        )


class Dw(DeviceOperand):
    """Boxes of dw[group], or of dw; its parts are stored without a tensor map, whose address had to be known."""

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.columns = plan.result_box(plan.tile[1])

    def parameter(self, given):
        if self.plan.in_parts:
            return None
        view = cute.make_tensor(
            given.dw.iterator, cute.select(given.dw.layout, [2, 1, 0] if self.plan.grouped else [1, 0])
        )
        return self.kit.box_map(self.kit.store_op(), view, (self.columns, self.plan.arch.warp_rows))

    def view(self, parameter):
        return descriptor_address(parameter)

    def result(self, values, box: int, number: int, where, work, boxes) -> int:
        if self.plan.in_parts:
            return 0
        if not boxes.single:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [ptx.pack_pair(low, high, self.out_dtype) for low, high in pairs]
        boxes.store_values(
            number, self.columns, values, work.operands.dw, self.place(*where), work.staging, self.plan.adds
        )
        return 1

    def place(self, column, row, group):
        """Coordinates of a box."""
        return (column, row, group) if self.plan.grouped else (column, row)
