"""Float32 parts of sums in scratch memory: a kernel leaves them there, a launch after it adds them up in order."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx
from fusekit.kernels.gemm.operands.base import DeviceOperand
from fusekit.plan.gemm import VECTOR_BYTES

THREADS = 128  # of a block that adds parts up
VECTOR = VECTOR_BYTES // 4  # neighbours of a thread
WIDTH = THREADS * VECTOR  # neighbours of a block
AHEAD = 8  # parts that are loaded before the first is added


class Parts(DeviceOperand):
    """An operand that leaves parts of sums. Its parameter is where they begin, a multiple of 16 bytes; its outputs are
    written by the launch that follows.
    """

    def bind(self, halves) -> None:
        earlier = [
            half for half in halves.values() if isinstance(half, Parts) and half.operand.order < self.operand.order
        ]
        self.before = sorted(earlier, key=lambda half: half.operand.order)

    def words(self, given) -> Int64:
        """Float32 words of its parts, as in its plan half (`scratch`)."""
        raise NotImplementedError

    def parts(self, given):
        """Where its parts begin, after those of the operands before."""
        return sum(
            (half.words(given) for half in self.before), start=cute.recast_ptr(given.scratch.iterator, dtype=Float32)
        )

    def parameter(self, given):
        return self.parts(given)


class GroupSums(Parts):
    """dbias [E, columns of dz] of parts [blocks, columns], each the sum of a block of rows.

    A group's first row begins a block, and its blocks follow each other. block: rows of one. A thread of the second
    launch has four columns of a group.
    """

    block: int

    def first(self, begin: Int32, group: Int32, offsets, rows: Int32) -> Int32:
        """Where the blocks of a group begin, whose first row is `begin`; all lanes of a warp. offsets: None for one."""
        raise NotImplementedError

    def then(self, given, groups, stream) -> None:
        rows, columns = given.preactivation.shape
        offsets = None if groups is None else given.offsets.iterator
        many = Int32(1) if groups is None else groups
        self.add_up(self.parts(given), given.dbias.iterator, offsets, rows, columns).launch(
            grid=[many * ((columns + (WIDTH - 1)) // WIDTH), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def add_up(self, parts, dbias, offsets, rows: Int32, columns: Int32):
        """A block of threads has WIDTH columns of a group."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        across = ptx.divide(columns + (WIDTH - 1), WIDTH)
        group = ptx.divide(block, across)
        column = (block - group * across) * WIDTH + thread * VECTOR
        begin, end = Int32(0), rows
        if cutlass.const_expr(offsets is not None):
            end = cutlass.min(offsets[group], rows)
            if group > 0:
                begin = cutlass.max(offsets[group - 1], 0)
        first = self.first(begin, group, offsets, rows)
        if column < columns:  # of which there is a multiple of VECTOR
            blocks = ptx.divide(cutlass.max(end - begin, 0) + (self.block - 1), self.block)
            address = parts.toint() + (Int64(first) * columns + column) * 4
            total = sum_of_parts(address, Int64(columns) * 4, blocks)
            for index in cutlass.range_constexpr(VECTOR):
                cute.arch.store(dbias + (Int64(group) * columns + column + index), Float32(total[index]))


@cute.jit
def sum_of_parts(first: Int64, step: Int64, parts: Int32):
    """The sums of four neighbours over all parts; first: their address in the first part. step: bytes."""
    sums = cute.make_rmem_tensor((VECTOR,), Float32)
    sums.fill(0.0)
    for part in cutlass.range(0, parts, AHEAD, unroll=1):
        add(sums, first, step, part, parts)
    return sums


def add(sums, first: Int64, step: Int64, part: Int32, parts: Int32) -> None:
    """AHEAD parts, of which those from `parts` on are zeros."""
    loaded = [
        ptx.load_parts_x4(first + Int64(part + ahead) * step, ptx.flag(part + ahead < parts)) for ahead in range(AHEAD)
    ]
    for values in loaded:
        for index, value in enumerate(values):
            sums[index] = sums[index] + value
