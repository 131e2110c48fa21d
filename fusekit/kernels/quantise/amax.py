"""Amax of quantise: of each group |x|, and |R x|, R a rotation of 16 tokens that NVFP4's recipes use.

R = H diag(signs) / 4, H Sylvester's of 16, for every 16 tokens of a column from the group's first on; the last ones are
filled with zeros. Source: Transformer Engine, NVFP4 recipe, its fixed signs. A warp takes 16 rows of 256 columns, a
thread block 128 rows of one group. It changes a group's number in memory once: changes of one number wait for each
other.
"""

import cutlass
import cutlass.memory
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide, maximum_in_memory
from fusekit.kernels.quantise import fp8
from fusekit.kernels.quantise.tiles import THREADS, rows_of
from fusekit.plan.quantise import SIDE, SIGNS, WARPS

COLUMNS = 8  # of a thread
RUN = len(SIGNS)  # rows


class Amax:
    """The kernels; calling it traces host function and device code."""

    def __init__(self, rotated: bool) -> None:
        self.rotated = rotated

    @cute.jit
    def __call__(self, x: cute.Tensor, offsets: cute.Tensor, x_amax: cute.Tensor, x_rht_amax, stream: CUstream):
        """Launch: zeros first, then whatever is larger."""
        outputs = [x_amax.iterator]
        if cutlass.const_expr(self.rotated):
            outputs.append(x_rht_amax.iterator)
        groups, (rows, columns) = offsets.shape[0], x.shape
        self.clear(outputs, groups).launch(
            grid=[(groups + (THREADS - 1)) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )
        tiles = (rows + (SIDE - 1)) // SIDE + groups
        strips = (columns + (WARP * COLUMNS - 1)) // (WARP * COLUMNS)
        self.kernel(x.iterator, Int64(x.stride[0]), offsets.iterator, outputs, groups, rows, columns, strips).launch(
            grid=[tiles * strips, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def clear(self, found, groups: Int32):
        """Sets the numbers of all groups to zero."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        group = block * THREADS + thread
        if group < groups:
            for each in found:
                each[group] = Float32(0.0)

    @cute.kernel
    def kernel(
        self, x: cute.Pointer, stride: Int64, offsets: cute.Pointer, found, groups: Int32, rows: Int32, columns: Int32,
        strips: Int32,
    ):  # fmt: skip
        """See the module's docstring."""
        shared = cutlass.memory.SmemAllocator().allocate(WARPS * 4 * len(found), 16).toint()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = thread & (WARP - 1), divide(thread, WARP)
        tile = divide(block, strips)
        begin, end, group = rows_of(offsets, groups, rows, tile, lane)
        row = begin + warp * RUN
        column = ((block - tile * strips) * WARP + lane) * COLUMNS
        if begin < end:
            source = x.toint() + (Int64(row) * stride + Int64(column)) * 2
            lines = []
            for number in cutlass.range_constexpr(RUN):
                there = (row + number < end) & (column < columns)
                lines.append(lanes.load(source + Int64(number) * stride * 2, 16, there))
            most = [fp8.larger(*fp8.numbers(fp8.largest([word for line in lines for word in line])))]
            if cutlass.const_expr(self.rotated):
                most.append(self.rotate(lines))
            for number in cutlass.range_constexpr(len(found)):
                bits = lanes.redux(lanes.bits_of(most[number]), "max")
                lanes.shared_store_u32_if(shared + (number * WARPS + warp) * 4, bits, lane == 0)
            cute.arch.sync_threads()
            for number in cutlass.range_constexpr(len(found)):
                if warp == number:
                    bits = lanes.shared_load_u32(shared + (number * WARPS + (lane & (WARPS - 1))) * 4)
                    at = found[number].toint() + Int64(group) * 4
                    maximum_in_memory(at, lanes.redux(bits, "max"), lane == 0)

    def rotate(self, lines: list) -> Float32:
        """The largest |R v| of a thread's columns, rounded to bf16; a NaN does not count."""
        most = Float32(0.0)
        for word in range(COLUMNS // 2):
            for side in range(2):
                values = [fp8.halves(line[word])[side] for line in lines]
                values = [-value if sign < 0 else value for value, sign in zip(values, SIGNS, strict=True)]
                for value in hadamard(values):
                    most = fp8.larger(most, fp8.magnitude(value))
        return fp8.rounded(fp8.multiply(most, Float32(0.25)))


def hadamard(values: list) -> list:
    """Sylvester's matrix times `values`, in steps of 1, 2, 4 and so on."""
    step = 1
    while step < len(values):
        for first in range(0, len(values), 2 * step):
            for at in range(first, first + step):
                a, b = values[at], values[at + step]
                values[at], values[at + step] = a + b, a - b
        step *= 2
    return values
