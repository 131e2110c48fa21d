"""What the drivers of a GEMM kernel call in the device half of an operand, and the structs that travel between them.

    host                  groups, precede | parameter | launch | then
    all threads           opening
    scheduler             source
    consumer warps        begin, scalars
      each tile           prepare, ahead | main loop | start
        each 16 rows      rows
          each chunk      chunk, scale, accumulate   8 columns of accumulators: scaled and shifted in place
          each box        box                     forward: before the activation
          each element    output                  forward: after the activation
          each box        result                  forward and weight gradients
          all of them     outputs                 forward
                          gradient                backward: da and the activation's value
          each unit       take, pack | stage, z_box, send, unit
          all of them     gradients               backward
        then              rows_end
      then                finish_tile
      after the last      finish
    idle warps            assist
    fourth warpgroup      fourth

A hook does nothing unless an operand overrides it; operands are called in the order of their `step`. A main loop or an
epilogue that reads one operand asks for the one of a role: LEFT and RIGHT, the factors, or BOTH in one where rows are
the reduction; STREAMED, z of a backward epilogue; and SCALES, those of w.

What differs from architecture to architecture an operand takes from its kit: `fusekit.kernels.gemm.sm90.kit`, for one.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute

from fusekit.dtypes import DTYPES
from fusekit.plan.gemm import GemmPlan


def dtype_of(name: str):
    """The DSL's type of a spec's dtype."""
    return getattr(cutlass, DTYPES[name].cutlass)


class Extents(NamedTuple):
    """Groups; rows of tokens; columns of the product, and half of them; elements of a row of x (wgrad: rows of dw)."""

    groups: Int32
    rows: Int32
    n: Int32
    half_n: Int32
    k: Int32


class Tile(NamedTuple):
    """A consumer warpgroup's tile: its first row, the group's end row, tile along N, group, number in the ring."""

    row: Int32
    end: Int32
    n_tile: Int32
    group: Int32
    count: Int32


class Work(NamedTuple):
    """What a consumer warp works with.

    operands: the kernel's parameters, tensor maps as addresses. shared: the CTA's regions of shared memory. staging:
    the warp's own boxes. warp_of_cta: the warp's number among the consumers. thread: in its warpgroup.
    """

    operands: Any
    shared: Any
    extents: Extents
    staging: Any
    warp_of_cta: Int32
    warpgroup: Int32
    thread: Int32


class Rows(NamedTuple):
    """16 rows of a tile, that one warp finishes: the first, the group's end, tile along N; `block` of 64 rows."""

    row: Int32
    end: Int32
    n_tile: Int32
    block: Any


class Idle(NamedTuple):
    """What a warp of the load warpgroup, or of the fourth, works with. warp: its number there."""

    operands: Any
    shared: Any
    extents: Extents
    ring: Any
    warp: Int32


LEFT, RIGHT, BOTH, STREAMED, SCALES = "left", "right", "both", "streamed", "scales"  # roles


