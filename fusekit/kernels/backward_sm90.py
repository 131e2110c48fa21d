"""GEMM with a backward epilogue: da = x . w, dz = da * activation'(z), and on demand the activation of z again.

x is the gradient of the layer above ([M, K]), w that layer's weight, z what the forward saved. Warp roles, pipeline and
barriers are those of gemm_sm90.py; what differs is the epilogue. A consumer warp streams z through `Z_BOXES` boxes of
its own: loaded by TMA ahead of time (the first while the warp still waits for its main loop), turned into dz in place,
stored by TMA from the same box, and loaded again. Only its own barriers, one a box, join a warp's loads and its reads.

A unit of work is one box: 32 columns of da with their 64 columns of z where the activation is gated, in every layout,
or the widest box of columns where it is plain.
"""

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import cpasync

from fusekit.kernels import activations, ptx
from fusekit.kernels.collect import Collector
from fusekit.kernels.config import CONSUMER_WARPGROUPS, THREADS, TILE_K, GemmConfig, dtype_of
from fusekit.kernels.epilogue import BIG, BOXES, WARP_ROWS, Epilogue, StagingBoxes, box_columns
from fusekit.kernels.gemm_sm90 import GemmSm90
from fusekit.kernels.mainloop_sm90 import MainLoop, swizzled
from fusekit.kernels.scheduler import Scheduler
from fusekit.kernels.sums import GradientSums

Z_BOXES = 3  # of a warp: one being worked on, the others on their way
GATED_UNIT = 32  # columns of da


