"""Products of rows of x in bf16 and of w in FP8, with a float32 scale for 128 x 128 of w: w is read as it is.

Rows of w take the side of wgmma that has 64 of them, as in swapped.py, and come from registers: a lane reads its FP8
values of a stage, 128 of K, makes bf16 of them, which is exact, and multiplies

    P_b[n, m] = sum over the 128 of K of block b,  w . x^T        wgmma m64nTILE_Mk16, from an empty accumulator
    sum[n, m] = fma(P_b[n, m], w_s[n / 128, b], sum[n, m])        float32, block after block

A product does not depend on the height of its tile, so a row of x has the same bits among few rows and among many; and
of a high tile hardly more rows are multiplied than exist.
Both consumer warpgroups share a tile, each half of its columns, so that one makes factors while the other waits; they
take turns in finishing tiles of few rows. (A tile of 64 columns has a warpgroup for itself.)

What a lane reads is on its way while sets of factors before it are made: of each set, as soon as the registers that it
comes to have been converted. Tiles of few rows read a stage ahead, and so do all of MXFP4; of higher ones of FP8 stages
are read as they come, and filled again the sooner, and one wgmma more is on its way. Registers of factors are used in
turn, so that a wgmma may still read one set while the next is made; what a block has added up to is taken over behind
the first factors of the next block.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute
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
from fusekit.plan.gemm import COLUMNS, TURNS
from fusekit.plan.operands.w_scale import EXCHANGE

SETS = 4  # of registers that hold factors
DEPTH = 16  # of K, that one wgmma multiplies
PARTS = 4  # sets of a stage's 128 of K, two wgmma each
WORDS = 4  # of FP8 values, that a lane has of a set
LOW = 32  # rows of a tile of FP8 values whose stages are read one ahead
HEIGHTS = 64, 96  # rows of x that are multiplied of a higher tile


class Fragments(NamedTuple):
    """Registers: products of each 64 rows of w; sets of factors; what has been read of w for each set, and its scales;
    sums of the products, where there are blocks. x: wgmma descriptors, for every stage.
    """

    products: tuple
    sets: tuple
    raw: object
    scales: object
    sums: object
    x: object


class ScaledRun(NamedTuple):
    """A tile's stages, as `Run`; where scales of the warp's rows of w begin, for each 64 rows. number: the tile's."""

    position: Int32
    count: Int32
    scales: tuple
    number: Int32


