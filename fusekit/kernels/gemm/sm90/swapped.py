"""Products of few tokens: rows of w take the side of wgmma that has 64 of them, rows of x the other (swap AB).

    (w . x^T)[n, m], wgmma m64nTILE_Mk16

A tile of 16 rows then needs no more of x than those, and the stages hold hardly anything but w: as much of it is in
flight as shared memory has room for, which is what a launch that is bound by reading w takes.

A warpgroup turns its products through shared memory into the order of an unswapped tile's accumulators, so that
epilogues and operands know nothing of it. The products have the same bits: sums over K are made of the same 16 at a
time, in the same order, and a product does not depend on which factor is on which side.
"""

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from fusekit.kernels import ptx
from fusekit.kernels.gemm.sm90.main_loop import MainLoop, Run, Stages, staged
from fusekit.kernels.gemm.sm90.maps import swizzled
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import COLUMNS, TURNS


class SwappedLoop(MainLoop):
    """Load role and accumulation; `most` of the parent are the accumulators in the epilogue's order."""

    def fragments(self, smem_x, smem_w):
        """The epilogue's accumulators; those of wgmma; wgmma descriptors of w and x, for every stage."""
        mma = self.tiled_mma()
        tile_m, tile_n = self.plan.tile
        most = cute.make_rmem_tensor((self.plan.arch.mma_rows * tile_n // self.plan.arch.warpgroup,), Float32)
        products = mma.make_fragment_C(mma.partition_shape_C((tile_n, tile_m)))
        w = mma.make_fragment_A(mma.get_slice(0).partition_A(self.w_tensor(smem_w, tile_n)))
        x = mma.make_fragment_B(mma.get_slice(0).partition_B(self.x_tensor(smem_x)))
        return most, (products, (w, x))

    def x_tensor(self, pointer):
        """Rows of x at `pointer`, every stage."""
        tile_m, tile_k = self.plan.tile[0], self.plan.tile_k
        layout = staged(swizzled(self.x_dtype, self.plan.arch.box), (tile_m, tile_k), self.plan.stages, tile_m * tile_k)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=self.x_dtype), layout.outer)

    def tiled_mma(self):
        """wgmma of one warpgroup."""
        w_major = OperandMajorMode.MN if self.n_major else OperandMajorMode.K
        return make_trivial_tiled_mma(
            self.w_dtype, self.x_dtype, w_major, OperandMajorMode.K, Float32, (1, 1, 1), (64, self.plan.tile[0])
        )

    @cute.jit
    def run_tile(self, most, fragments, stages: Stages, run: Run, rows_left: Int32, consumer: Int32, lane: Int32):
        """As the parent's; every tile has rows."""
        products, factors = fragments
        self.accumulate(products, factors, stages, run, consumer, lane)
        self.exchange(products, most, stages.exchange, consumer, lane, self.plan.tile[0])

    @cute.jit
    def exchange(self, products, most, memory, consumer: Int32, lane: Int32, height: cutlass.Constexpr):
        """Turn a tile's products, of the first `height` rows; all threads that work on it. Warps beyond the tile's rows
        get those of others, and those beyond `height` anything.

        Of a tile that two warpgroups share, each has half of the columns before and half of the rows after: a half of
        the rows goes through memory at a time.
        """
        (tile_m, tile_n), pitch = self.plan.tile, self.plan.exchange_pitch
        own, barrier, threads = 1, consumer + self.plan.named_barrier(COLUMNS), self.plan.arch.warpgroup
        first, base = 0, memory.toint() + consumer * (4 * tile_m * pitch)
        if cutlass.const_expr(not self.plan.pingpong):
            own = self.plan.arch.consumer_warpgroups
            barrier, threads = self.plan.named_barrier(TURNS), own * threads
            first, base = consumer * (tile_n // own), memory.toint()
        rows = tile_m // own
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        column, row = first + warp * WARP_ROWS + (lane >> 2), (lane & 3) * 2  # of the lane's first product
        to = base + (row * pitch + column) * 4
        line = (warp & (rows // WARP_ROWS - 1)) * WARP_ROWS + (lane >> 2)
        source = base + (line * pitch + (lane & 3) * 2) * 4
        how = to, source, barrier, threads, tile_n // own // 64, height
        if cutlass.const_expr(own == 1):
            self.turn(products, most, how, own, 0)
        else:
            if consumer == 0:  # each way takes once: else what it had before would stay in registers
                self.turn(products, most, how, own, 0)
            else:
                self.turn(products, most, how, own, 1)

    def turn(self, products, most, how: tuple, parts: int, taken: int) -> None:
        """Put so many parts of the rows in shared memory, one after the other, and take the one that is to be taken."""
        to, source, barrier, threads, blocks, height = how
        rows = self.plan.tile[0] // parts
        for part in range(parts):
            cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)  # what was there has been read
            self.put(products, to, blocks, part * rows, min(rows, max(height - part * rows, 0)))
            cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
            if part == taken:
                self.take(most, source)

    def put(self, products, to: Int32, blocks: int, first: int, rows: int) -> None:
        """Store a lane's products of `rows` rows from `first` on, from its first one's place on; of so many times 64
        columns.
        """
        tile_m, pitch = self.plan.tile[0], self.plan.exchange_pitch
        flat = cute.make_tensor(products.iterator, cute.make_layout(cute.size(products)))
        for block in range(blocks):
            for chunk in range(rows // 8):
                for r in range(2):
                    for c in range(2):
                        place = (chunk * 8 + c) * pitch + block * 64 + r * 8
                        value = flat[block * (tile_m // 2) + (first // 8 + chunk) * 4 + r * 2 + c]
                        ptx.store_shared_f32(to + place * 4, value)

    def take(self, most, source: Int32) -> None:
        """Load a lane's products of a row and of the eighth after it, from its first one's place on."""
        tile_n, pitch = self.plan.tile[1], self.plan.exchange_pitch
        for chunk in range(tile_n // 8):
            for r in range(2):
                pair = ptx.load_shared_f32x2(source + (r * 8 * pitch + chunk * 8) * 4)
                for c in range(2):
                    most[chunk * 4 + r * 2 + c] = pair[c]
