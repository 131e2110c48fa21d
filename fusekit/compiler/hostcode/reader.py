"""From the DSL's host module to a launch record: what each launch is given, as expressions over the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusekit.abi import Constraint, LaunchRecord, render
from fusekit.compiler import cubin as cubins
from fusekit.compiler.hostcode import maps
from fusekit.compiler.hostcode.arguments import Arguments
from fusekit.compiler.hostcode.bits import Bits, Pointer, Symbol
from fusekit.compiler.hostcode.expressions import Writer
from fusekit.compiler.hostcode.layout import Layout
from fusekit.compiler.hostcode.lower import Guard, Lowering
from fusekit.compiler.hostcode.machine import Call, Machine
from fusekit.compiler.hostcode.parts import Launch, Part, constraint
from fusekit.compiler.hostcode.terms import Algebra, Term
from fusekit.compiler.hostfunction import TracePlan
from fusekit.errors import BuildError

_ENTRY = "_mlir_ciface_"
_LAUNCH, _LOAD, _SET_ATTRIBUTE = "_cudaLaunchKernelEx", "cuda_load_to_device", "_cudaKernelSetAttributeForDevice"
_KERNELS = "kernels_"
# cudaLaunchConfig_t in bytes: grid, block, dynamic shared memory, stream, attributes and their count.
_GRID, _BLOCK, _SHARED, _STREAM, _ATTRIBUTES, _ATTRIBUTE_COUNT = 0, 12, 24, 32, 40, 48
_ATTRIBUTE_BYTES, _ATTRIBUTE_VALUE = 72, 8
_COOPERATIVE, _CLUSTER, _PROGRAMMATIC = 2, 4, 6  # cudaLaunchAttributeID
_LARGEST_SHARED, _CARVEOUT, _NON_PORTABLE = 8, 9, 14  # cudaFuncAttribute
_PORTABLE_CLUSTER = 8
_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_MAP_BYTES = 128


def read(module: Any, plan: TracePlan, cubin: bytes) -> LaunchRecord:
    """The launch record of the kernels that the host function of `module` launches.

    module: the DSL's, in MLIR's LLVM dialect. plan: what the function was traced with, and what its arguments mean.
    cubin: the kernels' code. Raises BuildError, with the place in the host code, for a launch that no record can say.
    """
    with module.context:  # which operands of vector types need to be looked at
        return _read(module, plan, cubin)


def _read(module: Any, plan: TracePlan, cubin: bytes) -> LaunchRecord:
    machine = Machine(module)
    entry = next((name for name in machine.names if name.startswith(_ENTRY)), None)
    if entry is None:
        raise BuildError(f"host code: it has no function {_ENTRY}...; this fusekit does not know the DSL that made it")
    arguments = Arguments(plan, machine, machine.function(entry).argument_types)
    if machine.call(entry, arguments.values, {}) is None:
        raise BuildError("host code: it always traps")
    calls = [call for call in machine.calls if call.name == _LAUNCH]
    strange = next((call for call in machine.calls if call.name not in _KNOWN_CALLS), None)
    if strange is not None:
        raise BuildError(
            f"host code: it calls {strange.name}, which is no launch: {strange.at.place}; a launch record has launches"
            " only; do this outside of the host function"
        )
    if not calls:
        raise BuildError("host code: it launches nothing; a spec is a host function that launches one kernel or more")
    return _Record(plan, machine, arguments, _kernel_attributes(machine), cubin).make(calls)


_KNOWN_CALLS = frozenset({_LAUNCH, "_cudaGetDevice", "_cudaDeviceGetAttribute", "_cuKernelGetAttribute"})


def _kernel_attributes(machine: Machine) -> dict[str, dict[int, int]]:
    """By kernel symbol, what is set when it is loaded."""
    before, traps = len(machine.calls), len(machine.traps)
    if _LOAD not in machine.names:
        raise BuildError(f"host code: it has no function {_LOAD}; this fusekit does not know the DSL that made it")
    types = [machine.layouts.of(each) for each in machine.function(_LOAD).argument_types]
    memory = machine.allocate(types[0])
    machine.call(_LOAD, [memory, *(machine.graph.const(0, each.leaves[0].width) for each in types[1:])], {})
    made, machine.calls[before:] = machine.calls[before:], []
    del machine.traps[traps:]
    found: dict[str, dict[int, int]] = {}
    for call in made:
        if call.name != _SET_ATTRIBUTE:
            continue
        kernel, attribute, value = call.arguments[:3]
        if attribute.number == _LARGEST_SHARED:  # the DSL allows all there is; a launcher allows what the record asks
            continue
        if not value.is_const:
            raise BuildError(f"host code: a kernel attribute that is no constant: {call.at.place}")
        found.setdefault(kernel.name.removeprefix(_KERNELS), {})[attribute.number] = value.signed
    return found


class _Record:
    def __init__(
        self,
        plan: TracePlan,
        machine: Machine,
        arguments: Arguments,
        attributes: dict[str, dict[int, int]],
        cubin: bytes,
    ) -> None:
        self._plan, self._machine, self._cubin = plan, machine, cubin
        self._arguments, self._attributes = arguments, attributes
        self._algebra = Algebra(arguments.ranges)
        terms = {name: self._algebra.term(expr) for name, expr in arguments.expressions.items()}
        self._lowering = Lowering(machine.graph, self._algebra, terms, arguments.floats)
        # What a launcher refuses by itself: term -> the range that it allows.
        self._allowed: dict[Term, tuple[int, int]] = {}

    def make(self, calls: Sequence[Call]) -> LaunchRecord:
        launches = [self._launch(call) for call in calls]
        traps = [self._lowering.condition(bits) for bits, _ in self._machine.traps]
        guards = [guard for guard in self._lowering.guards if not self._implied(guard)]
        read_terms = (term for launch in launches for term in launch.terms())
        writer = Writer([*read_terms, *(guard.term for guard in guards), *traps])
        constraints = [constraint(guard, writer) for guard in guards]
        constraints += [
            Constraint(writer.write(trap), f"the host function stops the program where {render(writer.write(trap))}")
            for trap in traps
            if trap is not self._algebra.const(0)
        ]
        first, *then = (launch.step(writer) for launch in launches)
        signature = self._plan.signature
        record = LaunchRecord(
            arch=signature.arch,
            arguments=signature.arguments,
            dims=signature.dims,
            constraints=(*signature.constraints, *constraints),
            **{name: getattr(first, name) for name in _STEP},
            workspace=signature.workspace,
            workspace_zeroed=signature.workspace_zeroed,
            scratch=signature.scratch,
            skip_if_zero=signature.skip_if_zero,
            values=writer.values,
            then=tuple(then),
        )
        record.check_complete()
        return record

    # -- what a launch is given

    def _launch(self, call: Call) -> Launch:
        config, kernel, parameters = call.arguments
        if not isinstance(kernel, Symbol) or not isinstance(config, Pointer) or not isinstance(parameters, Pointer):
            raise BuildError(f"host code: a launch whose kernel or configuration is not known: {call.at.place}")
        symbol = kernel.name.removeprefix(_KERNELS)
        stream = self._cell(call, config, _STREAM)
        if stream is not self._arguments.stream:
            raise BuildError(
                f"host code: it launches on another stream than the one that it is given: {call.at.place}; take a"
                " stream and pass it to the launch"
            )
        grid = [self._lowering.lower(self._number(call, config, _GRID + 4 * axis)) for axis in range(3)]
        for extent, limit in zip(grid, _GRID_LIMITS, strict=True):
            self._allow(extent, 1, limit)
        cluster, attributes = self._launch_attributes(call, config, symbol)
        x, y, z = (self._constant(call, config, _BLOCK + 4 * axis, "the block") for axis in range(3))
        return Launch(
            symbol,
            grid,
            (x, y, z),
            self._constant(call, config, _SHARED, "the size of shared memory"),
            cluster,
            attributes,
            self._parameters(call, parameters, symbol),
        )

    def _cell(self, call: Call, at: Pointer, offset: int) -> Any:
        cells = call.memory.get(at.memory, {})
        return cells.get(at.offset + offset, (0, None))[1]

    def _number(self, call: Call, at: Pointer, offset: int) -> Bits:
        value = self._cell(call, at, offset)
        if not isinstance(value, Bits):
            raise BuildError(f"host code: a launch configuration that is not filled in: {call.at.place}")
        return value

    def _constant(self, call: Call, at: Pointer, offset: int, what: str) -> int:
        term = self._lowering.lower(self._number(call, at, offset))
        if not term.is_const:
            written = render(Writer([term]).write(term))
            raise BuildError(
                f"host code: {what} of a launch is {written}, a launch record has a constant there: {call.at.place}"
            )
        return term.value

    def _launch_attributes(
        self, call: Call, config: Pointer, symbol: str
    ) -> tuple[tuple[int, int, int], dict[str, int]]:
        cluster, found = (1, 1, 1), {}
        base = self._cell(call, config, _ATTRIBUTES)
        for index in range(self._constant(call, config, _ATTRIBUTE_COUNT, "the number of attributes")):
            at = Pointer(base.memory, base.offset + index * _ATTRIBUTE_BYTES)
            kind = self._constant(call, at, 0, "a launch attribute")
            value = [self._constant(call, at, _ATTRIBUTE_VALUE, f"launch attribute {kind}")]
            if kind == _CLUSTER:
                value += [self._constant(call, at, _ATTRIBUTE_VALUE + 4 * axis, "the cluster") for axis in (1, 2)]
                cluster = (value[0], value[1], value[2])
            elif kind == _COOPERATIVE:
                found["cooperative"] = value[0]
            elif kind == _PROGRAMMATIC:
                found["programmatic_stream_serialization"] = value[0]
            elif value[0]:
                raise BuildError(f"host code: launch attribute {kind} is not known to launch records: {call.at.place}")
        kernel = self._attributes.get(symbol, {})
        if cluster[0] * cluster[1] * cluster[2] > _PORTABLE_CLUSTER and kernel.get(_NON_PORTABLE):
            found["non_portable_cluster_size_allowed"] = 1
        if kernel.get(_CARVEOUT, -1) >= 0:
            found["preferred_shared_memory_carveout"] = kernel[_CARVEOUT]
        return cluster, {name: value for name, value in found.items() if value}

    # -- parameters

    def _parameters(self, call: Call, pointers: Pointer, symbol: str) -> list[Part]:
        places = cubins.read(self._cubin, symbol).parameters
        parts = []
        for index, place in enumerate(places):
            at = self._cell(call, pointers, 8 * index)
            layout = self._machine.types[at.memory] if isinstance(at, Pointer) else None
            if layout is None or layout.size != place.size:
                raise BuildError(
                    f"host code: parameter {index} of {symbol} has {layout.size if layout else 0} bytes, in the cubin"
                    f" {place.size}: {call.at.place}"
                )
            parts.append(self._parameter(call, at, layout, place.offset))
        if self._cell(call, pointers, 8 * len(places)) is not None:
            raise BuildError(f"host code: it passes more parameters than {symbol} has: {call.at.place}")
        return parts

    def _parameter(self, call: Call, at: Pointer, layout: Layout, offset: int) -> Part:
        if _is_map(layout):
            words = [self._cell(call, at, 8 * index) for index in range(maps.WORDS)]
            fields = maps.read(words, self._lowering)
            if not fields.raw:
                for dim in fields.dims:
                    self._allow(dim, 1, 2**32)
                for stride in fields.strides:
                    self._allow(stride, 0, 2**40 - 1)
            return Part("map", offset, _MAP_BYTES, fields, self._base(fields.address, call)[0])
        parts = []
        for leaf in layout.leaves:
            bits = self._cell(call, at, leaf.offset)
            if bits is None or (isinstance(bits, Bits) and bits.op == "undefined"):
                continue  # padding, or a field that the kernel does not read
            if not isinstance(bits, Bits):
                raise BuildError(f"host code: a parameter is an address of the host's memory: {call.at.place}")
            parts.append(self._scalar(call, bits, leaf.kind, leaf.offset, leaf.size))
        if len(layout.leaves) == 1 and len(parts) == 1 and parts[0].offset == 0 and parts[0].size == layout.size:
            parts[0].offset = offset
            return parts[0]
        return Part("struct", offset, layout.size, parts)

    def _scalar(self, call: Call, bits: Bits, kind: str, offset: int, size: int) -> Part:
        if kind == "float":
            value = self._lowering.float(bits)
            own = isinstance(value, str) and value in {scalar.name for scalar in self._plan.signature.scalars}
            return Part("float", offset, size, value, str(value) if own else "")
        if kind == "pointer":
            term = self._lowering.lower(bits)
            if term.is_const:  # none
                return Part("integer", offset, size, term)
            argument, shift = self._base(term, call)
            return Part("pointer", offset, size, shift, argument)
        # A flag of one bit lies in a byte.
        term = self._lowering.condition(bits) if bits.width == 1 else self._lowering.lower(bits)
        return Part("integer", offset, size, self._within(term, 8 * size, bits.op == "trunc"))

    def _within(self, term: Term, bits: int, cut: bool) -> Term:
        """`term` as a word of `bits` bits: a launcher refuses what does not fit.

        cut: whether it was made of a wider value, and may be meant without a sign.
        """
        half = 1 << bits - 1
        signed, unsigned = term.low >= -half and term.high < half, term.low >= 0 and term.high < 2 * half
        if signed or unsigned or not cut:
            self._allow(term, -half, 2 * half - 1)
            return term
        if term.low < -half or term.high >= 2 * half:
            self._lowering.guard(term, -half, 2 * half - 1)
        return self._algebra.mod(term, self._algebra.const(2 * half))

    def _allow(self, term: Term, low: int, high: int) -> None:
        before = self._allowed.get(term, (low, high))
        self._allowed[term] = max(low, before[0]), min(high, before[1])

    def _base(self, term: Term, call: Call) -> tuple[str, Term]:
        """(the argument whose address a pointer is made of, what is added to it in bytes)."""
        _, parts = self._algebra.linear(term)
        names = [part for part in parts if part.op == "variable" and part.args[0].endswith(".address")]
        if len(names) != 1 or parts[names[0]] != 1:
            written = render(Writer([term]).write(term))
            raise BuildError(
                f"host code: a pointer is {written}; a launch record knows an argument's address and an offset to it:"
                f" {call.at.place}"
            )
        return names[0].args[0].removesuffix(".address"), self._algebra.sub(term, names[0])

    def _implied(self, guard: Guard) -> bool:
        low, high = self._allowed.get(guard.term, (guard.low - 1, guard.high + 1))
        return max(low, guard.term.low) >= guard.low and min(high, guard.term.high) <= guard.high


_STEP = ("symbol", "parameters", "grid", "block", "cluster", "dynamic_shared", "attributes")


def _is_map(layout: Layout) -> bool:
    words = tuple(leaf.width for leaf in layout.leaves if leaf.kind == "integer")
    return layout.size == _MAP_BYTES and words == (64,) * 16 and layout.alignment == 8
