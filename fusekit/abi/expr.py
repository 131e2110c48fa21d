"""Closed integer expressions: how a launch record computes a grid, a tensor-map field or a stride.

An expression is an ``int``, the name of a variable, or ``[operator, operand, operand, ...]``. It is data: it is walked,
never handed to ``eval``; what `symbolic` compiles is written by operator, with names of its own. In Python the nested
form is a tuple (hashable, immutable); in JSON it is an array. The set of operators is fixed:

=============  ==========  =======================================================
operator       operands    value
=============  ==========  =======================================================
``add``        2 or more   sum
``sub``        2           first minus second
``mul``        2 or more   product
``floordiv``   2           quotient rounded towards minus infinity
``ceildiv``    2           quotient rounded towards plus infinity
``mod``        2           ``a - b * floordiv(a, b)``: has the sign of the divisor
``min``        2 or more   smallest
``max``        2 or more   largest
``eq`` ``ne``  2           1 where the two are equal (differ), else 0
``lt`` ``le``  2           1 where the first is less (at most the second), else 0
``if``         3           the second where the first is not 0, else the third
``bit_length`` 1           bits of a value from 0: 0 of 0, 3 of 4
``exp2``       1           2 to the power of a value in [0, 62]
=============  ==========  =======================================================

The last five rows belong to records of schema 2. Of an ``if``, only the operand that it chooses is evaluated. A
divisor must be positive when it is evaluated. Every step must fit into a signed 64-bit integer, operands being taken
from left to right; one that does not has no value, in any launcher. Addresses are the one exception:
they are unsigned 64-bit and wrap modulo 2**64, so a ``*.address`` variable may only be an operand of ``add``, ``sub``
and ``mul``, where wrapping early or late gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fusekit.errors import FusekitError

Expr = int | str | list[Any] | tuple[Any, ...]

MAX_DEPTH = 32
MAX_NODES = 4096
"""Most constants, variables and operators in one expression."""
_LOW, _HIGH, _WRAP = -(2**63), 2**63 - 1, 2**64 - 1
_RING = frozenset({"add", "sub", "mul"})
_VARIADIC = frozenset({"add", "mul", "min", "max"})
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}
_BINARY = frozenset({"sub", "floordiv", "ceildiv", "mod", *_COMPARISONS})
_FIXED = dict.fromkeys(_BINARY, 2) | {"if": 3, "bit_length": 1, "exp2": 1}
OPERATORS = tuple(sorted(_VARIADIC | _FIXED.keys()))
SCHEMA_2_OPERATORS = frozenset({*_COMPARISONS, "if", "bit_length", "exp2"})


class RecordError(FusekitError):
    """A launch record is malformed, of another schema version, or has a field that cannot be evaluated.

    The message begins with the path of the field, for example ``parameters[2].box[1]``.
    """


def freeze(expr: Expr) -> Expr:
    """The same expression with tuples for lists, so that it can be hashed and compared. Validates nothing."""
    if isinstance(expr, list | tuple):
        return tuple(freeze(item) for item in expr)
    return expr


def thaw(expr: Expr) -> Any:
    """The JSON form: lists for tuples."""
    if isinstance(expr, list | tuple):
        return [thaw(item) for item in expr]
    return expr


def validate(expr: Any, where: str = "expression", known: frozenset[str] | None = None, depth: int = 0) -> None:
    """Raises RecordError, naming `where`, unless `expr` is well formed.

    It may read only the variables in `known`; None allows any.
    """
    if isinstance(expr, bool) or not isinstance(expr, int | str | list | tuple):
        raise RecordError(
            f"{where}: {expr!r} is a {type(expr).__name__}; an expression is an integer, a variable name or"
            " [operator, operand, ...]"
        )
    if isinstance(expr, int):
        if not -(2**63) <= expr < 2**63:
            raise RecordError(f"{where}: {expr} does not fit into a signed 64-bit integer")
        return
    if isinstance(expr, str):
        if not expr:
            raise RecordError(f"{where}: a variable name must not be empty")
        if known is not None and expr not in known:
            raise RecordError(f"{where}: unknown variable {expr!r}; known are {', '.join(sorted(known)) or 'none'}")
        return
    if depth == 0:
        check_size(expr, where)
    if depth >= MAX_DEPTH:
        raise RecordError(f"{where}: nested deeper than {MAX_DEPTH} levels; write it flatter")
    if not expr or not isinstance(expr[0], str) or expr[0] not in OPERATORS:
        head = expr[0] if expr else None
        raise RecordError(f"{where}: unknown operator {head!r}; the operators are {', '.join(OPERATORS)}")
    operator, operands = expr[0], expr[1:]
    count = _FIXED.get(operator)
    if count is not None and len(operands) != count:
        raise RecordError(
            f"{where}: {operator} takes {count} operand{'s' if count > 1 else ''}, it has {len(operands)}"
        )
    if operator in _VARIADIC and len(operands) < 2:
        raise RecordError(f"{where}: {operator} takes 2 or more operands, it has {len(operands)}")
    for index, operand in enumerate(operands, start=1):
        validate(operand, f"{where}[{index}]", known, depth + 1)
        if operator not in _RING and any(name.endswith(".address") for name in variables(operand)):
            raise RecordError(f"{where}: {operator} of an address; addresses wrap, only add, sub and mul may take them")


def check_size(expr: Any, where: str) -> None:
    """Raises RecordError for an expression of more than `MAX_NODES` operators and operands."""
    left, count = [expr], 0
    while left and count <= MAX_NODES:
        item = left.pop()
        if isinstance(item, list | tuple):
            count += len(item)
            left += [inside for inside in item if isinstance(inside, list | tuple)]
    if count > MAX_NODES:
        raise RecordError(f"{where}: more than {MAX_NODES} operators and operands; a launch computes with few")


def variables(expr: Expr) -> set[str]:
    """The names that `expr` reads."""
    if isinstance(expr, str):
        return {expr}
    if isinstance(expr, list | tuple):
        return set().union(*(variables(item) for item in expr[1:]))
    return set()


def operators(expr: Expr) -> set[str]:
    """The operators in `expr`."""
    if isinstance(expr, list | tuple):
        return {expr[0]}.union(*(operators(item) for item in expr[1:]))
    return set()


def evaluate(expr: Expr, env: Mapping[str, int]) -> int:
    """The value of `expr` with the variables in `env`.

    Raises RecordError for a variable that `env` lacks, an unknown operator, a divisor that is not positive, or a step
    that does not fit into 64 bits.
    """
    if isinstance(expr, int):
        return expr
    if isinstance(expr, str):
        try:
            return env[expr]
        except KeyError:
            known = ", ".join(sorted(env)) or "none"
            raise RecordError(f"expression reads {expr!r}, which has no value; known are {known}") from None
    if expr[0] == "if":
        return evaluate(expr[2] if evaluate(expr[1], env) else expr[3], env)
    function = _FUNCTIONS.get(expr[0])
    if function is None:
        raise RecordError(f"expression has the unknown operator {expr[0]!r}; the operators are {', '.join(OPERATORS)}")
    return function([evaluate(item, env) for item in expr[1:]])


def evaluate_address(expr: Expr, env: Mapping[str, int]) -> int:
    """`evaluate` modulo 2**64, where sums and products wrap: an unsigned 64-bit device address."""
    if isinstance(expr, int | str) or (expr[0] not in _RING and expr[0] != "if"):
        return evaluate(expr, env) & _WRAP
    if expr[0] == "if":
        return evaluate_address(expr[2] if evaluate(expr[1], env) else expr[3], env)
    first, *rest = (evaluate_address(item, env) for item in expr[1:])
    for item in rest:
        first = first + item if expr[0] == "add" else first - item if expr[0] == "sub" else first * item
    return first & _WRAP


def render(expr: Expr) -> str:
    """`expr` as people write it, for messages: ``["mul", 2, "I"]`` is ``2 * I``."""
    if not isinstance(expr, list | tuple):
        return str(expr)
    parts = [f"({render(item)})" if _is_infix(item) else render(item) for item in expr[1:]]
    if expr[0] == "if":
        return f"{parts[1]} if {parts[0]} else {parts[2]}"
    symbol = _INFIX.get(expr[0])
    if symbol is None:
        return f"{expr[0]}({', '.join(render(item) for item in expr[1:])})"
    return symbol.join(parts)


def _is_infix(expr: Expr) -> bool:
    return isinstance(expr, list | tuple) and (expr[0] in _INFIX or expr[0] == "if")


_INFIX = {"add": " + ", "sub": " - ", "mul": " * ", "floordiv": " // ", "mod": " % "} | {
    name: f" {symbol} " for name, symbol in _COMPARISONS.items()
}


def _overflow(what: str, values: list[int]) -> RecordError:
    return RecordError(f"expression: {what} of {', '.join(map(str, values))} does not fit into 64 bits")


def _sum(values: list[int]) -> int:
    result = 0
    for value in values:
        result += value
        if not _LOW <= result <= _HIGH:
            raise _overflow("the sum", values)
    return result


def _difference(values: list[int]) -> int:
    result = values[0] - values[1]
    if not _LOW <= result <= _HIGH:
        raise _overflow("the difference", values)
    return result


def _product(values: list[int]) -> int:
    result = 1
    for value in values:
        result *= value
        if not _LOW <= result <= _HIGH:
            raise _overflow("the product", values)
    return result


def _divisor(values: list[int], operator: str) -> tuple[int, int]:
    dividend, divisor = values
    if divisor <= 0:
        raise RecordError(f"expression: {operator} of {dividend} by {divisor}; a divisor must be positive")
    return dividend, divisor


def _floordiv(values: list[int]) -> int:
    dividend, divisor = _divisor(values, "floordiv")
    return dividend // divisor


def _ceildiv(values: list[int]) -> int:
    dividend, divisor = _divisor(values, "ceildiv")
    return -(-dividend // divisor)


def _mod(values: list[int]) -> int:
    dividend, divisor = _divisor(values, "mod")
    return dividend % divisor


def _bit_length(values: list[int]) -> int:
    if values[0] < 0:
        raise RecordError(f"expression: bit_length of {values[0]}; it takes values from 0")
    return values[0].bit_length()


def _exp2(values: list[int]) -> int:
    if not 0 <= values[0] <= 62:
        raise RecordError(f"expression: exp2 of {values[0]}; it takes 0 to 62")
    return 1 << values[0]


_FUNCTIONS: dict[str, Callable[[list[int]], int]] = {
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "floordiv": _floordiv,
    "ceildiv": _ceildiv,
    "mod": _mod,
    "min": min,
    "max": max,
    "eq": lambda values: int(values[0] == values[1]),
    "ne": lambda values: int(values[0] != values[1]),
    "lt": lambda values: int(values[0] < values[1]),
    "le": lambda values: int(values[0] <= values[1]),
    "bit_length": _bit_length,
    "exp2": _exp2,
}
