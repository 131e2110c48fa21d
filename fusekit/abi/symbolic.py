"""Expressions compiled: Python statements that compute many of them at once from one variable within bounds.

What is written are numbers, names of the writer's own and the operators of `expr`; no text of a record gets there.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusekit.abi.expr import Expr, RecordError, evaluate

Value = int | str
"""A number, or the name of a variable of the statements."""
_LOW, _HIGH = -(2**63), 2**63 - 1
_INFIX = {"add": " + ", "sub": " - ", "mul": " * ", "floordiv": " // ", "mod": " % "}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}


class NotCompiledError(Exception):
    """An expression that may have no value within the bounds: it has to be evaluated with checks."""


class Writer:
    """Statements of a function of "T", which is `low` to `high`. Each distinct operation is computed once."""

    def __init__(self, low: int, high: int) -> None:
        self.lines: list[str] = []
        self._known: dict[tuple[str, *tuple[Value, ...]], str] = {}
        self._bounds: dict[str, tuple[int, int]] = {"T": (low, high)}

    def define(self, expr: Expr, env: Mapping[str, Value] | None = None) -> Value:
        """The value of `expr`. env: those of its variables; None: they are names of this writer's.

        Raises NotCompiledError for a variable that has no value, or an operation that may have none.
        """
        if isinstance(expr, int):
            return expr
        if isinstance(expr, str):
            value = expr if env is None else env.get(expr)
            if value is None:
                raise NotCompiledError(f"{expr} is not known")
            return value
        operator, operands = expr[0], [self.define(operand, env) for operand in expr[1:]]
        if operator == "if" and isinstance(operands[0], int):
            return operands[1] if operands[0] else operands[2]
        if all(isinstance(operand, int) for operand in operands):
            try:
                return evaluate((operator, *operands), {})
            except RecordError as error:
                raise NotCompiledError(str(error)) from error
        if (operator, *operands) not in self._known:
            bounds = self._bounded(operator, operands)
            name = self._known[operator, *operands] = f"v{len(self._known)}"
            self._bounds[name] = bounds
            self.lines.append(f"{name} = {_python(operator, operands)}")
        return self._known[operator, *operands]

    def bounds(self, value: Value) -> tuple[int, int]:
        """The least and the greatest that it can be, or beyond."""
        return (value, value) if isinstance(value, int) else self._bounds[value]

    def require(self, value: Value, low: int, high: int) -> None:
        """Lets the function return None unless the value lies between the two."""
        least, greatest = self.bounds(value)
        if least < low or greatest > high:
            self.lines.append(f"if not {low} <= {value} <= {high}: return None")

    def equal(self, one: Value, other: Value) -> None:
        """Lets the function return None unless both are equal."""
        if one != other:
            self.lines.append(f"if {one} != {other}: return None")

    def function(self, name: str, result: str) -> str:
        """The source of the function with all statements so far."""
        return "\n    ".join([f"def {name}(T):", *self.lines, f"return {result}"]) + "\n"

    def _bounded(self, operator: str, operands: list[Value]) -> tuple[int, int]:
        first, *rest = (self.bounds(operand) for operand in operands)
        if operator in ("floordiv", "ceildiv", "mod"):
            divisor = operands[1]
            if not isinstance(divisor, int) or divisor <= 0:
                raise NotCompiledError(f"{operator} by a number that follows the tokens")
            if operator == "mod":
                return 0, divisor - 1
            more = divisor - 1 if operator == "ceildiv" else 0
            return (first[0] + more) // divisor, (first[1] + more) // divisor
        if operator in _COMPARED:
            return 0, 1
        if operator == "if":
            return min(rest[0][0], rest[1][0]), max(rest[0][1], rest[1][1])
        if operator == "bit_length" and first[0] >= 0:
            return 0, 63
        if operator in ("min", "max"):
            pick = min if operator == "min" else max
            return pick(first[0], *(low for low, _ in rest)), pick(first[1], *(high for _, high in rest))
        if operator not in _INFIX:
            raise NotCompiledError(f"{operator} of a number that follows the tokens")
        for low, high in rest:  # every step must fit, from left to right
            if operator == "mul":
                corners = [one * other for one in first for other in (low, high)]
                first = min(corners), max(corners)
            else:
                first = (first[0] + low, first[1] + high) if operator == "add" else (first[0] - high, first[1] - low)
            if first[0] < _LOW or first[1] > _HIGH:
                raise NotCompiledError(f"{operator} may go beyond 64 bits")
        return first


def _python(operator: str, operands: list[Value]) -> str:
    texts = [f"({operand})" if isinstance(operand, int) and operand < 0 else str(operand) for operand in operands]
    if operator in _INFIX:
        return _INFIX[operator].join(texts)
    if operator in _COMPARED:
        return f"int({texts[0]} {_COMPARED[operator]} {texts[1]})"
    if operator == "if":
        return "{1} if {0} else {2}".format(*texts)
    if operator == "ceildiv":
        return "-(-{} // {})".format(*texts)
    if operator == "bit_length":
        return f"{texts[0]}.bit_length()"
    return f"{operator}({', '.join(texts)})"
