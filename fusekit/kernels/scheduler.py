"""Which tile a CTA computes next: one warp decides, everybody else in the CTA reads its ring.

Static persistent schedule. Clusters are numbered; cluster c takes the cluster tiles c, c + clusters, c + 2 clusters and
so on. A cluster tile is `cluster` CTA tiles of one group. The groups' tiles are numbered one group after the other, so
a tile number is turned into (group, m, n) from the row offsets, read on the device: the host never learns them.
Inside a group, tiles go through panels of rows, M first inside a panel, so that a panel's operand rows stay in L2 while
N advances. A group is cut into the fewest panels of at most `PANEL_ELEMENTS` elements of x, all about equally high.

The warp keeps 32 groups at a time in its lanes. Tile numbers only grow, so it moves forward through the groups and
never looks back.
"""

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values

from fusekit.kernels.config import GemmConfig
from fusekit.kernels.ptx import divide, load_shared_v4, modulo, store_shared_v4

RING_SLOTS = 4
SLOT_BYTES = 16
PANEL_ELEMENTS = 12 * 2**20  # 24 MiB of 16-bit operands, about half of the L2 of an H100
NO_TILE = -1  # in place of a group: the schedule has ended


class TileRing:
    """The scheduler warp's ring of tiles in shared memory, guarded by one full and one empty barrier a slot.

    Arrive counts: full 1 (the scheduler's lane 0); empty 1 of the load warp + 4 for each consumer warpgroup that reads
    the slot (one in ping-pong, which hands even slots to one and odd slots to the other; two in cooperative).
    """

    def __init__(self, slots, full, empty) -> None:
        self.slots, self.full, self.empty = slots, full, empty

    def __extract_mlir_values__(self) -> list:
        """Lets the DSL carry a ring through run-time control flow."""
        return [value for part in (self.slots, self.full, self.empty) for value in extract_mlir_values(part)]

    def __new_from_mlir_values__(self, values: list) -> "TileRing":
        """The ring again, from the values of `__extract_mlir_values__`."""
        parts = []
        for part in (self.slots, self.full, self.empty):
            count = len(extract_mlir_values(part))
            parts.append(new_from_mlir_values(part, values[:count]))
            values = values[count:]
        return TileRing(*parts)

    def initialise(self, config: GemmConfig) -> None:
        """Set up the barriers; one thread."""
        readers = 1 + 4 * (1 if config.pingpong else 2)
        for slot in range(RING_SLOTS):
            cute.arch.mbarrier_init(self.full + slot, 1)
            cute.arch.mbarrier_init(self.empty + slot, readers)

    @cute.jit
    def put(self, count: Int32, row: Int32, end: Int32, n_tile: Int32, group: Int32):
        """Publish the `count`-th tile; the scheduler's lane 0."""
        slot = modulo(count, RING_SLOTS)
        phase = divide(count, RING_SLOTS) & 1
        cute.arch.mbarrier_wait(self.empty + slot, phase ^ 1)
        store_shared_v4(self.slots + slot * SLOT_BYTES, (row, end, n_tile, group))
        cute.arch.mbarrier_arrive(self.full + slot)

    @cute.jit
    def get(self, count: Int32, lane: Int32):
        """Read the `count`-th tile; every lane of the calling warp (lane 0 alone for the load thread)."""
        slot = modulo(count, RING_SLOTS)
        cute.arch.mbarrier_wait(self.full + slot, divide(count, RING_SLOTS) & 1)
        row, end, n_tile, group = load_shared_v4(self.slots + slot * SLOT_BYTES)
        return row, end, n_tile, group

    @cute.jit
    def free(self, count: Int32):
        """Give the slot back; one lane of each reading warp, after the warp has read it."""
        cute.arch.mbarrier_arrive(self.empty + modulo(count, RING_SLOTS))


class StaticScheduler:
    """The scheduler warp's program."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.cluster_rows = config.tile[0] * config.cluster[0]
        self.sentinels = 2 if config.pingpong else 1  # each consumer warpgroup must see the end

    @cute.jit
    def groups_of_lanes(
        self, offsets, first: Int32, groups: Int32, rows: Int32, n_clusters: Int32, base: Int32, lane: Int32
    ):
        """Rows [begin, end) of group first + lane, and the tile number at which that group ends."""
        begin = Int32(0)
        end = Int32(0)
        if cutlass.const_expr(self.config.grouped):
            group = first + lane
            if group < groups:
                end = cutlass.min(offsets[group], rows)  # what lies beyond the buffer is nobody's
                if group > 0:
                    begin = cutlass.max(offsets[group - 1], 0)
        else:
            if lane == 0:
                end = rows
        tiles = Int32(0)
        if end > begin:
            tiles = divide(end - begin + (self.cluster_rows - 1), self.cluster_rows) * n_clusters
        last = tiles
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(last, 1 << step, mask_and_clamp=0)
            if lane >= (1 << step):
                last += below
        return begin, end, last + base

    @cute.jit
    def run(self, ring: TileRing, offsets, groups: Int32, rows: Int32, k: Int32, n_clusters: Int32, ranks):
        """Fill the ring until the cluster's tiles are over; all lanes of one warp. ranks: of the CTA, along M and N."""
        config = self.config
        lane = cute.arch.lane_idx()
        grid, _, _ = cute.arch.grid_dim()
        block, _, _ = cute.arch.block_idx()
        clusters = divide(grid, config.cluster_size)
        number = divide(block, config.cluster_size)
        most = cutlass.max(divide(Int32(PANEL_ELEMENTS // self.cluster_rows), k), 1)  # cluster tiles in a panel
        count = Int32(0)
        first = Int32(0)
        begin, end, last = self.groups_of_lanes(offsets, first, groups, rows, n_clusters, Int32(0), lane)
        chunk_end = cute.arch.shuffle_sync(last, 31)
        more = Boolean(True)
        while more:
            while number >= chunk_end and first + 32 < groups:
                first += 32
                begin, end, last = self.groups_of_lanes(offsets, first, groups, rows, n_clusters, chunk_end, lane)
                chunk_end = cute.arch.shuffle_sync(last, 31)
            more = number < chunk_end
            if more:
                owner = cute.arch.popc(cute.arch.vote_ballot_sync(number >= last))
                group_begin = cute.arch.shuffle_sync(begin, owner)
                group_end = cute.arch.shuffle_sync(end, owner)
                m_clusters = divide(group_end - group_begin + (self.cluster_rows - 1), self.cluster_rows)
                local = number - (cute.arch.shuffle_sync(last, owner) - m_clusters * n_clusters)
                panels = divide(m_clusters + most - 1, most)
                height = divide(m_clusters + panels - 1, panels)
                panel = divide(local, height * n_clusters)
                inside = local - panel * height * n_clusters
                first_m = panel * height
                n_cluster = divide(inside, cutlass.min(m_clusters - first_m, height))
                m_cluster = first_m + inside - n_cluster * cutlass.min(m_clusters - first_m, height)
                if lane == 0:
                    row = group_begin + m_cluster * self.cluster_rows + ranks[0] * config.tile[0]
                    ring.put(count, row, group_end, n_cluster * config.cluster[1] + ranks[1], first + owner)
                count += 1
                number += clusters
        if lane == 0:
            for extra in cutlass.range_constexpr(self.sentinels):
                ring.put(count + extra, Int32(0), Int32(0), Int32(0), Int32(NO_TILE))
