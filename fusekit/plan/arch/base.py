"""What a row of an architecture says."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. Bytes, or counts.

    kernels: the folder of its main loops, below fusekit/kernels/gemm. sms: multiprocessors of the GPUs that variants
    are chosen for. shared_bytes: of one CTA, at most. registers: of a multiprocessor. accumulator_registers: float32
    accumulators that a consumer thread can hold without spilling. splits: registers of a thread of the load warpgroup,
    and of a consumer, one of which a kernel takes; the first where the consumers need most: with more than `crowd`
    accumulators. consumer_warpgroups: of a CTA, beside the one that loads. mma_rows: rows of one matrix instruction;
    tile_rows: by main loop, the heights of a CTA's tile; max_tile_n: its most columns; gather_tile_n: those with a
    fourth warpgroup, which leaves a thread 128 registers to begin with; 256 columns take 154. swizzle_bytes: a row of
    a shared-memory tile. default: it is meant where nobody says.
    """

    name: str
    kernels: str
    sms: int
    shared_bytes: int
    registers: int
    accumulator_registers: int
    splits: tuple[tuple[int, int], ...]
    crowd: int
    consumer_warpgroups: int
    mma_rows: int
    tile_rows: Mapping[str, tuple[int, ...]]
    max_tile_n: int
    gather_tile_n: int
    swizzle_bytes: int
    warpgroup: int = 128
    default: bool = False

    @property
    def consumer_registers(self) -> int:
        """The most that a consumer thread can have."""
        return max(consumer for _, consumer in self.splits)
