"""What the host function of a foreign kernel is given: its run-time arguments, flattened as the DSL does.

Names come from the host function's signature; members of tuples, NamedTuples and dataclasses follow after an
underscore.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from fusekit.abi.arguments import OPTIONS, RESERVED
from fusekit.compiler import dsl
from fusekit.dtypes import ARGUMENTS, DTYPES, FLOATS, ROWS, SIGNED, UNSIGNED
from fusekit.errors import BuildError

TENSOR, POINTER, INTEGER, FLOAT, STREAM, EVENT = "tensor", "pointer", "integer", "float", "stream", "event"
BIT = "i1"  # the type of a truth value, which is an integer of one bit
# The DSL's name of a type -> the record's; one that no tensor of a record has is seen as unsigned bits.
_BITS = {DTYPES[name].bits: name for name in ARGUMENTS if DTYPES[name].kind == UNSIGNED}
RECORDED = {row.cutlass: row.name if row.argument else _BITS[row.bits] for row in ROWS if row.framework}
RECORDED |= {DTYPES["tf32"].cutlass: "f32", "Int4": "u8"}  # float32 of which less is read; two values in a byte
# Of a number by value; from 32 bits on a sign says nothing.
_INTEGERS = {
    row.cutlass: f"i{row.bits}" if row.bits >= 32 else row.name for row in ROWS if row.kind in (SIGNED, UNSIGNED)
}
_FLOATS = {DTYPES[name].cutlass: name for name in FLOATS}
NARROW = {
    f"{sign}{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if sign == "i" else (0, 2**bits - 1)
    for sign in "iu"
    for bits in (8, 16)
} | {BIT: (0, 1)}
"""The least and the largest value of an integer of less than 32 bits, which callers pass as one of 32."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One run-time argument. kind: tensor, pointer, integer, float or stream; dtype: the record's, or i1; fake: what
    the trace is given for it.
    """

    name: str
    kind: str
    dtype: str
    fake: Any

    @property
    def rank(self) -> int:
        return len(self.fake.shape) if self.kind == TENSOR else 0

    @property
    def packed(self) -> int:
        """Elements in one of the record's."""
        return values_in_one(self.fake)

    @property
    def contiguous(self) -> int:
        """The contiguous mode of a tensor; -1: none."""
        return next((mode for mode, stride in enumerate(self.fake.stride) if stride == 1), -1)

    @property
    def shape(self) -> list[Any]:
        """The extents of a tensor: numbers, as the record counts them, where the trace fixes them, else symbols."""
        return [
            extent // (self.packed if mode == self.contiguous else 1) if isinstance(extent, int) else extent
            for mode, extent in enumerate(self.fake.shape)
        ]

    def __str__(self) -> str:
        if self.kind == TENSOR:
            extents = ", ".join(str(extent) if isinstance(extent, int) else "?" for extent in self.fake.shape)
            return f"{self.name} ({self.dtype}, rank {self.rank}: [{extents}])"
        return f"{self.name} ({self.kind}{f' to {self.dtype}' if self.kind == POINTER else ''})"


