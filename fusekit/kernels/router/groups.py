"""Group-limited selection: experts of the groups with the best sums stay in, the others get key 0.

A group's score is the sum of its best `topk / group_topk` selection scores, added from the largest down. The row's keys
are laid out by group in shared memory; a few neighbouring lanes share a group and take its maxima one by one.
"""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide, modulo
from fusekit.kernels.router.config import RouterConfig, Row
from fusekit.kernels.router.select import greatest, key_of, value_of


class GroupLimit:
    """The groups of one configuration. Each warp needs `shared_bytes` of shared memory."""

    def __init__(self, config: RouterConfig, row: Row) -> None:
        self.row = row
        self.groups, self.keep = config.num_groups, config.group_topk
        self.size = config.experts // config.num_groups
        self.members = config.topk // config.group_topk
        share = 1  # lanes of one group
        while share * 2 * self.groups <= WARP and share * 2 <= self.size:
            share *= 2
        self.share = share
        self.per_lane = -(-self.size // share)
        self.passes = -(-self.groups * share // WARP)
        # Words from group to group, so that the lanes of all groups read different banks.
        self.stride = self.size + (share - self.size) % WARP
        self.scores = self.groups * self.stride * 4  # bytes before the groups' own scores
        self.shared_bytes = -(-(self.scores + self.groups * 4) // 8) * 8

    @cute.jit
    def run(self, keys, ranked, shared: Int32, lane: Int32):
        """The keys with those of other groups 0. ranked: keys of the selection scores, of which sums are made."""
        self.stage(ranked, shared, lane)
        cute.arch.sync_warp()
        for step in cutlass.range_constexpr(self.passes):
            slot = lane + step * WARP
            group, part = divide(slot, self.share), modulo(slot, self.share)
            score = self.score(group, part, shared, lane)
            if group < self.groups and part == 0:
                lanes.shared_store_u32(shared + self.scores + group * 4, key_of(score))
        cute.arch.sync_warp()
        ranks = cute.make_rmem_tensor((-(-self.groups // WARP),), Int32)
        for slot in cutlass.range_constexpr(-(-self.groups // WARP)):
            group = lane + slot * WARP
            group_score = lanes.shared_load_u32(shared + self.scores + cutlass.min(group, self.groups - 1) * 4)
            rank = Int32(0)
            for index in cutlass.range(self.groups):
                other = lanes.shared_load_u32(shared + self.scores + index * 4)
                rank += Int32((other > group_score) | ((other == group_score) & (index < group)))
            ranks[slot] = rank
        cute.arch.sync_warp()
        for slot in cutlass.range_constexpr(-(-self.groups // WARP)):
            if lane + slot * WARP < self.groups:
                kept = Uint32(ranks[slot] < self.keep)
                lanes.shared_store_u32(shared + self.scores + (lane + slot * WARP) * 4, kept)
        cute.arch.sync_warp()
        limited = self.masked(keys, shared, lane)
        cute.arch.sync_warp()
        return limited

    def stage(self, ranked: list, shared: Int32, lane: Int32) -> None:
        """Writes a lane's keys to their groups' places."""
        for position, key in enumerate(ranked):
            chunk, place = divmod(position, self.row.vector)
            expert = self.row.first(chunk, lane) + place
            address = shared + (expert + divide(expert, self.size) * (self.stride - self.size)) * 4
            valid = self.row.valid(chunk, lane)
            if valid is None:
                lanes.shared_store_u32(address, key)
            else:
                lanes.shared_store_u32_if(address, key, valid)

    @cute.jit
    def score(self, group: Int32, part: Int32, shared: Int32, lane: Int32):
        """The group's score, in each of its lanes."""
        start = shared + (cutlass.min(group, self.groups - 1) * self.stride + part) * 4
        keys = cute.make_rmem_tensor((self.per_lane,), Uint32)
        for index in cutlass.range_constexpr(self.per_lane):
            # Past the group's end lie words that were not written: they are read, and not used.
            key = lanes.shared_load_u32(start + index * self.share * 4)
            keys[index] = cutlass.select_(part + index * self.share < self.size, key, Uint32(0))
        below = ((Int32(1) << (lane & (self.share - 1))) - 1) << (lane & -self.share)  # of the group's lanes
        total = Float32(0.0)
        for _ in cutlass.range(self.members):
            lane_best = greatest([keys[index] for index in range(self.per_lane)])
            best = lane_best
            for step in cutlass.range_constexpr(5):
                if cutlass.const_expr(1 << step < self.share):
                    best = lanes.extreme("max", best, cute.arch.shuffle_sync_bfly(best, 1 << step))
            # One of several equal keys is taken: the first of the first lane that has it.
            left = Int32(lane_best == best) & Int32((cute.arch.vote_ballot_sync(lane_best == best) & below) == 0)
            for index in cutlass.range_constexpr(self.per_lane):
                hit = left & Int32(keys[index] == best)
                keys[index] = cutlass.select_(hit != 0, Uint32(0), keys[index])
                left = left ^ hit
            total += value_of(best)
        return total

    def masked(self, keys: list, shared: Int32, lane: Int32) -> list:
        """The keys whose group is kept."""
        result, kept = [], None
        for position, key in enumerate(keys):
            chunk, place = divmod(position, self.row.vector)
            if place == 0 or self.size % self.row.vector:
                group = divide(self.row.first(chunk, lane) + place, self.size)
                kept = lanes.shared_load_u32(shared + self.scores + cutlass.min(group, self.groups - 1) * 4)
            result.append(cutlass.select_(kept != 0, key, Uint32(0)))
        return result
