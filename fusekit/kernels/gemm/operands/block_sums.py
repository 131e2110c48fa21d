"""dbias of a backward epilogue whose dz is turned: the fourth warpgroup adds up columns of a block of 128 tokens."""

from cutlass import Int32, Int64, cute

from fusekit.kernels.gemm.parts import GroupSums
from fusekit.plan.quant import SIDE


class BlockSums(GroupSums):
    block = SIDE

    def words(self, given) -> Int64:
        rows, columns = given.preactivation.shape
        groups = given.offsets.shape[0] if self.plan.grouped else 1
        return Int64(rows // SIDE + groups) * columns

    def first(self, begin: Int32, group: Int32, offsets, rows: Int32) -> Int32:
        """Blocks are counted as those of the transpose."""
        if offsets is None:
            return Int32(0)
        return self.kit.blocks_between(offsets, rows, Int32(0), group, cute.arch.lane_idx())
