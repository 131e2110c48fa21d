"""Expressions compiled: Python statements that compute many of them at once from one variable within bounds.

What is written are numbers, names of the writer's own and the operators of `expr`; no text of a record gets there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import gcd, prod

from fusekit.abi.expr import Expr, RecordError, evaluate

Value = int | str
"""A number, or the name of a variable of the statements."""
_LOW, _HIGH = -(2**63), 2**63 - 1
_INFIX = {"add": " + ", "sub": " - ", "mul": " * ", "floordiv": " // ", "mod": " % "}
_NAMES = re.compile(r"\bv\d+\b")
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}


class NotCompiledError(Exception):
    """An expression that may have no value within the bounds: it has to be evaluated with checks."""


class Writer:
    """Statements of a function of "T", which is `low` to `high`.

    Each distinct operation is computed once, and only where it is needed; what can only be one number is that number.
    """

    def __init__(self, low: int, high: int) -> None:
        self._known: dict[tuple[Value, ...], str] = {}
        self._bounds: dict[str, tuple[int, int]] = {"T": (low, high)}
        self._products: dict[str, tuple[int, str]] = {}  # of those that are a number times another variable
        self._quotients: dict[str, tuple[str, int]] = {}  # of those without a remainder: what is divided, and by what
        self._divisors: dict[str, int] = {}
        self._texts: dict[str, str] = {}  # by name, in order
        self._checks: dict[str, list[str]] = {}  # by the name after which they can be made

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
        bounds = self._bounded(operator, operands)
        if bounds[0] == bounds[1]:
            return bounds[0]
        return self._simpler(operator, operands, bounds)

    def _simpler(self, operator: str, operands: list[Value], bounds: tuple[int, int]) -> Value:
        """The operation, or what has the same value."""
        if operator == "mul":
            return self._product(operands, bounds)
        if operator == "add":
            operands = [operand for operand in operands if operand != 0]
        elif operator in ("floordiv", "ceildiv", "mod"):
            divisor = operands[1]
            assert isinstance(divisor, int)
            if self._divisor(operands[0]) % divisor == 0:
                if operator == "mod":
                    return 0
                whole = str(operands[0])
                factor, base = self._products.get(whole, (1, whole))
                if factor % divisor == 0:
                    return self._product([factor // divisor, base], bounds)
                name = self._named(operator, operands, bounds)
                self._quotients[name] = whole, divisor
                return name
        elif operator in ("min", "max"):
            limits, pick = [self.bounds(operand) for operand in operands], int(operator == "min")
            best = min(limit[1] for limit in limits) if pick else max(limit[0] for limit in limits)
            apart = [limit[0] > best if pick else limit[1] < best for limit in limits]  # it is never that one
            operands = list(dict.fromkeys(operand for operand, never in zip(operands, apart, strict=True) if not never))
        if len(operands) == 1 and operator in ("add", "min", "max"):
            return operands[0]
        return self._named(operator, operands, bounds)

    def _product(self, operands: list[Value], bounds: tuple[int, int]) -> Value:
        """The product of numbers, and of variables that may be products themselves."""
        factor, variables = 1, list[str]()
        for operand in operands:
            times, base = (operand, "") if isinstance(operand, int) else self._products.get(operand, (1, operand))
            factor *= times
            variables += [base] * bool(base)
        if len(variables) == 1:
            whole, divisor = self._quotients.get(variables[0], ("", 0))
            if whole and factor % divisor == 0:
                return self._product([factor // divisor, whole], bounds)
        if factor == 1 and len(variables) == 1:
            return variables[0]
        name = self._named("mul", [*variables] if factor == 1 else [factor, *variables], bounds)
        if len(variables) == 1:
            self._products[name] = factor, variables[0]
        return name

    def _named(self, operator: str, operands: list[Value], bounds: tuple[int, int]) -> str:
        """The name of the operation's value."""
        key = operator, *operands
        if key not in self._known:
            name = self._known[key] = f"v{len(self._known)}"
            self._bounds[name] = bounds
            divisors = [self._divisor(operand) for operand in operands]
            if operator in ("add", "sub", "min", "max"):
                self._divisors[name] = gcd(*divisors)
            elif operator in ("mul", "if"):
                self._divisors[name] = prod(divisors) if operator == "mul" else gcd(*divisors[1:])
            self._texts[name] = f"{name} = {_python(operator, operands)}"
        return self._known[key]

    def _divisor(self, value: Value) -> int:
        """A number that divides it."""
        return abs(value) if isinstance(value, int) else self._divisors.get(value, 1)

    def bounds(self, value: Value) -> tuple[int, int]:
        """The least and the greatest that it can be, or beyond."""
        return (value, value) if isinstance(value, int) else self._bounds[value]

    def require(self, value: Value, low: int, high: int) -> None:
        """Lets the function return None unless the value lies between the two."""
        least, greatest = self.bounds(value)
        if least < low or greatest > high:
            self._check(value, f"if not {low} <= {value} <= {high}: return None")

    def equal(self, one: Value, other: Value) -> None:
        """Lets the function return None unless both are equal."""
        if one != other:
            self.require(self.define(("sub", one, other)), 0, 0)

    def _check(self, value: Value, text: str) -> None:
        after = value if isinstance(value, str) else ""
        if text not in self._checks.setdefault(after, []):
            self._checks[after].append(text)

    def function(self, name: str, result: str, *lines: str) -> str:
        """The source of the function. lines: before its end, after the statements."""
        needed = set(_NAMES.findall(" ".join([result, *lines]))).union(self._checks)
        for variable in reversed(self._texts):
            if variable in needed:
                needed.update(_NAMES.findall(self._texts[variable]))
        body = [*self._checks.get("", ()), *self._checks.get("T", ())]
        for variable, text in self._texts.items():
            body += [text] * (variable in needed) + self._checks.get(variable, [])
        return "\n    ".join([f"def {name}(T):", *body, *lines, f"return {result}"]) + "\n"

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
