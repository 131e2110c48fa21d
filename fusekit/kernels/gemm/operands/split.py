"""The parts of a dense weight gradient: where the first launch leaves them, and the launch that adds them up.

A part is dw [N, K] and dbias [N] after it, in float32, or room for it. A thread of the second launch has four columns
of a row, or of dbias.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.gemm.parts import THREADS, VECTOR, WIDTH, Parts, sum_of_parts
from fusekit.plan.operands.split import ROWS, TILE


class Split(Parts):
    def groups(self, given):
        """How many parts there are, each a group; see `fusekit.plan.operands.split`."""
        n, k = given.dy.shape[1], given.x.shape[1]
        tiles = Int64((n + (TILE[0] - 1)) // TILE[0]) * Int64((k + (TILE[1] - 1)) // TILE[1])
        most = cutlass.min(Int64(self.plan.arch.sms) // tiles, Int64((given.x.shape[0] + (ROWS - 1)) // ROWS))
        return Int32(cutlass.max(most, Int64(1)))

    def dbias(self, given):
        """dbias of the first part."""
        return self.parts(given) + Int64(given.dy.shape[1]) * given.x.shape[1]

    def result(self, values, box: int, number: int, where, work, boxes) -> int:
        """A warp's 16 rows of a box; of rows and columns there is a multiple of 8."""
        column, row, part = where
        n, k, lane = work.extents.k, work.extents.n, cute.arch.lane_idx()
        place = Int64(part) * n * (k + 1) + Int64(row + (lane >> 2)) * k + (column + (lane & 3) * 2)
        for r in range(2):
            first = work.operands.split.toint() + (place + r * 8 * Int64(k)) * 4
            for chunk in range(len(values) // 4):
                words = [lanes.bits_of(values[chunk * 4 + r * 2 + c]) for c in range(2)]
                there = (row + r * 8 < n) & (column + chunk * 8 < k)
                lanes.store(first, words, 8, there, chunk * 32)
        return 0

    def then(self, given, parts, stream) -> None:
        n, k = given.dy.shape[1], given.x.shape[1]
        dbias = given.dbias.iterator if hasattr(given, "dbias") else None
        self.add_up(self.parts(given), given.dw.iterator, given.dw.stride[0], dbias, parts, n, k).launch(
            grid=[n * ((k + (WIDTH - 1)) // WIDTH), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def add_up(self, memory, dw, stride: Int64, dbias, parts: Int32, n: Int32, k: Int32):
        """A block has WIDTH columns of a row."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        blocks = ptx.divide(k + (WIDTH - 1), WIDTH)  # of a row
        row = ptx.divide(block, blocks)
        column = (block - row * blocks) * WIDTH + thread * VECTOR
        step = Int64(n) * (k + 1) * 4
        if column < k:  # of which there is a multiple of VECTOR, as of n
            total = sum_of_parts(memory.toint() + (Int64(row) * k + column) * 4, step, parts)
            self.store(dw.toint() + (Int64(row) * stride + column) * (self.out_dtype.width // 8), total)
        if cutlass.const_expr(dbias is not None):  # noqa: SIM102
            if column == 0 and row & (VECTOR - 1) == 0:
                total = sum_of_parts(memory.toint() + (Int64(n) * k + row) * 4, step, parts)
                for index in cutlass.range_constexpr(VECTOR):
                    to = dbias + (row + index)
                    if cutlass.const_expr(self.plan.has("accumulate")):
                        total[index] = cute.arch.load(to, Float32) + total[index]
                    cute.arch.store(to, total[index])

    def store(self, to: Int64, total) -> None:
        """Four neighbours of a row of dw."""
        values = [total[index] for index in range(VECTOR)]
        if self.plan.has("accumulate"):
            held = ptx.load_parts_x4(to, Int32(1))
            values = [before + value for before, value in zip(held, values, strict=True)]
        if self.out_dtype is Float32:
            ptx.store_parts_x4(to, values)
        else:
            pairs = [ptx.pack_pair(*values[first : first + 2], self.out_dtype) for first in (0, 2)]
            lanes.store(to, pairs, 8)