class DequantisedLoop(SwappedLoop):
    """Load role and accumulation; `most` of the parents are the sums in the epilogue's order."""

    anew = True  # whether each stage begins with an empty accumulator

    def __init__(self, plan, halves) -> None:
        super().__init__(plan, halves)
        self.share = plan.tile[1] // (1 if plan.pingpong else plan.arch.consumer_warpgroups)  # of w's rows
        self.blocks = self.share // plan.arch.mma_rows
        self.concat = plan.halved and plan.glu_layout == "concat"
        self.scales = Operands(halves).role(SCALES)

    @property
    def sets(self) -> int:
        """Sets of factors of a stage."""
        return PARTS * self.blocks

    @property
    def early(self) -> bool:
        """Whether a stage is read while the one before is converted."""
        return self.plan.tile[0] <= LOW

    @property
    def ahead(self) -> int:
        """Sets that are read before they are converted."""
        return self.sets if self.early else 1

    def fragments(self, smem_x, smem_w):
        """The epilogue's accumulators; wgmma descriptors of x, for every stage."""
        tile_m, tile_n = self.plan.tile
        most = cute.make_rmem_tensor((self.plan.warpgroup_rows * tile_n // self.plan.arch.warpgroup,), Float32)
        mma = self.tiled_mma(tile_m)
        return most, mma.make_fragment_B(mma.get_slice(0).partition_B(self.x_tensor(smem_x)))

    def registers(self, rows: int, x) -> Fragments:
        """Those of a tile, of which so many rows of x are multiplied: made for it alone, or ptxas would keep what they
        have from tile to tile.
        """
        mma = self.tiled_mma(rows)
        products = tuple(mma.make_fragment_C(mma.partition_shape_C((64, rows))) for _ in range(self.blocks))
        sets = tuple(mma.make_fragment_A(mma.partition_shape_A((64, 2 * DEPTH))) for _ in range(SETS))
        return Fragments(products, sets, *self.read_registers(rows), x)

    def read_registers(self, rows: int) -> tuple:
        """Those for what has been read, scales and sums."""
        return (
            cute.make_rmem_tensor((self.ahead * WORDS,), Uint32),
            cute.make_rmem_tensor((self.blocks,), Float32),
            cute.make_rmem_tensor((self.blocks * rows // 2,), Float32),
        )

    def tiled_mma(self, rows: int):
        """wgmma of one warpgroup, w from registers, and so many rows of x."""
        major = OperandMajorMode.K
        source = warpgroup.OperandSource.RMEM
        shape = (64, rows)
        return make_trivial_tiled_mma(self.x_dtype, self.x_dtype, major, major, Float32, (1, 1, 1), shape, source)

    def of_tile(self, run: Run, tile: Tile, work: Work):
        """As the parent's, with the scales."""
        columns = (self.column(tile, work, block) for block in range(self.blocks))
        scales = tuple(self.scales.begin_of(tile, work, column) for column in columns)
        return ScaledRun(run.position, run.count, scales, tile.count)

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
    def run_tile(self, most, x, stages: Stages, run, rows_left: Int32, consumer: Int32, lane: Int32):
        """As the parent's."""
        rows = rows_left
        if cutlass.const_expr(not self.plan.swapped):
            rows = rows + consumer * self.plan.warpgroup_rows
        self.multiply(self.heights, most, x, stages, run, rows, consumer, lane)

    @property
    def heights(self) -> tuple[int, ...]:
        """How many rows of x may be multiplied: of a high tile, hardly more than exist."""
        tile_m = self.plan.tile[0]
        return (*(height for height in HEIGHTS if height < tile_m), tile_m)

    @cute.jit
    def multiply(self, heights: cutlass.Constexpr, most, x, stages, run, rows: Int32, consumer, lane):
        """Accumulate a tile that has so many rows, in the first of `heights` that has room for them."""
        height, *higher = heights
        if cutlass.const_expr(not higher):
            self.multiply_tile(most, x, stages, run, height, consumer, lane)
        else:
            if rows <= height:
                self.multiply_tile(most, x, stages, run, height, consumer, lane)
            else:
                self.multiply(tuple(higher), most, x, stages, run, rows, consumer, lane)

    @cute.jit
    def multiply_tile(self, most, x, stages, run, rows: cutlass.Constexpr, consumer: Int32, lane: Int32):
        """Accumulate a tile, of which so many rows of x are multiplied."""
        fragments = self.registers(rows, x)
        depth = self.plan.stages
        stage = ptx.modulo(run.position, depth)
        phase = ptx.divide(run.position, depth) & 1
        places = self.places(stages, self.row(consumer, lane), lane)
        self.await_stage(stages.full + stage, phase)
        self.begin(fragments, places, run, stage)
        after, turned = stage, phase
        if cutlass.const_expr(self.early):
            after, turned = self.after(stage, phase, run.count > 1)
            self.await_stage(stages.full + after, turned)
        self.add_stage(fragments, places, run, (stage, after), rows, Int32(0), None, lane)
        released = stage
        for number in cutlass.range(1, run.count, unroll=1):
            if cutlass.const_expr(self.early):
                stage, phase = after, turned
                after, turned = self.after(stage, phase, number + 1 < run.count)
                self.await_stage(stages.full + after, turned)
            else:
                stage, phase = self.after(stage, phase, True)
                self.await_stage(stages.full + stage, phase)
                self.enter(fragments, places, stage)
            self.add_stage(fragments, places, run, (stage, after), rows, number, stages.empty + released, lane)
            released = stage
        self.turns.pass_on(consumer)
        warpgroup.wait_group(0)
        release(self.plan, stages.empty + released, lane)
        result = self.total(fragments)
        if cutlass.const_expr(self.plan.alternates):
            self.hand_over(result, most, stages.exchange, run.number, consumer, lane)
        else:
            self.exchange(result, most, stages.exchange, consumer, lane, rows)

    @cute.jit
    def after(self, stage: Int32, phase: Int32, more: Boolean):
        """The stage after `stage`, and its phase; the same again where there are no more."""
        if more:
            stage += 1
            if stage == self.plan.stages:
                stage = Int32(0)
                phase ^= 1
        return stage, phase

    def row(self, consumer: Int32, lane: Int32):
        """A lane's first row of w in a stage."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        row = warp * WARP_ROWS + (lane >> 2)
        return row if self.plan.pingpong else row + consumer * self.share

    def add_stage(self, fragments, places, run, which: tuple, rows: int, number: Int32, before, lane) -> None:
        """Convert a stage's factors and start its wgmma, and read ahead. which: it, and the stage after it. rows: of x.
        number: of the tile's stages. before: the barrier that releases the stage before; None of the first.
        """
        stage, after = which
        start, add = self.tiled_mma(rows), self.tiled_mma(rows)
        start.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        for index in range(self.sets):
            block, part = divmod(index, PARTS)
            factors = fragments.sets[index % SETS]
            warpgroup.wait_group(SETS - (2 if self.early else 1))  # what reads this set has ended
            self.convert(fragments, places, run, index, cute.recast_tensor(factors, Uint32))
            if self.early:
                self.read(fragments, places, after, index)
            elif index + 1 < self.sets:
                self.read(fragments, places, stage, index + 1)
            self.meanwhile(fragments, places, run, index, after, number, before, lane)
            warpgroup.fence()
            for step in range(2):
                empty = part == 0 and step == 0 and (self.anew or before is None)
                where = (None, None, part * 2 + step, stage)
                mma, product = start if empty else add, fragments.products[block]
                cute.gemm(mma, product, factors[None, None, step], fragments.x[where], product)
            warpgroup.commit_group()

    @cute.jit
    def hand_over(self, product, most, memory, number: Int32, consumer: Int32, lane: Int32):
        """Turn a tile's products for the warpgroup that finishes it. The other goes on at once, and waits one tile
        later, or two, until what it put there has been read.
        """
        (tile_m, _), pitch, finisher = self.plan.tile, self.plan.exchange_pitch, number & 1
        full, read = self.plan.named_barrier(TURNS) + finisher, self.plan.named_barrier(EXCHANGE) + finisher
        group, both = self.plan.arch.warpgroup, 2 * self.plan.arch.warpgroup
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) & 3
        base = memory.toint() + finisher * (4 * tile_m * pitch)
        column = consumer * self.share + warp * WARP_ROWS + (lane >> 2)
        to = base + ((lane & 3) * 2 * pitch + column) * 4
        if consumer == finisher:
            cute.arch.barrier(barrier_id=self.plan.named_barrier(COLUMNS) + consumer, number_of_threads=group)
            self.put(product, to, self.blocks, 0, tile_m)
            cute.arch.barrier(barrier_id=full, number_of_threads=both)
            line = (warp & (tile_m // WARP_ROWS - 1)) * WARP_ROWS + (lane >> 2)
            self.take(most, base + (line * pitch + (lane & 3) * 2) * 4)
            cute.arch.barrier_arrive(barrier_id=read, number_of_threads=both)
        else:
            if number > 1:
                cute.arch.barrier(barrier_id=read, number_of_threads=both)
            self.put(product, to, self.blocks, 0, tile_m)
            cute.arch.barrier_arrive(barrier_id=full, number_of_threads=both)

    # -- of FP8 values ------------------------------------------------------------------------------------------------

    def places(self, stages: Stages, row: Int32, lane: Int32) -> tuple:
        """Where a lane's rows begin in a stage, with the place of its first two values of any 16; what its units of 16
        bytes are exchanged by.
        """
        return stages.w.toint() + row * self.plan.w_row_bytes + (lane & 3) * 2, ((lane >> 2) & 7) * DEPTH

    def begin(self, fragments, places, run, stage: Int32) -> None:
        """Read what a tile begins with."""
        self.enter(fragments, places, stage)
        self.load_scales(fragments, run, Int32(0))
        for number in range(cute.size(fragments.sums)):
            fragments.sums[number] = Float32(0.0)

    def enter(self, fragments, places, stage: Int32) -> None:
        """Read a stage's first sets."""
        for index in range(self.ahead):
            self.read(fragments, places, stage, index)

    def read(self, fragments, places, stage: Int32, index: int) -> None:
        """Read what a set of factors is made of."""
        row_bytes, (base, swizzle) = self.plan.w_row_bytes, places
        block, part = divmod(index, PARTS)
        address = base + stage * (self.plan.tile[1] * row_bytes)
        for step in range(2):
            unit = address + ((part * 2 + step) * DEPTH ^ swizzle)
            for r in range(2):
                place = (block * self.plan.arch.mma_rows + r * 8) * row_bytes
                fragments.raw[index % self.ahead * WORDS + step * 2 + r] = loaded(unit, place)

    def convert(self, fragments, places, run, index: int, words) -> None:
        """Make a set of factors of what has been read."""
        for step in range(2):
            for r in range(2):
                low, high = converted(fragments.raw[index % self.ahead * WORDS + step * 2 + r])
                words[step * 4 + r], words[step * 4 + 2 + r] = low, high

    def meanwhile(self, fragments, places, run, index: int, after: Int32, number: Int32, before, lane) -> None:
        """What else there is to do when a set has been made and the one before is multiplied."""
        if index == 0 and before is not None:
            warpgroup.wait_group(0)
            self.take_over(fragments)
            self.load_scales(fragments, run, number)
            release(self.plan, before, lane)

    def take_over(self, fragments) -> None:
        """Add up what a block has made, times its scales."""
        for block, product in enumerate(fragments.products):
            size = cute.size(product)
            flat = cute.make_tensor(product.iterator, cute.make_layout(size))
            for number in range(size):
                place = block * size + number
                fragments.sums[place] = fma(flat[number], fragments.scales[block], fragments.sums[place])

    def load_scales(self, fragments, run: ScaledRun, number: Int32) -> None:
        """Load those of block `number`."""
        for block, scale in enumerate(load_all(run.scales, number)):
            fragments.scales[block] = scale

    def total(self, fragments):
        """What a tile has added up to."""
        self.take_over(fragments)
        return fragments.sums


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