class DeviceOperand:
    """The device half of an operand in one kernel. operand: its plan half. kit: what its architecture has for operands.

    role: what a driver asks for it as, where it does.
    """

    step = 0  # its place among the hooks of one kind
    role = ""

    def __init__(self, plan: GemmPlan, operand, kit) -> None:
        self.plan, self.operand, self.kit = plan, operand, kit
        self.dtype, self.out_dtype = dtype_of(plan.dtype), dtype_of(plan.out_dtype)

    def bind(self, halves) -> None:
        """What it needs of the kernel's other operands, once all are there."""

    def parameter(self, given):
        """The kernel's parameter, from the launch's arguments: a tensor map, a pointer, numbers; None for none."""
        return

    def groups(self, given):
        """How many groups of rows there are; None from an operand that makes none."""
        return

    def source(self, source, operands):
        """What the scheduler reads the groups' rows from; source: what earlier operands gave."""
        return source

    def scalars(self, operands) -> tuple:
        """What an activation takes after z, or after gate and up, from the kernel's parameters."""
        return ()

    def precede(self, given, groups, stream) -> None:
        """On the host: launches that go before the kernel's. groups: of the kernel, None for one."""

    def then(self, given, groups, stream) -> None:
        """On the host, after the kernel's launch: launches that follow it. groups: of the kernel, None for one."""

    def view(self, parameter):
        """What consumer warps have of the parameter."""
        return parameter

    def opening(self, operands, shared, extents: Extents) -> None:
        """Runs before all else on the device; all threads of a CTA."""

    def begin(self, shared, warpgroup: Int32) -> Any:
        """Runs once per consumer warp; the result is the `warp_state` of the hooks of a tile."""

    def prepare(self, tile: Tile, work: Work, warp_state) -> None:
        """Runs before a tile's main loop; all threads of a warpgroup."""

    def ahead(self, tile: Tile, work: Work) -> None:
        """Runs before the main loop of a backward epilogue, when the warp's boxes are free; one lane."""

    def start(self, tile: Tile, work: Work, warp_state) -> Any:
        """Runs before a tile's epilogue; the result is the `state` of the hooks below."""
        return warp_state

    def rows(self, rows: Rows, work: Work, state, acc) -> Any:
        """Runs before 16 rows, whose accumulators are `acc`; the result is the `row_state` of element hooks."""

    def chunk(self, chunk: int, state) -> Any:
        """Runs before chunk `chunk` of 8 columns; the result is handed to `accumulate`."""

    def scale(self, value, row_state, r: int):
        """The accumulator, in the lane's row `r` of two."""
        return value

    def accumulate(self, value, state, chunk, c: int):
        """The accumulator in column 2 (lane % 4) + `c` of a chunk."""
        return value

    def stored_boxes(self) -> int:
        """Staging boxes that it stores of a 64-row block."""
        return 0

    def box(self, acc, base: int, sources, number: int, rows: Rows, work: Work, boxes) -> int:
        """Stores what it has in the accumulator chunks `sources`; how many boxes. number: of its first one."""
        return 0

    def result(self, values, box: int, number: int, where, work: Work, boxes) -> int:
        """Stores box `box` of the outputs; how many boxes. values: (chunk, r) in order, packed, or two float32; of a
        weight gradient always these. where: Rows, or of a weight gradient (column, row, group). number: of its first.
        """
        return 0

    def output(self, value, row_state, r: int):
        """An output, in the lane's row `r` of two."""
        return value

    def outputs(self, words, rows: Rows, work: Work, state) -> None:
        """The outputs of 16 rows, packed, (chunk, r) in order: two columns of chunk `chunk` in the lane's row `r`."""

    def gradient(self, da, value, row_state, r: int):
        """(da, value of the activation) in the lane's row `r` of two."""
        return da, value

    def take(self, row_state, first, second) -> None:
        """dz of the lane's two rows in the next columns."""

    def pack(self, values):
        """Two columns of the activation's value, packed; None where they are not stored."""

    def gradients(self, packed, rows: Rows, work: Work) -> None:
        """dz and y of 16 rows, packed. dz by unit, step and side: (chunk, r) in order; (chunk, r, c) where gate and up
        lie side by side, and make one side. y (chunk, r) in order, where an operand packs it.
        """

    def stage(self, number, outputs, work: Work) -> Any:
        """Writes the packed outputs of unit `number` into a box; which it is. All lanes."""

    def z_box(self, box, where, work: Work) -> None:
        """Stores a unit's box of z, which has dz in it, to the coordinates `where`; one lane."""

    def send(self, staged, unit: int, rows: Rows, work: Work) -> None:
        """Starts the store of what was staged; one lane."""

    def unit(self, state, row_state, unit: int) -> None:
        """Runs after a unit."""

    def rows_end(self, rows: Rows, row_state, work: Work) -> None:
        """Runs after the units of 16 rows."""

    def finish_tile(self, state, work: Work) -> None:
        """Runs after a tile."""

    def finish(self, count: Int32, work: Work) -> None:
        """Runs after the last tile; there is no `count`-th one."""

    def assist(self, idle: Idle) -> None:
        """What idle warps do; all warps of the load warpgroup."""

    def fourth(self, idle: Idle) -> None:
        """What the fourth warpgroup does; all its warps."""


def struct(name: str, fields) -> Any:
    """A named tuple of (name, value) pairs: what the DSL carries through control flow and into a kernel."""
    names, values = zip(*fields, strict=True)
    return namedtuple(name, names)(*values)


@cute.jit
def row_pair(numbers, rows):
    """The numbers of this lane's two rows, 0 beyond the group."""
    low = rows.row + (cute.arch.lane_idx() >> 2)
    first = Float32(0.0)
    second = Float32(0.0)
    if low < rows.end:
        first = numbers[low]
    if low + 8 < rows.end:
        second = numbers[low + 8]
    return first, second
