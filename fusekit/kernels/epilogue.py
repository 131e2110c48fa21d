"""From accumulators to stored rows, one warp at a time.

A consumer warp owns 16 rows of each 64-row block of its warpgroup's accumulators. It finishes them by itself: scale
and bias in place, the pre-activation and the activated values rounded into a staging box of its own, stored by TMA.
No barrier joins the warps, so a warp's stores overlap its neighbours' arithmetic.

Accumulator layout (PTX ISA, "wgmma, D fragment"): register (c, r, j) of a 64-row block holds row lane/4 + 8 r of the
warp's 16 and column 8 j + 2 (lane % 4) + c.

A row box ends where its group ends, which the host does not know. The output maps therefore describe memory through two
extra dimensions whose strides sum to 2^34 elements, so that coordinates (BIG - rows_left, BIG, end) reach row
end - rows_left with the address wrapping modulo 2^64, and the hardware's own bounds check at BIG clips what lies beyond
the group (the idea: Triton's ragged TMA descriptors).
"""

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from fusekit.kernels import activations, ptx
from fusekit.kernels.config import CONSUMER_WARPGROUPS, WARPGROUP, GemmConfig, dtype_of

WARP_ROWS = 16
BOXES = 2  # staging boxes a warp alternates between
BIG = 2**30
LARGEST = 2**31 - 1
WRAP = 2**34


