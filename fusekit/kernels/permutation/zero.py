"""moe-zero: zeros for the spare rows of a grouped GEMM's result, those from the last group's end on.

    y[m] = 0 for m >= offsets[E - 1]; rows of groups are left as they are

A thread block has a run of rows, a warp a row at a time, a lane 16 bytes of it.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide

UNIT = 16  # bytes of an access
ROWS = 16  # of a warp


class MoeZero:
    """The kernel of one spec; calling it traces host function and kernel."""

    def __init__(self, dtype: str, warps: int) -> None:
        self.size, self.warps = DTYPES[dtype].bytes, warps
        self.rows = ROWS * warps

    @classmethod
    def of(cls, spec) -> "MoeZero":
        """The kernel of a spec."""
        return cls(spec.dtype, spec.warps)

    @cute.jit
    def __call__(self, offsets: cute.Tensor, y: cute.Tensor, stream: CUstream):
        """Launch."""
        rows, columns = y.shape
        self.kernel(
            offsets.iterator, y.iterator, offsets.shape[0], rows, columns * self.size, Int64(y.stride[0]) * self.size
        ).launch(grid=[(rows - 1) // self.rows + 1, 1, 1], block=[self.warps * WARP, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, offsets: cute.Pointer, y: cute.Pointer, groups: Int32, rows: Int32, nbytes: Int32, stride: Int64
    ):  # fmt: skip
        """See the module's docstring; nbytes and stride of a row."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(divide(thread, WARP))
        end = Int32(lanes.load(offsets.toint() + Int64(groups - 1) * 4, 4)[0])
        first = block * self.rows + warp
        for row in cutlass.range(first, cutlass.min(rows, (block + 1) * self.rows), self.warps, unroll=1):
            if row >= end:
                place = y.toint() + Int64(row) * stride
                for offset in cutlass.range(lane * UNIT, nbytes, WARP * UNIT, unroll=1):
                    lanes.store(place + Int64(offset), [Uint32(0)] * (UNIT // 4), UNIT)