class BackwardEpilogue(Epilogue):
    """What one backward configuration does with its accumulators."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.out_dtype = dtype_of(config.out_dtype)
        self.gated = config.z_layout != "none"
        self.concat = config.z_layout == "concat"
        self.unit = GATED_UNIT if self.gated else box_columns(config.tile[1], 64)
        self.units = config.tile[1] // self.unit  # of one 64-row block
        self.blocks = config.warpgroup_rows // 64
        self.z_columns = (self.unit if self.concat else 2 * self.unit) if self.gated else self.unit
        self.z_bytes = self.unit * (2 if self.gated else 1) * WARP_ROWS * 2
        self.boxes = StagingBoxes(self.unit * WARP_ROWS * 2 if config.recompute or config.dbias else 0)
        self.warp_bytes = Z_BOXES * self.z_bytes + BOXES * self.boxes.bytes
        self.staging_bytes = CONSUMER_WARPGROUPS * 4 * self.warp_bytes
        table = activations.GATED_DERIVATIVES if self.gated else activations.PLAIN_DERIVATIVES
        kind, _, approximate = config.activation.partition(":")
        self.derivative = table[kind, approximate or "none"]
        self.sums = GradientSums(config, self.unit, self.warp_bytes, Z_BOXES * self.z_bytes)
        self.collector = Collector(self.sums)
        self.barriers = (1,) * (CONSUMER_WARPGROUPS * 4 * Z_BOXES) + (self.sums.barriers if config.sums else ())

    # -- z ------------------------------------------------------------------------------------------------------------

    def place(self, tile, warp: Int32, block, unit):
        """Coordinates of a unit's box in z and dz."""
        row, end, n_tile, *_ = tile
        column = n_tile * self.config.tile[1] + unit * self.unit
        rows = BIG - (end - row - block * 64 - warp * WARP_ROWS)
        if self.concat:
            return (column, rows, 0, BIG, end)
        return (column * (2 if self.gated else 1), rows, BIG, end)

    def count(self, tile, warp: Int32):
        """Units of a tile that have rows for this warp."""
        row, end, *_ = tile
        left = cutlass.max(end - row - warp * WARP_ROWS, 0)
        blocks = cutlass.min(ptx.divide(left + 63, 64), self.blocks)
        return blocks * self.units

    @cute.jit
    def fetch(self, tile, context, number, seen: Int32):
        """Start loading unit `number` of the tile, `seen` units having come before the tile; one lane."""
        (_, map_z, _), (staging, arrivals, _, warp_of_cta), *_ = context
        slot = ptx.modulo(seen + number, Z_BOXES)
        barrier = arrivals + (warp_of_cta * Z_BOXES + slot)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.z_bytes)
        block = number // self.units if isinstance(number, int) else ptx.divide(number, self.units)
        where = self.place(tile, warp_of_cta & 3, block, number - block * self.units)
        ptx.tma_load(map_z, staging + slot * self.z_bytes, barrier, where)

    @cute.jit
    def prepare(self, tile, context, seen: Int32):
        """Before a tile's main loop: send for its first boxes of z."""
        _, (_, arrivals, sum_boxes, warp_of_cta), *_ = context
        total = self.count(tile, warp_of_cta & 3)
        if cute.arch.lane_idx() == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the last tile's boxes have left
            for number in cutlass.range_constexpr(min(Z_BOXES, self.units * self.blocks)):
                if number < total:
                    self.fetch(tile, context, number, seen)
            if cutlass.const_expr(self.config.sums):
                self.sums.begin(self.left(arrivals, sum_boxes), tile, warp_of_cta)

    @cute.jit
    def assist(self, gradients, memory, warp: Int32):
        """The idle warps' part of the sums; memory: (barriers, boxes of sums, staging), of the CTA."""
        arrivals, sum_boxes, staging = memory
        self.collector.assist(gradients, self.left(arrivals, sum_boxes, staging), warp)

    def left(self, arrivals, sum_boxes, staging=None):
        """Where `GradientSums` leaves what the idle warps collect."""
        return arrivals + CONSUMER_WARPGROUPS * 4 * Z_BOXES, sum_boxes, staging

    @cute.jit
    def finish(self, context, count: Int32):
        """The consumer warps' last step of the sums; there is no `count`-th tile."""
        _, (_, arrivals, sum_boxes, warp_of_cta), *_ = context
        self.sums.finish(self.left(arrivals, sum_boxes), count, warp_of_cta)

    # -- a tile -------------------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, acc, tile, context, seen: Int32):
        """Finish the accumulators of one tile; arguments as in `Epilogue.run`. Returns the units seen so far."""
        config = self.config
        (_, (staging, arrivals, sum_boxes, warp_of_cta), *_) = context
        lane = cute.arch.lane_idx()
        left = self.left(arrivals, sum_boxes)
        sums = self.sums.registers()
        elements = config.tile[1] // 2  # of a lane in a 64-row block
        if cutlass.const_expr(config.dbias):
            # The code for one block is long enough to be worth fetching once; the next one's accumulators move up.
            rows = cute.make_rmem_tensor((elements,), Float32)
            for element in cutlass.range_constexpr(elements):
                rows[element] = ptx.fresh_float(acc[element])
            for block in cutlass.range(self.blocks, unroll=1):
                self.run_block(rows, 0, block, sums, tile, context, seen)
                for element in cutlass.range_constexpr(elements * (self.blocks - 1)):
                    rows[element] = ptx.fresh_float(acc[element + elements])
            self.sums.leave_columns(sums, staging, lane)
        else:
            for block in cutlass.range_constexpr(self.blocks):
                self.run_block(acc, block * elements, block, sums, tile, context, seen)
        if cutlass.const_expr(config.sums):
            self.sums.end(left, warp_of_cta)
        return seen + self.count(tile, warp_of_cta & 3)

    @cute.jit
    def run_block(self, acc, first, block, sums, tile, context, seen: Int32):
        """Finish 64 rows, whose accumulators begin with number `first`; block: which ones, maybe known at run time."""
        config = self.config
        tile_row, end, n_tile, *_ = tile
        (map_y, _, map_dz), (staging, arrivals, sum_boxes, warp_of_cta), _, operands, *_ = context
        _, row_scale, act_alpha, act_limit, act_up_offset = operands
        scalars = activations.GluScalars(act_alpha, act_limit, act_up_offset)
        warp, lane = warp_of_cta & 3, cute.arch.lane_idx()
        total = self.count(tile, warp)
        row = tile_row + block * 64 + warp * WARP_ROWS
        if row < end:
            if cutlass.const_expr(config.dbias):
                self.sums.clear_rows(acc, end - row, lane)
            shares = self.sums.shares()
            scale = self.row_scales(row_scale, row, end, lane)
            for unit in cutlass.range_constexpr(self.units):
                number = block * self.units + unit
                slot = ptx.modulo(seen + number, Z_BOXES)
                phase = ptx.divide(seen + number, Z_BOXES) & 1
                box = staging + slot * self.z_bytes
                cute.arch.mbarrier_wait(arrivals + (warp_of_cta * Z_BOXES + slot), phase)
                base = first + unit * (self.unit // 2)
                outputs = self.work(acc, base, box.toint(), lane, scalars, scale, shares)
                if cutlass.const_expr(config.recompute):
                    y_box = staging + (Z_BOXES * self.z_bytes + (number & (BOXES - 1)) * self.boxes.bytes)
                    self.boxes.write(y_box, self.unit, outputs, lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.tma_store(map_dz, box, self.place(tile, warp, block, unit))
                    if cutlass.const_expr(config.recompute):
                        where = (n_tile * config.tile[1] + unit * self.unit, BIG - (end - row), BIG, end)
                        ptx.tma_store(map_y, y_box, where)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(1, read=True)  # the box before this one has left
                    self.fetch_ahead(tile, context, number, total, seen)
                cute.arch.sync_warp()
                if cutlass.const_expr(config.dbias):
                    self.sums.collect(sums, unit, shares)
            if cutlass.const_expr(config.dprob):
                self.sums.leave_rows(shares.dots, self.left(arrivals, sum_boxes), block, warp_of_cta, lane)

    @cute.jit
    def fetch_ahead(self, tile, context, number, total: Int32, seen: Int32):
        """Behind unit `number` of `total`: into the box before its own."""
        ahead = number - 1 + Z_BOXES
        if cutlass.const_expr(isinstance(number, int)):
            if ahead < total and cutlass.const_expr(0 < number <= self.blocks * self.units - Z_BOXES):
                self.fetch(tile, context, ahead, seen)
        else:
            if number > 0 and ahead < total:
                self.fetch(tile, context, ahead, seen)

    def work(self, acc, base: int, box: Int32, lane: Int32, scalars, scale, shares):
        """Replace z in a box by dz; the packed outputs, (chunk, r) in order, where they are asked for.

        With sums, z is read one step ahead of where dz is written: ptxas moves no load of shared memory over a store
        to it, and with fewer registers left it finds less to do meanwhile.
        shares: takes down what goes into sums, None where nothing does.
        """
        adjacent = self.gated and self.config.z_layout == "interleaved"
        steps = self.unit // (8 if adjacent else 16)
        load, finish = (self.load_chunk, self.finish_chunk) if adjacent else (self.load_pair, self.finish_pair)
        outputs, loaded = [], []
        ahead = 1 if self.config.sums and adjacent else 0
        for step in range(steps + ahead):
            if step < steps:
                loaded.append(load(box, step, lane))
            if step >= ahead:
                number = step - ahead
                outputs += finish(acc, base, number, *loaded[number], scalars, scale, shares)
        return outputs

    def load_pair(self, box: Int32, pair: int, lane: Int32):
        """A lane's addresses of 16 columns of z, or of gate and of up; and what is there."""
        addresses = self.matrix_addresses(box, pair, lane)
        return addresses, [ptx.load_matrix_x4(address) for address in addresses]

    def finish_pair(self, acc, base: int, pair: int, addresses, parts, scalars, scale, shares):
        """`work` of one pair of chunks whose z has been loaded."""
        outputs, results, rows = [], [[] for _ in parts], []
        for index in range(4):  # (chunk, r) of the pair of chunks
            first = base + pair * 8 + index * 2
            values, gradients = [], []
            halves = [ptx.unpack_pair(part[index], self.dtype) for part in parts]
            for c in range(2):
                value, *slopes = self.slopes([half[c] for half in halves], scalars)
                gradient = acc[first + c]
                if shares is not None:
                    shares.take(gradient, value, index % 2)
                if self.config.row_scale:
                    gradient, value = gradient * scale[index % 2], value * scale[index % 2]
                values.append(value)
                gradients.append([gradient * slope for slope in slopes])
            if shares is not None:
                rows.append([each for pair_of_sides in gradients for each in pair_of_sides])
                if index % 2:
                    shares.take_columns(*rows)
                    rows = []
            for side, result in enumerate(results):
                result.append(ptx.pack_pair(gradients[0][side], gradients[1][side], self.dtype))
            if self.config.recompute:
                outputs.append(ptx.pack_pair(*values, self.out_dtype))
        for address, result in zip(addresses, results, strict=True):
            ptx.store_matrix_x4(address, result)
        return outputs

    def load_chunk(self, box: Int32, chunk: int, lane: Int32):
        """The same of a chunk of 8 columns where gate and up stand side by side: a lane's two are eight bytes."""
        addresses = []
        for r in range(2):
            row = (lane >> 2) + 8 * r
            place = (chunk * 32 + (lane & 3) * 8) ^ ((row & 7) * 16)
            addresses.append(box + row * (2 * self.z_columns) + place)
        return addresses, [ptx.load_shared_b32x2(address) for address in addresses]

    def finish_chunk(self, acc, base: int, chunk: int, addresses, parts, scalars, scale, shares):
        """`work` of one such chunk whose z has been loaded."""
        outputs, rows = [], []
        for r, (address, packed) in enumerate(zip(addresses, parts, strict=True)):
            values, results, gradients = [], [], []
            for c in range(2):
                gate, up = ptx.unpack_pair(packed[c], self.dtype)
                value, by_gate, by_up = self.slopes([gate, up], scalars)
                gradient = acc[base + chunk * 4 + r * 2 + c]
                if shares is not None:
                    shares.take(gradient, value, r)
                if self.config.row_scale:
                    gradient, value = gradient * scale[r], value * scale[r]
                values.append(value)
                gradients += [gradient * by_gate, gradient * by_up]
                results.append(ptx.pack_pair(*gradients[-2:], self.dtype))
            rows.append(gradients)
            ptx.store_shared_b32x2(address, *results)
            if self.config.recompute:
                outputs.append(ptx.pack_pair(*values, self.out_dtype))
        if shares is not None:
            shares.take_columns(*rows)
        return outputs

    def slopes(self, z, scalars):
        """Value and derivatives of the activation at z, or at (gate, up)."""
        return self.derivative(*z, scalars) if self.gated else self.derivative(*z)

    def matrix_addresses(self, box: Int32, pair: int, lane: Int32) -> list[Int32]:
        """Where a lane's row of 16 columns begins: of z, or of gate and of up."""
        row = lane & (WARP_ROWS - 1)
        stride = 2 * self.z_columns
        swizzle = ((row * stride) >> 7) & (self.z_columns // 8 - 1)
        unit = lane >> 4
        if not self.gated:
            return [box + row * stride + ((unit ^ swizzle) * 16 ^ (pair * 32))]
        if self.concat:  # one box of gates behind one of ups
            place = box + row * stride + ((unit ^ swizzle) * 16 ^ (pair * 32))
            return [place, place + WARP_ROWS * stride]
        return [box + row * stride + ((unit ^ swizzle) * 16 ^ ((pair + side * 2) * 32)) for side in range(2)]


class BackwardSm90(GemmSm90):
    """One configuration of the GEMM with a backward epilogue."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.out_dtype = dtype_of(config.out_dtype)
        self.main_loop = MainLoop(config)
        self.epilogue = BackwardEpilogue(config)
        self.scheduler = Scheduler(config)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        preactivation: cute.Tensor,
        dz: cute.Tensor,
        y,
        offsets,
        row_scale,
        act_alpha,
        act_limit,
        act_up_offset,
        dprob,
        dbias,
        counters,
        scratch,
        sm_count: Int32,
        cluster_margin: Int32,
        stream: CUstream,
    ):
        """Make the tensor maps and the grid, launch. Absent operands are None; a dense w has no E."""
        config = self.config
        rows = x.shape[0]
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        if cutlass.const_expr(config.dbias):  # which is written without rows too, and a tensor map cannot be empty
            shape = (cutlass.max(x.shape[0], 1), x.shape[1])
            x = cute.make_tensor(x.iterator, cute.make_layout(shape, stride=x.stride))
        map_x = self.load_map(x, (self.main_loop.x_box, TILE_K), swizzled(self.dtype, 64))
        w_nk, n = self.weights_as_nke(w)
        w_box = (self.main_loop.w_box, TILE_K, *([1] if config.grouped else []))
        map_w = self.load_map(w_nk, w_box, swizzled(self.dtype, 64, n_major=self.main_loop.n_major))
        z_box = (self.epilogue.z_columns, WARP_ROWS)
        map_z = self.ragged_map(load, preactivation, z_box, split=self.epilogue.concat, both=True)
        map_dz = self.ragged_map(store, dz, z_box, split=self.epilogue.concat, both=True)
        map_y = None
        if cutlass.const_expr(config.recompute):
            map_y = self.ragged_map(store, y, (self.epilogue.unit, WARP_ROWS))
        groups = offsets.shape[0] if cutlass.const_expr(config.grouped) else None
        self.kernel(
            map_x,
            map_w,
            map_y,
            map_z,
            map_dz,
            offsets.iterator if cutlass.const_expr(config.grouped) else None,
            None,
            row_scale.iterator if cutlass.const_expr(config.row_scale) else None,
            None,
            act_alpha,
            act_limit,
            act_up_offset,
            dprob.iterator if cutlass.const_expr(config.dprob) else None,
            dbias.iterator if cutlass.const_expr(config.dbias) else None,
            counters.iterator if cutlass.const_expr(counters is not None) else None,
            scratch.iterator if cutlass.const_expr(scratch is not None) else None,
            groups,
            rows,
            n,
            x.shape[1],
        ).launch(
            grid=[self.clusters(rows, n, groups, sm_count, cluster_margin) * config.cluster_size, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[config.cluster_size, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )
