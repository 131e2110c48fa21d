"""Executes host code on symbols: every value is a `Bits` node over the arguments, host memory is a table of them.

A branch on the arguments is taken both ways, up to the block in which the ways meet; what differs there becomes a
`select`. A way that ends in a trap becomes a condition that arguments must not meet (`traps`). A loop whose end depends
on the arguments is known only as the logarithm of fast division (`loops`); what others leave is unknown, which is an
error only where a launch is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusekit.compiler import dsl
from fusekit.compiler.hostcode import encoded, loops
from fusekit.compiler.hostcode.bits import FLOAT_OPERATIONS, FLOAT_PREDICATES, PREDICATES, Bits, Graph, Pointer, Symbol
from fusekit.compiler.hostcode.layout import Layout, Layouts, Leaf
from fusekit.compiler.hostcode.program import EXIT, Function, Instruction, functions
from fusekit.dtypes import ROUNDINGS
from fusekit.errors import BuildError

Value = Any  # Bits, Pointer, Symbol, or a list of values: an aggregate
Memory = dict[int, dict[int, tuple[int, Value]]]
_STEPS = 100_000
_DYNAMIC = -(2**31)  # among the constant indices of a getelementptr
_ARITHMETIC = frozenset({
    "add", "sub", "mul", "udiv", "sdiv", "urem", "srem", "and", "or", "xor", "shl", "lshr", "ashr",
    "intr.smin", "intr.smax", "intr.umin", "intr.umax", "intr.ctlz", "intr.abs", "zext", "sext", "trunc",
})  # fmt: skip
_FLOATS = frozenset({
    *FLOAT_OPERATIONS, "intr.sqrt", "intr.floor", "intr.ceil", "intr.trunc", "intr.fabs", "sitofp", "uitofp", "fptrunc",
    "fpext", "fneg",
})  # fmt: skip
_INTEGERS = frozenset({"fptosi", "fptoui"})
_SAME = frozenset({"ptrtoint", "inttoptr", "addrspacecast", "bitcast", "freeze"})
_ASKING = frozenset({"_cudaGetDevice", "_cudaDeviceGetAttribute", "_cuKernelGetAttribute"})
# No launch depends on a message, nor on whether a call that is known to succeed did.
_HARMLESS = frozenset({"printf", "cuda_dialect_assert_success"})
_NOTHING = frozenset({"intr.assume", "intr.lifetime.start", "intr.lifetime.end"})


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function outside the module, with `memory` as it was then. conditions: under which it is made."""

    name: str
    arguments: list[Value]
    memory: Memory
    at: Instruction
    conditions: tuple[Bits, ...] = ()

    def cell(self, at: Pointer, offset: int) -> Value:
        """What was written `offset` bytes after `at`; None where nothing was."""
        return self.memory.get(at.memory, {}).get(at.offset + offset, (0, None))[1]


@dataclass(slots=True)
class Ending:
    """How a run of blocks ended. block: the one that it was to stop at, or EXIT; values: passed to it, or returned."""

    block: int
    values: list[Value]
    memory: Memory


@dataclass(slots=True)
class Machine:
    """Executes functions of `module`. calls: what they called; traps: conditions under which the host code ends the
    process; types: of each piece of host memory, its element's layout.

    answer: what a call of an outside function returns; by default 0.
    """

    module: Any
    graph: Graph = field(default_factory=Graph)
    layouts: Layouts = field(default_factory=Layouts)
    calls: list[Call] = field(default_factory=list)
    traps: list[tuple[Bits, str]] = field(default_factory=list)
    types: dict[int, Layout] = field(default_factory=dict)
    conditions: list[Bits] = field(default_factory=list)  # of the branches that are under way
    _functions: dict[str, Any] = field(default_factory=dict)
    _steps: int = 0

    def __post_init__(self) -> None:
        for operation in functions(self.module):
            self._functions[operation.attributes["sym_name"].value] = operation

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._functions)

    def function(self, name: str) -> Function:
        return Function(self._functions[name])

    def allocate(self, layout: Layout) -> Pointer:
        self.types[len(self.types)] = layout
        return Pointer(len(self.types) - 1, 0)

    def call(self, name: str, arguments: Sequence[Value], memory: Memory) -> Ending | None:
        """Executes a function of the module; None where every way ends in a trap."""
        return Run(self, self.function(name)).blocks(0, list(arguments), memory, EXIT)

    def step(self) -> None:
        self._steps += 1
        if self._steps > _STEPS:
            raise BuildError(f"host code: it did not end in {_STEPS} steps; a launch record cannot hold such a loop")

    def load(self, memory: Memory, at: Value, layout: Layout, by: Instruction) -> Value:
        if isinstance(at, Symbol):
            return at
        if not isinstance(at, Pointer):
            raise BuildError(f"host code: it reads memory at an address that is not the host's own: {by.place}")
        if layout.is_aggregate:
            return [
                self.load(memory, Pointer(at.memory, at.offset + offset), part, by) for offset, part in layout.parts
            ]
        cells = memory.get(at.memory, {})
        size, value = cells.get(at.offset, (0, None))
        if value is None:
            if any(other < at.offset + layout.size and at.offset < other + cells[other][0] for other in cells):
                return self.graph.unknown(f"it reads part of what was written: {by.place}", layout.leaves[0].width)
            return self.graph.undefined(layout.leaves[0].width)
        if size != layout.size:
            return self.graph.unknown(
                f"it reads {layout.size} bytes where {size} were written: {by.place}", 8 * layout.size
            )
        return value

    def store(self, memory: Memory, at: Value, value: Value, layout: Layout, by: Instruction) -> None:
        if not isinstance(at, Pointer):
            raise BuildError(f"host code: it writes to an address that is not the host's own: {by.place}")
        if layout.is_aggregate:
            for (offset, part), item in zip(layout.parts, value, strict=True):
                self.store(memory, Pointer(at.memory, at.offset + offset), item, part, by)
            return
        cells = memory.setdefault(at.memory, {})
        for other in [x for x in cells if x < at.offset + layout.size and at.offset < x + cells[x][0]]:
            del cells[other]
        cells[at.offset] = (layout.size, value)

    def filled(self, layout: Layout, leaf: Callable[[Leaf], Value]) -> Value:
        """A value of a type, each scalar made by `leaf`."""
        if layout.is_aggregate:
            return [self.filled(part, leaf) for _, part in layout.parts]
        return leaf(layout.leaves[0])


