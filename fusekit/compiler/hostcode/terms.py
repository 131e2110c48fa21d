"""Integer terms in a normal form, each with what is known of its value: bounds, and a number that divides it.

`Algebra` makes them. A rule is applied only where it holds for every value that the variables may have; their bounds
and divisors are stated, never guessed. Sums are linear forms, so that equal sums are identical; a quotient by a
constant gives up what is divisible; a remainder drops it. Terms are unbounded integers: that a machine word may be too
narrow is the business of `lower`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.abi import Expr

INFINITY = 1 << 200


@dataclass(frozen=True, slots=True)
class Range:
    """What is stated of a variable: it lies in [low, high] and is a multiple of divisor."""

    low: int
    high: int
    divisor: int = 1


class Term:
    """One term. op: const, variable, sum, product, floordiv, mod, min, max, bit_length, exp2, if; le0 and eq0 are 1
    where their operand is at most 0 (is 0), else 0.
    """

    __slots__ = ("args", "divisor", "high", "low", "number", "op")

    def __init__(self, op: str, args: tuple[Any, ...], low: int, high: int, divisor: int, number: int) -> None:
        self.op, self.args, self.low, self.high, self.divisor, self.number = op, args, low, high, divisor, number

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    @property
    def value(self) -> int:
        """Of a constant."""
        value: int = self.args[0]
        return value

    @property
    def is_boolean(self) -> bool:
        return self.low >= 0 and self.high <= 1

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


Linear = tuple[int, dict[Term, int]]


class Algebra:
    """Makes terms over `variables`, by name."""

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

    def term(self, expr: Expr) -> Term:
        """A record's expression as a term."""
        if isinstance(expr, int):
            return self.const(expr)
        if isinstance(expr, str):
            return self.variable(expr)
        operator, *rest = expr
        items = [self.term(item) for item in rest]
        made: Term = {
            "add": self.add, "sub": self.sub, "mul": self.mul, "floordiv": self.floordiv, "ceildiv": self.ceildiv,
            "mod": self.mod, "min": self.minimum, "max": self.maximum, "eq": self.equal, "lt": self.less,
            "le": self.at_most, "ne": lambda a, b: self.negation(self.equal(a, b)), "if": self._if,
            "bit_length": self.bit_length, "exp2": self.exp2,
        }[operator](*items)  # type: ignore[operator]  # fmt: skip
        return made

    def _if(self, condition: Term, a: Term, b: Term) -> Term:
        known = condition if condition.is_boolean else self.negation(self.equal(condition, self.const(0)))
        return self.choose(known, a, b)

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
        total: dict[Term, int] = {}
        for item, factor in items:
            offset, parts = self.linear(item)
            constant += factor * offset
            for part, coefficient in parts.items():
                total[part] = total.get(part, 0) + factor * coefficient
        return self._sum(constant, {part: coefficient for part, coefficient in total.items() if coefficient})

    def _sum(self, constant: int, parts: dict[Term, int]) -> Term:
        simpler = self._without_quotient(constant, parts)
        if simpler is not None:
            return simpler
        if not parts:
            return self.const(constant)
        if constant == 0 and len(parts) == 1:
            ((part, coefficient),) = parts.items()
            if coefficient == 1:
                return part
        if len(parts) == 1:
            ((part, coefficient),) = parts.items()
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
            quotient, factor = part, coefficient
            if part.op == "product":
                if len(part.args) != 2:
                    continue
                a, b = part.args
                quotient = a if a.op == "floordiv" and a.args[1] is b else b
                if quotient.op != "floordiv" or quotient.args[1] is not (b if quotient is a else a):
                    continue
            elif part.op == "floordiv" and part.args[1].is_const and coefficient % part.args[1].value == 0:
                factor = coefficient // part.args[1].value
            else:
                continue
            dividend, divisor = quotient.args
            rest = {item: value for item, value in parts.items() if item is not part}
            offset, more = self.linear(dividend)
            for item, value in more.items():
                rest[item] = rest.get(item, 0) + factor * value
            remainder = self.mod(dividend, divisor)
            if not remainder.is_const:
                rest[remainder] = rest.get(remainder, 0) - factor
            rest = {item: value for item, value in rest.items() if value}
            if len(rest) < len(parts) or (remainder.is_const and len(rest) == len(parts)):
                base = constant + factor * offset - (factor * remainder.value if remainder.is_const else 0)
                return self.combine(rest.items(), base)
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
        made = atoms[0] if len(atoms) == 1 else self._product(tuple(sorted(atoms, key=lambda atom: atom.number)))
        return self.scale(made, factor)

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
        return common, self._sum(constant // common, {part: value // common for part, value in parts.items()})

    # -- quotients and remainders; a divisor is at least 1

    def floordiv(self, a: Term, b: Term) -> Term:
        if not b.is_const:
            return self._divided_by_term(a, b)
        return self._floordiv(a, b.value)

    def _divided_by_term(self, a: Term, b: Term) -> Term:
        if a.is_const and a.value == 0:
            return a
        if a.op == "product" and b in a.args:
            rest = list(a.args)
            rest.remove(b)
            return self.mul(*rest)
        if a.low >= 0 and a.high < b.low:
            return self.const(0)
        corners = [x // y for x in (a.low, a.high) for y in (max(b.low, 1), max(b.high, 1))]
        high = max(corners)
        times, smaller = self._content(a)
        if smaller is not None and self.sub(b, smaller).low >= 1:  # times * smaller // b is below times
            high = min(high, times - -(-times // max(b.high, 1)))
        return self._make("floordiv", (a, b), min(corners), high, 1)

    def _floordiv(self, a: Term, d: int) -> Term:
        if d == 1:
            return a
        constant, parts = self.linear(a)
        whole: list[tuple[Term, int]] = []
        rest: dict[Term, int] = {}
        for part, coefficient in parts.items():
            if coefficient * part.divisor % d == 0:
                common = math.gcd(coefficient, d)
                whole.append((self._exact(part, d // common), coefficient // common))
            else:
                times = abs(coefficient) // d * (1 if coefficient > 0 else -1)
                whole.append((part, times))
                rest[part] = coefficient - times * d
        quotient, constant = divmod(constant, d)
        return self.combine([*whole, (self._remaining(constant, rest, d), 1)], quotient)

    def _remaining(self, constant: int, rest: dict[Term, int], d: int) -> Term:
        """(rest + constant) // d, where no part of rest is divisible and 0 <= constant < d."""
        common = math.gcd(d, *rest.values())
        if common > 1 and rest:
            reduced = self._sum(constant // common, {part: value // common for part, value in rest.items()})
            return self._floordiv(reduced, d // common)
        a = self._sum(constant, rest)
        if a.low // d == a.high // d:
            return self.const(a.low // d)
        if len(rest) == 1:
            ((part, coefficient),) = rest.items()
            if coefficient == 1 and part.op == "floordiv" and part.args[1].is_const:
                inner, other = part.args[0], part.args[1].value
                return self._floordiv(self.plus(inner, constant * other), other * d)
            if coefficient == 1 and constant == 0 and part.op == "mod" and part.args[1].is_const:
                inner, other = part.args[0], part.args[1].value
                if other % d == 0:
                    return self._mod(self._floordiv(inner, d), other // d)
        return self._make("floordiv", (a, self.const(d)), a.low // d, a.high // d, 1)

    def _exact(self, term: Term, d: int) -> Term:
        """term / d, where d divides it."""
        if d == 1:
            return term
        if term.op == "product":
            for index, atom in enumerate(term.args):
                if atom.divisor % d == 0:
                    return self.mul(self._floordiv(atom, d), *term.args[:index], *term.args[index + 1 :])
        if term.op == "if":
            condition, a, b = term.args
            return self.choose(condition, self._floordiv(a, d), self._floordiv(b, d))
        if term.op == "floordiv" and term.args[1].is_const:
            return self._floordiv(term.args[0], term.args[1].value * d)
        return self._make("floordiv", (term, self.const(d)), term.low // d, term.high // d, term.divisor // d)

    def mod(self, a: Term, b: Term) -> Term:
        if not b.is_const:
            if a.low >= 0 and a.high < b.low:
                return a
            return self._make("mod", (a, b), 0, max(b.high - 1, 0), 1)
        return self._mod(a, b.value)

    def _mod(self, a: Term, m: int) -> Term:
        constant, parts = self.linear(a)
        kept: dict[Term, int] = {}
        opened: list[tuple[Term, int]] = []
        for part, coefficient in parts.items():
            if part.op == "mod" and part.args[1].is_const and coefficient * part.args[1].value % m == 0:
                opened.append((part.args[0], coefficient))
            elif coefficient * part.divisor % m:
                rest = coefficient % m
                kept[part] = rest - m if rest > m // 2 else rest
        if opened:
            return self._mod(self.combine([*kept.items(), *opened], constant), m)
        a = self._sum(constant, kept)
        if a.low // m == a.high // m:
            return self.plus(a, -(a.low // m) * m)
        common = math.gcd(m, constant, *kept.values())
        if common > 1:
            reduced = self._sum(constant // common, {part: value // common for part, value in kept.items()})
            return self.scale(self._mod(reduced, m // common), common)
        a = self._sum(constant % m, kept)
        if a.low >= 0 and a.high < m:
            return a
        return self._make("mod", (a, self.const(m)), 0, m - 1, 1)

    # -- choices

    def minimum(self, *items: Term) -> Term:
        return self._extreme("min", items)

    def maximum(self, *items: Term) -> Term:
        return self._extreme("max", items)

    def _extreme(self, op: str, items: tuple[Term, ...]) -> Term:
        sign = 1 if op == "min" else -1
        kept: list[Term] = []
        for item in [part for each in items for part in (each.args if each.op == op else (each,))]:
            if any(self._never_above(other, item, sign) for other in kept):
                continue
            kept = [other for other in kept if not self._never_above(item, other, sign)] + [item]
        if len(kept) == 1:
            return kept[0]
        pick = min if op == "min" else max
        ordered = tuple(sorted(kept, key=lambda item: (not item.is_const, item.number)))
        divisor = math.gcd(*(item.divisor for item in kept))
        return self._make(op, ordered, pick(x.low for x in kept), pick(x.high for x in kept), divisor)

    def _never_above(self, a: Term, b: Term, sign: int) -> bool:
        """a <= b for all arguments; with sign -1, a >= b."""
        difference = self.combine([(a, sign), (b, -sign)])
        return difference.high <= 0

    def bit_length(self, a: Term) -> Term:
        """Of a value from 0."""
        if a.is_const:
            return self.const(a.value.bit_length())
        return self._make("bit_length", (a,), max(a.low, 0).bit_length(), max(a.high, 0).bit_length(), 1)

    def exp2(self, a: Term) -> Term:
        """Of a value from 0."""
        if a.is_const:
            return self.const(1 << a.value)
        if a.op == "if":
            condition, x, y = a.args
            return self.choose(condition, self.exp2(x), self.exp2(y))
        low, high = 1 << min(max(a.low, 0), 200), 1 << min(max(a.high, 0), 200)
        return self._make("exp2", (a,), low, high, low)

    # -- conditions: terms that are 0 or 1

    def at_most(self, a: Term, b: Term) -> Term:
        """a <= b."""
        constant, parts = self.linear(self.sub(a, b))
        if parts:
            common = math.gcd(*parts.values())
            parts = {part: value // common for part, value in parts.items()}
            constant = -(-constant // common)
        term = self._sum(constant, parts)
        if term.high <= 0 or term.low > 0:
            return self.const(int(term.high <= 0))
        return self._make("le0", (term,), 0, 1, 1)

    def less(self, a: Term, b: Term) -> Term:
        return self.at_most(self.plus(a, 1), b)

    def equal(self, a: Term, b: Term) -> Term:
        term = self.sub(a, b)
        if term.low > 0 or term.high < 0:
            return self.const(0)
        constant, parts = self.linear(term)
        if not parts:
            return self.const(int(constant == 0))
        if constant % math.gcd(*(value * part.divisor for part, value in parts.items())):
            return self.const(0)
        if len(parts) == 1:
            ((part, value),) = parts.items()
            if part.is_boolean and constant in (0, -value):
                return self.negation(part) if constant == 0 else part
        common = math.gcd(constant, *parts.values())
        first = min(parts, key=lambda part: part.number)
        common = -common if parts[first] < 0 else common
        term = self._sum(constant // common, {part: value // common for part, value in parts.items()})
        return self._make("eq0", (term,), 0, 1, 1)

    def negation(self, condition: Term) -> Term:
        if condition.op == "le0":
            return self.at_most(self.const(1), condition.args[0])
        return self.sub(self.const(1), condition)

    def both(self, a: Term, b: Term) -> Term:
        return self.choose(a, b, self.const(0))

    def either(self, a: Term, b: Term) -> Term:
        return self.choose(a, self.const(1), b)

    def choose(self, condition: Term, a: Term, b: Term) -> Term:
        """a where `condition` is 1, else b."""
        if condition.is_const:
            return a if condition.value else b
        positive = self._negated(condition)
        if positive is not None:
            return self.choose(positive, b, a)
        if a is b:
            return a
        if condition.op == "le0":
            if condition in (self.at_most(a, b), self.less(a, b)):
                return self.minimum(a, b)
            if condition in (self.at_most(b, a), self.less(b, a)):
                return self.maximum(a, b)
        if a.is_const and b.is_const and {a.value, b.value} == {0, 1}:
            return condition if a.value else self.negation(condition)
        if condition.op == "eq0":
            found = self._rounded_up(condition.args[0], b, a) or self._logarithm(condition.args[0], b, a)
            if found is not None:
                return found
        low, high, divisor = min(a.low, b.low), max(a.high, b.high), math.gcd(a.divisor, b.divisor)
        return self._make("if", (condition, a, b), low, high, divisor)

    def _negated(self, condition: Term) -> Term | None:
        """The condition whose negation this is."""
        if condition.op != "sum" or condition.args[0] != 1 or len(condition.args[1]) != 1:
            return None
        ((part, coefficient),) = condition.args[1]
        return part if coefficient == -1 and part.is_boolean else None

    def _rounded_up(self, remainder: Term, larger: Term, smaller: Term) -> Term | None:
        """`larger` where `remainder` is not 0, else `smaller`: y // d + 1 and y // d make y // d rounded up."""
        if remainder.op != "mod":
            return None
        quotient = self.floordiv(*remainder.args)
        if self.sub(larger, smaller) is not self.const(1):
            return None
        others = self.sub(smaller, quotient)
        if len(self.linear(others)[1]) >= len(self.linear(smaller)[1]):
            return None
        dividend, divisor = remainder.args
        return self.add(others, self.ceildiv(dividend, divisor))

    def ceildiv(self, a: Term, b: Term) -> Term:
        """Rounded towards plus infinity."""
        return self.floordiv(self.add(a, b, self.const(-1)), b)

    def _logarithm(self, y: Term, b: Term, a: Term) -> Term | None:
        """0 where y is 0, else max(1, bit_length(y)): that is bit_length(y)."""
        length = self.bit_length(y) if y.low >= 0 else None
        if length is not None and a.is_const and a.value == 0 and b is self.maximum(self.const(1), length):
            return length
        return None

    def _make(self, op: str, args: tuple[Any, ...], low: int, high: int, divisor: int) -> Term:
        key = (op, *args)
        found = self._terms.get(key)
        if found is None:
            number = len(self._terms)
            low, high = max(low, -INFINITY), min(high, INFINITY)
            found = self._terms[key] = Term(op, args, low, high, max(divisor, 1) if op != "const" else divisor, number)
        return found


def _interval(constant: int, parts: Iterable[tuple[Term, int]]) -> tuple[int, int]:
    low = high = constant
    for part, coefficient in parts:
        ends = coefficient * part.low, coefficient * part.high
        low, high = low + min(ends), high + max(ends)
    return low, high
