"""GEMM with a backward epilogue: da = x . w, dz = da * activation'(z), and on demand the activation of z recomputed.

x is the gradient of the layer above ([M, K]), w that layer's weight, z what the forward saved. Warp roles, pipeline and
barriers are those of kernel.py; what differs is the epilogue. A consumer warp streams z through a ring of boxes of
its own: loaded by TMA ahead of time (the first while the warp still waits for its main loop), turned into dz in place,
stored by TMA from the same box, and loaded again. Only its own barriers, one a box, join a warp's loads and its reads.

A unit of work is one box: 32 columns of da with their 64 columns of z where the activation is gated, in every layout,
or the widest box of columns where it is plain.
"""

import cutlass
from cutlass import Float32, Int32, cute

from fusekit.kernels import lanes, ptx
from fusekit.kernels.gemm import maths
from fusekit.kernels.gemm.operands.base import STREAMED, Rows, Tile, Work, dtype_of
from fusekit.kernels.gemm.sm90.hooks import Operands
from fusekit.kernels.gemm.sm90.kernel import Gemm
from fusekit.kernels.gemm.sm90.maps import z_place
from fusekit.kernels.gemm.sm90.promoted import main_loop
from fusekit.kernels.gemm.sm90.scheduler import scheduler
from fusekit.plan.activations import forms
from fusekit.plan.arch.sm_90a import WARP_ROWS
from fusekit.plan.gemm import GemmPlan


def kernel(plan: GemmPlan, halves) -> Gemm:
    """The kernel of `plan`; halves: the device halves of its operands, by name."""
    return Gemm(plan, halves, main_loop(plan, halves), BackwardEpilogue(plan, halves), scheduler(plan))


