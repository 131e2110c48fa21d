"""What one architecture offers, as a row of facts. Another architecture is another row and another kernel folder.

Sources: CUDA C++ Programming Guide, "Compute Capabilities" (227 KiB of shared memory a block, 65536 registers a
multiprocessor); PTX ISA, "wgmma" (64 rows, N up to 256).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. Bytes, or counts.

    kernels: the folder of its main loops, below fusekit/kernels/gemm. shared_bytes: of one CTA, at most. registers: of
    a multiprocessor. accumulator_registers: float32 accumulators that a consumer thread can hold without spilling.
    splits: registers of a thread of the load warpgroup, and of a consumer, one of which a kernel takes; the first where
    the consumers need most. mma_rows: rows of one matrix instruction; max_tile_n: its most columns;
    gather_tile_n: those beside a fourth warpgroup, which leaves a thread 128 registers to begin with; a wgmma of 256
    columns takes 154. swizzle_bytes: a row of a shared-memory tile.
    """

    name: str
    kernels: str
    shared_bytes: int
    registers: int
    accumulator_registers: int
    splits: tuple[tuple[int, int], ...]
    mma_rows: int
    max_tile_n: int
    gather_tile_n: int
    swizzle_bytes: int
    warpgroup: int = 128

    @property
    def consumer_registers(self) -> int:
        """The most that a consumer thread can have."""
        return max(consumer for _, consumer in self.splits)


SM90A = Architecture(
    name="sm_90a",
    kernels="sm90",
    shared_bytes=232448,
    registers=65536,
    accumulator_registers=192,
    splits=((24, 240), (40, 232)),
    mma_rows=64,
    max_tile_n=256,
    gather_tile_n=192,
    swizzle_bytes=128,
)

ARCHITECTURES = {row.name: row for row in (SM90A,)}
ARCHES = tuple(ARCHITECTURES)
