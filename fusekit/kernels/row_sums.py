"""dprob: da * y summed over a row's columns, while the backward epilogue has both in registers. Bitwise repeatable.

A consumer warp leaves its rows' sums over the tile's columns in shared memory and arrives at a barrier. An idle warp of
the load warpgroup takes them to scratch memory, as one part of each row, and arrives at the counter of the tile's rows.
Whoever arrives last there has all parts along N and adds them up in their order. So the fences that a counter in global
memory needs hold up nobody who computes.

Two boxes stand between them, for even and odd tiles of the CTA: `BOX_WORDS` + tile_m words each, first what tile it is,
then its rows' sums.

    full[b]    4 arrivals (one a warp) of each warpgroup that has the tile
    empty[b]   1 arrival (the idle warp, when it has the sums in registers)
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.config import GemmConfig
from fusekit.kernels.sums import GradientSums

BOXES = 2
BOX_WORDS = 4  # first row, end row of the group, tile along N, group
NO_TILE = -1  # in place of a group: there are no more


class RowSums:
    """The sums of one configuration. `shared`: (barriers, boxes), `full` before `empty`."""

    def __init__(self, config: GemmConfig, sums: GradientSums) -> None:
        self.config, self.sums = config, sums
        self.box_bytes = (BOX_WORDS + config.tile[0]) * 4
        self.barriers = (config.consuming_warps,) * BOXES + (1,) * BOXES  # their arrive counts

    # -- a consumer warp ----------------------------------------------------------------------------------------------

    @cute.jit
    def begin(self, shared, count: Int32, tile):
        """Before the main loop of the CTA's `count`-th tile, when the box is free: what tile it is; one lane."""
        barriers, boxes = shared
        cute.arch.mbarrier_wait(barriers + (BOXES + (count & 1)), ((count >> 1) & 1) ^ 1)
        ptx.store_shared_v4(boxes.toint() + (count & 1) * self.box_bytes, tile)

    def leave(self, dots, shared, count: Int32, first: Int32, lane: Int32) -> None:
        """Sums of 16 rows of the tile from its row `first` on; `dots` are those of a lane's columns.

        The four lanes of a row write the same.
        """
        _, boxes = shared
        address = boxes.toint() + ((count & 1) * self.box_bytes + (BOX_WORDS + first + (lane >> 2)) * 4)
        for r in range(2):
            dot = dots[r]
            for step in range(2):
                dot = dot + cute.arch.shuffle_sync_bfly(dot, 1 << step)
            ptx.store_shared_f32(address + 32 * r, dot)

    @cute.jit
    def end(self, shared, count: Int32, lane: Int32):
        """The warp has left all that it has of the tile."""
        barriers, _ = shared
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barriers + (count & 1))

    @cute.jit
    def finish(self, shared, count: Int32, lane: Int32):
        """There is no `count`-th tile."""
        if lane == 0:
            self.begin(shared, count, (Int32(0), Int32(0), Int32(0), Int32(NO_TILE)))
        self.end(shared, count, lane)

    # -- the idle warp ------------------------------------------------------------------------------------------------

    @cute.jit
    def collect(self, operands, shared):
        """The idle warp's program, until the tiles are over."""
        lane = cute.arch.lane_idx()
        self.sums.wait(operands, Int32(0))
        count = Int32(0)
        tile = self.tile_of(shared, count)
        while tile[3] >= 0:
            self.add_tile(tile, shared, count, operands, lane)
            count += 1
            tile = self.tile_of(shared, count)

    @cute.jit
    def tile_of(self, shared, count: Int32):
        """What the `count`-th tile is, when all of its sums are there."""
        barriers, boxes = shared
        cute.arch.mbarrier_wait(barriers + (count & 1), (count >> 1) & 1)
        return ptx.load_shared_v4(boxes.toint() + (count & 1) * self.box_bytes)

    @cute.jit
    def add_tile(self, tile, shared, count: Int32, operands, lane: Int32):
        """Take a tile's sums to its part of the rows; maybe add the parts up."""
        barriers, boxes = shared
        dprob, _, scratch, _, _, _, rows, n = operands
        row, end, n_tile, group = tile
        steps = self.config.tile[0] // 32
        dots = boxes.toint() + ((count & 1) * self.box_bytes + (BOX_WORDS + lane) * 4)
        taken = [ptx.load_shared_f32(dots + 128 * step) for step in range(steps)]
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(barriers + (BOXES + (count & 1)))
        if row < end:
            tiles_n = self.sums.tiles_n(n)
            parts = self.sums.row_parts(operands) + (row + lane)
            left = end - row - lane
            for step in cutlass.range_constexpr(steps):
                if 32 * step < left:
                    cute.arch.store(parts + (Int64(n_tile) * rows + 32 * step), taken[step])
            counter = scratch + (ptx.divide(row, self.config.tile[0]) + group)
            if self.sums.arrive(counter, lane) == tiles_n - 1:
                self.add_parts(dprob + (row + lane), parts.toint(), left, rows, tiles_n)

    @cute.jit
    def add_parts(self, dprob, address: Int64, left: Int32, rows: Int32, count: Int32):
        """Add up the parts of a lane's rows, every 32nd of `left`; the first part of the first one is at `address`."""
        steps = self.config.tile[0] // 32
        totals = cute.make_rmem_tensor((steps,), Float32)
        totals.fill(0.0)
        for _ in cutlass.range(count, unroll=1):
            parts = [ptx.load_part(address + 128 * step, Int32(32 * step < left)) for step in range(steps)]
            for step in cutlass.range_constexpr(steps):
                totals[step] = totals[step] + parts[step]
            address += Int64(rows) * 4
        for step in cutlass.range_constexpr(steps):
            if 32 * step < left:
                cute.arch.store(dprob + 32 * step, totals[step])