class StagingBoxes:
    """A warp's staging boxes in shared memory, of `bytes` each, used in turn and stored by TMA."""

    def __init__(self, box_bytes: int) -> None:
        self.bytes = box_bytes

    @cute.jit
    def store(
        self, number: cutlass.Constexpr, columns: cutlass.Constexpr, registers, descriptor, coordinates, staging, lane
    ):
        """Write a 16-row box of 16-bit elements and start its store.

        `registers` holds (chunk, r) in order: two columns of chunk `chunk`, row lane/4 + 8 r, packed. The swizzle is
        the tensor map's: 16-byte units exchanged by address bits 7 and up.
        """
        box = staging + (number % BOXES) * self.bytes
        self.acquire(lane)
        self.write(box, columns, registers, lane)
        self.send(box, descriptor, coordinates, lane, False)

    def write(self, box, columns: int, registers, lane: Int32) -> None:
        """The box's elements alone, no store."""
        row = lane & (WARP_ROWS - 1)
        swizzle = ((row * (2 * columns)) >> 7) & (columns // 8 - 1)
        unit = ((lane >> 4) ^ swizzle) * 16
        base = box.toint() + row * (2 * columns)
        for pair in range(columns // 16):
            ptx.store_matrix_x4(base + (unit ^ (pair * 32)), registers[4 * pair : 4 * pair + 4])

    @cute.jit
    def store_single(
        self,
        number: cutlass.Constexpr,
        columns: cutlass.Constexpr,
        values,
        descriptor,
        coordinates,
        staging,
        lane,
        add: cutlass.Constexpr,
    ):
        """Write a 16-row box of float32 (accumulator registers in order) and start its store, or its addition."""
        row = lane >> 2
        box = staging + (number % BOXES) * self.bytes
        base = box.toint() + row * (4 * columns)
        swizzle = ((row * (4 * columns)) >> 7) & (columns // 4 - 1)
        place = (lane & 3) * 8
        self.acquire(lane)
        for chunk in cutlass.range_constexpr(columns // 8):
            offset = ((chunk * 32 + place) ^ (swizzle * 16)) + base
            for r in cutlass.range_constexpr(2):  # eight rows further the swizzle is the same
                index = chunk * 4 + r * 2
                ptx.store_shared_f32x2(offset + r * (8 * 4 * columns), values[index], values[index + 1])
        self.send(box, descriptor, coordinates, lane, add)

    @cute.jit
    def acquire(self, lane: Int32):
        """Wait until the store of the box before the last has left shared memory."""
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(BOXES - 1, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def send(self, box, descriptor, coordinates, lane: Int32, add: cutlass.Constexpr):
        """Start the store of a box that the warp has written."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if lane == 0:
            ptx.tma_store(descriptor, box, coordinates, add)
            cute.arch.cp_async_bulk_commit_group()


def box_columns(width: int, limit: int) -> int:
    """Columns of a staging box: the widest of 64, 32, 16 up to `limit` that divides `width`."""
    return next(columns for columns in (64, 32, 16) if columns <= limit and width % columns == 0)


def bias_barrier(warpgroup: Int32) -> Int32:
    """Named barrier of one consumer warpgroup."""
    return warpgroup + 3


class Epilogue:
    """What one configuration does with its accumulators."""

    barriers = ()  # that it wants in shared memory: their arrive counts

    def __init__(self, config: GemmConfig) -> None:
        self.config = config
        self.dtype = dtype_of(config.dtype)
        self.out_dtype = dtype_of(config.out_dtype)
        self.concat = config.glu_layout == "concat"
        half = config.tile[1] // 2
        self.y_box = box_columns(config.out_tile_n, config.epilogue_box)
        self.z_box = box_columns(half if self.concat else config.tile[1], config.epilogue_box)
        self.boxes = StagingBoxes(config.epilogue_box * WARP_ROWS * 2)
        self.warp_bytes = BOXES * self.boxes.bytes
        self.staging_bytes = CONSUMER_WARPGROUPS * 4 * self.warp_bytes
        self.z_boxes = config.tile[1] // self.z_box if config.save_preactivation else 0
        self.box_count = self.z_boxes + config.out_tile_n // self.y_box  # of one 64-row block
        table = activations.GATED if config.gated else activations.PLAIN
        kind, _, approximate = config.activation.partition(":")
        self.activation = table[kind, approximate or "none"]

    def partners(self, chunk: int) -> tuple[int, int]:
        """Accumulator chunks (8 columns each) of gate and up for output chunk `chunk`."""
        if self.concat:
            return chunk, chunk + self.config.tile[1] // 16
        return chunk // 4 * 8 + chunk % 4, chunk // 4 * 8 + chunk % 4 + 4

    def sources(self, chunks) -> list[int]:
        """Accumulator chunks that these output chunks are made of."""
        if self.config.glu_layout == "interleaved":
            return [2 * chunk + side for chunk in chunks for side in range(2)]
        if self.config.gated:
            return [partner for chunk in chunks for partner in self.partners(chunk)]
        return list(chunks)

    # -- columns ------------------------------------------------------------------------------------------------------

    def column_of(self, column: Int32, n_tile: Int32, half_n: Int32) -> Int32:
        """Column of the product in memory for column `column` of the tile."""
        if cutlass.const_expr(self.concat):
            half = self.config.tile[1] // 2
            side = ptx.divide(column, half)
            return n_tile * half + column - side * half + side * half_n
        return n_tile * self.config.tile[1] + column

    @cute.jit
    def prepare(self, tile, context, seen: Int32):
        """Before a tile's main loop: its bias as float32 into shared memory, zero beyond N; a warpgroup's threads."""
        if cutlass.const_expr(self.config.bias):
            _, _, n_tile, group, _ = tile
            _, _, (bias, shared, n, half_n), _, (thread, warpgroup), _ = context
            cute.arch.barrier(barrier_id=bias_barrier(warpgroup), number_of_threads=WARPGROUP)
            for step in cutlass.range_constexpr((self.config.tile[1] + WARPGROUP - 1) // WARPGROUP):
                column = thread + step * WARPGROUP
                if column < self.config.tile[1]:
                    source = self.column_of(column, n_tile, half_n)
                    value = Float32(0.0)
                    if source < n:
                        value = Float32(bias[cutlass.Int64(group) * n + source])
                    shared[column] = value
            cute.arch.barrier(barrier_id=bias_barrier(warpgroup), number_of_threads=WARPGROUP)

    # -- values -------------------------------------------------------------------------------------------------------

    def activate(self, acc, base: int, chunk: int, r: int, c: int, scalars, scale):
        """Output (chunk, r, c) of the 64-row block whose accumulators start at `base`."""
        if self.config.gated:
            gate, up = self.partners(chunk)
            value = self.activation(acc[base + gate * 4 + r * 2 + c], acc[base + up * 4 + r * 2 + c], scalars)
        else:
            value = self.activation(acc[base + chunk * 4 + r * 2 + c])
        return value * scale[r] if self.config.row_scale else value

    def adjacent(self, acc, base: int, chunk: int, r: int, scalars, scale):
        """Outputs `lane % 4` of accumulator chunk `chunk`, whose gate and up stand side by side."""
        index = base + chunk * 4 + r * 2
        value = self.activation(acc[index], acc[index + 1], scalars)
        return value * scale[r] if self.config.row_scale else value

    def output_registers(self, acc, base: int, chunks, scalars, scale, lane):
        """Packed outputs of these chunks, (chunk, r) in order, as `StagingBoxes.store` wants them."""
        packed = []
        for chunk in chunks:
            for r in range(2):
                if self.config.glu_layout == "interleaved":
                    low = self.adjacent(acc, base, 2 * chunk, r, scalars, scale)
                    high = self.adjacent(acc, base, 2 * chunk + 1, r, scalars, scale)
                    packed.append(gather_pairs(ptx.pack_pair(low, high, self.out_dtype), lane))
                else:
                    low, high = (self.activate(acc, base, chunk, r, c, scalars, scale) for c in range(2))
                    packed.append(ptx.pack_pair(low, high, self.out_dtype))
        return packed

    def preactivation_registers(self, acc, base: int, box: int):
        """Packed accumulators of pre-activation box `box`, (chunk, r) in order."""
        chunks = range(box * self.z_box // 8, (box + 1) * self.z_box // 8)
        indices = [base + chunk * 4 + r * 2 for chunk in chunks for r in range(2)]
        return [ptx.pack_pair(acc[index], acc[index + 1], self.dtype) for index in indices]

    # -- a tile -------------------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, acc, tile, context, seen: Int32):
        """Finish the accumulators of one tile; all four warps of a warpgroup, each for itself.

        acc: warpgroup_rows / 64 blocks one after the other. tile: the warpgroup's first row, end row of the group, tile
        along N, group, its number in the ring. context: what `consume` gathers. seen: carried from tile to tile, not
        used here.
        """
        config = self.config
        tile_row, end, n_tile, group, _ = tile
        (map_y, map_z, _), (staging, _, _, warp_of_cta), (_, shared_bias, _, _), operands, *_ = context
        alpha, row_scale, act_alpha, act_limit, act_up_offset = operands
        scalars = activations.GluScalars(act_alpha, act_limit, act_up_offset)
        warp, lane = warp_of_cta & 3, cute.arch.lane_idx()
        if cutlass.const_expr(config.alpha == "group"):
            alpha = alpha[group]
        if lane == 0:  # the boxes of the last tile have left; the numbering starts again
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        per_block = config.tile[1] // 2
        for block in cutlass.range_constexpr(config.warpgroup_rows // 64):
            row = tile_row + block * 64 + warp * WARP_ROWS
            if row < end:
                base = block * per_block
                scale = self.row_scales(row_scale, row, end, lane)
                number = block * self.box_count
                for box in cutlass.range_constexpr(config.out_tile_n // self.y_box):
                    chunks = range(box * self.y_box // 8, (box + 1) * self.y_box // 8)
                    sources = self.sources(chunks)
                    self.scale_and_bias(acc, base, sources, alpha, shared_bias, lane)
                    for z_box in cutlass.range_constexpr(self.z_boxes):
                        if cutlass.const_expr(z_box * self.z_box // 8 in sources):
                            registers = self.preactivation_registers(acc, base, z_box)
                            where = self.preactivation_coordinates(z_box, row, end, n_tile)
                            self.boxes.store(number, self.z_box, registers, map_z, where, staging, lane)
                            number += 1
                    registers = self.output_registers(acc, base, chunks, scalars, scale, lane)
                    where = (n_tile * config.out_tile_n + box * self.y_box, BIG - (end - row), BIG, end)
                    self.boxes.store(number, self.y_box, registers, map_y, where, staging, lane)
                    number += 1
        return seen

    def scale_and_bias(self, acc, base: int, chunks, alpha, shared_bias, lane) -> None:
        """acc <- acc * alpha + bias on these chunks, in place.

        Done box by box: the stores in between keep the compiler from holding every bias and activation at once.
        """
        for chunk in chunks:
            bias = (None, None)
            if self.config.bias:
                bias = ptx.load_shared_f32x2(shared_bias.iterator.toint() + (chunk * 8 + (lane & 3) * 2) * 4)
            for c in range(2):
                for r in range(2):
                    index = base + chunk * 4 + r * 2 + c
                    value = acc[index]
                    if self.config.alpha != "none":
                        value = value * alpha
                    if self.config.bias:
                        value = value + bias[c]
                    acc[index] = value

    def preactivation_coordinates(self, box: int, row, end, n_tile):
        """Where pre-activation box `box` goes, in the order of the weights' columns."""
        first = box * self.z_box
        if self.concat:
            half = self.config.tile[1] // 2
            side = first // half
            return (n_tile * half + first - side * half, BIG - (end - row), side, BIG, end)
        return (n_tile * self.config.tile[1] + first, BIG - (end - row), BIG, end)

    @cute.jit
    def row_scales(self, row_scale, row: Int32, end: Int32, lane: Int32):
        """The router weights of this lane's two rows."""
        scale = (Float32(1.0), Float32(1.0))
        if cutlass.const_expr(self.config.row_scale):
            low = row + (lane >> 2)
            first = Float32(0.0)
            second = Float32(0.0)
            if low < end:
                first = row_scale[low]
            if low + 8 < end:
                second = row_scale[low + 8]
            scale = (first, second)
        return scale


def gather_pairs(packed: Uint32, lane: Int32) -> Uint32:
    """Give each lane of a quad two neighbouring columns.

    In: lane t holds column t (low half) and column 4 + t (high half) of eight. Out: columns 2t and 2t + 1.
    """
    quad = lane & 28
    source = quad + (lane * 2 & 2)
    first = cute.arch.shuffle_sync(packed, source)
    second = cute.arch.shuffle_sync(packed, source + 1)
    upper = cutlass.Uint32((lane >> 1) & 1)
    return ptx.permute_bytes(first, second, cutlass.Uint32(0x5410) + upper * cutlass.Uint32(0x2222))
