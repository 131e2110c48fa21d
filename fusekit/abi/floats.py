"""Float expressions: what a kernel's host function computes of numbers, `softmax_scale * log2(e)` for one.

An expression is a number, the name of a float scalar, or ``[operator, operand, ...]``. It is computed as IEEE 754 says,
rounded to nearest, so its bits are the same everywhere:

====================================  =====================================================================
operators                             value
====================================  =====================================================================
``fadd`` ``fsub`` ``fmul`` ``fdiv``   of two binary32 numbers, binary32
``fsqrt``                             square root of a binary32 number, binary32
``dadd`` ``dsub`` ``dmul`` ``ddiv``   of two binary64 numbers, binary64
``dsqrt``                             square root of a binary64 number, binary64
``f32`` ``bf16`` ``fp16``             a number rounded to that type
``fint`` ``dint``                     an integer rounded to binary32 (binary64): the name of a variable
``neg``                               the same with the other sign
``floor`` ``ceil`` ``trunc``          the next whole number that is at most (at least, in size at most) the number
``abs``                               the same without a sign
``feq`` ``flt`` ``fle``               1 where the first is equal (less, at most) the second, else 0; of a NaN 0
``fif``                               the second where the first is not 0, else the third
====================================  =====================================================================

The first row belongs to records of schema 2, the others to schema 5. A number where binary32 is meant is rounded to it.
In Python the nested form is a tuple, in JSON an array; infinities and NaN are the strings ``"inf"``, ``"-inf"`` and
``"nan"``, which no scalar may be called. `Truncated` makes an integer of one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from fusekit.abi.codec import describe
from fusekit.abi.expr import MAX_DEPTH, Expr, RecordError, check_size, evaluate, freeze, variables
from fusekit.dtypes import DTYPES, ROUNDINGS

FloatExpr = float | str | tuple[Any, ...]
_NOT_FINITE = ("inf", "-inf", "nan")
_OF_INTEGERS = ("fint", "dint")
_FAR = 2**62
_SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "==", "lt": "<", "le": "<="}


def validate_float(
    expr: Any, where: str, known: frozenset[str] | None = None, depth: int = 0, integers: frozenset[str] | None = None
) -> None:
    """Raises RecordError, naming `where`, unless `expr` is well formed and reads only the float scalars in `known` and
    the variables in `integers`.
    """
    if isinstance(expr, int | float) and not isinstance(expr, bool):
        return
    if isinstance(expr, str):
        if known is not None and expr not in known and expr not in _NOT_FINITE:
            raise RecordError(f"{where}: unknown f32 scalar {expr!r}; known are {', '.join(sorted(known)) or 'none'}")
        return
    if not isinstance(expr, list | tuple):
        raise RecordError(f"{where}: {describe(expr)}; it must be a number, an f32 scalar or [operator, a, b]")
    operands = FLOAT_OPERATORS.get(expr[0]) if expr and isinstance(expr[0], str) else None
    if operands is None or len(expr) != 1 + operands:
        raise RecordError(f"{where}: {describe(expr)}; it must be [operator, a, b] with {', '.join(FLOAT_OPERATORS)}")
    if depth == 0:
        check_size(expr, where)
    if depth >= MAX_DEPTH:
        raise RecordError(f"{where}: nested deeper than {MAX_DEPTH} levels; write it flatter")
    if expr[0] in _OF_INTEGERS:
        if not isinstance(expr[1], str) or (integers is not None and expr[1] not in integers):
            shown = ", ".join(sorted(integers or ())) or "none"
            raise RecordError(f"{where}[1]: {describe(expr[1])}; {expr[0]} takes the name of a variable: {shown}")
        return
    for index in range(1, len(expr)):
        validate_float(expr[index], f"{where}[{index}]", known, depth + 1, integers)


def float_variables(expr: Any) -> set[str]:
    """The float scalars that `expr` reads."""
    if isinstance(expr, str):
        return set() if expr in _NOT_FINITE else {expr}
    if isinstance(expr, list | tuple) and expr[0] not in _OF_INTEGERS:
        return set().union(*map(float_variables, expr[1:]))
    return set()


def integer_variables(expr: Any) -> set[str]:
    """The integers that `expr` reads."""
    return {item[1] for item in _operations(expr) if item[0] in _OF_INTEGERS}


def float_operators(expr: Any) -> set[str]:
    """The operators in `expr`."""
    return {item[0] for item in _operations(expr)}


def _operations(expr: Any) -> Iterator[Any]:
    if isinstance(expr, list | tuple):
        yield expr
        for item in expr[1:]:
            yield from _operations(item)


def with_integers(expr: Any, env: Mapping[str, int]) -> FloatExpr:
    """`expr` with numbers for the integers that it reads."""
    if not isinstance(expr, list | tuple):
        return expr  # type: ignore[no-any-return]
    if expr[0] in _OF_INTEGERS:
        return _of_integer(env[expr[1]], expr[0] == "fint")
    return (expr[0], *(with_integers(item, env) for item in expr[1:]))


def evaluate_float(expr: Any, scalars: Mapping[str, float], single: bool = True) -> float:
    """The value of `expr`. scalars: numbers of their own types. single: whether a mere number is rounded to binary32.

    It reads no integers: see `with_integers`.
    """
    if not isinstance(expr, list | tuple):
        value = scalars[expr] if isinstance(expr, str) and expr not in _NOT_FINITE else float(expr)
        return rounded(value) if single else value
    operator, *operands = expr
    if operator == "fif":
        chosen = operands[1 if evaluate_float(operands[0], scalars, single=False) else 2]
        return evaluate_float(chosen, scalars, single)
    function, narrow = _FUNCTIONS[operator]
    # The exact sum, product, quotient or root of binary32 numbers, rounded to binary64 and then to binary32, is the one
    # rounded once: 53 bits are more than 2 * 24 + 2.
    result = function(*(evaluate_float(item, scalars, narrow) for item in operands))
    return rounded(result) if narrow else result


@dataclass(frozen=True)
class Truncated:
    """An integer among a record's values: a float expression without its fraction.

    From 2**62 or -2**62 on, and for a NaN, it is -2**62. What is out of range a constraint of the record refuses.
    """

    expr: FloatExpr

    def __post_init__(self) -> None:
        object.__setattr__(self, "expr", freeze(self.expr))  # type: ignore[arg-type]

    @cached_property
    def scalars(self) -> frozenset[str]:
        """The float scalars that it reads."""
        return frozenset(float_variables(self.expr))

    def evaluate(self, env: Mapping[str, int], scalars: Mapping[str, float]) -> int:
        """Its value. env: the integers that it reads; scalars: numbers of their own types."""
        number = evaluate_float(with_integers(self.expr, env), scalars, single=False)
        return int(number) if -_FAR < number < _FAR else -_FAR

    def __str__(self) -> str:
        return f"int({render_float(self.expr)})"


Value = Expr | Truncated
"""What a record's values are."""


