"""What the host function's arguments are: each machine word as an expression of the record, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fusekit.abi import Expr, LaunchRecord, TensorArgument, variables
from fusekit.compiler.hostcall import check_plan, given, layout, tensor_of
from fusekit.compiler.hostcode.bits import Bits, words
from fusekit.compiler.hostcode.layout import Leaf
from fusekit.compiler.hostcode.machine import Machine, Value
from fusekit.compiler.hostcode.terms import Range
from fusekit.compiler.hostfunction import (
    HostArgument,
    HostInteger,
    HostMemory,
    HostPointer,
    HostScalar,
    HostTensor,
    Signature,
    TracePlan,
)
from fusekit.dtypes import DTYPES
from fusekit.errors import BuildError

MEMORY_ALIGNMENT = 256  # of workspace and scratch
ADDRESS_BITS = 57  # of a device address; a tensor lies below, so its strides in bytes do too
_MOST_MULTIPROCESSORS = 2**16 - 1
_INT32 = 2**31


class Arguments:
    """The host function's arguments as values of `machine`.

    expressions, floats: by the name of a word in the graph, its expression, or the f32 scalar that it is. ranges: of
    the variables in the expressions. stream: the word that is the stream; None where the function takes none.
    """

    def __init__(self, plan: TracePlan, machine: Machine, types: list[Any]) -> None:
        check_plan(plan)
        fakes = given(plan)
        if len(types) != len(fakes):
            raise BuildError(
                f"host code: it takes {len(types)} arguments, the trace gave {len(fakes)}; this fusekit does not know"
                " how the DSL passes them"
            )
        self.expressions: dict[str, Expr] = {}
        self.floats: dict[str, str] = {}
        self.ranges = ranges(plan.signature)
        self.stream: Bits | None = None
        self.values: list[Value] = []
        self._machine = machine
        for index, (fake, host, type_) in enumerate(zip(fakes, plan.host_arguments, types, strict=True)):
            laid_out = machine.layouts.of(type_)
            _check_width(plan.signature, index, host, laid_out.leaves[0].width)
            words = self._words(plan.signature, fake, host, index)
            if len(words) != len(laid_out.leaves):
                raise BuildError(
                    f"host code: argument {index} has {len(laid_out.leaves)} words, the trace tells of {len(words)};"
                    " this fusekit does not know how the DSL passes it"
                )
            self.values.append(machine.filled(laid_out, self._taker(f"argument {index}", iter(words))))

    def variables(self, nodes: Iterable[Bits]) -> set[str]:
        """The record's variables that `nodes` are made of."""
        return {name for word in words(nodes) for name in variables(self.expressions.get(word, 0))}

    def _taker(self, name: str, given: Any) -> Any:
        def take(leaf: Leaf) -> Bits:
            label, what = next(given)
            if isinstance(what, int):
                return self._machine.graph.const(what, leaf.width)
            bits = self._machine.graph.argument(f"{name} {label}".strip(), leaf.width)
            if what is None:
                self.stream = bits
            elif leaf.kind == "float":
                self.floats[bits.args[0]] = what
            else:
                self.expressions[bits.args[0]] = what
            return bits

        return take

    def _words(self, signature: Signature, fake: Any, host: Any, index: int) -> list[tuple[str, Expr | None]]:
        """(label, expression) of each machine word; the stream has no expression."""
        if isinstance(host, HostTensor):
            tensor = tensor_of(signature, host.argument)
            return _tensor_words(fake, tensor.name, f"{tensor.name}.address", *layout(tensor, host))
        if isinstance(host, HostMemory):
            return _tensor_words(fake, host.argument, host.address, host.shape, host.strides)
        if isinstance(host, HostPointer):
            # Traced as a pointer or as a tensor of which only the address is dynamic.
            return [(host.argument, host.address)]
        if isinstance(host, HostScalar):
            return [(host.argument, host.argument)]
        if isinstance(host, HostInteger):
            return [("", host.value)]
        return [("stream", None)]


def _tensor_words(
    fake: Any, name: str, address: Expr, shape: Sequence[Expr], strides: Sequence[Expr]
) -> list[tuple[str, Expr | None]]:
    words: list[tuple[str, Expr | None]] = [(name, address)]
    for kind, declared, exprs in (("extent", fake.shape, shape), ("stride", fake.stride, strides)):
        for mode, (symbol, expr) in enumerate(zip(declared, exprs, strict=True)):
            if not isinstance(symbol, int):
                words.append((f"{kind} {mode} of {name}", expr))
    return words


def _check_width(signature: Signature, index: int, host: HostArgument, width: int) -> None:
    """A number is not wider in the host code than what it is given: the bits above would be anything."""
    if isinstance(host, HostScalar | HostInteger):
        given = 64 if isinstance(host, HostInteger) and host.dtype == "i64" else 32
        if isinstance(host, HostScalar):
            (given,) = (DTYPES[item.dtype].bits for item in signature.scalars if item.name == host.argument)
        if width > given:
            raise BuildError(
                f"host code: argument {index} has {width} bits, the source gives a number of {given}; give it in the"
                f" parameter's own type, such as cutlass.Int{width}(1)"
            )


def ranges(signature: Signature | LaunchRecord) -> dict[str, Range]:
    """What every allowed argument keeps to."""
    known = {
        "sm_count": Range(1, _MOST_MULTIPROCESSORS),
        "cluster_margin": Range(0, _INT32 - 1),
        "active_clusters": Range(0, _INT32 - 1),
        **{f"{name}.address": Range(0, (1 << ADDRESS_BITS) - 1, MEMORY_ALIGNMENT) for name in ("workspace", "scratch")},
    }
    for dim in signature.dims:
        least = max(dim.minimum, 1) if dim.name in signature.skip_if_zero else dim.minimum
        known[dim.name] = Range(least, dim.maximum, dim.divisor)
    for scalar in signature.scalars:
        if scalar.is_integer:
            known[scalar.name] = Range(scalar.minimum, scalar.maximum, scalar.divisor)
    for tensor in signature.tensors:
        known[f"{tensor.name}.address"] = Range(0, (1 << ADDRESS_BITS) - 1, tensor.alignment)
        for index in range(tensor.rank):
            if tensor.reads_stride(index):
                known[tensor.stride_variable(index)] = _stride(tensor)
    return known


def _stride(tensor: TensorArgument) -> Range:
    # 0 is what the launcher takes for a tensor without elements.
    return Range(0, (1 << ADDRESS_BITS) // tensor.itemsize, tensor.stride_divisor)
