"""What a GEMM kernel is compiled for, as plain scalars: no shapes of a problem."""

from dataclasses import dataclass

import cutlass

from fusekit.dtypes import DTYPES

TILE_K = 64  # elements of K in one pipeline stage: 128 bytes of a 16-bit type, one swizzle row
WARPGROUP = 128  # threads
CONSUMER_WARPGROUPS = 2
THREADS = WARPGROUP * (1 + CONSUMER_WARPGROUPS)


@dataclass(frozen=True)
class GemmConfig:
    """One compiled GEMM. `tile` and `cluster` are (M, N); `dtype` and `out_dtype` are "bf16" or "fp16".

    `alpha` is "none", "scalar" or "group"; `activation` a key of `activations.ACTIVATIONS`; `glu_layout` one of "none",
    "concat", "interleaved", "interleaved-32"; `stages` the depth of the shared-memory pipeline; `epilogue_box` the most
    columns of an epilogue staging box; `dynamic` the schedule. `wgrad`: the weight gradient dw[e] = dy^T x, whose
    `out_dtype` may be "f32", and with `accumulate` is added to what is there. `z_layout` is "" but in a backward
    epilogue, where it says how z lies: "none" (a plain activation), or as `glu_layout`; `recompute`: also the
    output; `dprob`, `dbias`: sums.py, `dbias` of a weight gradient: column_sums.py.
    """

    grouped: bool
    dtype: str
    out_dtype: str
    b_major: str
    activation: str
    row_scale: bool
    tile: tuple[int, int]
    cluster: tuple[int, int]
    pingpong: bool
    stages: int
    epilogue_box: int
    dynamic: bool
    alpha: str = "none"
    bias: bool = False
    save_preactivation: bool = False
    glu_layout: str = "none"
    wgrad: bool = False
    accumulate: bool = False
    z_layout: str = ""
    recompute: bool = False
    dprob: bool = False
    dbias: bool = False

    @property
    def gated(self) -> bool:
        """Whether two columns of the product, gate and up, make one column of the output."""
        return self.glu_layout != "none"

    @property
    def out_tile_n(self) -> int:
        """Columns of the output that one tile makes."""
        return self.tile[1] // 2 if self.gated else self.tile[1]

    @property
    def warpgroup_rows(self) -> int:
        """Rows of the tile that one consumer warpgroup accumulates: all (ping-pong) or its half (cooperative)."""
        return self.tile[0] if self.pingpong else self.tile[0] // CONSUMER_WARPGROUPS

    @property
    def registers(self) -> tuple[int, int]:
        """A thread's, of the load warpgroup and of a consumer; the three warpgroups share 504, in steps of 8.

        Warps that sum columns need more than 24.
        """
        accumulators = self.warpgroup_rows * self.tile[1] // WARPGROUP
        return (24, 240) if accumulators > 160 and not self.dbias else (40, 232)

    @property
    def sums(self) -> bool:
        """Whether a backward epilogue sums gradients over rows or columns."""
        return (self.dprob or self.dbias) and not self.wgrad

    @property
    def column_warps(self) -> int:
        """Warps of a CTA that sum dy over a group's rows."""
        return 2 if self.wgrad and self.dbias else 0

    @property
    def reading_warps(self) -> int:
        """Warps of a CTA that read a tile and its stages."""
        return 4 * (1 if self.pingpong else CONSUMER_WARPGROUPS) + self.column_warps

    @property
    def ring_slots(self) -> int:
        """Tiles decided ahead: few where a tile taken early could have gone to an idle SM."""
        return 2 if self.dynamic else 4

    @property
    def slot_bytes(self) -> int:
        """What the scheduler says of a tile."""
        return 32 if self.wgrad else 16

    @property
    def cluster_size(self) -> int:
        """CTAs in a cluster."""
        return self.cluster[0] * self.cluster[1]


def dtype_of(name: str):
    """The DSL's type of a spec's dtype."""
    return getattr(cutlass, DTYPES[name].cutlass)
