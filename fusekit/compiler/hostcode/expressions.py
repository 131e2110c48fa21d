"""Terms as expressions of a launch record."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from fusekit.abi import Expr, Truncated
from fusekit.abi.floats import Value
from fusekit.compiler.hostcode.terms import Term

_LARGE = 64  # nodes of an expression from which its shared parts get names
_SHARED = 4  # nodes of a part that is worth a name


class ExpressionWriter:
    """Writes terms as expressions. Where one of `roots` is large, parts that occur more than once are in `values`.

    wide: whether a number in them has more than 64 bits, and so no place in a launch record.
    """

    def __init__(self, roots: Iterable[Term]) -> None:
        self.values: dict[str, Value] = {}
        self._written: dict[Term, Expr] = {}
        self._named: dict[Term, str] = {}
        sizes: dict[Term, int] = {}
        uses: dict[Term, int] = {}
        for root in dict.fromkeys(roots):
            self._measure(root, sizes, uses)
        self.wide = any(term.is_const and not -(2**63) <= term.value < 2**63 for term in uses)
        if max(sizes.values(), default=0) > _LARGE:
            shared = [term for term in uses if uses[term] > 1 and sizes[term] > _SHARED]
            for term in sorted(shared, key=lambda term: term.number):
                self._named[term] = self.name(term)

    def write(self, term: Term) -> Expr:
        """`term` as an expression."""
        expr = self._written.get(term)
        if expr is None:
            expr = self._written[term] = self._write(term)
        return expr

    def name(self, term: Term) -> str:
        """The name of a variable, or of a value, that has the value of `term`."""
        expr = self.write(term)
        if not isinstance(expr, str):
            self._written[term] = expr = self._new(expr)
        return expr

    def _new(self, value: Value) -> str:
        name = f"v{len(self.values)}"
        self.values[name] = value
        return name

    def _measure(self, term: Term, sizes: dict[Term, int], uses: dict[Term, int]) -> int:
        uses[term] = uses.get(term, 0) + 1
        if term not in sizes:
            parts = [item for item, _ in term.args[1]] if term.op == "sum" else term.args
            if term.op == "truncated":
                parts = tuple(terms_of(term.args[0]))
            inside = sum(self._measure(part, sizes, uses) for part in parts if isinstance(part, Term))
            sizes[term] = 1 + inside + (len(parts) if term.op == "sum" else 0)
        return sizes[term]

    def _write(self, term: Term) -> Expr:
        op, args = term.op, term.args
        if op in ("const", "variable"):
            value: Expr = args[0]
            return value
        if op == "sum":
            return self._sum(*args)
        if op == "product":
            return ("mul", *(self.write(item) for item in args))
        if op == "floordiv":
            return self._quotient(*args)
        if op in ("le0", "eq0"):
            return self._condition(op, args[0])
        if op == "truncated":
            return self._new(Truncated(written(args[0], self)))
        if op == "within":
            return self.write(args[0])
        return (op, *(self.write(item) for item in args))

    def _sum(self, constant: int, parts: tuple[tuple[Term, int], ...]) -> Expr:
        common = math.gcd(constant, *(value for _, value in parts))
        if common > 1 and len(parts) + (constant != 0) > 1:
            return ("mul", common, self._sum(constant // common, tuple((part, v // common) for part, v in parts)))
        plus = [self._times(part, value) for part, value in parts if value > 0] + [constant] * (constant > 0)
        minus = [self._times(part, -value) for part, value in parts if value < 0] + [-constant] * (constant < 0)
        if not minus:
            return _joined(plus)
        return ("sub", _joined(plus), _joined(minus))

    def _times(self, part: Term, value: int) -> Expr:
        written = self.write(part)
        if value == 1:
            return written
        return ("mul", value, *(written[1:] if isinstance(written, tuple) and written[0] == "mul" else (written,)))

    def _quotient(self, a: Term, b: Term) -> Expr:
        """The quotient, rounded up where that is what it amounts to."""
        if a.op == "sum" and b.is_const and a.args[0] == b.value - 1:
            return ("ceildiv", self._sum(0, a.args[1]), b.value)
        if a.op == "sum" and not b.is_const:
            constant, parts = a.args
            others = tuple(item for item in parts if item[0] is not b)
            if constant == -1 and len(others) == len(parts) - 1 and dict(parts)[b] == 1:
                return ("ceildiv", self._sum(0, others), self.write(b))
        return ("floordiv", self.write(a), self.write(b))

    def _condition(self, op: str, term: Term) -> Expr:
        """`term` <= 0 or == 0, what is taken away on the right-hand side."""
        constant, parts = term.args if term.op == "sum" else (0, ((term, 1),))
        left = [self._times(part, value) for part, value in parts if value > 0]
        right = [self._times(part, -value) for part, value in parts if value < 0]
        if op == "le0" and constant == 1:
            return ("lt", _joined(left), _joined(right))
        left += [constant] * (constant > 0)
        right += [-constant] * (constant < 0)
        return ("le" if op == "le0" else "eq", _joined(left), _joined(right))


def terms_of(expr: Any) -> Iterator[Term]:
    """The integers in a float expression."""
    if isinstance(expr, Term):
        yield expr
    elif isinstance(expr, tuple):
        for item in expr[1:]:
            yield from terms_of(item)


def written(expr: Any, writer: ExpressionWriter) -> Any:
    """A float expression with names for its integers."""
    if isinstance(expr, Term):
        return writer.name(expr)
    return (expr[0], *(written(item, writer) for item in expr[1:])) if isinstance(expr, tuple) else expr


def _joined(items: list[Expr]) -> Expr:
    if not items:
        return 0
    return items[0] if len(items) == 1 else ("add", *items)
