"""Float32 parts of sums in memory, which a thread adds up in their order, with a few on their way at a time."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from fusekit.kernels import ptx

VECTOR = 4  # neighbours of a thread
AHEAD = 8  # parts that are loaded before the first is added


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


def memory(given):
    """The launch's scratch memory, as float32."""
    return cute.recast_ptr(given.scratch.iterator, dtype=Float32)