def value_of(value: Value, env: Mapping[str, int], scalars: Mapping[str, float]) -> int:
    """A record's value. env: the integers that it reads; scalars: numbers of their own types."""
    return value.evaluate(env, scalars) if isinstance(value, Truncated) else evaluate(value, env)


def value_variables(value: Value) -> set[str]:
    """The integers that a record's value reads."""
    return integer_variables(value.expr) if isinstance(value, Truncated) else variables(value)


def render_float(expr: Any) -> str:
    """`expr` as people write it, for messages."""
    if not isinstance(expr, list | tuple):
        return str(expr)
    operator, *operands = expr
    if operator in _OF_INTEGERS:
        return str(operands[0])
    shown = [
        f"({render_float(item)})" if isinstance(item, list | tuple) and len(item) > 2 else render_float(item)
        for item in operands
    ]
    if operator == "fif":
        return f"{shown[1]} if {shown[0]} else {shown[2]}"
    symbol = _SYMBOLS.get(operator[1:])
    return f" {symbol} ".join(shown) if symbol else f"{operator}({', '.join(map(render_float, operands))})"


def rounded(value: float, dtype: str = "f32") -> float:
    """`value` as the nearest number of the type; too large is infinite."""
    try:
        number = float(value)
        if dtype == "f64" or not math.isfinite(number) or number == 0:
            return number
        if dtype == "bf16":
            return _bfloat(number)
        code = "<f" if dtype == "f32" else "<e"
        nearest: float = struct.unpack(code, struct.pack(code, number))[0]
        return nearest
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def packed(value: float, dtype: str) -> bytes:
    """`value`, a number of the type, as bytes."""
    if dtype == "bf16":
        return struct.pack("<f", value)[2:]
    return struct.pack({16: "<e", 32: "<f", 64: "<d"}[DTYPES[dtype].bits], value)


