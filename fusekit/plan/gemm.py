"""The plan of one GEMM kernel: stages, boxes, barriers, registers, memory, grid, arguments.

A CTA has a warpgroup that fetches tiles, consumer warpgroups that multiply and run the epilogue, and where an operand
asks for it, as to gather rows, one more. How many there are and what they can hold is in the architecture's row. In the
CTA's dynamic shared memory are

stages       the tiles of both operands in flight; a row of a tile is one row of the swizzle
    staging      for each consumer warp 2 boxes of 16 rows x 64 columns x 2 bytes; or of 32 columns, where that makes
                 room for one more stage; float32 boxes have half as many columns. A weight gradient of FP8 values has 3
                 boxes a warp. With a backward activation: 3 boxes of z, and 2 of y where it is recomputed, or for sums
                 of columns. FP8 values of 16 rows x 128 columns take the place of boxes
    the rest     barriers, the ring of tiles, regions of operands such as a row of bias for each consumer warpgroup
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from fusekit.plan.product import VECTOR_BYTES as VECTOR_BYTES
from fusekit.plan.product import Product
from fusekit.plan.quant import SIDE
from fusekit.plan.shared import Region, SharedMemory, barriers, pipeline

if TYPE_CHECKING:
    from fusekit.abi import Argument, Constraint, Dim, Expr
    from fusekit.plan.operands import Operand

WARP = 32
OUTPUT_BOXES, Z_BOXES = 2, 3  # of a warp: of an output in turn, and of z on its way in or out
WGRAD_BOXES = 3  # of dw, where factors are FP8 values: their tiles end sooner
GATED_UNIT = 32  # columns of da whose gate and up a backward epilogue works on at a time
BOX_WIDTHS = (64, 32, 16)  # columns of a staging box
MIN_STAGES, MAX_STAGES = 3, 8
SWAPPED_STAGES = 20  # at most, where tiles have few rows: what is in flight of w keeps memory busy
FACTOR_REGISTERS = 32  # of a thread, for w in 16 bits
EXCHANGE_PAD = 4  # float32 after each row of swapped products, so that a warp's stores meet no bank twice
SEGMENT = SIDE // 2  # columns of a tile that have one scale of w, wherever the tile begins
SCHEDULE_BYTES = 8  # of the workspace: two int32 of the dynamic schedule
BIG = 2**30  # rows of a ragged tensor map
MOST_GROUPS = 2**16
VECTOR = 8  # elements of 16 bits in it
GATHERS = ("none", "x", "dy")  # the factor whose rows an index chooses
GATHER_WARPS = 4
# Sets of named barriers: the main loops of ping-pong take turns; a consumer warpgroup has its numbers of columns; the
# fourth warpgroup's warps meet.
TURNS, COLUMNS, FOURTH = NAMED_BARRIERS = "turns", "columns", "fourth"


class GemmPlan(Product):
    """The plan of `spec`; see `Product`."""

    # -- operands -----------------------------------------------------------------------------------------------------

    @cached_property
    def operands(self) -> tuple[Operand, ...]:
        """The kernel's operands, in the order of a launch's arguments."""
        from fusekit.plan.operands import operands_of

        return tuple(operand for operand in operands_of(self.epilogue) if operand.present(self))

    def has(self, name: str) -> bool:
        """Whether the kernel has the operand `name`."""
        return any(operand.name == name for operand in self.operands)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Dotted names of what makes up this kernel: architecture, driver of its epilogue, operands, activation."""
        row = f"fusekit.plan.arch.{self.arch.name}"
        operands = (module for operand in self.operands for module in operand.modules)
        return row, self.driver, self.kit, *operands, self.kind.module

    @property
    def driver(self) -> str:
        """Dotted name of the module that puts the kernel together."""
        blocks = "_blocks" if self.wgrad and self.quant.coded_inputs else ""
        return f"fusekit.kernels.gemm.{self.arch.kernels}.{self.epilogue}{blocks}"

    @property
    def kit(self) -> str:
        """Dotted name of the module of what the architecture has for the device halves of operands."""
        return f"fusekit.kernels.gemm.{self.arch.kernels}.kit"

    @property
    def begins_early(self) -> bool:
        """Whether the launch begins before the one before it in the stream has ended."""
        return any(operand.begins_early for operand in self.operands)

    # -- warps --------------------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        return self.arch.warpgroup * (1 + self.arch.consumer_warpgroups + self.fourth)

    @property
    def consumer_warps(self) -> int:
        """Warps of a CTA that multiply and finish tiles."""
        return 4 * self.arch.consumer_warpgroups

    @property
    def fourth(self) -> bool:
        """Whether there is a fourth warpgroup, which an operand has for itself."""
        return any(operand.fourth(self) for operand in self.operands)

    @property
    def warpgroup_rows(self) -> int:
        """Rows of the tile that one consumer warpgroup finishes: all (ping-pong) or its half (cooperative). A swapped
        tile has fewer than the one block that its epilogue is made for.
        """
        if self.swapped:
            return self.arch.mma_rows
        return self.tile[0] if self.pingpong else self.tile[0] // self.arch.consumer_warpgroups

    @property
    def turning(self) -> bool:
        """Whether a fourth warpgroup quantises the transpose of dz."""
        return self.backward and self.quant.coded and self.quant.transpose

    @property
    def waves(self) -> int:
        """Parts of the tile's columns that are multiplied one after the other: where sums are promoted, or where ptxas
        has too few registers for all of them at once.
        """
        if self.gathers and self.tile[1] > self.arch.gather_tile_n:
            return 2
        whole = self._accumulators(1) <= self.arch.accumulator_registers
        return 1 if whole or self.wgrad or not self.quant.promoted or self.tile[1] % SIDE else 2

    @property
    def accumulators(self) -> int:
        """float32 accumulators of a consumer thread; promoted ones and those of the rows that are multiplied."""
        return self._accumulators(self.waves)

    def _accumulators(self, waves: int) -> int:
        if self.quant.weights_alone:  # sums and products, which end before the epilogue; factors in registers
            owners = 1 if self.pingpong else self.arch.consumer_warpgroups
            sums = (1 if self.quant.mx_weights else 2) * self.tile[0] * self.tile[1] // owners
            return max(sums, self.warpgroup_rows * self.tile[1]) // self.arch.warpgroup + FACTOR_REGISTERS
        multiplied = self.tile[0] if self.swapped else self.arch.mma_rows // waves if self.quant.promoted else 0
        return (self.warpgroup_rows + multiplied) * self.tile[1] // self.arch.warpgroup

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread: (of the load warpgroup, of a consumer warpgroup)."""
        if self.fourth:
            load = self.arch.load_registers[self._fourth_level if self._idle_work else "idle"]
            rest = self.arch.registers // self.arch.warpgroup - load - self.fourth_registers
            step = self.arch.register_step
            return load, rest // (self.arch.consumer_warpgroups * step) * step
        most, balanced = self.arch.splits
        return most if self.crowded and not self._idle_work else balanced

    @property
    def _idle_work(self) -> bool:
        return self.filling_threads > 0 or any(operand.needs_registers for operand in self.operands)

    @property
    def fourth_registers(self) -> int:
        """Registers per thread of the fourth warpgroup: a lane that gathers keeps the addresses of a 16th of the tile's
        rows.
        """
        return self.arch.fourth_registers[self._fourth_level]

    @property
    def _fourth_level(self) -> str:
        """What the fourth warpgroup's share of registers is called in the architecture's row."""
        if self.turning or (self.wgrad and self.crowded and self._idle_work):
            return "few"
        return "tall" if not self.wgrad and self.tile[0] > max(self.arch.tile_rows["pingpong"]) else "usual"

    @property
    def accumulator_registers(self) -> int:
        """float32 accumulators that a consumer thread can hold without spilling."""
        most, spare = self.arch.accumulator_registers, self.arch.spare_registers
        return most - spare if self.fourth and self.registers[1] < most + spare else most

    @property
    def crowded(self) -> bool:
        """Whether accumulators leave a consumer thread few other registers."""
        return self.accumulators > self.arch.crowd

    @property
    def idle_readers(self) -> int:
        """Warps of the load warpgroup that read tiles and stages for an operand."""
        return sum(operand.reading_warps(self) for operand in self.operands)

    @property
    def gathers(self) -> bool:
        """Whether a warpgroup of its own brings rows that an index chooses."""
        return self.gather != "none"

    @property
    def order_role(self) -> str:
        """Role of the order of rows, offsets and index: an output where the launch makes it from choices."""
        return "output" if self.has("choices") else "input"

    @property
    def indexed_rows(self) -> Expr:
        """Elements of index."""
        return ["mul", self.spec.operands["choices"], "T"] if self.has("choices") else "M"

    @property
    def gathered_side(self) -> int:
        """Which side of a tile is gathered: 0 along M, 1 along N (x of a weight gradient)."""
        return int(self.wgrad and self.gather == "x")

    @property
    def relays(self) -> bool:
        """Whether an idle warp hands gathered stages on, after a fence; else their consumers fence."""
        return self.gathers and (not self._idle_work or self.quant.mx_weights)

    @property
    def stage_arrivals(self) -> int:
        """Arrivals that complete a stage, next to the bytes that come by TMA."""
        return 1 + self.filling_threads + (0 if not self.gathers else 1 if self.relays else self.gather_threads)

    @property
    def gather_threads(self) -> int:
        """Threads of the warpgroup that gathers."""
        return self.arch.warpgroup if self.gathers else 0

    @property
    def reading_warps(self) -> int:
        """Warps of a CTA that read a tile and its stages."""
        return 4 * (1 if self.pingpong else self.arch.consumer_warpgroups) + self.idle_readers

    @property
    def following_warps(self) -> int:
        """Warps of the load warpgroup that read tiles alone, for an operand."""
        return sum(operand.following_warps(self) for operand in self.operands)

    @property
    def filling_threads(self) -> int:
        """Threads of the load warpgroup that fill stages for an operand; their warps read tiles."""
        return sum(operand.filling_threads(self) for operand in self.operands)

    @property
    def blocks_in_turn(self) -> bool:
        """Whether one piece of code finishes the blocks of rows of a tile, in a loop at run time."""
        return any(operand.blocks_in_turn for operand in self.operands)

    @property
    def ring_slots(self) -> int:
        """Tiles decided ahead: few where a tile taken early could have gone to an idle SM."""
        return 2 if self.dynamic else 4

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the ring of tiles: what the scheduler writes of a tile."""
        return 32 if self.wgrad else 16

    # -- shared memory ------------------------------------------------------------------------------------------------

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a tile of each operand."""
        return self.tile[0] * self.x_row_bytes + self.tile[1] * self.w_row_bytes

    @property
    def x_row_bytes(self) -> int:
        """Bytes of a row of x in a stage."""
        return self.tile_k * self.element

    @property
    def w_row_bytes(self) -> int:
        """Bytes of a row of w in a stage."""
        return self.w_tile_k * self.w_element

    @property
    def tma_bytes(self) -> int:
        """Bytes per stage that TMA loads."""
        return self.stage_bytes - (self.tile[self.gathered_side] * self.x_row_bytes if self.gathers else 0)

    def box(self, width: int, limit: int | None = None) -> int:
        """Columns of a staging box for `width` columns: the widest that divides it."""
        most = self.epilogue_box if limit is None else limit
        return next(columns for columns in BOX_WIDTHS if columns <= most and width % columns == 0)

    @property
    def sums(self) -> bool:
        """Whether consumer warps of a backward epilogue add up what they make."""
        return self.has("dprob") or self.has("dbias")

    @property
    def outputs_staged(self) -> bool:
        """Whether a backward epilogue has staging boxes of y, or of sums of columns."""
        return self.has("recompute") or self.has("dbias")

    @cached_property
    def epilogue_box(self) -> int:
        """Columns of a staging box, at most; of a backward epilogue, columns of da that are worked on at a time."""
        if self.backward:
            return GATED_UNIT if self.kind.gated else self.box(self.tile[1], BOX_WIDTHS[0])
        # 64 columns, or 32 where that makes room for one more stage. Weight gradients of FP8 values gain less from
        # a fifth stage than they lose by short rows of dw.
        enough = 4 if self.wgrad and self.quant.coded_inputs else self.max_stages
        return max((min(enough, self._stages(self._warp_bytes(box))), box) for box in (64, 32))[1]

    def result_box(self, width: int) -> int:
        """Columns of a staging box for `width` columns of y or dw: of float32, half as many."""
        return self.box(width, self.epilogue_box // 2 if self.out_dtype == "f32" else self.epilogue_box)

    @property
    def z_columns(self) -> int:
        """Columns of a box of z; where gates and ups lie apart, of one of its two halves."""
        return self.epilogue_box * (1 if self.glu_layout == "concat" else self.sides)

    @property
    def warp_bytes(self) -> int:
        """Bytes of a consumer warp's staging boxes."""
        return self._warp_bytes(self.epilogue_box)

    def _warp_bytes(self, box: int) -> int:
        boxes = self.output_boxes
        if self.backward:
            z, outputs = self.z_boxes * self.sides, OUTPUT_BOXES if self.outputs_staged else 0
            rest = outputs * box * self.arch.warp_rows * 2 + self.fp8_bytes
            if self.turning:  # FP8 values of rows, and then the transpose of y, in one place
                rest = max(self.tile[1] * self.arch.warp_rows * 2 * self.spec.operands["recompute"], self.fp8_bytes)
            return z * box * self.arch.warp_rows * 2 + rest
        if not self.quant.wide and not self.has("preactivation"):
            boxes = 0
        return max(boxes * box * self.arch.warp_rows * 2, self.fp8_bytes)

    @property
    def output_boxes(self) -> int:
        """Staging boxes of a warp that an output takes in turn."""
        return WGRAD_BOXES if self.wgrad and self.quant.coded_inputs else OUTPUT_BOXES

    @property
    def fp8_bytes(self) -> int:
        """Bytes of the FP8 values of a warp's rows: they replace its boxes, or follow those of a backward epilogue."""
        columns = self.sides * self.tile[1] if self.backward else self.out_tile_n
        return columns * self.arch.warp_rows if self.quant.coded else 0

    @property
    def max_stages(self) -> int:
        """The deepest operand pipeline."""
        return SWAPPED_STAGES if self.swapped else MAX_STAGES

    @property
    def exchange_pitch(self) -> int:
        """float32 from one row of a swapped tile's products to the next, in shared memory."""
        return self.tile[1] + EXCHANGE_PAD

    def _stages(self, warp_bytes: int) -> int:
        room = self.arch.shared_bytes - warp_bytes * self.consumer_warps
        stages = min(self.max_stages, room // self.stage_bytes)
        while stages > 0 and self.layout(stages, warp_bytes).bytes > self.arch.shared_bytes:
            stages -= 1
        return stages

    @property
    def z_box_bytes(self) -> int:
        """Bytes of a box of z in a backward epilogue."""
        return self.epilogue_box * self.sides * self.arch.warp_rows * 2

    @property
    def z_bytes(self) -> int:
        """Bytes of a warp's boxes of z; its boxes of outputs follow."""
        return self.z_boxes * self.z_box_bytes

    @property
    def z_boxes(self) -> int:
        """Staging boxes per warp: those used in turn, or all of its 16 rows."""
        return self.tile[1] // self.epilogue_box if self.turning else Z_BOXES

    @cached_property
    def stages(self) -> int:
        """Depth of the operand pipeline."""
        return self._stages(self.warp_bytes)

    @cached_property
    def shared(self) -> SharedMemory:
        """The shared memory of a CTA; the launch record's dynamic shared memory is its size."""
        return self.layout(self.stages, self.warp_bytes)

    def layout(self, stages: int, warp_bytes: int) -> SharedMemory:
        """The shared memory with a pipeline of `stages`, and `warp_bytes` of staging boxes per warp."""
        tile_m, tile_n = self.tile
        ring = self.ring_slots
        counts = [count for operand in self.operands for count in operand.barriers(self)]
        owners = self.arch.consumer_warpgroups  # with a region each, or half of the rows at a time
        exchange = 4 * tile_m * self.exchange_pitch
        exchange = exchange * owners if self.pingpong or self.alternates else exchange // owners
        return SharedMemory(
            (
                Region("x", stages * tile_m * self.x_row_bytes, 1024),
                Region("w", stages * tile_n * self.w_row_bytes, 1024),
                Region("staging", warp_bytes * self.consumer_warps, 1024),
                *pipeline("stages", stages, self.stage_arrivals, self.reading_warps * self.cluster_size),
                Region("tiles", ring * self.slot_bytes),
                *pipeline("tiles", ring, 1, self.ring_readers),
                *([barriers("barriers", *counts)] if counts else []),
                *(region for operand in self.operands for region in operand.regions(self, stages)),
                *([Region("exchange", exchange)] if self.exchanged else []),
            )
        )

    def first_barrier(self, name: str) -> int:
        """Index of the first barrier of the operand `name` among those of all operands."""
        names = [operand.name for operand in self.operands]
        return sum(len(operand.barriers(self)) for operand in self.operands[: names.index(name)])

    def named_barrier(self, name: str) -> int:
        """The first of a set of named barriers.

        A set has one for each warpgroup of a plain CTA; where the first set has that of the load warpgroup, barrier 0
        is the one of all threads.
        """
        names = (barrier for operand in self.operands for barrier in operand.named_barriers)
        return max(1, list(dict.fromkeys((*NAMED_BARRIERS, *names))).index(name) * (1 + self.arch.consumer_warpgroups))

    @property
    def local_rows_first(self) -> bool:
        """Whether tiles whose rows are the rank's own come first."""
        return any(operand.local_rows_first for operand in self.operands)

    @property
    def in_parts(self) -> bool:
        """Whether the rows of a weight gradient are summed in parts, which a second launch adds up."""
        return any(operand.in_parts for operand in self.operands)

    @property
    def ring_shared(self) -> bool:
        """Whether one scheduler serves a whole cluster."""
        return self.dynamic and self.cluster_size > 1

    @property
    def ring_readers(self) -> int:
        """Warps that free a slot of the ring of tiles."""
        idle = self.filling_threads // WARP + self.following_warps
        return (1 + idle + self.reading_warps + self.gather_threads // WARP + self.relays) * (
            self.cluster_size if self.ring_shared else 1
        )

    # -- arguments and memory -----------------------------------------------------------------------------------------

    @property
    def added_to(self) -> str:
        """Role of a weight gradient's outputs."""
        return "inout" if self.has("accumulate") else "output"

    @property
    def adds(self) -> bool:
        """Whether a tile is added to what dw holds; where the rows are split, the sum of the parts is."""
        return self.has("accumulate") and not self.in_parts

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """What a launch passes."""
        return tuple(argument for operand in self.operands for argument in operand.arguments(self))

    @property
    def columns(self) -> dict[str, int]:
        """The extents of columns, and what each is a multiple of."""
        width = 32 if self.glu_layout == "interleaved-32" else 2 * VECTOR if self.quant.coded else VECTOR
        if self.kind.gated and self.glu_layout == "concat":
            if self.backward and self.quant.coded:
                width = SIDE  # a block has gates alone, or ups
            elif self.halved and self.quant.by_block:
                width = SEGMENT
            elif self.quant.weights_alone and not self.quant.mx_weights:
                width = SIDE  # a scale is of gates alone, or of ups
        return {"N": self.vector, "K": self.vector} if self.wgrad else {"K": self.vector, str(self.width): width}

    @property
    def dims(self) -> tuple[Dim, ...]:
        """Extents that a launch's tensors have."""
        from fusekit.abi import Dim

        groups = [Dim("E", minimum=1, maximum=MOST_GROUPS)] if self.grouped else []
        columns = (Dim(name, divisor, divisor, BIG // 2) for name, divisor in self.columns.items())
        tokens = Dim("P", SIDE, SIDE, BIG) if self.wgrad and self.quant.coded_inputs else Dim("M", maximum=BIG)
        more = (dim for operand in self.operands for dim in operand.dims(self))
        return tokens, *groups, *columns, *more

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """What a launch's arguments must keep to."""
        return tuple(constraint for operand in self.operands for constraint in operand.constraints(self))

    @property
    def workspace(self) -> int:
        """Bytes of the workspace, which are zero between launches."""
        scheduler = SCHEDULE_BYTES if self.dynamic else 0
        return max([scheduler, *(operand.workspace(self) for operand in self.operands)])

    @property
    def scratch(self) -> Expr:
        """Bytes of scratch memory, of any content."""
        words = [word for operand in self.operands for word in operand.scratch(self)]
        return ["mul", 4, words[0] if len(words) == 1 else ["add", *words]] if words else 0

    @property
    def skip_if_zero(self) -> tuple[str, ...]:
        """Dims without which there is nothing to do: outputs of groups are written without rows too."""
        by_group = not self.has("accumulate") if self.wgrad else self.backward and self.spec.operands["dbias"]
        return () if by_group or self.quant.largest else ("P" if self.wgrad and self.quant.coded_inputs else "M",)
