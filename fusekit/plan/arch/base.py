"""The fields of an architecture's row."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. Bytes, or counts.

    kernels: the folder of its main loops, below fusekit/kernels/gemm. sms: multiprocessors of the GPUs that variants
    are chosen for. shared_bytes: of one CTA, at most. registers: of a multiprocessor. accumulator_registers: float32
    accumulators that a consumer thread can hold without spilling. splits: registers of a thread of the load warpgroup,
    and of a consumer, one of which a kernel takes; the first where the consumers need most: with more than `crowd`
    accumulators. consumer_warpgroups: of a CTA, without the one that loads. mma_rows: rows of one matrix instruction;
    tile_rows: by main loop, the heights of a CTA's tile; max_tile_n: its most columns; gather_tile_n: those with a
    fourth warpgroup, which leaves a thread 128 registers to begin with; 256 columns take 154. swizzle_bytes: a row of
    a shared-memory tile. default: the architecture of a spec that names none.

    With a fourth warpgroup: fourth_registers: of one of its threads, where there are few, as a rule, and for a tile
    higher than a ping-pong one; load_registers: of a thread of the load warpgroup next to it, by the same names, and
    where it is idle. register_step: what registers of a thread are a multiple of. spare_registers: what a consumer
    thread needs next to its accumulators.
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
    fourth_registers: Mapping[str, int]
    load_registers: Mapping[str, int]
    register_step: int
    spare_registers: int
    warpgroup: int = 128
    default: bool = False

    @property
    def warp_rows(self) -> int:
        """Rows of a block of accumulators that one warp of a warpgroup holds and finishes."""
        return self.mma_rows * 32 // self.warpgroup

    @property
    def box(self) -> int:
        """16-bit elements of a row of a shared-memory tile: columns of a box of rows along the reduction."""
        return self.swizzle_bytes // 2

    @property
    def consumer_registers(self) -> int:
        """The most that a consumer thread can have."""
        return max(consumer for _, consumer in self.splits)