class BackwardEpilogue:
    """What one backward kernel does with its accumulators."""

    def __init__(self, plan: GemmPlan, halves) -> None:
        self.plan = plan
        self.operands = Operands(halves)
        self.z = self.operands.role(STREAMED)
        self.dtype = dtype_of(plan.dtype)
        self.concat = plan.glu_layout == "concat"
        self.adjacent = plan.glu_layout == "interleaved"
        self.columns = plan.epilogue_box  # of da, in a unit
        self.units = plan.tile[1] // self.columns  # of one 64-row block
        self.blocks = plan.warpgroup_rows // 64
        self.z_columns = plan.z_columns
        self.depth = plan.z_boxes  # of a warp's ring of boxes
        # Where registers are few: ptxas moves no load of z over a store of dz, whether dz is kept or not.
        self.in_place = plan.quant.wide or plan.turning
        _, self.derivative = forms(plan.kind.function)[plan.approximate]

    # -- z ------------------------------------------------------------------------------------------------------------

    def place(self, tile: Tile, warp: Int32, block, unit):
        """Coordinates of a unit's box in z and dz."""
        left = tile.end - tile.row - block * 64 - warp * WARP_ROWS
        return z_place(self.plan, left, tile.end, tile.n_tile, unit)

    def count(self, tile: Tile, warp: Int32):
        """Units of a tile that have rows for this warp."""
        left = cutlass.max(tile.end - tile.row - warp * WARP_ROWS, 0)
        blocks = cutlass.min(ptx.divide(left + 63, 64), self.blocks)
        return blocks * self.units

    @cute.jit
    def fetch(self, tile: Tile, work: Work, number, seen: Int32):
        """Start loading unit `number` of the tile, `seen` units having come before the tile; one lane."""
        slot = ptx.modulo(seen + number, self.depth)
        barrier = self.z.barrier(work.shared, work.warp_of_cta, slot)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.plan.z_box_bytes)
        block = number // self.units if isinstance(number, int) else ptx.divide(number, self.units)
        where = self.place(tile, work.warp_of_cta & 3, block, number - block * self.units)
        self.z.load(work.operands, work.staging + slot * self.plan.z_box_bytes, barrier, where)

    @cute.jit
    def prepare(self, tile: Tile, work: Work, warp_state, seen: Int32):
        """Before a tile's main loop: send for its first boxes of z."""
        total = self.count(tile, work.warp_of_cta & 3)
        self.operands.prepare(tile, work, warp_state)
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last tile's boxes have left
            ahead = 0 if self.plan.turning else min(self.depth, self.units * self.blocks)  # else it is sent for already
            for number in cutlass.range_constexpr(ahead):
                if number < total:
                    self.fetch(tile, work, number, seen)
            for half in self.operands:
                half.ahead(tile, work)

    def finish(self, count: Int32, work: Work) -> None:
        """After the last tile."""
        self.operands.finish(count, work)

    # -- a tile -------------------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, acc, tile: Tile, work: Work, warp_state, seen: Int32):
        """Finish the accumulators of one tile; arguments as in `Epilogue.run`. Returns the units seen so far."""
        states = self.operands.start(tile, work, warp_state)
        elements = self.plan.tile[1] // 2  # of a lane in a 64-row block
        if cutlass.const_expr(self.plan.blocks_in_turn):
            # The code for one block is long enough to be worth fetching once; the next one's accumulators move up.
            rows = cute.make_rmem_tensor((elements,), Float32)
            for element in cutlass.range_constexpr(elements):
                rows[element] = ptx.fresh_float(acc[element])
            for block in cutlass.range(self.blocks, unroll=1):
                self.run_block(rows, 0, block, states, tile, work, seen)
                for element in cutlass.range_constexpr(elements * (self.blocks - 1)):
                    rows[element] = ptx.fresh_float(acc[element + elements])
        else:
            for block in cutlass.range_constexpr(self.blocks):
                self.run_block(acc, block * elements, block, states, tile, work, seen)
        self.operands.finish_tile(states, work)
        return seen + self.count(tile, work.warp_of_cta & 3)

    @cute.jit
    def run_block(self, acc, first, block, states, tile: Tile, work: Work, seen: Int32):
        """Finish 64 rows, whose accumulators begin with number `first`; block: which ones, maybe known at run time."""
        scalars = self.operands.scalars(work.operands)
        warp, lane = work.warp_of_cta & 3, cute.arch.lane_idx()
        total = self.count(tile, warp)
        row = tile.row + block * 64 + warp * WARP_ROWS
        if row < tile.end:
            rows = Rows(row, tile.end, tile.n_tile, block)
            row_state = self.operands.rows(rows, work, states, acc)
            gradients, values = [], []  # dz, and y, where they are stored as FP8 values
            for unit in cutlass.range_constexpr(self.units):
                number = block * self.units + unit
                slot = ptx.modulo(seen + number, self.depth)
                phase = ptx.divide(seen + number, self.depth) & 1
                box = work.staging + slot * self.plan.z_box_bytes
                cute.arch.mbarrier_wait(self.z.barrier(work.shared, work.warp_of_cta, slot), phase)
                if cutlass.const_expr(self.plan.quant.coded_inputs):
                    chunks = range(unit * self.columns // 8, (unit + 1) * self.columns // 8)
                    self.operands.accumulate(acc, first, chunks, states, row_state)
                base, steps = first + unit * (self.columns // 2), []
                outputs = self.work(acc, base, box.toint(), lane, scalars, row_state, steps)
                gradients.append(steps)
                values += outputs
                if cutlass.const_expr(self.plan.turning):  # else ptxas packs them later, and holds their factors
                    for packed in zip(outputs[::2], outputs[1::2], strict=True):
                        ptx.worked_out(*(lanes.float_of(word) for word in packed), work.extents.rows)
                staged = self.operands.stage(number, outputs, work)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    if cutlass.const_expr(self.plan.quant.wide):
                        self.operands.z_box(box, self.place(tile, warp, block, unit), work)
                    self.operands.send(staged, unit, rows, work)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(1, read=True)  # the box before this one has left
                    if cutlass.const_expr(not self.plan.turning):
                        self.fetch_ahead(tile, work, number, total, seen)
                cute.arch.sync_warp()
                self.operands.unit(states, row_state, unit)
            self.operands.gradients((gradients, values), rows, work)
            self.operands.rows_end(rows, row_state, work)

    @cute.jit
    def fetch_ahead(self, tile: Tile, work: Work, number, total: Int32, seen: Int32):
        """After unit `number` of `total`: into the box before its own."""
        ahead = number - 1 + self.depth
        if cutlass.const_expr(isinstance(number, int)):
            if ahead < total and cutlass.const_expr(0 < number <= self.blocks * self.units - self.depth):
                self.fetch(tile, work, ahead, seen)
        else:
            if number > 0 and ahead < total:
                self.fetch(tile, work, ahead, seen)

    def work(self, acc, base: int, box: Int32, lane: Int32, scalars, row_state, gradients: list) -> list:
        """Replace z in a box by dz; the packed outputs, (chunk, r) in order, where an operand asks for them.

        gradients: gets the packed dz of each step, gates and ups apart, or together where they lie side by side.

        With sums, z is read one step ahead of where dz is written: ptxas moves no load of shared memory over a store
        to it, and with fewer registers left it finds less to do meanwhile.
        """
        steps = self.columns // (8 if self.adjacent else 16)
        load, finish = (self.load_chunk, self.finish_chunk) if self.adjacent else (self.load_pair, self.finish_pair)
        outputs, loaded = [], []
        ahead = 1 if self.plan.sums and self.adjacent else 0
        for step in range(steps + ahead):
            if step < steps:
                loaded.append(load(box, step, lane))
            if step >= ahead:
                number = step - ahead
                packed, results = finish(acc, base, number, *loaded[number], scalars, row_state)
                outputs += packed
                gradients.append(results)
        return outputs

    def load_pair(self, box: Int32, pair: int, lane: Int32):
        """A lane's addresses of 16 columns of z, or of gate and of up; and what is there."""
        addresses = self.matrix_addresses(box, pair, lane)
        return addresses, [ptx.load_matrix_x4(address) for address in addresses]

    def finish_pair(self, acc, base: int, pair: int, addresses, parts, scalars, row_state):
        """`work` of one pair of chunks whose z has been loaded: packed outputs, packed dz by side."""
        outputs, results, rows = [], [[] for _ in parts], []
        for index in range(4):  # (chunk, r) of the pair of chunks
            first = base + pair * 8 + index * 2
            halves = [ptx.unpack_pair(part[index], self.dtype) for part in parts]
            values, gradients = [], []
            for c in range(2):
                value, sides = self.element(acc[first + c], [half[c] for half in halves], index % 2, scalars, row_state)
                values.append(value)
                gradients.append(sides)
            rows.append([gradient for sides in gradients for gradient in sides])
            if index % 2:
                self.operands.take(row_state, *rows)
                rows = []
            for side, result in enumerate(results):
                result.append(ptx.pack_pair(gradients[0][side], gradients[1][side], self.dtype))
            outputs += self.operands.pack(values)
        if self.in_place:
            for address, result in zip(addresses, results, strict=True):
                ptx.store_matrix_x4(address, result)
        return outputs, results

    def load_chunk(self, box: Int32, chunk: int, lane: Int32):
        """The same of a chunk of 8 columns where gate and up lie side by side: a lane's two are eight bytes."""
        addresses = []
        for r in range(2):
            row = (lane >> 2) + 8 * r
            place = (chunk * 32 + (lane & 3) * 8) ^ ((row & 7) * 16)
            addresses.append(box + row * (2 * self.z_columns) + place)
        return addresses, [ptx.load_shared_b32x2(address) for address in addresses]

    def finish_chunk(self, acc, base: int, chunk: int, addresses, parts, scalars, row_state):
        """`work` of one such chunk whose z has been loaded."""
        outputs, rows, words = [], [], []
        for r, (address, packed) in enumerate(zip(addresses, parts, strict=True)):
            values, results, gradients = [], [], []
            for c in range(2):
                z = ptx.unpack_pair(packed[c], self.dtype)
                value, sides = self.element(acc[base + chunk * 4 + r * 2 + c], z, r, scalars, row_state)
                values.append(value)
                gradients += sides
                results.append(ptx.pack_pair(*sides, self.dtype))
            rows.append(gradients)
            if self.in_place:
                ptx.store_shared_b32x2(address, *results)
            words += results
            outputs += self.operands.pack(values)
        self.operands.take(row_state, *rows)
        return outputs, [words]

    def element(self, da, z, r: int, scalars, row_state):
        """The activation's value and dz of one column, from da and z, or (gate, up)."""
        value, *slopes = self.derivative(maths, *z, *scalars)
        da, value = self.operands.gradient(da, value, row_state, r)
        return value, [da * slope for slope in slopes]

    def matrix_addresses(self, box: Int32, pair: int, lane: Int32) -> list[Int32]:
        """Where a lane's row of 16 columns begins: of z, or of gate and of up."""
        row = lane & (WARP_ROWS - 1)
        stride = 2 * self.z_columns
        swizzle = ((row * stride) >> 7) & (self.z_columns // 8 - 1)
        unit = lane >> 4
        if not self.plan.kind.gated:
            return [box + row * stride + ((unit ^ swizzle) * 16 ^ (pair * 32))]
        if self.concat:  # one box of gates after one of ups
            place = box + row * stride + ((unit ^ swizzle) * 16 ^ (pair * 32))
            return [place, place + WARP_ROWS * stride]
        return [box + row * stride + ((unit ^ swizzle) * 16 ^ ((pair + side * 2) * 32)) for side in range(2)]
