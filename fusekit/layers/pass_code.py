"""A pass compiled for any number of tokens: Python functions that say what its launches are given.

A class of calls has one kernel for each step: the calls differ in tokens and addresses alone. The functions are written
from the layer's record and the launch records, `shape` and `place` for each layout of memory:

    shapes(T)                 shape and strides of each argument in turn
    choose(T)                 the number of the layout
    shape(T)                  what follows the tokens (`Shape`), or None where a check fails
    write(arena, n)           packs `Shape.numbers`
    place(arena, a, o, z, s)  packs what follows addresses `a` and `Shape.values`. o, z: the addresses from low to high,
                              and the bytes at each. False, and nothing is packed, where arguments share memory or are
                              not in that order, or one is not aligned.
    maps(T)                   dims and strides of each tensor map

A None or False sends the call to the checks of `binding`, which say what is wrong.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fusekit.abi import (
    FloatParameter,
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    StructParameter,
    TensorArgument,
    TensorMapParameter,
    Truncated,
    flat,
)
from fusekit.abi.expr import Expr
from fusekit.abi.layer_memory import ALIGNMENT, Layout
from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH, LayerStep
from fusekit.abi.layer_record import LayerRecord
from fusekit.abi.symbolic import NotCompiledError, Value, Writer
from fusekit.abi.tensormap import DIMS_AT, STRIDES_AT
from fusekit.dtypes import DTYPES
from fusekit.layers.arena import Arena, Cells
from fusekit.runtime.launch_plan import GRID_LIMITS

if TYPE_CHECKING:
    from fusekit.runtime.launch_plan import Block, LaunchPlan

_FORMATS = {1: "b", 2: "h", 4: "i", 8: "q"}
_NEVER, _ADDRESS_END = 2**63, 2**64
_TMA_EXTENT, _TMA_STRIDE = 2**32, 2**40
_FOLLOWING_STRIDE = 2**36  # the higher bits are elsewhere in a map


class Shape(NamedTuple):
    """values: for `place`. numbers: for `write`. grids: of the launches. sizes: bytes of the arguments. kept, scratch:
    bytes that they need. own: the number of each launch whose kernel has scratch memory, its bytes, and where in them
    each pointer begins.
    """

    values: tuple[int, ...]
    numbers: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...]
    sizes: tuple[int, ...]
    kept: int
    scratch: int
    own: tuple[tuple[int, int, tuple[int, ...]], ...]


class Call(NamedTuple):
    """A class of calls. names: of the tensors, all contiguous, in the order of addresses, with "kept" and "scratch".

    low, high: the tokens for which the kernels are those of `steps`, each with its launches.
    """

    record: LayerRecord
    which: str
    names: tuple[str, ...]
    itemsizes: tuple[int, ...]
    outputs: frozenset[str]
    in_place: bool
    steps: Sequence[tuple[LayerStep, Sequence[tuple[LaunchPlan, Block]]]]
    low: int
    high: int


Maps = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
Place = Callable[[Arena, Sequence[int], Sequence[int], Sequence[int], Sequence[int]], bool]
Shapes = list[tuple[int, ...]]


class PassCode:
    """The functions for a class of calls. masks: of each argument, the bits that its address has not.

    Raises NotCompiledError.
    """

    def __init__(self, call: Call, masks: Sequence[int]) -> None:
        self._call = call
        self._layouts = [
            layout
            for layout in call.record.layouts(call.which, call.outputs, call.in_place)
            if layout.lends.issubset(call.outputs) and layout.since <= call.high and layout.until >= call.low
        ]
        self._launches, self._writing = _Launches(call, masks), threading.Lock()
        self.cells, self.write, self.maps = self._launches.cells, self._launches.write, self._launches.maps
        self._functions: dict[int, tuple[Callable[[int], Shape | None], Place]] = {}
        self.shapes = self._shapes()
        self._choose = self._chooser()

    def functions(self, tokens: int) -> tuple[Callable[[int], Shape | None], Place]:
        """`shape` and `place` of the layout for a call. Raises NotCompiledError."""
        number = self._choose(tokens)
        if number not in self._functions:
            if number < 0:
                raise NotCompiledError("no layout serves")
            with self._writing:
                self._functions[number] = self._launches.at(self._layouts[number])
        return self._functions[number]

    def _chooser(self) -> Callable[[int], int]:
        """A function of T: the number of the first layout that needs least scratch memory; -1: none serves."""
        memory, needed = _Memory(self._call, self._call.low, self._call.high), list[str]()
        for layout in self._layouts:
            places = memory.places(layout)
            rules = [
                f"{end} <= {memory.room(home)}" for home, end in places.needed.items()
                if home != SCRATCH and not memory.holds(home, end)
            ]  # fmt: skip
            rules += [f"{layout.since} <= T"] * (layout.since > self._call.low)
            rules += [f"T <= {layout.until}"] * (layout.until < self._call.high)
            where = f" if {' and '.join(rules)} else {_NEVER}" if rules else ""
            needed.append(f"{places.scratch}{where}, ")
        lines = f"needed = ({''.join(needed)})", "least = min(needed)"
        result = f"needed.index(least) if least < {_NEVER} else -1"
        return _compiled(memory.writer.function("choose", result, *lines), "choose")  # type: ignore[no-any-return]

    def _shapes(self) -> Callable[[int], Shapes]:
        """A function of T: shape and strides of each tensor that is not "kept" or "scratch"."""
        memory, pairs = _Memory(self._call, self._call.low, self._call.high), list[str]()
        for name in self._call.names:
            if name not in (KEPT, SCRATCH):
                extents = memory.extents(name)
                strides = [memory.writer.define(_compact(extents, index)) for index in range(len(extents))]
                pairs += _tuple(extents), _tuple(strides)
        return _compiled(memory.writer.function("shapes", f"[{', '.join(pairs)}]"), "shapes")  # type: ignore[no-any-return]


class _Places:
    """Where buffers begin in their homes, what each home needs, and the bytes of scratch memory."""

    def __init__(self, memory: _Memory, layout: Layout) -> None:
        writer, call = memory.writer, memory.call
        ends: dict[str, Value] = {}
        self.begins: dict[str, tuple[str, Value]] = {}
        self.needed: dict[str, Value] = {}
        for place in layout.places:
            above = [ends[name] for name in place.above]
            begin = writer.define(("max", *above)) if len(above) > 1 else above[0] if above else 0
            takes = place.buffer in memory.used and place.buffer not in call.outputs
            end = writer.define(("add", begin, memory.size(place.buffer))) if takes else begin
            ends[place.buffer] = memory.padded(end)
            self.begins[place.buffer] = place.home, begin
            before = self.needed.get(place.home)
            self.needed[place.home] = end if before is None else writer.define(("max", before, end))
        self.scratch = memory.padded(self.needed.get(SCRATCH, 0))


class _Memory:
    """Sizes of buffers, and where each lies, written as statements for `low` to `high` tokens."""

    def __init__(self, call: Call, low: int, high: int) -> None:
        self.call, record = call, call.record
        self.writer = writer = Writer(low, high)
        self.dims: dict[str, Value] = {"T": "T"}
        for name, expr in record.dims.items():
            self.dims[name] = writer.define(expr, self.dims)
        queued = record.passes[call.which].queued(call.outputs, in_place=call.in_place)
        self.used = {name for step in queued for name in step.arguments.values()}
        self._sizes: dict[str, Value] = {}
        self.kept: dict[str, Value] = {}
        self.kept_bytes: Value = 0
        for name, buffer in record.buffers.items():
            if buffer.place == KEPT:
                self.kept[name] = self.kept_bytes
                self.kept_bytes = writer.define(("add", self.kept_bytes, self.padded(self.size(name))))

    def places(self, layout: Layout) -> _Places:
        return _Places(self, layout)

    def extents(self, name: str) -> list[Value]:
        """The shape of a buffer, of which no extent is 0."""
        extents = [self.writer.define(extent, self.dims) for extent in self.call.record.buffers[name].shape]
        if any(self.writer.bounds(extent)[0] < 1 for extent in extents):
            raise NotCompiledError(f"{name} may be empty")
        return extents

    def size(self, name: str) -> Value:
        if name not in self._sizes:
            itemsize = DTYPES[self.call.record.buffers[name].dtype].bytes
            self._sizes[name] = self.writer.define(("mul", itemsize, *(self.extents(name) or (1,))))
        return self._sizes[name]

    def room(self, home: str) -> Value:
        """The bytes of an output or a kept buffer that holds others."""
        size = self.size(home)
        return self.padded(size) if self.call.record.buffers[home].place == KEPT else size

    def holds(self, home: str, end: Value) -> bool:
        """Whether the home always has so many bytes."""
        return self.writer.bounds(end)[1] <= self.writer.bounds(self.room(home))[0]

    def base(self, name: str, places: _Places) -> tuple[int, Value]:
        """(number of the argument in whose memory a buffer lies, bytes from its begin)."""
        call = self.call
        if name in call.names and (name in call.outputs or name in call.record.passes[call.which].inputs):
            return call.names.index(name), 0
        if call.record.buffers[name].place not in (ARGUMENT, KEPT, SCRATCH):
            raise NotCompiledError(f"{name} lies in a window")
        home, begin = places.begins.get(name, (KEPT, self.kept.get(name)))
        if home in self.kept:
            home, begin = KEPT, self.writer.define(("add", self.kept[home], begin or 0))
        if begin is None or home not in call.names:
            raise NotCompiledError(f"{name} has no place")
        return call.names.index(home), begin

    def padded(self, size: Value) -> Value:
        return self.writer.define(("mul", ALIGNMENT, ("ceildiv", size, ALIGNMENT)))


class _Launches:
    """What the launches of a class are given. A layout decides no more than where `place` finds buffers (`at`)."""

    def __init__(self, call: Call, masks: Sequence[int]) -> None:
        # For all tokens of the class, not a layout's alone: what follows none of them stays as another layout has it.
        self._call, self._masks, self._memory = call, masks, _Memory(call, call.low, call.high)
        self._writer = self._memory.writer
        self.cells = Cells()
        # What `place` packs: the buffers of tensor maps; buffer and shift of each pointer, and its place in a struct.
        self._mapped: list[str] = []
        self._pointers: dict[tuple[str, Value], None] = {}
        self._inner: list[tuple[str, tuple[str, Value]]] = []
        # What `write` packs: numbers; and where one lies in a tensor map or in a struct, its format and its value.
        self._numbers: dict[str, None] = {}
        self._written: list[tuple[str, str, str]] = []
        self._maps: list[str] = []
        self._grids: list[str] = []
        self._own: list[str] = []
        number = 0
        for step, parts in call.steps:
            for plan, block in parts:
                self._launch(number, step, plan, block)
                number += 1
        self.write = self._writing()
        self.maps: Callable[[int], Maps] = _compiled(self._writer.function("maps", _tuple(self._maps)), "maps")

    def at(self, layout: Layout) -> tuple[Callable[[int], Shape | None], Place]:
        """(shape, place) of a layout."""
        memory, names = self._memory, self._call.names
        places, values = memory.places(layout), dict[str, None]()
        homes = {name: memory.base(name, places) for name, _ in [*self._pointers, *(key for _, key in self._inner)]}
        homes |= {name: memory.base(name, places) for name in self._mapped}

        def address(name: str, shift: Value = 0) -> str:
            number, begin = homes[name]
            terms = [value for value in (begin, shift) if value != 0]
            values.update((term, None) for term in terms if isinstance(term, str))
            return " + ".join([f"a{number}", *map(str, terms)])

        sizes = [memory.kept_bytes if name == KEPT else places.scratch if name == SCRATCH else memory.size(name)
                 for name in names]  # fmt: skip
        packed = [*map(address, self._mapped), *(address(*key) for key in self._pointers)]
        inner = [f"{into}, {address(*key)})" for into, key in self._inner]
        place = self._placing(packed, inner, list(values))
        kept = memory.kept_bytes if KEPT in names else 0
        groups = [_tuple(group) for group in (values, self._given, self._grids, sizes)]
        result = f"Shape({', '.join(groups)}, {kept}, {places.scratch}, {_tuple(self._own)})"
        return _compiled(self._writer.function("shape", result), "shape"), place

    def _placing(self, packed: Sequence[str], inner: Sequence[str], values: Sequence[str]) -> Place:
        count = len(self._call.names)
        addresses, ordered, sizes = ([f"{letter}{index}" for index in range(count)] for letter in "aoz")
        ends = [f"{begin} + {size}" for begin, size in zip(ordered, sizes, strict=True)]
        apart = [f"{end} <= {begin}" for end, begin in zip(ends, [*ordered[1:], str(_ADDRESS_END)], strict=True)]
        masked = [
            (mask, [address for address, own in zip(addresses, self._masks, strict=True) if own == mask])
            for mask in dict.fromkeys(self._masks)
        ]
        unaligned = [f"({' | '.join(group)}) & {mask}" for mask, group in masked]
        shared = {text: f"p{index}" for index, text in enumerate(packed) if "+" in text and packed.count(text) > 1}
        lines = [
            "def place(arena, a, o, z, s):",
            f"{', '.join(addresses)}, = a",
            f"{', '.join(ordered)}, = o",
            f"{', '.join(sizes)}, = z",
            f"if {' | '.join(unaligned)} or not (0 < o0 and {' and '.join(apart)}): return False",
            "memory, heads, given, blocks = arena",
            *([f"{', '.join(values)}, = s"] if values else []),
            *(f"{name} = {text}" for text, name in shared.items()),
            f"pack(memory, {self.cells.addresses_at}, {', '.join(shared.get(text, text) for text in packed)})",
            *(["heads[:] = given"] if self._mapped else []),
            *inner,
            "return True",
        ]
        known = {"pack": struct.Struct(f"<{len(packed)}Q").pack_into, "pointer": struct.Struct("<Q").pack_into}
        return _compiled("\n    ".join(lines) + "\n", "place", known)  # type: ignore[no-any-return]

    def _writing(self) -> Callable[[Arena, Sequence[int]], None]:
        given = self._given = list(self._numbers | dict.fromkeys(value for _, _, value in self._written))
        cells = list(self._numbers)
        known = {f"pack_{code}": struct.Struct(f"<{code}").pack_into for _, code, _ in self._written}
        known["pack"] = struct.Struct(f"<{len(cells)}q").pack_into
        lines = [
            "def write(arena, n):",
            "memory, _, _, blocks = arena",
            *([f"{', '.join(given)}, = n"] if given else []),
            *([f"pack(memory, {self.cells.numbers_at}, {', '.join(cells)})"] if cells else []),
            *(f"pack_{code}({into}, {value})" for into, code, value in self._written),
        ]
        return _compiled("\n    ".join(lines) + "\n", "write", known)  # type: ignore[no-any-return]

    def _launch(self, number: int, step: LayerStep, plan: LaunchPlan, block: Block) -> None:
        record, writer = plan.record, self._writer
        env = self._bound(record, step)
        env |= plan.variables
        for name, value in record.values.items():
            if isinstance(value, Truncated):
                raise NotCompiledError("an integer is made of a float")
            env[name] = writer.define(value, env)
        for constraint in record.constraints:
            writer.require(writer.define(constraint.expr, env), 0, 0)
        if not all(isinstance(item, int) for item in (*record.block, record.dynamic_shared, record.when)):
            raise NotCompiledError("the launch follows the tokens")
        grid = [writer.define(expr, env) for expr in record.grid]
        for blocks, cluster, limit in zip(grid, record.cluster, GRID_LIMITS, strict=True):
            writer.require(blocks, 1, limit)
            writer.require(writer.define(("mod", blocks, cluster)), 0, 0)
        self._grids.append(f"({', '.join(map(str, grid))})")
        if shifts := self._own_shifts(record, env):
            self._own.append(f"({number}, {writer.define(record.scratch, env)}, {_tuple(shifts)})")
        alone = {parameter.offset for parameter in record.parameters if not isinstance(parameter, StructParameter)}
        for offset, parameter in flat(record.parameters):
            if isinstance(parameter, TensorMapParameter):
                begin = self.cells.add_map(number, offset)
                self._map(begin, parameter, env, step.arguments)
            elif isinstance(parameter, FloatParameter):
                continue  # a layer gives no scalar: as it was bound
            elif isinstance(parameter, IntegerParameter):
                self._integer(number, offset, parameter, env, offset in alone)
            elif parameter.argument in plan.index:  # otherwise memory of the stream
                shift = writer.define(parameter.shift, env)
                if writer.bounds(shift)[0] < 0:
                    raise NotCompiledError("a pointer to what is before its tensor")
                key = step.arguments[parameter.argument], shift
                if offset in alone:
                    self.cells.add_pointer(number, offset, key)
                    self._pointers[key] = None
                else:
                    self._inner.append((f"pointer(blocks[{number}], {offset}", key))

    def _own_shifts(self, record: LaunchRecord, env: Mapping[str, Value]) -> list[Value]:
        """Where each pointer into the scratch memory of the stream begins."""
        pointers = [each for _, each in flat(record.parameters) if isinstance(each, PointerParameter)]
        shifts = {name: [self._writer.define(each.shift, env) for each in pointers if each.argument == name]
                  for name in ("workspace", "scratch")}  # fmt: skip
        if not all(isinstance(shift, int) for shift in shifts["workspace"]):
            raise NotCompiledError("a pointer into the workspace that follows the tokens")
        return shifts["scratch"]

    def _integer(
        self, number: int, offset: int, parameter: IntegerParameter, env: Mapping[str, Value], alone: bool
    ) -> None:
        value = self._writer.define(parameter.value, env)
        self._writer.require(value, *parameter.range)
        if isinstance(value, str) and alone:
            self.cells.add_number(number, offset, value)
            self._numbers[value] = None
        elif isinstance(value, str):
            code = _FORMATS[parameter.size]
            self._written.append((f"blocks[{number}], {offset}", code if parameter.signed else code.upper(), value))

    def _map(
        self, begin: int, parameter: TensorMapParameter, env: Mapping[str, Value], arguments: Mapping[str, str]
    ) -> None:
        """begin: of the map in the arena."""
        if parameter.encoding != "driver" or parameter.address != f"{parameter.argument}.address":
            raise NotCompiledError("a tensor map that is not at its tensor")
        if parameter.interleave == "32B" or parameter.dtype.endswith("_align16"):
            raise NotCompiledError("a tensor map at a multiple of 32 bytes")  # the driver would refuse another address
        writer = self._writer
        dims, strides = ([writer.define(expr, env) for expr in group] for group in (parameter.dims, parameter.strides))
        for dim in dims:
            writer.require(dim, 1, _TMA_EXTENT)
        for stride in strides:
            writer.require(stride, 0, _TMA_STRIDE - 1)
            writer.require(writer.define(("mod", stride, 16)), 0, 0)
        for index, dim in enumerate(dims):
            if isinstance(dim, str):
                self._field(begin + DIMS_AT + 4 * index, writer.define(("sub", dim, 1)))
        for index, stride in enumerate(strides):
            if isinstance(stride, str):
                writer.require(stride, 0, _FOLLOWING_STRIDE - 1)
                self._field(begin + STRIDES_AT + 4 * index, writer.define(("floordiv", stride, 16)))
        self._mapped.append(arguments[parameter.argument])
        self._maps.append(f"({_tuple(dims)}, {_tuple(strides)})")

    def _field(self, at: int, value: Value) -> None:
        """A field of a tensor map."""
        if isinstance(value, str):  # else as it was bound: a class may be of one number of tokens
            self._written.append((f"memory, {at}", "I", value))

    def _bound(self, record: LaunchRecord, step: LayerStep) -> dict[str, Value]:
        """Dims and strides of a launch, whose tensors are contiguous; checks as `binding.bind`."""
        writer, dims = self._writer, dict[str, Value]()
        shapes = {tensor.name: self._memory.extents(step.arguments[tensor.name]) for tensor in record.tensors}
        for tensor in sorted(record.tensors, key=lambda tensor: tensor.written):
            for extent, value in zip(tensor.shape, shapes[tensor.name], strict=True):
                if isinstance(extent, str):
                    dims.setdefault(extent, value)
        for dim in record.dims:
            if dim.name not in dims:
                raise NotCompiledError(f"no shape is {dim.name} alone")
            writer.require(dims[dim.name], dim.minimum, dim.maximum)
            writer.require(writer.define(("mod", dims[dim.name], dim.divisor)), 0, 0)
        env = dict(dims)
        for tensor in record.tensors:
            shape = shapes[tensor.name]
            for extent, value in zip(tensor.shape, shape, strict=True):
                writer.equal(writer.define(extent, dims), value)
            for index, step_ in enumerate(self._strides(tensor, shape, dims)):
                env[tensor.stride_variable(index)] = step_
            if self._call.record.buffers[step.arguments[tensor.name]].dtype != tensor.dtype or tensor.alignment > 64:
                raise NotCompiledError(f"{tensor.name} is not as the layer has it")
        return env

    def _strides(self, tensor: TensorArgument, shape: Sequence[Value], dims: Mapping[str, Value]) -> Iterator[Value]:
        for index, expr in enumerate(tensor.strides):
            value = self._writer.define(_compact(shape, index))
            if tensor.reads_stride(index):
                self._writer.require(self._writer.define(("mod", value, tensor.stride_divisor)), 0, 0)
            else:
                self._writer.equal(self._writer.define(expr, dims), value)
            yield value


def _compiled(source: str, name: str, known: Mapping[str, Any] | None = None) -> Any:
    scope = {"Shape": Shape, **(known or {})}
    exec(compile(source, f"<{name} of a pass>", "exec"), scope)
    return scope[name]


def _tuple(items: Iterable[object]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"


def _compact(extents: Sequence[Value], index: int) -> Expr:
    """The stride of a dim of a contiguous tensor, in elements."""
    return ("mul", 1, *extents[index + 1 :]) if extents[index + 1 :] else 1
