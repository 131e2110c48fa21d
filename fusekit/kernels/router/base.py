"""What the router kernels share: a warp a token, the grid, element access."""

from dataclasses import fields

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from fusekit.dtypes import DTYPES
from fusekit.kernels import lanes
from fusekit.kernels.lanes import WARP
from fusekit.kernels.ptx import divide, maximum
from fusekit.kernels.router.config import RouterConfig, Row, vector_elements
from fusekit.kernels.router.select import key_of, value_of

REGISTERS = 65536  # of an SM
SPARE_REGISTERS = 40  # of a thread, without those that hold its share of a row


def negative_infinity(dtype: str) -> int:
    """A 32-bit word of it, as an integer."""
    row = DTYPES[dtype]
    return row.negative_infinity * ((2**32 - 1) // (2**row.bits - 1))


class RouterKernel:
    """Sizes, and a token's row in the tensors of one configuration.

    row_lanes: lanes, of one or more warps, that share a token; rows: how many of its rows they hold at a time.
    """

    @classmethod
    def of(cls, spec):
        """The kernel of a spec."""
        return cls(RouterConfig(**{key.name: getattr(spec, key.name) for key in fields(RouterConfig)}))

    def __init__(self, config: RouterConfig, row_lanes: int = WARP, rows: int = 1) -> None:
        self.config = config
        self.threads = config.warps * WARP
        self.row_lanes = row_lanes
        widest = max(DTYPES[dtype].bytes for dtype in (config.dtype, config.out_dtype, config.grad_dtype))
        self.row = Row(config.experts, vector_elements(config.experts, widest), row_lanes)
        self.tokens_per_block = self.threads // row_lanes
        # Left alone, the compiler spends registers on computing ahead what a long row needs; warps are worth more.
        self.min_blocks = max(1, REGISTERS // (self.threads * (rows * self.row.size + SPARE_REGISTERS)))

    def grid(self, tokens: Int32) -> Int32:
        """Blocks: every warp, or set of warps, has one token."""
        return (tokens - 1) // self.tokens_per_block + 1

    def launch(self, kernel, tokens: Int32, stream) -> None:
        """Launches it; the carveout is left to what its shared memory needs."""
        kernel.launch(
            grid=[self.grid(tokens), 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=-1,
            stream=stream,
        )

    def token(self):
        """(token, lane in the token's row, which of the block's tokens it is)."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        place = cute.arch.make_warp_uniform(divide(thread, self.row_lanes))
        return block * self.tokens_per_block + place, thread & (self.row_lanes - 1), place

    def address(self, tensor, token: Int32, columns: int, nbytes: int) -> Int64:
        """Where the token's row of `columns` elements of `nbytes` begins."""
        return tensor.toint() + Int64(token) * (columns * nbytes)

    def element(self, row: Int64, index: Int32, dtype: str, valid) -> Float32:
        """Element `index` of a row; 0 where it is not valid."""
        size = DTYPES[dtype].bytes
        words = lanes.load(row + Int64(index * size), size, valid)
        return lanes.unpack(words, 1, dtype)[0]

    def put_element(self, row: Int64, index: Int32, value: Float32, dtype: str, valid) -> None:
        """Stores element `index` of a row where it is valid."""
        size = DTYPES[dtype].bytes
        lanes.store(row + Int64(index * size), lanes.pack([value], dtype), size, valid)

    def load_keys(self, row: Int64, lane: Int32) -> list:
        """A lane's logits as keys."""
        fill = negative_infinity(self.config.dtype)
        return self.existing([key_of(x) for x in lanes.load_row(row, self.row, lane, self.config.dtype, fill)], lane)

    def existing(self, keys: list, lane: Int32) -> list:
        """The keys, 0 for experts that do not exist."""
        valid = [self.row.valid(position // self.row.vector, lane) for position in range(len(keys))]
        return [
            key if use is None else cutlass.select_(use, key, Uint32(0)) for key, use in zip(keys, valid, strict=True)
        ]

    def values(self, keys: list, lane: Int32) -> list:
        """The logits of keys, minus infinity for experts that do not exist."""
        lowest = Uint32(0x007FFFFF)  # the key of minus infinity
        valid = [self.row.valid(position // self.row.vector, lane) for position in range(len(keys))]
        return [
            value_of(key if use is None else cutlass.select_(use, key, lowest))
            for key, use in zip(keys, valid, strict=True)
        ]

    def maximum_of(self, values: list) -> Float32:
        """The row's maximum in every lane of a warp; NaN if there is one."""
        largest = values[0]
        for value in values[1:]:
            largest = maximum(largest, value)
        for step in (16, 8, 4, 2, 1):
            largest = maximum(largest, cute.arch.shuffle_sync_bfly(largest, step))
        return largest

    def add_up(self, values) -> Float32:
        """The sum of a lane's values, made one by one: four running sums keep rounding errors and registers few."""
        sums: list = []
        for position, value in enumerate(values):
            if position < 4:
                sums.append(value)
            else:
                sums[position % 4] = sums[position % 4] + value
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + sums[len(sums) // 2 * 2 :]
        return sums[0]