class Run:
    """One activation of a function."""

    def __init__(self, machine: Machine, function: Function) -> None:
        self.machine, self.function, self.graph = machine, function, machine.graph
        self.slots: dict[int, Value] = {}

    def blocks(self, number: int, arguments: list[Value], memory: Memory, stop: int) -> Ending | None:
        """Executes from block `number` up to block `stop`, or to the end; None where it traps."""
        while number != stop:
            self.machine.step()
            block = self.function.blocks[number]
            last = block.last
            if last.name == "unreachable":  # what comes before is a message
                return None
            self.slots.update(zip(block.arguments, arguments, strict=True))
            for instruction in block.instructions[:-1]:
                self.execute(instruction, memory)
            if last.name == "return":
                return Ending(EXIT, [self.slots[slot] for slot in last.operands], memory)
            if last.name == "cond_br":
                condition = self.slots[last.operands[0]]
                if not isinstance(condition, Bits):
                    raise BuildError(f"host code: it branches on an address: {last.place}")
                if not condition.is_const:
                    ending = self.branch(number, condition, memory)
                    if ending is None or ending.block == EXIT:
                        return ending
                    number, arguments, memory = ending.block, ending.values, ending.memory
                    continue
                number, slots = last.targets[0 if condition.number else 1]
            elif last.name == "br":
                number, slots = last.targets[0]
            else:
                raise BuildError(f"host code: it ends a block in a way that is not known: {last.place}")
            arguments = [self.slots[slot] for slot in slots]
        return Ending(stop, arguments, memory)

    def branch(self, number: int, condition: Bits, memory: Memory) -> Ending | None:
        """Both ways of a branch on the arguments, from the end of block `number` to where they meet."""
        loop = self.function.loops[number]
        last = self.function.blocks[number].last
        leaving = [target not in loop for target, _ in last.targets]
        if loop and any(leaving):
            return loops.leave(self, number, leaving.index(True), memory)
        join = self.function.joins[number]
        endings = []
        for way, (target, slots) in enumerate(last.targets):
            taken = condition if way == 0 else self.graph.negation(condition)
            self.machine.conditions.append(taken)
            copied = {name: dict(cells) for name, cells in memory.items()}
            endings.append(self.blocks(target, [self.slots[slot] for slot in slots], copied, join))
            self.machine.conditions.pop()
            if endings[-1] is None:
                self.machine.traps.append((self._all(taken), last.place))
        first, second = endings
        if first is None or second is None:
            return first or second
        values = [self.merge(condition, a, b, last) for a, b in zip(first.values, second.values, strict=True)]
        return Ending(join, values, self._merge_memory(condition, first.memory, second.memory, last))

    def _all(self, condition: Bits) -> Bits:
        for other in self.machine.conditions:
            condition = self.graph.make("and", 1, other, condition)
        return condition

    def merge(self, condition: Bits, a: Value, b: Value, at: Instruction) -> Value:
        if isinstance(a, list):
            return [self.merge(condition, x, y, at) for x, y in zip(a, b, strict=True)]
        if isinstance(a, Bits) and isinstance(b, Bits):
            return self.graph.make("select", a.width, condition, a, b)
        if a == b:
            return a
        return self.graph.unknown(f"a branch on the arguments chooses between two addresses: {at.place}", 64)

    def _merge_memory(self, condition: Bits, first: Memory, second: Memory, at: Instruction) -> Memory:
        merged: Memory = {}
        for name in first.keys() | second.keys():
            a, b = first.get(name, {}), second.get(name, {})
            merged[name] = cells = {}
            for offset in sorted(a.keys() | b.keys()):
                (size, x), (other, y) = a.get(offset, (0, None)), b.get(offset, (0, None))
                if size == other:
                    cells[offset] = (size, x if x == y else self.merge(condition, x, y, at))
                else:
                    why = f"only one side of a branch on the arguments writes it: {at.place}"
                    cells[offset] = (size or other, self.graph.unknown(why, 8 * (size or other)))
        return merged

    def execute(self, instruction: Instruction, memory: Memory) -> None:
        name = instruction.name
        if name in _NOTHING:
            return
        operands = [self.slots[slot] for slot in instruction.operands]
        method = _METHODS.get(name)
        if method is not None:
            result = method(self, instruction, operands, memory)
        elif name in _SAME:
            result = operands[0]
        elif name in _ARITHMETIC or name in _FLOATS or name in _INTEGERS:
            result = self.arithmetic(instruction, operands)
        else:
            raise BuildError(
                f"host code: {name} is an operation that a launch record is not read out of: {instruction.place};"
                " compute it before the launch, and pass the result"
            )
        if instruction.result is not None:
            self.slots[instruction.result] = result

    def arithmetic(self, instruction: Instruction, operands: list[Value]) -> Value:
        name, width = instruction.name.removeprefix("intr."), self.layout(instruction).leaves[0].width
        if not all(isinstance(item, Bits) for item in operands):
            return self.unknown(instruction)
        if name == "fptrunc":
            to = str(instruction.operation.results[0].type).replace("f16", "fp16").replace("bfp16", "bf16")
            name = to if to in ROUNDINGS else name
        elif instruction.name in _FLOATS and width < 32 and name != "fpext":  # the DSL computes with 32 bits or more
            return self.unknown(instruction)
        return self.graph.make(name, width, *operands)

    def unknown(self, instruction: Instruction) -> Value:
        why = f"a launch record cannot compute {instruction.place}"
        return self.machine.filled(self.layout(instruction), lambda leaf: self.graph.unknown(why, leaf.width))

    def layout(self, instruction: Instruction) -> Layout:
        return self.machine.layouts.of(instruction.operation.results[0].type)

    def constant(self, instruction: Instruction, *_: Any) -> Value:
        ir = dsl.ir()
        value, layout = instruction.attributes["value"], self.layout(instruction)
        if isinstance(value, ir.IntegerAttr):
            return self.graph.const(value.value, layout.leaves[0].width)
        if isinstance(value, ir.BoolAttr):
            return self.graph.const(int(value.value), 1)
        if isinstance(value, ir.FloatAttr):
            return self.graph.float(value.value, layout.leaves[0].width)
        if isinstance(value, ir.DenseIntElementsAttr):
            items = [value[0]] * len(layout.parts) if value.is_splat else list(value)
            return [self.graph.const(int(item), leaf.width) for item, leaf in zip(items, layout.leaves, strict=True)]
        return self.unknown(instruction)

    def zero(self, instruction: Instruction, *_: Any) -> Value:
        return self.machine.filled(self.layout(instruction), lambda leaf: self.graph.const(0, leaf.width))

    def undefined(self, instruction: Instruction, *_: Any) -> Value:
        return self.machine.filled(self.layout(instruction), lambda leaf: self.graph.undefined(leaf.width))

    def address_of(self, instruction: Instruction, *_: Any) -> Value:
        return Symbol(instruction.attributes["global_name"].value)

    def compare(self, instruction: Instruction, operands: list[Value], _: Memory) -> Value:
        if not all(isinstance(item, Bits) for item in operands):
            return self.unknown(instruction)
        return self.graph.compare(PREDICATES[instruction.attributes["predicate"].value], *operands)

    def compare_floats(self, instruction: Instruction, operands: list[Value], _: Memory) -> Value:
        if not all(isinstance(item, Bits) for item in operands):
            return self.unknown(instruction)
        predicate = FLOAT_PREDICATES[instruction.attributes["predicate"].value]
        return self.graph.make(f"fcmp_{predicate}", 1, *operands)

    def select(self, instruction: Instruction, operands: list[Value], _: Memory) -> Value:
        condition, a, b = operands
        if isinstance(condition, list):
            return self.unknown(instruction)
        return self.merge(condition, a, b, instruction)

    def extract(self, instruction: Instruction, operands: list[Value], _: Memory) -> Value:
        value = operands[0]
        for index in instruction.attributes["position"]:
            value = value[index]
        return value

    def insert(self, instruction: Instruction, operands: list[Value], _: Memory) -> Value:
        return _inserted(operands[0], list(instruction.attributes["position"]), operands[1])

    def allocate(self, instruction: Instruction, operands: list[Value], _: Memory) -> Value:
        return self.machine.allocate(self.machine.layouts.of(instruction.attributes["elem_type"].value))

    def element(self, instruction: Instruction, operands: list[Value], _: Memory) -> Value:
        """The address of an element: of host memory, or a device address with integer steps."""
        base, *dynamic = operands
        layout = self.machine.layouts.of(instruction.attributes["elem_type"].value)
        indices = [
            dynamic.pop(0) if index == _DYNAMIC else self.graph.const(index, 64)
            for index in instruction.attributes["rawConstantIndices"]
        ]
        if isinstance(base, Symbol):
            return base
        if isinstance(base, Pointer):
            offset = base.offset
            for depth, index in enumerate(indices):
                if not index.is_const:
                    raise BuildError(
                        f"host code: an index into host memory depends on the arguments: {instruction.place}"
                    )
                if depth == 0:
                    offset += index.signed * layout.size
                else:
                    place, layout = layout.parts[index.number]
                    offset += place
            return Pointer(base.memory, offset)
        if len(indices) != 1:
            return self.unknown(instruction)
        index = indices[0] if indices[0].width == 64 else self.graph.make("sext", 64, indices[0])
        step = self.graph.make("mul", 64, index, self.graph.const(layout.size, 64))
        return self.graph.make("add", 64, base, step)

    def load(self, instruction: Instruction, operands: list[Value], memory: Memory) -> Value:
        return self.machine.load(memory, operands[0], self.layout(instruction), instruction)

    def store(self, instruction: Instruction, operands: list[Value], memory: Memory) -> None:
        layout = self.machine.layouts.of(instruction.operation.operands[0].type)
        self.machine.store(memory, operands[1], operands[0], layout, instruction)

    def call(self, instruction: Instruction, operands: list[Value], memory: Memory) -> Value:
        if "callee" not in instruction.attributes:
            raise BuildError(f"host code: it calls through a pointer: {instruction.place}")
        name = instruction.attributes["callee"].value
        machine = self.machine
        if name in machine.names:
            ending = machine.call(name, operands, memory)
            if ending is None:
                raise BuildError(f"host code: {name} always traps: {instruction.place}")
            memory.clear()
            memory.update(ending.memory)
            return ending.values[0] if ending.values else None
        if name in _HARMLESS:
            return self.graph.const(0, 32)
        copied = {number: dict(cells) for number, cells in memory.items()}
        called = Call(name, operands, copied, instruction, tuple(machine.conditions))
        if name == encoded.ENCODE:
            self._encode(called, memory)
            return self.graph.const(0, 32)
        machine.calls.append(called)
        if _answers(name) and isinstance(at := operands[0], Pointer):
            layout = machine.types[at.memory]
            value = self.graph.unknown(f"{name} answers it", layout.leaves[0].width)
            machine.store(memory, at, value, layout, instruction)
        return self.graph.const(0, 32)

    def _encode(self, call: Call, memory: Memory) -> None:
        at = call.arguments[0]
        layout = self.machine.types[at.memory] if isinstance(at, Pointer) else None
        if layout is None or {leaf.width for leaf in layout.leaves} != {64}:
            raise BuildError(f"host code: a tensor map that is not words of 64 bits: {call.at.place}")
        words = iter(encoded.words(self.graph, call, len(layout.leaves)))
        self.machine.store(memory, at, self.machine.filled(layout, lambda _: next(words)), layout, call.at)


def _answers(name: str) -> bool:
    """Whether the first argument of a driver call receives an answer."""
    return name in _ASKING or name.startswith("_cudaOccupancy")


def _inserted(aggregate: Value, path: list[int], value: Value) -> Value:
    parts = list(aggregate)
    parts[path[0]] = value if len(path) == 1 else _inserted(parts[path[0]], path[1:], value)
    return parts


_METHODS: dict[str, Callable[[Run, Instruction, list[Value], Memory], Value]] = {
    "mlir.constant": Run.constant,
    "mlir.zero": Run.zero,
    "mlir.poison": Run.undefined,
    "mlir.undef": Run.undefined,
    "mlir.addressof": Run.address_of,
    "icmp": Run.compare,
    "fcmp": Run.compare_floats,
    "select": Run.select,
    "extractvalue": Run.extract,
    "insertvalue": Run.insert,
    "alloca": Run.allocate,
    "getelementptr": Run.element,
    "load": Run.load,
    "store": Run.store,
    "call": Run.call,
}
