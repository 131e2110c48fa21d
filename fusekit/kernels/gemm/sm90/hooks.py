"""The operands of a kernel as its drivers call them; the hooks: operands/base.py."""

from cutlass import Int32

from fusekit.kernels.gemm.operands.base import Idle, Rows, Tile, Work, struct


class Operands:
    """The device halves of a kernel as a driver calls them, in the order of their steps."""

    def __init__(self, halves) -> None:
        self.halves = dict(sorted(halves.items(), key=lambda item: item[1].step))

    def __iter__(self):
        return iter(self.halves.values())

    def gather_states(self, call):
        """What `call(name, half)` gives for each operand, as a struct."""
        return struct("Each", [(name, call(name, half)) for name, half in self.halves.items()])

    def role(self, name: str):
        """The operand that a driver asks for as `name`; None where there is none."""
        return next((half for half in self if half.role == name), None)

    def groups(self, given):
        """How many groups of rows there are; None: all rows belong together."""
        return next((count for half in self if (count := half.groups(given)) is not None), None)

    def source(self, operands):
        source = None
        for half in self:
            source = half.source(source, operands)
        return source

    def scalars(self, operands) -> tuple:
        return tuple(value for half in self for value in half.scalars(operands))

    def opening(self, operands, shared, extents) -> None:
        for half in self:
            half.opening(operands, shared, extents)

    def begin(self, shared, warpgroup: Int32):
        return self.gather_states(lambda name, half: half.begin(shared, warpgroup))

    def prepare(self, tile: Tile, work: Work, warp_state) -> None:
        for name, half in self.halves.items():
            half.prepare(tile, work, getattr(warp_state, name))

    def start(self, tile: Tile, work: Work, warp_state):
        return self.gather_states(lambda name, half: half.start(tile, work, getattr(warp_state, name)))

    def rows(self, rows: Rows, work: Work, states, acc=None):
        return self.gather_states(lambda name, half: half.rows(rows, work, getattr(states, name), acc))

    def accumulate(self, acc, base: int, chunks, states, row_state) -> None:
        """What operands make of the accumulators of these chunks, in place.

        Done box by box: the stores in between keep the compiler from holding every bias and activation at once.
        """
        for chunk in chunks:
            loaded = [half.chunk(chunk, getattr(states, name)) for name, half in self.halves.items()]
            for c in range(2):
                for r in range(2):
                    index = base + chunk * 4 + r * 2 + c
                    value = acc[index]
                    for (name, half), columns in zip(self.halves.items(), loaded, strict=True):
                        value = half.scale(value, getattr(row_state, name), r)
                        value = half.accumulate(value, getattr(states, name), columns, c)
                    acc[index] = value

    def result(self, values, box: int, number: int, where, work: Work, boxes) -> int:
        return sum(half.result(values, box, number, where, work, boxes) for half in self)

    def output(self, value, row_state, r: int):
        for name, half in self.halves.items():
            value = half.output(value, getattr(row_state, name), r)
        return value

    def outputs(self, words, rows: Rows, work: Work, states) -> None:
        for name, half in self.halves.items():
            half.outputs(words, rows, work, getattr(states, name))

    def gradient(self, da, value, row_state, r: int):
        for name, half in self.halves.items():
            da, value = half.gradient(da, value, getattr(row_state, name), r)
        return da, value

    def take(self, row_state, first, second) -> None:
        for name, half in self.halves.items():
            half.take(getattr(row_state, name), first, second)

    def pack(self, values) -> list:
        return [packed for half in self if (packed := half.pack(values)) is not None]

    def gradients(self, packed, rows: Rows, work: Work) -> None:
        for half in self:
            half.gradients(packed, rows, work)

    def stage(self, number, outputs, work: Work):
        return self.gather_states(lambda name, half: half.stage(number, outputs, work))

    def z_box(self, box, where, work: Work) -> None:
        for half in self:
            half.z_box(box, where, work)

    def send(self, staged, unit: int, rows: Rows, work: Work) -> None:
        for name, half in self.halves.items():
            half.send(getattr(staged, name), unit, rows, work)

    def unit(self, states, row_state, unit: int) -> None:
        for name, half in self.halves.items():
            half.unit(getattr(states, name), getattr(row_state, name), unit)

    def rows_end(self, rows: Rows, row_state, work: Work) -> None:
        for name, half in self.halves.items():
            half.rows_end(rows, getattr(row_state, name), work)

    def finish_tile(self, states, work: Work) -> None:
        for name, half in self.halves.items():
            half.finish_tile(getattr(states, name), work)

    def finish(self, count: Int32, work: Work) -> None:
        for half in self:
            half.finish(count, work)

    def assist(self, idle: Idle) -> None:
        for half in self:
            half.assist(idle)

    def fourth(self, idle: Idle) -> None:
        for half in self:
            half.fourth(idle)
