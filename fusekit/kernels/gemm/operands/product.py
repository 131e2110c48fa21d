"""The factors of a GEMM, its result, and the groups' end rows."""

from cutlass import cute

from fusekit.kernels.dsl import descriptor_address
from fusekit.kernels.gemm.operands.base import LEFT, RIGHT, DeviceOperand, dtype_of


class X(DeviceOperand):
    """Rows of x, from a tile's first one on."""

    role = LEFT

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.dtype = dtype_of(plan.factors[0])
        self.several = plan.quant.weights_alone  # boxes along K make a stage
        self.height = plan.tile[0] // (1 if self.several else plan.cluster_size)  # of a box
        self.depth = plan.arch.box if self.several else plan.tile_k

    def parameter(self, given):
        if self.plan.gathers:
            return None
        x = given.x if self.plan.skip_if_zero else self.kit.not_empty(given.x)
        return self.kit.load_map(x, (self.height, self.depth), self.kit.swizzled(self.dtype, self.depth))

    def view(self, parameter):
        return None

    def extents(self, given) -> tuple:
        """Rows, and elements of a row."""
        return (given.index if self.plan.gathers else given.x).shape[0], given.x.shape[1]

    def descriptor(self, operands):
        """Its tensor map's address; None where its rows are gathered."""
        return None if self.plan.gathers else descriptor_address(operands.x)

    def boxes(self, descriptor, stages, stage, k_tile, row):
        """A stage of x from row `row` on."""
        tile_m, tile_k = self.plan.tile[0], self.plan.tile_k
        destination, barrier, k = stages.x + stage * (tile_m * tile_k), stages.full + stage, k_tile * tile_k
        starts = [k + first for first in range(0, tile_k, self.depth)] if self.several else [
            row + first for first in range(0, tile_m, self.height)
        ]  # fmt: skip

        def place(start):
            return (start, row) if self.several else (k, start)

        return self.kit.Boxes(descriptor, destination, barrier, starts, self.height * self.depth, place)


class W(DeviceOperand):
    """Columns of w[group]; after a gated activation's concatenated halves, of either half."""

    role = RIGHT

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.dtype = dtype_of(plan.factors[1])
        self.n_major = plan.b_major == "n"
        self.concat = plan.halved and plan.glu_layout == "concat"
        halves = plan.cluster_size > 1 or self.concat
        self.width = plan.arch.box if self.n_major else plan.tile[1] // (2 if halves else 1)

    def parameter(self, given):
        w, _ = self.view_nke(given.w)
        box = (self.width, self.plan.w_tile_k, *([1] if self.plan.grouped else []))
        return self.kit.load_map(w, box, self.kit.swizzled(self.dtype, self.plan.w_tile_k, n_major=self.n_major))

    def view(self, parameter):
        return None

    def columns(self, given):
        """Columns of the product."""
        return self.view_nke(given.w)[1]

    def view_nke(self, w):
        """w viewed as [N, K, E], [N, K] when dense, whatever its layout in memory; and N. K: bytes of MXFP4 values."""
        if self.plan.quant.mx_weights:
            *groups, n, blocks, size = w.shape
            *stride, row, _, _ = w.stride
            layout = cute.make_layout((n, blocks * size, *groups), stride=(row, 1, *stride))
        elif self.plan.grouped:
            layout = cute.select(w.layout, [2, 1, 0] if self.n_major else [1, 2, 0])
        else:
            layout = cute.select(w.layout, [1, 0] if self.n_major else [0, 1])
        return cute.make_tensor(w.iterator, layout), layout.shape[0]

    def descriptor(self, operands):
        """Its tensor map's address."""
        return descriptor_address(operands.w)

    def boxes(self, descriptor, stages, stage, k_tile, columns):
        """A stage of w; columns: (tile along N, half of N, group)."""
        n_tile, half_n, group = columns
        tile_n, tile_k = self.plan.tile[1], self.plan.w_tile_k
        destination, barrier, k = stages.w + stage * (tile_n * tile_k), stages.full + stage, k_tile * tile_k
        if self.concat:
            half = tile_n // 2
            firsts = range(0, half, self.width)
            starts = [side + n_tile * half + first for side in (0, half_n) for first in firsts]
        else:
            starts = [n_tile * tile_n + first for first in range(0, tile_n, self.width)]
        group_place = (group,) if self.plan.grouped else ()

        def place(start):
            return (start, k, *group_place) if self.n_major else (k, start, *group_place)

        return self.kit.Boxes(descriptor, destination, barrier, starts, self.width * tile_k, place)


class Y(DeviceOperand):
    """The result of a forward epilogue, in boxes of `columns`."""

    def __init__(self, plan, operand, kit) -> None:
        super().__init__(plan, operand, kit)
        self.columns = plan.result_box(plan.out_tile_n)

    def parameter(self, given):
        return self.kit.ragged_map(self.kit.store_op(), given.y, (self.columns, self.plan.arch.warp_rows))

    def view(self, parameter):
        return descriptor_address(parameter)

    def stored_boxes(self) -> int:
        return self.plan.out_tile_n // self.columns

    def result(self, values, box: int, number: int, where, work, boxes) -> int:
        boxes.store_values(number, self.columns, values, work.operands.y, self.place(box, where), work.staging)
        return 1

    def place(self, box: int, rows):
        """Coordinates of a box."""
        column = rows.n_tile * self.plan.out_tile_n + box * self.columns
        return self.kit.ragged_place(column, rows.end - rows.row, rows.end)


class Offsets(DeviceOperand):
    """What the scheduler finds a group's rows by."""

    def parameter(self, given):
        return given.offsets.iterator

    def groups(self, given):
        return given.offsets.shape[0]

    def source(self, source, operands):
        return operands.offsets
