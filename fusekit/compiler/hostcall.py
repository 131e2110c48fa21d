"""How the arguments of the DSL's host function lie in memory, and their values for one argument set.

A tensor is a struct: the address, then the extents that are dynamic, then the strides that are dynamic, each as wide as
the fake tensor declares it. Everything else is passed by the address of its value.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from fusekit.abi import TensorArgument
from fusekit.abi.arguments import OPTIONS
from fusekit.abi.expr import Expr, evaluate, evaluate_address, render
from fusekit.abi.floats import packed
from fusekit.compiler import dsl
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
from fusekit.compiler.leaves import bytes_of
from fusekit.compiler.samples import ArgumentSet
from fusekit.errors import BuildError, ProofError


def check_plan(plan: TracePlan) -> None:
    """Raises BuildError where the fake arguments and the record's cannot be the same thing: count, dtype, alignment;
    and for an argument that no launch from Python could name.
    """
    for argument in plan.signature.arguments:
        if argument.name in OPTIONS:
            raise BuildError(
                f"trace plan: an argument is called {argument.name!r}, which is an option of launches; rename it"
            )
    fakes = given(plan)
    if len(fakes) != len(plan.host_arguments):
        raise BuildError(
            f"trace plan: {len(fakes)} arguments that are not None and {len(plan.host_arguments)} host arguments; they"
            " correspond one for one"
        )
    for fake, host in zip(fakes, plan.host_arguments, strict=True):
        if not isinstance(host, HostTensor):
            continue
        tensor, alignment = tensor_of(plan.signature, host.argument), dsl.alignment(fake)
        if bytes_of(fake) != tensor.itemsize:
            raise BuildError(
                f"trace plan: {tensor.name} is traced as {fake.element_type}, the record says {tensor.dtype}"
            )
        if tensor.alignment % alignment:
            raise BuildError(
                f"trace plan: {tensor.name} is traced with {alignment}-byte alignment, the record promises"
                f" only {tensor.alignment}; raise the one or lower the other"
            )
        shape, strides = layout(tensor, host)
        if len(shape) != len(fake.shape) or len(strides) != len(fake.stride):
            raise BuildError(
                f"trace plan: {tensor.name} is traced with {len(fake.shape)} modes, its layout here has {len(shape)}"
            )


def pack(plan: TracePlan, arguments: ArgumentSet) -> list[ctypes.Array[Any]]:
    """One buffer for each host argument.

    Raises ProofError where the record allows a value that the traced function excludes: a fixed extent that differs, or
    a divisor that does not hold.
    """
    return [
        _buffer(_bytes(plan.signature, fake, host, arguments))
        for fake, host in zip(given(plan), plan.host_arguments, strict=True)
    ]


def given(plan: TracePlan) -> list[Any]:
    """The traced arguments that the host function takes."""
    if plan.leaves is not None:
        return list(plan.leaves)
    # The DSL compiles a None away: it is no argument of the host function.
    return [argument for argument in plan.arguments if argument is not None]


def _bytes(signature: Signature, fake: Any, host: HostArgument, arguments: ArgumentSet) -> bytes:
    if isinstance(host, HostTensor):
        address = f"{host.argument}.address"
        modes = layout(tensor_of(signature, host.argument), host)
        return _tensor_bytes(host.argument, address, modes, fake, arguments)
    if isinstance(host, HostMemory):
        return _tensor_bytes(host.argument, host.address, (host.shape, host.strides), fake, arguments)
    if isinstance(host, HostPointer):
        return struct.pack("<Q", evaluate_address(host.address, arguments.values))
    if isinstance(host, HostScalar):
        if host.argument in arguments.floats:
            (scalar,) = (scalar for scalar in signature.scalars if scalar.name == host.argument)
            return packed(arguments.floats[host.argument], scalar.dtype)
        (scalar,) = (scalar for scalar in signature.scalars if scalar.name == host.argument)
        return struct.pack("<q" if scalar.dtype == "i64" else "<i", arguments.values[host.argument])
    if isinstance(host, HostInteger):
        return struct.pack("<q" if host.dtype == "i64" else "<i", evaluate(host.value, arguments.values))
    return struct.pack("<Q", arguments.stream)


def _tensor_bytes(
    name: str, address: Expr, modes: tuple[tuple[Expr, ...], tuple[Expr, ...]], fake: Any, arguments: ArgumentSet
) -> bytes:
    packed = struct.pack("<Q", evaluate_address(address, arguments.values))
    shape, strides = modes
    for kind, declared, exprs in (("extent", fake.shape, shape), ("stride", fake.stride, strides)):
        for mode, (symbol, expr) in enumerate(zip(declared, exprs, strict=True)):
            value = evaluate(expr, arguments.values)
            fixed = isinstance(symbol, int)
            wrong = value != symbol if fixed else value % symbol.divisibility
            if wrong:
                rule = f"compiled as {symbol}" if fixed else f"compiled as a multiple of {symbol.divisibility}"
                raise ProofError(
                    f"{name}: {kind} of mode {mode} is {rule}, the launch record allows {render(expr)} = {value}"
                    "; give the dim that divisor (dims.NAME.divisor) or the stride an expression that has it, or trace"
                    f" with a divisor of 1. Argument set {arguments}",
                    parameter=name,
                )
            if not fixed:
                width = symbol.width // 8
                # What is wider than the word is cut: the record refuses it where the host code reads it.
                packed += bytes(-len(packed) % width) + (value % (1 << symbol.width)).to_bytes(width, "little")
    return packed


def layout(tensor: TensorArgument, host: HostTensor) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
    """Extents and strides of the traced tensor's modes."""
    shape = tensor.shape if host.shape is None else host.shape
    strides = tensor.strides if host.strides is None else host.strides
    return shape, strides


def tensor_of(signature: Signature, name: str) -> TensorArgument:
    """The tensor argument called `name`; BuildError where there is none."""
    argument = next((tensor for tensor in signature.tensors if tensor.name == name), None)
    if argument is None:
        known = ", ".join(tensor.name for tensor in signature.tensors)
        raise BuildError(f"trace plan: a host tensor names {name!r}; the signature's tensors are {known}")
    return argument


def _buffer(data: bytes) -> ctypes.Array[Any]:
    return ctypes.create_string_buffer(data, max(len(data), 8))
