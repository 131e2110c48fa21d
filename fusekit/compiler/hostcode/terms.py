"""All that terms are made of: quotients, remainders, choices and conditions, over sums and products (`sums`).

A rule is applied only where it holds for every value that the variables may have; their bounds and divisors are stated,
never guessed. A quotient by a constant gives up what is divisible; a remainder drops it.
"""

from __future__ import annotations

import math
from typing import Any

from fusekit.abi import Expr, Truncated
from fusekit.compiler.hostcode.sums import Range, Sums, Term

__all__ = ["Algebra", "Range", "Term"]


class Algebra(Sums):
    """Makes terms over `variables`, by name."""

    def term(self, expr: Expr) -> Term:
        """A record's expression as a term."""
        if isinstance(expr, int):
            return self.const(expr)
        if isinstance(expr, str):
            return self.variable(expr)
        operator, *rest = expr
        items = [self.term(item) for item in rest]
        result: Term = {
            "add": self.add, "sub": self.sub, "mul": self.mul, "floordiv": self.floordiv, "ceildiv": self.ceildiv,
            "mod": self.mod, "min": self.minimum, "max": self.maximum, "eq": self.equal, "lt": self.less,
            "le": self.at_most, "ne": lambda a, b: self.negation(self.equal(a, b)), "if": self._if,
            "bit_length": self.bit_length, "exp2": self.exp2,
        }[operator](*items)  # type: ignore[operator]  # fmt: skip
        return result

    def _if(self, condition: Term, a: Term, b: Term) -> Term:
        known = condition if condition.is_boolean else self.negation(self.equal(condition, self.const(0)))
        return self.choose(known, a, b)

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
            return self._floordiv(self._reduced(constant, rest, common), d // common)
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
            return self.scale(self._mod(self._reduced(constant, kept, common), m // common), common)
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
        for item in [part for operand in items for part in (operand.args if operand.op == op else (operand,))]:
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
        """The term for a value of 0 or more."""
        if a.is_const:
            return self.const(a.value.bit_length())
        return self._make("bit_length", (a,), max(a.low, 0).bit_length(), max(a.high, 0).bit_length(), 1)

    def exp2(self, a: Term) -> Term:
        """The term for a value of 0 or more."""
        if a.is_const:
            return self.const(1 << a.value)
        if a.op == "if":
            condition, x, y = a.args
            return self.choose(condition, self.exp2(x), self.exp2(y))
        low, high = 1 << min(max(a.low, 0), 200), 1 << min(max(a.high, 0), 200)
        return self._make("exp2", (a,), low, high, low)

    # -- integers of floats

    def truncated(self, expr: Any, low: int, high: int) -> Term:
        """A float expression, whose integers are terms, without its fraction."""
        if not isinstance(expr, tuple | str):
            return self.const(Truncated(expr).evaluate({}, {}))
        return self._make("truncated", (expr, _exact(expr)), low, high, 1)

    def within(self, term: Term, low: int, high: int) -> Term:
        """`term`, which lies in [low, high] where it matters."""
        return term if term.is_const else self._make("within", (term, low, high), low, high, 1)

    # -- conditions: terms that are 0 or 1

    def at_most(self, a: Term, b: Term) -> Term:
        """a <= b."""
        constant, parts = self.linear(self.sub(a, b))
        common = math.gcd(*parts.values()) or 1
        term = self._reduced(constant + common - 1, parts, common)  # the constant is rounded up
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
        term = self._reduced(constant, parts, -common if parts[first] < 0 else common)
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
            term = self._rounded_up(condition.args[0], b, a) or self._logarithm(condition.args[0], b, a)
            if term is not None:
                return term
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


def _exact(expr: Any) -> Any:
    """A float expression that equals no other one: as numbers, 0.0 and -0.0 are equal."""
    if isinstance(expr, tuple):
        return tuple(map(_exact, expr))
    return expr.hex() if isinstance(expr, float) else expr