def unpacked(data: bytes, dtype: str) -> float:
    """The number of the type that bytes are."""
    code = {16: "<e", 32: "<f", 64: "<d"}[DTYPES[dtype].bits]
    value: float = struct.unpack(*(("<f", bytes(2) + data) if dtype == "bf16" else (code, data)))[0]
    return value


def is_nan(data: bytes, dtype: str) -> bool:
    """Whether bytes are a NaN of the type."""
    row, bits = DTYPES[dtype], int.from_bytes(data, "little")
    return bits & (1 << row.bits - 1) - 1 > row.negative_infinity & (1 << row.bits - 1) - 1


def _bfloat(value: float) -> float:
    row = DTYPES["bf16"]
    exponent = max(math.frexp(value)[1] - 1, row.lowest) - row.significand + 1
    nearest = math.ldexp(round(math.ldexp(abs(value), -exponent)), exponent)  # round: half to even
    return math.copysign(nearest if nearest <= row.max else math.inf, value)


def _of_integer(value: int, single: bool) -> float:
    """The nearest number, rounded once."""
    if not single:
        return float(value)
    size, spare = abs(value), max(abs(value).bit_length() - 53, 0)
    lost = size & (1 << spare) - 1
    return rounded(math.copysign(float((size >> spare | (lost > 0)) << spare), value))


def _divide(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _root(a: float) -> float:
    return math.nan if a < 0 else math.sqrt(a)


def _whole(rounding: Callable[[float], int], a: float) -> float:
    return math.copysign(float(rounding(a)), a) if abs(a) < 2.0**52 else a


_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
}
# By operator: what it computes, and whether of binary32 numbers.
_FUNCTIONS: dict[str, tuple[Callable[..., float], bool]] = {
    **{f"f{name}": (function, True) for name, function in _ARITHMETIC.items()},
    "fsqrt": (_root, True),
    **{f"d{name}": (function, False) for name, function in _ARITHMETIC.items()},
    "dsqrt": (_root, False),
    **{name: (partial(rounded, dtype=name), False) for name in ROUNDINGS},
    "neg": (lambda a: -a, False),
    "floor": (partial(_whole, math.floor), False),
    "ceil": (partial(_whole, math.ceil), False),
    "trunc": (partial(_whole, math.trunc), False),
    "abs": (abs, False),
    "feq": (lambda a, b: float(a == b), False),
    "flt": (lambda a, b: float(a < b), False),
    "fle": (lambda a, b: float(a <= b), False),
}
FLOAT_OPERATORS = {
    **dict.fromkeys(_FUNCTIONS, 2), "fsqrt": 1, "dsqrt": 1, "fif": 3,
    **dict.fromkeys((*ROUNDINGS, *_OF_INTEGERS, "neg", "floor", "ceil", "trunc", "abs"), 1),
}  # fmt: skip
"""How many operands each has."""
SCHEMA_2_FLOATS = frozenset({"fadd", "fsub", "fmul", "fdiv"})
