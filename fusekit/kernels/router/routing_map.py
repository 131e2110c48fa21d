"""Writing a token's routing map: bytes, or bits packed into 32-bit words, the lowest expert in the lowest bit."""

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.router.config import RouterConfig


class MapWriter:
    """Bytes are cleared in memory and set one by one; bits are gathered in shared memory, `shared_bytes` a warp."""

    def __init__(self, config: RouterConfig) -> None:
        self.bits = config.routing_map == "bits"
        self.words = config.map_words
        self.row_bytes = self.words * 4 if self.bits else config.experts
        self.shared_bytes = -(-self.words // 2) * 8 if self.bits else 0

    def clear(self, row: Int64, shared: Int32, lane: Int32) -> None:
        """No expert is chosen yet."""
        if not self.bits:
            lanes.clear(row, self.row_bytes, lane)
            return
        for start in range(0, self.words, WARP):
            lanes.shared_store_u32_if(shared + (lane + start) * 4, Uint32(0), lane + start < self.words)

    @cute.jit
    def put(self, row: Int64, shared: Int32, expert: Int32, valid):
        """Sets the expert where `valid`. The warp has met since it cleared the map."""
        if cutlass.const_expr(self.bits):
            if valid:
                lanes.shared_or(shared + (expert >> 5) * 4, Uint32(1) << Uint32(expert & 31))
        else:
            lanes.store(row + Int64(expert), [Uint32(1)], 1, valid)

    @cute.jit
    def finish(self, row: Int64, shared: Int32, lane: Int32):
        """All experts are set."""
        if cutlass.const_expr(self.bits):
            cute.arch.sync_warp()
            for start in cutlass.range_constexpr(0, self.words, WARP):
                index = lane + start
                word = lanes.shared_load_u32(shared + cutlass.min(index, self.words - 1) * 4)
                lanes.store(row + Int64(index * 4), [word], 4, index < self.words)
