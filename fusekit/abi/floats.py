"""Float32 expressions: what a kernel's host function computes of its f32 scalars, `softmax_scale * log2(e)` for one.

An expression is a number, the name of an f32 scalar, or ``[operator, a, b]`` with one of ``fadd``, ``fsub``, ``fmul``
and ``fdiv``. Every step is IEEE 754 binary32, rounded to nearest. In Python the nested form is a tuple, in JSON
an array; infinities and NaN are the strings ``"inf"``, ``"-inf"`` and ``"nan"``, which no scalar may be called.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from fusekit.abi.codec import describe
from fusekit.abi.expr import MAX_DEPTH, RecordError, check_size

FloatExpr = float | str | tuple[Any, ...]
_NOT_FINITE = ("inf", "-inf", "nan")


def validate_float(expr: Any, where: str, known: frozenset[str] | None = None, depth: int = 0) -> None:
    """Raises RecordError, naming `where`, unless `expr` is well formed and reads only the f32 scalars in `known`."""
    if isinstance(expr, int | float) and not isinstance(expr, bool):
        return
    if isinstance(expr, str):
        if known is not None and expr not in known and expr not in _NOT_FINITE:
            raise RecordError(f"{where}: unknown f32 scalar {expr!r}; known are {', '.join(sorted(known)) or 'none'}")
        return
    if not isinstance(expr, list | tuple):
        raise RecordError(f"{where}: {describe(expr)}; it must be a number, an f32 scalar or [operator, a, b]")
    if len(expr) != 3 or expr[0] not in FLOAT_OPERATORS:
        raise RecordError(f"{where}: {describe(expr)}; it must be [operator, a, b] with {', '.join(FLOAT_OPERATORS)}")
    if depth == 0:
        check_size(expr, where)
    if depth >= MAX_DEPTH:
        raise RecordError(f"{where}: nested deeper than {MAX_DEPTH} levels; write it flatter")
    for index in (1, 2):
        validate_float(expr[index], f"{where}[{index}]", known, depth + 1)


def float_variables(expr: Any) -> set[str]:
    """The scalars that `expr` reads."""
    if isinstance(expr, str):
        return set() if expr in _NOT_FINITE else {expr}
    if isinstance(expr, list | tuple):
        return float_variables(expr[1]) | float_variables(expr[2])
    return set()


def evaluate_float(expr: Any, scalars: Mapping[str, float]) -> float:
    """The value of `expr`, a binary32 number."""
    if isinstance(expr, str):
        return rounded(float(expr) if expr in _NOT_FINITE else scalars[expr])
    if not isinstance(expr, list | tuple):
        return rounded(expr)
    # The exact sum, product or quotient of two binary32 numbers, rounded to binary64 and then to binary32, is the one
    # rounded once: 53 bits are more than 2 * 24 + 2.
    return rounded(_FUNCTIONS[expr[0]](evaluate_float(expr[1], scalars), evaluate_float(expr[2], scalars)))


def rounded(value: float) -> float:
    """`value` as the nearest binary32 number; too large is infinite."""
    try:
        nearest: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
        return nearest
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _divide(a: float, b: float) -> float:
    if b != 0:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


_FUNCTIONS: dict[str, Callable[[float, float], float]] = {
    "fadd": lambda a, b: a + b,
    "fsub": lambda a, b: a - b,
    "fmul": lambda a, b: a * b,
    "fdiv": _divide,
}
FLOAT_OPERATORS = tuple(_FUNCTIONS)