def leaves(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[Leaf]:
    """The run-time arguments of a host function, in the order of its parameters.

    Raises BuildError where the arguments do not fit its signature, or one of them has a type that no record knows.
    """
    try:
        bound = signature_of(function).bind(*arguments, **keywords)
    except (TypeError, ValueError) as error:
        raise BuildError(f"the host function cannot be called with what the source returns: {error}") from None
    bound.apply_defaults()
    traced = [leaf for name, value in run_time(bound).items() for leaf in flat(name, value)]
    twice = sorted({leaf.name for leaf in traced if [other.name for other in traced].count(leaf.name) > 1})
    if twice:
        raise BuildError(
            f"the host function has two arguments called {twice[0]}: members are named after their parameter, with an"
            " underscore between; call a parameter of it otherwise"
        )
    return traced


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a host function. Annotations are resolved as the DSL does, also those written as text."""
    call = host_callable(function)
    try:
        return inspect.signature(call, eval_str=True)
    except (NameError, AttributeError, SyntaxError):  # a name that only type checkers see
        return inspect.signature(call)


def is_constant(annotation: Any) -> bool:
    """Whether what has this annotation is known at compile time, and no argument of the host code."""
    return "Constexpr" in str(annotation)


def run_time(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments of a call that are not constants of the trace, those of `**` by their own names."""
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = bound.signature.parameters[name]
        if not is_constant(parameter.annotation):
            single = {name: _cast(value, parameter.annotation)}
            values |= value if parameter.kind is parameter.VAR_KEYWORD else single
    return values


def _cast(value: Any, annotation: Any) -> Any:
    """`value` as the DSL passes it: a number in the type that its parameter states."""
    from cutlass import Numeric

    if not (isinstance(annotation, type) and issubclass(annotation, Numeric)) or vars(annotation).get("_is_abstract"):
        return value
    return annotation(value) if isinstance(value, bool | int | float | Numeric) else value


def argument_name(name: str) -> str:
    """What the record calls an argument of this name: one that records or launches use for something else gets an
    underscore.
    """
    return f"{name}_" if name in RESERVED | OPTIONS else name


def is_extent(leaf: Leaf, others: Sequence[Leaf]) -> bool:
    """Whether the trace has one symbol for an integer and for an extent of one of the tensors among `others`."""
    return any(leaf.fake is extent for other in others if other.kind == TENSOR for extent in other.fake.shape)


def host_callable(function: Callable[..., Any]) -> Callable[..., Any]:
    """What of a host function has its signature: itself, or the method that calling an object calls."""
    if inspect.isfunction(function) or inspect.ismethod(function):
        return function
    instance: Any = function
    method: Callable[..., Any] = instance.__call__
    return method


def flat(name: str, value: Any) -> Iterator[Leaf]:
    """The run-time arguments in one parameter of the host function."""
    kind = type(value).__name__
    parts = members(value)
    if value is None or isinstance(value, str | enum.Enum | type):
        return  # compiled away, or into the code
    if dsl.is_tensor(value):
        yield Leaf(name, TENSOR, _dtype(name, value.element_type), value)
    elif parts is not None:
        for part in parts:
            yield from flat(f"{name}_{part}", member(value, part))
    elif kind in ("CUstream", "cudaStream_t") or "FakeStream" in kind:
        yield Leaf(name, STREAM, "", value)
    elif kind in ("CUevent", "cudaEvent_t"):
        yield Leaf(name, EVENT, "i64", value)
    elif kind == "Boolean" or isinstance(value, bool):
        yield Leaf(name, INTEGER, BIT, value)
    elif kind == "SymInt":
        yield Leaf(name, INTEGER, f"i{value.width}", value)
    elif kind in _INTEGERS or isinstance(value, int):
        yield Leaf(name, INTEGER, _INTEGERS.get(kind, "i32"), value)
    elif kind in _FLOATS or isinstance(value, float):
        yield Leaf(name, FLOAT, _FLOATS.get(kind, "f32"), value)
    elif "Pointer" in kind:
        yield Leaf(name, POINTER, _dtype(name, value.dtype), value)
    elif not callable(value) or dsl.has_values(value):
        raise BuildError(
            f"{name} is a {kind}, which launch records do not know; pass tensors, pointers, integers, floats or a"
            " stream, also in tuples and dataclasses; annotate a constant as cutlass.Constexpr"
        )


def members(value: Any) -> Sequence[str | int] | None:
    """What a NamedTuple, a tuple, a list or a dataclass holds, but for constants of the trace; None of any other."""
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return range(len(value))
    if hasattr(value, "_fields"):
        names = value._fields
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
    else:
        return None
    try:
        hints = get_type_hints(type(value))
    except (NameError, AttributeError, SyntaxError, TypeError):  # a name that only type checkers see
        hints = getattr(type(value), "__annotations__", {})
    return [name for name in names if not is_constant(hints.get(name, ""))]


def member(value: Any, part: str | int) -> Any:
    """One of the `members` of a value."""
    return value[part] if isinstance(part, int) else getattr(value, part)


def values_in_one(tensor: Any) -> int:
    """How many elements of a traced tensor one of the record's holds: a byte has two 4-bit values."""
    return 2 if tensor.element_type.width == 4 else 1


def bytes_of(tensor: Any) -> int:
    """Bytes of one of the record's elements, of a traced tensor: a truth value has one bit, and lies in a byte."""
    return max(values_in_one(tensor) * int(tensor.element_type.width) // 8, 1)


def _dtype(name: str, element: Any) -> str:
    known = RECORDED.get(getattr(element, "__name__", str(element)))
    if known is None:
        raise BuildError(f"{name} holds {element}, which launch records do not know; they know {', '.join(RECORDED)}")
    return known
