"""Products of rows of x in bf16 and of w in FP8, with a float32 scale for 128 x 128 of w: w is read as it is.

Rows of w take the side of wgmma that has 64 of them, as in swapped.py, and come from registers: a lane reads its FP8
values of a stage, makes bf16 of them, which is exact, and multiplies

    P_b[n, m] = sum over the 128 of K of block b,  w . x^T        wgmma m64nTILE_Mk16, from an empty accumulator
    sum[n, m] = fma(P_b[n, m], w_s[n / 128, b], sum[n, m])        float32, block after block

A product does not depend on the height of its tile, so a row of x has the same bits among few rows and among many. For
few, each warpgroup has tiles of its own; for many, both share one, each half of its columns, and while one makes bf16
of FP8 values, the other multiplies.

A stage has 64 of K: two make a block. Registers of factors are used in turn, so that a wgmma may still read one set
while the next is made; what a block has added up to is taken over behind the first factors of the next block.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma

from fusekit.kernels import ptx
from fusekit.kernels.floats import fma
from fusekit.kernels.gemm.operands.base import SCALES, Tile, Work
from fusekit.kernels.gemm.sm90.hooks import Operands
from fusekit.kernels.gemm.sm90.main_loop import Run, Stages, release
from fusekit.kernels.gemm.sm90.swapped import SwappedLoop
from fusekit.kernels.inline import inline
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.quant import SIDE

SETS = 4  # of registers that hold factors
DEPTH = 16  # of K, that one wgmma multiplies
PARTS = 2  # sets of a stage's 64 of K, two wgmma each


class ScaledRun(NamedTuple):
    """A tile's stages, as `Run`; where the scales of the warp's rows of w begin, for each 64 rows; how many there are
    along K.
    """

    position: Int32
    count: Int32
    scales: tuple
    blocks: Int32


class DequantisedLoop(SwappedLoop):
    """Load role and accumulation; `most` of the parents are the sums in the epilogue's order."""

    def __init__(self, plan, halves) -> None:
        super().__init__(plan, halves)
        self.share = plan.tile[1] // (1 if plan.pingpong else plan.arch.consumer_warpgroups)  # of w's rows
        self.blocks = self.share // plan.arch.mma_rows
        self.concat = plan.halved and plan.glu_layout == "concat"
        self.scales = Operands(halves).role(SCALES)

    def fragments(self, smem_x, smem_w):
        """The epilogue's accumulators; sums; of each 64 rows of w those of wgmma; factors; wgmma descriptors of x."""
        mma = self.tiled_mma()
        tile_m, tile_n = self.plan.tile
        most = cute.make_rmem_tensor((self.plan.warpgroup_rows * tile_n // self.plan.arch.warpgroup,), Float32)
        sums = cute.make_rmem_tensor((self.blocks * tile_m // 2,), Float32)
        shape = mma.partition_shape_C((64, tile_m))
        products = tuple(mma.make_fragment_C(shape) for _ in range(self.blocks))
        sets = tuple(mma.make_fragment_A(mma.partition_shape_A((64, 2 * DEPTH))) for _ in range(SETS))
        x = mma.make_fragment_B(mma.get_slice(0).partition_B(self.x_tensor(smem_x)))
        return most, (sums, products, sets, x)

    def tiled_mma(self):
        """wgmma of one warpgroup, w from registers."""
        major = OperandMajorMode.K
        source = warpgroup.OperandSource.RMEM
        shape = (64, self.plan.tile[0])
        return make_trivial_tiled_mma(self.x_dtype, self.x_dtype, major, major, Float32, (1, 1, 1), shape, source)

    def of_tile(self, run: Run, tile: Tile, work: Work):
        """As the parent's, with the scales."""
        columns = (self.column(tile, work, block) for block in range(self.blocks))
        scales = tuple(self.scales.begin_of(tile, work, column) for column in columns)
        return ScaledRun(run.position, run.count, scales, ptx.divide(work.extents.k + (SIDE - 1), SIDE))

    def column(self, tile: Tile, work: Work, block: int):
        """The first of a warp's 16 rows of w in 64 rows of its warpgroup, which all have one scale."""
        warp = work.warp_of_cta & 3
        tile_n = self.plan.tile[1]
        column = block * 64 + warp * WARP_ROWS
        if not self.plan.pingpong:
            column = column + work.warpgroup * self.share
        if not self.concat:
            return tile.n_tile * tile_n + column
        half = tile_n // 2
        side = ptx.divide(column, half)
        return tile.n_tile * half + column - side * half + side * work.extents.half_n

    @cute.jit
    def run_tile(self, most, fragments, stages: Stages, run: ScaledRun, rows_left: Int32, consumer: Int32, lane: Int32):
        """As the parent's."""
        sums, products, sets, x = fragments
        depth = self.plan.stages
        stage = ptx.modulo(run.position, depth)
        phase = ptx.divide(run.position, depth) & 1
        base = stages.w.toint() + self.lane_offset(consumer, lane)
        for number in cutlass.range_constexpr(cute.size(sums)):
            sums[number] = Float32(0.0)
        self.empty(products)
        before = tuple(Float32(0.0) for _ in range(self.blocks))  # what the last block's products are multiplied by
        scales = load_all(run.scales, Int32(0))
        released = stage
        for block in cutlass.range(ptx.divide(run.count, 2), unroll=1):
            self.await_stage(stages.full + stage, phase)
            self.add_stage(0, sums, products, sets, x, base, stage, before, lane)
            if block > 0:
                release(self.plan, stages.empty + released, lane)
            released = stage
            before = scales
            scales = load_all(run.scales, ptx.minimum_of(block + 1, run.blocks - 1))
            stage, phase = self.next(stage, phase)
            self.await_stage(stages.full + stage, phase)
            self.add_stage(1, sums, products, sets, x, base, stage, before, lane)
            warpgroup.wait_group(SETS - 2)
            release(self.plan, stages.empty + released, lane)
            released = stage
            stage, phase = self.next(stage, phase)
        if run.count & 1 == 1:  # half a block
            self.await_stage(stages.full + stage, phase)
            self.add_stage(0, sums, products, sets, x, base, stage, before, lane)
            if run.count > 1:
                release(self.plan, stages.empty + released, lane)
            released = stage
            before = scales
        self.turns.pass_on(consumer)
        warpgroup.wait_group(0)
        release(self.plan, stages.empty + released, lane)
        self.take_over(sums, products, before)
        self.exchange(sums, most, stages.exchange, consumer, lane)

    def empty(self, products) -> None:
        """Zero what the first block of a tile takes over."""
        for product in products:
            for number in range(cute.size(product)):
                product[number] = Float32(0.0)

    @cute.jit
    def next(self, stage: Int32, phase: Int32):
        """The stage after `stage`, and its phase."""
        stage += 1
        if stage == self.plan.stages:
            stage = Int32(0)
            phase ^= 1
        return stage, phase

    def lane_offset(self, consumer: Int32, lane: Int32):
        """Where a lane's row of w begins in a stage, with the place of its first two FP8 values of any 16."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        row = warp * WARP_ROWS + (lane >> 2)
        if not self.plan.pingpong:
            row = row + consumer * self.share
        return row * self.plan.w_row_bytes + (lane & 3) * 2

    def add_stage(self, half: int, sums, products, sets, x, base, stage, before, lane) -> None:
        """Convert a stage's factors and start its wgmma; `half` of a block, of which the first takes over what the
        block before has added up.
        """
        start, add = self.tiled_mma(), self.tiled_mma()
        start.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        row_bytes = self.plan.w_row_bytes
        address = base + stage * (self.plan.tile[1] * row_bytes)
        swizzle = ((lane >> 3) & 3) * DEPTH  # the row's: units of 16 bytes, two rows after two
        # All of the stage at once: each set would wait for what it reads of shared memory.
        given = {}
        for number in range(PARTS * self.blocks):
            block, part = divmod(number, PARTS)
            for step in range(2):
                unit = address + ((part * 2 + step) * DEPTH ^ swizzle)
                for r in range(2):
                    place = (block * self.plan.arch.mma_rows + r * 8) * row_bytes
                    given[number, step, r] = loaded(unit, place)
        for number in range(PARTS * self.blocks):
            block, part = divmod(number, PARTS)
            factors = sets[(half * PARTS * self.blocks + number) % SETS]
            words = cute.recast_tensor(factors, Uint32)
            warpgroup.wait_group(SETS - 2)  # what reads this set has ended
            for step in range(2):
                for r in range(2):
                    low, high = converted(given[number, step, r])
                    words[step * 4 + r], words[step * 4 + 2 + r] = low, high
            if half == 0 and number == 0:
                warpgroup.wait_group(0)
                self.take_over(sums, products, before)
            warpgroup.fence()
            for step in range(2):
                first = half == 0 and part == 0 and step == 0
                where = (None, None, part * 2 + step, stage)
                mma, product = start if first else add, products[block]
                cute.gemm(mma, product, factors[None, None, step], x[where], product)
            warpgroup.commit_group()

    def take_over(self, sums, products, scales) -> None:
        """Add up what a block has made, times its scales."""
        for block, product in enumerate(products):
            size = cute.size(product)
            flat = cute.make_tensor(product.iterator, cute.make_layout(size))
            for number in range(size):
                place = block * size + number
                sums[place] = fma(flat[number], scales[block], sums[place])


def load_all(addresses, number: Int32) -> tuple:
    """Float32 `number` from each address on, in global memory."""
    text = "{ .reg .b64 a; mad.wide.s32 a, {$r1}, 4, {$r0}; ld.global.nc.f32 {$w0}, [a]; }"
    return tuple(inline(Float32, text, address, number) for address in addresses)


def loaded(address: Int32, place: int) -> Uint32:
    """Four FP8 values of shared memory: two at address + place, in bytes 0 and 2; two 8 bytes further, in 1 and 3."""
    text = (
        "{ .reg .b32 low_, high_;"
        f" ld.shared.u16 low_, [{{$r0}}+{place}]; ld.shared.u16 high_, [{{$r0}}+{place + 8}];"
        " prmt.b32 {$w0}, low_, high_, 0x5140; }"
    )
    return inline(Uint32, text, address)


def converted(fp8: Uint32):
    """bf16 of the e4m3 values in bytes 0 and 2, and of those in 1 and 3; exact.

    Sign, exponent and mantissa move to where bf16 has them, and 2^120 makes up for the difference of the exponents'
    biases, of subnormal numbers too. The code of NaN becomes 480.
    """
    text = (
        "{ .reg .b32 low_, high_, sign_, bias_; mov.b32 bias_, 0x7B807B80;"
        " shl.b32 low_, {$r0}, 4; and.b32 low_, low_, 0x07F007F0;"
        " shl.b32 sign_, {$r0}, 8; and.b32 sign_, sign_, 0x80008000; or.b32 low_, low_, sign_;"
        " shr.u32 high_, {$r0}, 4; and.b32 high_, high_, 0x07F007F0;"
        " and.b32 sign_, {$r0}, 0x80008000; or.b32 high_, high_, sign_;"
        " mul.rn.bf16x2 {$w0}, low_, bias_; mul.rn.bf16x2 {$w1}, high_, bias_; }"
    )
    return inline([Uint32] * 2, text, fp8)
