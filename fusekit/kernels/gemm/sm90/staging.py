"""A consumer warp's staging boxes: 16 rows of finished elements on their way to global memory.

Accumulator layout (PTX ISA, "wgmma, D fragment"): register (c, r, j) of a 64-row block holds row lane/4 + 8 r of the
warp's 16 and column 8 j + 2 (lane % 4) + c.
"""

import cutlass
from cutlass import cute

from fusekit.kernels import ptx
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import GemmPlan


class StagingBoxes:
    """A warp's staging boxes in shared memory, of `bytes` each, used in turn and stored by TMA."""

    def __init__(self, plan: GemmPlan) -> None:
        self.bytes = plan.epilogue_box * WARP_ROWS * 2
        self.count = plan.output_boxes
        self.single = plan.out_dtype == "f32"

    def store_values(self, number: int, columns: int, values, descriptor, where, staging, add: bool = False) -> None:
        """Store a box of outputs, packed pairs or float32, or add it to what is there (float32)."""
        if self.single:
            self.store_single(number, columns, values, descriptor, where, staging, add)
        else:
            self.store(number, columns, values, descriptor, where, staging)

    @cute.jit
    def store(self, number: cutlass.Constexpr, columns: cutlass.Constexpr, registers, descriptor, where, staging):
        """Write a 16-row box of 16-bit elements and start its store.

        `registers` holds (chunk, r) in order: two columns of chunk `chunk`, row lane/4 + 8 r, packed. The swizzle is
        the tensor map's: 16-byte units exchanged by address bits 7 and up.
        """
        box = staging + (number % self.count) * self.bytes
        self.acquire()
        self.write(box, columns, registers)
        self.send(box, descriptor, where, False)

    def write(self, box, columns: int, registers) -> None:
        """The box's elements alone, no store."""
        lane = cute.arch.lane_idx()
        row = lane & (WARP_ROWS - 1)
        swizzle = ((row * (2 * columns)) >> 7) & (columns // 8 - 1)
        unit = ((lane >> 4) ^ swizzle) * 16
        base = box.toint() + row * (2 * columns)
        for pair in range(columns // 16):
            ptx.store_matrix_x4(base + (unit ^ (pair * 32)), registers[4 * pair : 4 * pair + 4])

    @cute.jit
    def store_single(
        self,
        number: cutlass.Constexpr,
        columns: cutlass.Constexpr,
        values,
        descriptor,
        where,
        staging,
        add: cutlass.Constexpr,
    ):
        """Write a 16-row box of float32 (accumulator registers in order) and start its store, or its addition."""
        lane = cute.arch.lane_idx()
        row = lane >> 2
        box = staging + (number % self.count) * self.bytes
        base = box.toint() + row * (4 * columns)
        swizzle = ((row * (4 * columns)) >> 7) & (columns // 4 - 1)
        place = (lane & 3) * 8
        self.acquire()
        for chunk in cutlass.range_constexpr(columns // 8):
            offset = ((chunk * 32 + place) ^ (swizzle * 16)) + base
            for r in cutlass.range_constexpr(2):  # eight rows further the swizzle is the same
                index = chunk * 4 + r * 2
                ptx.store_shared_f32x2(offset + r * (8 * 4 * columns), values[index], values[index + 1])
        self.send(box, descriptor, where, add)

    @cute.jit
    def acquire(self):
        """Wait until what the next box has held has left shared memory."""
        lane = cute.arch.lane_idx()
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(self.count - 1, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def acquire_all(self):
        """Wait until the stores of all boxes have left shared memory."""
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def send(self, box, descriptor, where, add: cutlass.Constexpr):
        """Start the store of a box that the warp has written."""
        lane = cute.arch.lane_idx()
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            ptx.tma_store(descriptor, box, where, add)
            cute.arch.cp_async_bulk_commit_group()
