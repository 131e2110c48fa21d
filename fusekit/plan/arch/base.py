"""What a row of an architecture says."""

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
