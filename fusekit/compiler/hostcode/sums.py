"""Integer terms in a normal form, each with what is known of its value; sums and products of them.

A sum is a linear form, so that equal sums are identical. Terms are unbounded integers: that a machine word may be too
narrow is the business of `lower`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

INFINITY = 1 << 200


@dataclass(frozen=True, slots=True)
class Range:
    """What is stated of a variable: it lies in [low, high] and is a multiple of divisor."""

    low: int
    high: int
    divisor: int = 1


class Term:
    """One term. op: const, variable, sum, product, floordiv, mod, min, max, bit_length, exp2, if; le0 and eq0 are 1
    where their operand is at most 0 (is 0), else 0. truncated is a float expression without its fraction; within is its
    operand, which is known to lie within other bounds.
    """

    __slots__ = ("args", "divisor", "high", "low", "number", "op")

    def __init__(self, op: str, args: tuple[Any, ...], low: int, high: int, divisor: int, number: int) -> None:
        self.op, self.args, self.low, self.high, self.divisor, self.number = op, args, low, high, divisor, number

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    @property
    def value(self) -> int:
        """The value of a constant."""
        value: int = self.args[0]
        return value

    @property
    def is_boolean(self) -> bool:
        return self.low >= 0 and self.high <= 1

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


Linear = tuple[int, dict[Term, int]]


class Sums(ABC):
    """Makes sums and products of terms over `variables`, by name."""

    def __init__(self, variables: Mapping[str, Range]) -> None:
        self._variables = variables
        self._terms: dict[Any, Term] = {}

    # -- leaves and parts

    def const(self, value: int) -> Term:
        return self._make("const", (value,), value, value, abs(value))

    def variable(self, name: str) -> Term:
        known = self._variables[name]
        low = -(-known.low // known.divisor) * known.divisor
        high = known.high // known.divisor * known.divisor
        return self._make("variable", (name,), low, high, known.divisor)

    def linear(self, term: Term) -> Linear:
        """(constant, term -> coefficient)."""
        if term.op == "const":
            return term.value, {}
        if term.op == "sum":
            return term.args[0], dict(term.args[1])
        return 0, {term: 1}

    @abstractmethod
    def mod(self, a: Term, b: Term) -> Term:
        """The remainder of a by b, which is at least 1."""

    @abstractmethod
    def _extreme(self, op: str, items: tuple[Term, ...]) -> Term:
        """The minimum or the maximum of terms."""

    # -- sums and products

    def add(self, *items: Term) -> Term:
        return self.combine([(item, 1) for item in items])

    def sub(self, a: Term, b: Term) -> Term:
        return self.combine([(a, 1), (b, -1)])

    def scale(self, item: Term, factor: int) -> Term:
        return self.combine([(item, factor)])

    def plus(self, item: Term, value: int) -> Term:
        return self.combine([(item, 1)], value)

    def combine(self, items: Iterable[tuple[Term, int]], constant: int = 0) -> Term:
        """The sum of terms times factors, and `constant`."""
        return self._sum(*self._total(items, constant))

    def _total(self, items: Iterable[tuple[Term, int]], constant: int) -> Linear:
        total: dict[Term, int] = {}
        for item, factor in items:
            offset, parts = self.linear(item)
            constant += factor * offset
            for part, coefficient in parts.items():
                total[part] = total.get(part, 0) + factor * coefficient
        return constant, {part: coefficient for part, coefficient in total.items() if coefficient}

    def _reduced(self, constant: int, parts: dict[Term, int], divisor: int) -> Term:
        """The sum over `divisor`, which divides all coefficients; the constant is rounded down."""
        return self._sum(constant // divisor, {part: value // divisor for part, value in parts.items()})

    def _sum(self, constant: int, parts: dict[Term, int]) -> Term:
        simpler = self._without_quotient(constant, parts)
        if simpler is not None:
            return simpler
        if not parts:
            return self.const(constant)
        if len(parts) == 1:
            ((part, coefficient),) = parts.items()
            if coefficient == 1 and constant == 0:
                return part
            if coefficient == 1 and part.op in ("min", "max"):
                return self._extreme(part.op, tuple(self.plus(item, constant) for item in part.args))
        ordered = tuple(sorted(parts.items(), key=lambda item: item[0].number))
        low, high = self._sum_bounds(constant, ordered)
        divisor = math.gcd(constant, *(coefficient * part.divisor for part, coefficient in ordered))
        return self._make("sum", (constant, ordered), low, high, divisor)

    def _sum_bounds(self, constant: int, parts: tuple[tuple[Term, int], ...]) -> tuple[int, int]:
        low, high = _interval(constant, parts)
        for part, coefficient in parts:
            # exp2(bit_length(y)) lies in [y + 1, 2 * y + 1] for every y from 0, which matters where y is taken away.
            if part.op == "exp2" and part.args[0].op == "bit_length" and part.args[0].args[0].low >= 0:
                bounded = part.args[0].args[0]
                rest = [item for item in parts if item[0] is not part]
                for factor in (1, 2):
                    offset, more = self.linear(self.combine([*rest, (bounded, factor * coefficient)], constant))
                    side = _interval(offset + coefficient, tuple(more.items()))
                    if (coefficient > 0) == (factor == 1):
                        low = max(low, side[0])
                    else:
                        high = min(high, side[1])
        return low, high

    def _without_quotient(self, constant: int, parts: dict[Term, int]) -> Term | None:
        """The sum with k * d * (y // d) written as k * (y - y % d), where that is shorter."""
        for part, coefficient in parts.items():
            match = _quotient_in(part, coefficient)
            if match is None:
                continue
            quotient, factor = match
            remainder = self.mod(*quotient.args)
            others = [(item, value) for item, value in parts.items() if item is not part]
            total = self._total([*others, (quotient.args[0], factor), (remainder, -factor)], constant)
            if len(total[1]) < len(parts) or (remainder.is_const and len(total[1]) == len(parts)):
                return self._sum(*total)
        return None

    def mul(self, *items: Term) -> Term:
        factor = 1
        atoms: list[Term] = []
        for item in items:
            content, rest = self._content(item)
            factor *= content
            if rest is not None:
                atoms += rest.args if rest.op == "product" else [rest]
        if factor == 0 or not atoms:
            return self.const(factor)
        product = atoms[0] if len(atoms) == 1 else self._product(tuple(sorted(atoms, key=lambda atom: atom.number)))
        return self.scale(product, factor)

    def _product(self, atoms: tuple[Term, ...]) -> Term:
        low, high, divisor = 1, 1, 1
        for atom in atoms:
            corners = [x * y for x in (low, high) for y in (atom.low, atom.high)]
            low, high, divisor = min(corners), max(corners), divisor * atom.divisor
        return self._make("product", atoms, low, high, divisor)

    def _content(self, term: Term) -> tuple[int, Term | None]:
        """(the number that all parts have in common, the rest); a constant has no rest."""
        constant, parts = self.linear(term)
        if not parts:
            return constant, None
        common = math.gcd(constant, *parts.values())
        return common, self._reduced(constant, parts, common)

    def _make(self, op: str, args: tuple[Any, ...], low: int, high: int, divisor: int) -> Term:
        key = (op, *args)
        term = self._terms.get(key)
        if term is None:
            number = len(self._terms)
            low, high = max(low, -INFINITY), min(high, INFINITY)
            term = self._terms[key] = Term(op, args, low, high, max(divisor, 1) if op != "const" else divisor, number)
        return term


def _interval(constant: int, parts: Iterable[tuple[Term, int]]) -> tuple[int, int]:
    low = high = constant
    for part, coefficient in parts:
        ends = coefficient * part.low, coefficient * part.high
        low, high = low + min(ends), high + max(ends)
    return low, high


def _quotient_in(part: Term, coefficient: int) -> tuple[Term, int] | None:
    """(y // d, k) where coefficient * part is k * d * (y // d)."""
    if part.op == "floordiv" and part.args[1].is_const and coefficient % part.args[1].value == 0:
        return part, coefficient // part.args[1].value
    if part.op == "product" and len(part.args) == 2:
        for quotient, divisor in (part.args, part.args[::-1]):
            if quotient.op == "floordiv" and quotient.args[1] is divisor:
                return quotient, coefficient
    return None
