"""Where a record's own expressions change their course: argument sets on both sides of each such place.

Random sets seldom meet a multiple of a tile, or the count at which a minimum takes its other operand. Here every
quotient and remainder gives sets at a multiple of its divisor and one step either side, and every minimum, maximum,
comparison and choice gives the last set on one side and the first on the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusekit.abi import Expr, LaunchRecord, RecordError, Truncated, evaluate, flat, render, variables
from fusekit.abi.floats import Value, unpacked, value_of, value_variables
from fusekit.dtypes import DTYPES

Fixed = dict[str, Any]
Base = Mapping[str, Any]
"""Values of variables; of float scalars, floats."""
_PERIODS = 40  # a multiple further on than the first: there a divisor that is off by one shows, whatever the step
_CHOICES = frozenset({"min", "max", "eq", "ne", "lt", "le"})
_WHOLE = (1, 2, 5, 100, -1)  # what an integer that is made of a float crosses
_QUOTIENTS = frozenset({"floordiv", "ceildiv", "mod"})


@dataclass(frozen=True, slots=True)
class Axis:
    """A variable that argument sets may choose: low, low + step, ..., up to high."""

    name: str
    low: int
    high: int
    step: int

    @property
    def count(self) -> int:
        return (self.high - self.low) // self.step

    def at(self, index: int) -> int:
        return self.low + index * self.step


@dataclass(frozen=True, slots=True)
class FloatAxis:
    """A float scalar: the numbers of its type with one sign, from 0 to infinity, one by one."""

    name: str
    dtype: str
    sign: int

    @property
    def count(self) -> int:
        row = DTYPES[self.dtype]
        return row.negative_infinity & (1 << row.bits - 1) - 1

    def at(self, index: int) -> float:
        return self.sign * unpacked(index.to_bytes(DTYPES[self.dtype].bytes, "little"), self.dtype)


@dataclass(frozen=True, slots=True)
class _Boundary:
    """Where `expr` is a multiple of `divisor`; without one, where it crosses 0."""

    expr: Expr
    divisor: int = 0

    def __str__(self) -> str:
        what = render(self.expr)
        return f"multiples of {self.divisor} in {what}" if self.divisor else f"the sign of {what}"


def directed(
    record: LaunchRecord, axes: Sequence[Axis | FloatAxis], bases: Sequence[Base]
) -> Iterator[tuple[str, Fixed]]:
    """(label, values of variables) of sets to try: one variable of a base at a time is moved to a boundary.

    axes: the variables that may be chosen. bases: values of all variables, to start from.
    """
    seen: set[tuple[tuple[str, int], ...]] = set()
    chosen = {axis.name for axis in axes}
    for boundary in dict.fromkeys(_boundaries(record)):
        named = _named(record, boundary.expr)
        read = variables(boundary.expr).union(*map(_read, named.values()))
        for axis in axes:
            if axis.name not in read or axis.count < 1:
                continue
            for base in bases:
                for index in _indices(boundary, named, axis, base):
                    fixed = {name: base[name] for name in chosen} | {axis.name: axis.at(index)}
                    key = tuple(sorted(fixed.items()))
                    if key not in seen:
                        seen.add(key)
                        yield f"{boundary}: {axis.name} = {fixed[axis.name]}", fixed


def _boundaries(record: LaunchRecord) -> Iterator[_Boundary]:
    """The boundaries of everything that a launch evaluates."""
    exprs: list[Expr] = [constraint.expr for constraint in record.constraints]
    for name, value in record.values.items():
        if isinstance(value, Truncated):
            yield from (_Boundary(("sub", name, whole)) for whole in _WHOLE)
        else:
            exprs.append(value)
    for step in record.launches:
        exprs += [step.when, *step.grid, *step.block, step.dynamic_shared]
        exprs += [expr for _, item in flat(step.parameters) for expr in item.expressions]
    for expr in exprs:
        yield from _inside(expr)


def _named(record: LaunchRecord, expr: Expr) -> dict[str, Value]:
    """The record's values that `expr` reads, also through others, in the record's order. Written out in its place, one
    that others read many times would grow without bound.
    """
    needed = set(variables(expr))
    for name, value in reversed(list(record.values.items())):
        if name in needed:
            needed |= value_variables(value)
    return {name: value for name, value in record.values.items() if name in needed}


def _read(value: Value) -> set[str]:
    """The integers and the float scalars that a value reads."""
    return value_variables(value).union(value.scalars if isinstance(value, Truncated) else ())


def _inside(expr: Expr) -> Iterator[_Boundary]:
    if not isinstance(expr, list | tuple):
        return
    operator, *operands = expr
    for operand in operands:
        yield from _inside(operand)
    if operator in _QUOTIENTS and isinstance(operands[1], int) and operands[1] > 1:
        yield _Boundary(operands[0], operands[1])
    elif operator in _QUOTIENTS:
        yield _Boundary(("sub", operands[0], operands[1]))
    elif operator in _CHOICES:
        for index, first in enumerate(operands):
            for second in operands[:index]:
                yield _Boundary(("sub", first, second))
    elif operator == "if" and not (isinstance(operands[0], tuple) and operands[0][0] in _CHOICES):
        yield _Boundary(operands[0])


def _indices(boundary: _Boundary, named: Mapping[str, Value], axis: Axis | FloatAxis, base: Base) -> Iterator[int]:
    """Where on `axis` the boundary lies, and its neighbours. named: the values that it reads."""

    def value(index: int) -> int:
        values = {**base, axis.name: axis.at(index)}
        for name, expr in named.items():
            values[name] = value_of(expr, values, values)
        return evaluate(boundary.expr, values)

    try:
        places = list(_multiples(boundary.divisor, value, axis) if boundary.divisor else _crossings(value, axis))
    except RecordError:  # the expression has no value there: a launch cannot be there either
        return
    for place in dict.fromkeys(near for at in places for near in (at - 1, at, at + 1)):
        if 0 <= place <= axis.count:
            yield place


def _multiples(divisor: int, value: Callable[[int], int], axis: Axis | FloatAxis) -> Iterator[int]:
    """The first place where an affine value is a multiple, and one some periods on."""
    start = value(0)
    slope = value(1) - start
    if slope == 0 or (axis.count > 1 and value(2) - value(1) != slope):
        return
    common = math.gcd(divisor, slope)
    if start % common:
        return
    period = divisor // common
    index = -start // common * pow(slope // common, -1, period) % period or period
    yield index
    yield index + _PERIODS * period


def _crossings(value: Callable[[int], int], axis: Axis | FloatAxis) -> Iterator[int]:
    """The last place before the value's sign changes, for each change seen from one power of two to the next."""
    low, at = 0, _sign(value(0))
    reach = 1
    while low < axis.count:
        high = min(reach, axis.count)
        end = _sign(value(high))
        while at != end:  # twice where it is 0 for a while
            first, last = low, high
            while last - first > 1:
                middle = (first + last) // 2
                if _sign(value(middle)) == at:
                    first = middle
                else:
                    last = middle
            yield first
            yield last
            low, at = last, _sign(value(last))
        low, reach = high, reach * 2


def _sign(value: int) -> int:
    return (value > 0) - (value < 0)
