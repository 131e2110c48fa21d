"""From the DSL's host module to a launch record: what each launch is given, as expressions over the arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from fusekit.abi import Argument, Constraint, Expr, LaunchRecord, LaunchStep, TensorArgument, Truncated, render
from fusekit.abi.events import LAUNCH_COMPLETION, PROGRAMMATIC, LaunchEvent
from fusekit.abi.limits import THREADS
from fusekit.compiler import cubin as cubins
from fusekit.compiler.dsl import ENTRY
from fusekit.compiler.hostcall import given, layout, tensor_of
from fusekit.compiler.hostcode.arguments import Arguments
from fusekit.compiler.hostcode.bits import Bits, Pointer, Symbol, UndecidedError
from fusekit.compiler.hostcode.expressions import ExpressionWriter
from fusekit.compiler.hostcode.floats import Floats
from fusekit.compiler.hostcode.implicit import Implicit, implicit
from fusekit.compiler.hostcode.lower import Guard, Lowering
from fusekit.compiler.hostcode.machine import Call, Machine
from fusekit.compiler.hostcode.parameters import Parameters
from fusekit.compiler.hostcode.terms import Algebra, Term
from fusekit.compiler.hostfunction import HostTensor, TracePlan
from fusekit.errors import BuildError

_LAUNCH, _LOAD, _SET_ATTRIBUTE = "_cudaLaunchKernelEx", "cuda_load_to_device", "_cudaKernelSetAttributeForDevice"
_KERNELS = "kernels_"
# cudaLaunchConfig_t in bytes: grid, block, dynamic shared memory, stream, attributes and their count.
_GRID, _BLOCK, _SHARED, _STREAM, _ATTRIBUTES, _ATTRIBUTE_COUNT = 0, 12, 24, 32, 40, 48
_ATTRIBUTE_BYTES, _ATTRIBUTE_VALUE = 72, 8
_COOPERATIVE, _CLUSTER, _PROGRAMMATIC, _PREFERRED_CLUSTER = 2, 4, 6, 11  # cudaLaunchAttributeID
_EVENTS = {7: PROGRAMMATIC, 12: LAUNCH_COMPLETION}
_LARGEST_SHARED, _CARVEOUT, _NON_PORTABLE = 8, 9, 14  # cudaFuncAttribute
_PORTABLE_CLUSTER = 8
_GRID_LIMITS = (2**31 - 1, 65535, 65535)


def read(module: Any, plan: TracePlan, cubin: bytes) -> tuple[TracePlan, LaunchRecord]:
    """The launch record of the kernels that the host function of `module` launches, and the plan that it keeps to.

    module: the DSL's, in MLIR's LLVM dialect. plan: what the function was traced with, and what its arguments mean; a
    number of its `traced` that decides what a record has as a constant is fixed in the plan that is returned. cubin:
    the kernels' code. Raises BuildError, with the place in the host code, for a launch that no record can express.
    """
    guarded = False
    with module.context:  # which operands of vector types need to be looked at
        added = implicit(module)
        plan = added.given_to(plan) if added.sizes else plan
        while True:
            machine = Machine(module)
            entry = next((name for name in machine.names if name.startswith(ENTRY)), None)
            if entry is None:
                raise BuildError(
                    f"host code: it has no function {ENTRY}...; this fusekit does not know the DSL that made it"
                )
            arguments = Arguments(plan, machine, machine.function(entry).argument_types)
            try:
                return plan, _read(machine, entry, arguments, plan, cubin, guarded, added)
            except TooWideError:
                if guarded:
                    raise
                guarded = True
            except UndecidedError as error:
                configuring = arguments.variables(error.on) & plan.traced.keys()
                if not configuring:
                    raise BuildError(str(error)) from None
                plan = plan.fixed(configuring)


def _read(
    machine: Machine, entry: str, arguments: Arguments, plan: TracePlan, cubin: bytes, guarded: bool, added: Implicit
) -> LaunchRecord:
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
    deciding = [condition for call in calls for condition in call.conditions]
    if arguments.variables(deciding) & plan.traced.keys():
        raise UndecidedError("host code: a number that the trace fixes decides what is launched", deciding)
    return _Record(plan, machine, arguments, _kernel_attributes(machine), cubin, guarded, added).make(calls)


_KNOWN_CALLS = frozenset({_LAUNCH, "_cudaGetDevice", "_cudaDeviceGetAttribute", "_cuKernelGetAttribute"})


def _kernel_attributes(machine: Machine) -> dict[str, dict[int, int]]:
    """By kernel symbol, what is set when it is loaded."""
    before, traps = len(machine.calls), len(machine.traps)
    if _LOAD not in machine.names:
        raise BuildError(f"host code: it has no function {_LOAD}; this fusekit does not know the DSL that made it")
    types = [machine.layouts.of(type_) for type_ in machine.function(_LOAD).argument_types]
    memory = machine.allocate(types[0])
    machine.call(_LOAD, [memory, *(machine.graph.const(0, type_.leaves[0].width) for type_ in types[1:])], {})
    calls, machine.calls[before:] = machine.calls[before:], []
    del machine.traps[traps:]
    attributes: dict[str, dict[int, int]] = {}
    for call in calls:
        if call.name != _SET_ATTRIBUTE:
            continue
        kernel, attribute, value = call.arguments[:3]
        if attribute.number == _LARGEST_SHARED:  # the DSL allows all there is; a launcher allows what the record asks
            continue
        if not value.is_const:
            raise BuildError(f"host code: a kernel attribute that is no constant: {call.at.place}")
        attributes.setdefault(kernel.name.removeprefix(_KERNELS), {})[attribute.number] = value.signed
    return attributes


class TooWideError(BuildError):
    """What the host code computes has no expression: its numbers have more than 64 bits."""


class _Record:
    def __init__(
        self,
        plan: TracePlan,
        machine: Machine,
        arguments: Arguments,
        attributes: dict[str, dict[int, int]],
        cubin: bytes,
        guarded: bool,
        added: Implicit,
    ) -> None:
        self._plan, self._machine, self._cubin = plan, machine, cubin
        self._arguments, self._attributes = arguments, attributes
        self._algebra = Algebra(arguments.ranges)
        terms = {name: self._algebra.term(expr) for name, expr in arguments.expressions.items()}
        self._lowering = Lowering(machine.graph, self._algebra, terms, guarded)
        # What a launcher refuses by itself: (term, the condition of the launch) -> the range that it allows.
        self._allowed: dict[tuple[Term, Term], tuple[int, int]] = {}
        self._when = self._always = self._algebra.const(1)  # the condition of the launch that is being read
        self._reaches: list[tuple[Term, str, Term]] = []
        self._lowering.floats = floats = Floats(self._lowering, arguments.floats)
        self._parameters = Parameters(machine.types, self._lowering, floats, plan.signature, self._allow, added.kernels)

    def make(self, calls: Sequence[Call]) -> LaunchRecord:
        drafts = [draft for call in calls if (draft := self._conditional(call)) is not None]
        if not drafts:
            raise BuildError("host code: it launches nothing, whatever its arguments; widen the dims or the bounds")
        traps = [self._lowering.condition(bits) for bits, _ in self._machine.traps]
        guards = [guard for guard in self._lowering.guards if not self._implied(guard)]
        bounds = [*((term, message, self._always) for term, message in self._spans()), *self._reaches]
        roots = [guard.term for guard in guards] + [term for term, _, _ in bounds]
        terms = [*self._parameters.terms, *roots, *traps]
        if ExpressionWriter([*terms, *(guard.condition for guard in guards)]).wide:
            raise TooWideError(
                "host code: it computes with numbers that do not fit into the 64 bits of a launch record"
            )
        writer = ExpressionWriter(terms)
        constraints = [_constraint(guard, writer) for guard in guards]
        constraints += [
            Constraint(_where(when, ("max", 0, writer.write(term)), writer), message) for term, message, when in bounds
        ]
        constraints += [
            Constraint(writer.write(trap), f"the host function stops the program where {render(writer.write(trap))}")
            for trap in traps
            if trap is not self._algebra.const(0)
        ]
        first, *then = (draft(writer) for draft in drafts)
        signature = self._plan.signature
        record = LaunchRecord(
            arch=signature.arch,
            arguments=tuple(map(self._aligned, signature.arguments)),
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

    def _aligned(self, argument: Argument) -> Argument:
        needed = self._parameters.alignments.get(argument.name, 1)
        if not isinstance(argument, TensorArgument) or argument.alignment % needed == 0:
            return argument
        return replace(argument, alignment=math.lcm(argument.alignment, needed))

    # -- what a launch is given

    def _spans(self) -> Iterator[tuple[Term, str]]:
        """(what must be 0 or less, rule) of tensors over which the kernel's address sums have 32 bits."""
        signature, algebra = self._plan.signature, self._algebra
        for fake, host in zip(given(self._plan), self._plan.host_arguments, strict=True):
            if not isinstance(host, HostTensor) or host.large:
                continue
            last = algebra.const(0)
            modes = zip(*layout(tensor_of(signature, host.argument), host), fake.stride, strict=True)
            for extent, stride, symbol in modes:
                if getattr(symbol, "width", 32) == 32:
                    steps = algebra.plus(algebra.term(extent), -1)
                    last = algebra.add(last, algebra.mul(steps, algebra.term(stride)))
            beyond = algebra.plus(last, 1 - 2**31)
            if beyond.high > 0:
                yield (
                    beyond,
                    (
                        f"{host.argument} must span fewer than 2**31 elements: the kernel was traced with strides that"
                        " are fixed or have 32 bits; trace it with sym_int64 strides, or say"
                        f" arguments.{host.argument}.large = true in its spec if it computes with 64 bits"
                    ),
                )

    def _conditional(self, call: Call) -> Callable[[ExpressionWriter], LaunchStep] | None:
        """The launch `call`; None for one that no arguments lead to."""
        lowering, when = self._lowering, self._always
        for condition in call.conditions:
            with lowering.under(when):
                when = self._algebra.both(when, lowering.condition(condition))
        if when.is_const and not when.value:
            return None
        self._when = when
        self._parameters.terms.append(when)
        with lowering.under(when):
            draft = self._launch(call)
        self._reaches += [(term, message, when) for term, message in self._parameters.reaches]
        self._parameters.reaches.clear()
        return draft

    def _launch(self, call: Call) -> Callable[[ExpressionWriter], LaunchStep]:
        config, kernel, parameters = call.arguments
        if not isinstance(kernel, Symbol) or not isinstance(config, Pointer) or not isinstance(parameters, Pointer):
            raise BuildError(f"host code: a launch whose kernel or configuration is not known: {call.at.place}")
        symbol = kernel.name.removeprefix(_KERNELS)
        self._check_stream(call, call.cell(config, _STREAM))
        grid = [self._lowering.lower(self._number(call, config, _GRID + 4 * axis)) for axis in range(3)]
        for extent, limit in zip(grid, _GRID_LIMITS, strict=True):
            self._allow(extent, 1, limit)
        cluster, preferred, attributes, events = self._launch_attributes(call, config, symbol)
        block = [self._open(call, config, _BLOCK + 4 * axis, "the block") for axis in range(3)]
        shared = self._open(call, config, _SHARED, "the size of shared memory")
        for extent in block:
            self._allow(extent, 1, THREADS)
        self._allow(shared, 0, 2**31 - 1)
        self._parameters.terms += [*grid, *block, shared]
        when = self._when
        drafts = self._parameters.of(call, parameters, cubins.read(self._cubin, symbol))

        def draft(writer: ExpressionWriter) -> LaunchStep:
            names: set[str] = set()
            gx, gy, gz = (writer.write(extent) for extent in grid)
            x, y, z = (writer.write(extent) for extent in block)
            parameters = tuple(write(writer, names) for write in drafts)
            bytes_, condition = writer.write(shared), writer.write(when)
            return LaunchStep(
                parameters, (gx, gy, gz), (x, y, z), cluster, bytes_, symbol, attributes, preferred, condition,
                events,
            )  # fmt: skip

        return draft

    def _check_stream(self, call: Call, stream: Any) -> None:
        """A host function that takes no stream launches on the default one: there a launcher's takes its place."""
        given = self._arguments.stream
        default = isinstance(stream, Bits) and stream.is_const and stream.number == 0
        if stream is not given if given is not None else not default:
            raise BuildError(
                f"host code: it launches on another stream than the one that it is given: {call.at.place}; pass that"
                " stream to the launch"
            )

    def _number(self, call: Call, at: Pointer, offset: int) -> Bits:
        value = call.cell(at, offset)
        if not isinstance(value, Bits):
            raise BuildError(f"host code: a launch configuration that is not filled in: {call.at.place}")
        return value

    def _open(self, call: Call, at: Pointer, offset: int, what: str) -> Term:
        """A number that may follow the arguments; not those that the trace fixes."""
        number = self._number(call, at, offset)
        if self._arguments.variables([number]) & self._plan.traced.keys():
            return self._algebra.const(self._constant(call, at, offset, what))
        return self._lowering.lower(number)

    def _constant(self, call: Call, at: Pointer, offset: int, what: str) -> int:
        number = self._number(call, at, offset)
        term = self._lowering.lower(number)
        if not term.is_const:
            written = render(ExpressionWriter([term]).write(term))
            raise UndecidedError(
                f"host code: {what} of a launch is {written}, a launch record has a constant there: {call.at.place};"
                " make it a Constexpr of the host function, or give a number that it is made of a fixed value in the"
                " spec, such as arguments.n.value = 1",
                [number],
            )
        return term.value

    def _launch_attributes(
        self, call: Call, config: Pointer, symbol: str
    ) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, int], tuple[LaunchEvent, ...]]:
        """Cluster, preferred cluster, attributes and events."""
        cluster, attributes = (1, 1, 1), {}
        preferred: tuple[int, ...] = ()
        events: list[LaunchEvent] = []
        base = call.cell(config, _ATTRIBUTES)
        for index in range(self._constant(call, config, _ATTRIBUTE_COUNT, "the number of attributes")):
            at = Pointer(base.memory, base.offset + index * _ATTRIBUTE_BYTES)
            kind = self._constant(call, at, 0, "a launch attribute")
            if kind in _EVENTS:
                events.append(self._event(call, at, kind))
                continue
            value = [self._constant(call, at, _ATTRIBUTE_VALUE, f"launch attribute {kind}")]
            if kind in (_CLUSTER, _PREFERRED_CLUSTER):
                value += [self._constant(call, at, _ATTRIBUTE_VALUE + 4 * axis, "the cluster") for axis in (1, 2)]
                if kind == _CLUSTER:
                    cluster = (value[0], value[1], value[2])
                else:
                    preferred = tuple(value)
            elif kind == _COOPERATIVE:
                attributes["cooperative"] = value[0]
            elif kind == _PROGRAMMATIC:
                attributes["programmatic_stream_serialization"] = value[0]
            elif value[0]:
                raise BuildError(f"host code: launch attribute {kind} is not known to launch records: {call.at.place}")
        attributes = {name: value for name, value in attributes.items() if value}
        kernel = self._attributes.get(symbol, {})
        if max(math.prod(cluster), math.prod(preferred)) > _PORTABLE_CLUSTER and kernel.get(_NON_PORTABLE):
            attributes["non_portable_cluster_size_allowed"] = 1
        if kernel.get(_CARVEOUT, -1) >= 0:
            attributes["preferred_shared_memory_carveout"] = kernel[_CARVEOUT]
        return cluster, preferred, attributes, tuple(sorted(events, key=lambda event: event.kind))

    def _event(self, call: Call, at: Pointer, kind: int) -> LaunchEvent:
        term = self._lowering.lower(self._number(call, at, _ATTRIBUTE_VALUE))
        if term.op != "variable":
            raise BuildError(f"host code: a launch records an event that is no argument: {call.at.place}; pass it")
        flags, start = _ATTRIBUTE_VALUE + 8, _ATTRIBUTE_VALUE + 12
        return LaunchEvent(
            _EVENTS[kind], term.args[0], self._constant(call, at, flags, "the flags of an event"),
            self._constant(call, at, start, "the trigger of an event") if _EVENTS[kind] == PROGRAMMATIC else 0,
        )  # fmt: skip

    def _allow(self, term: Term, low: int, high: int) -> None:
        before = self._allowed.get((term, self._when), (low, high))
        self._allowed[term, self._when] = max(low, before[0]), min(high, before[1])

    def _implied(self, guard: Guard) -> bool:
        for when in (self._always, guard.condition):
            low, high = self._allowed.get((guard.term, when), (guard.low - 1, guard.high + 1))
            if max(low, guard.term.low) >= guard.low and min(high, guard.term.high) <= guard.high:
                return True
        return False


_STEP = tuple(item.name for item in fields(LaunchStep))


def _where(when: Term, expr: Expr, writer: ExpressionWriter) -> Expr:
    """0 where `when` is 0."""
    return expr if when.is_const else ("if", writer.write(when), expr, 0)


def _constraint(guard: Guard, writer: ExpressionWriter) -> Constraint:
    """0 where the guard holds."""
    term = writer.write(guard.term)
    value = writer.values.get(term) if isinstance(term, str) else None
    shown, why = render(term), "computes with no more bits"
    if isinstance(value, Truncated):
        shown, why = str(value), "makes an integer of no other number"
    over: list[Expr] = []
    rules = []
    if guard.term.low < guard.low:
        over.append(("sub", guard.low, term))
        rules.append(f"at least {guard.low}")
    if guard.term.high > guard.high:
        most = min(guard.high, 2**63 - 1)  # what a launcher computes with
        over.append(("sub", term, most))
        rules.append(f"at most {most}")
    expr: Expr = ("max", 0, *over)
    return Constraint(
        _where(guard.condition, expr, writer),
        f"{shown} must be {' and '.join(rules)}: the kernel's host code {why}",
    )
