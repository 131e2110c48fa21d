"""From what host code computes in machine words to integer terms, and the guards under which both are the same.

A node of w bits becomes a term that equals it modulo 2**w: sums and products need nothing more. Where an operation
looks at the whole value (a division, a comparison, a wider type), the term must lie in the word's range. Where bounds
do not show that, a wrapped value is written as a remainder if it is meant (a difference that may be negative, an
address), and else becomes a guard: the record refuses arguments with which the host code itself would overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from fusekit.compiler.hostcode.bits import Bits, Graph
from fusekit.compiler.hostcode.terms import Algebra, Term
from fusekit.errors import BuildError

if TYPE_CHECKING:
    from fusekit.compiler.hostcode.floats import Floats


@dataclass(frozen=True, slots=True)
class Guard:
    """`term` must lie in [low, high] wherever `condition` is 1, or the launch is refused."""

    term: Term
    low: int
    high: int
    condition: Term


_FAR = 1 << 62  # from here on floats are no integers
Path = frozenset[Term]
"""Conditions that hold together: those of the choices that lead to a value."""


class _Needs:
    """What must lie in which range, and on which paths; of these only those that no other makes superfluous."""

    def __init__(self, algebra: Algebra) -> None:
        self._algebra = algebra
        self.paths: dict[tuple[Term, int, int], list[Path]] = {}

    def add(self, what: tuple[Term, int, int], path: Path) -> None:
        known = self.paths.setdefault(what, [])
        if any(other <= path for other in known):
            return
        for condition in sorted(path, key=_number):
            rest = path - {condition}
            if {*rest, self._algebra.negation(condition)} in known:  # both ways
                self.add(what, rest)
                return
        known[:] = [other for other in known if not path <= other] + [path]

    def add_all(self, needs: _Needs, path: Path) -> None:
        """Adds the needs of a value that is met on `path`."""
        for what, paths in needs.paths.items():
            for needed in paths:
                self.add(what, path | needed)


# Operations that are one of terms, by how the operands are read.
_PLAIN = {
    "add": ("lower", "add"), "sub": ("lower", "sub"), "mul": ("lower", "mul"), "smin": ("signed", "minimum"),
    "smax": ("signed", "maximum"), "umin": ("unsigned", "minimum"), "umax": ("unsigned", "maximum"),
}  # fmt: skip


class Lowering:
    """Lowers nodes of `graph`.

    arguments: the term that each argument of the graph is, by its name there. guarded: whether a negative number that
    is read as one of 64 bits without a sign is refused; else it is a remainder, which may have no expression. floats:
    what lowers the floats that integers are made of.
    """

    floats: Floats

    def __init__(self, graph: Graph, algebra: Algebra, arguments: Mapping[str, Term], guarded: bool = False) -> None:
        self.graph, self.algebra, self._guarded = graph, algebra, guarded
        self._arguments = arguments
        self._known: dict[Bits, tuple[Term, _Needs]] = {}
        self._wrapping: dict[Term, bool] = {}
        # Of what is being lowered: a node has its own, which count wherever it is met.
        self._needs, self._path = _Needs(algebra), Path()

    def lower(self, bits: Bits) -> Term:
        """A term that equals `bits` modulo 2**width."""
        if bits not in self._known:
            outside, self._needs, self._path = (self._needs, self._path), _Needs(self.algebra), Path()
            self._known[bits] = self._lower(bits), self._needs
            self._needs, self._path = outside
        term, needs = self._known[bits]
        self._needs.add_all(needs, self._path)
        return term

    @contextmanager
    def under(self, condition: Term) -> Iterator[None]:
        """What is lowered inside matters only where `condition` is 1."""
        outside, self._path = self._path, self._path if condition.is_const else self._path | {condition}
        try:
            yield
        finally:
            self._path = outside

    def unsigned(self, bits: Bits) -> Term:
        """The value of `bits` without a sign."""
        term, bound = self.lower(bits), 1 << bits.width
        if (
            term.low >= 0 and term.high < bound
        ) or bits.op == "zext":  # which is a value without a sign, guarded or not
            return term
        meant = -bound // 2 <= term.low and term.high < bound // 2
        if meant and self._guarded and bits.width == 64 and not self._wraps(term):
            return self.guard(term, 0, bound // 2 - 1)
        if meant or self._wraps(term):
            return self.algebra.mod(term, self.algebra.const(bound))
        return self.guard(term, 0, bound - 1)

    def signed(self, bits: Bits) -> Term:
        """The value of `bits` in two's complement."""
        term, bound = self.lower(bits), 1 << bits.width - 1
        if (-bound <= term.low and term.high < bound) or bits.op in ("zext", "sext"):
            return term
        return self.guard(term, -bound, bound - 1)

    @staticmethod
    def words(bits: Bits) -> str:
        """Words that describe a value that cannot be lowered."""
        if bits.op == "unknown":
            return str(bits.args[0])
        if bits.op == "undefined":
            return "a value that is never set"
        return f"the operation {bits.op} of {bits.width} bits"

    def _wraps(self, term: Term) -> bool:
        """Whether it reads an address: those wrap."""
        if term not in self._wrapping:
            if term.op == "variable":
                self._wrapping[term] = term.args[0].endswith(".address")
            else:
                self._wrapping[term] = any(self._wraps(part) for part in _operands(term))
        return self._wrapping[term]

    def guard(self, term: Term, low: int, high: int) -> Term:
        """`term`, which must lie in [low, high] where the present choices lead."""
        if term.high < low or term.low > high:
            raise BuildError(f"host code: a value always overflows: it is {term.low} to {term.high}")
        self._needs.add((term, low, high), self._path)
        return term

    @property
    def guards(self) -> list[Guard]:
        """The guards of everything lowered so far."""
        one = self.algebra.const(1)
        return [
            Guard(*what, reduce(self.algebra.both, sorted(path, key=_number), one))
            for what, paths in self._needs.paths.items()
            for path in paths
        ]

    def _lower(self, bits: Bits) -> Term:
        algebra, op, args = self.algebra, bits.op, bits.args
        if op == "const":
            return algebra.const(bits.number if bits.width == 1 else bits.signed)
        if op == "argument":
            return self._argument(bits)
        if op in _PLAIN:
            read, operation = _PLAIN[op]
            plain: Term = getattr(algebra, operation)(*(getattr(self, read)(item) for item in args))
            return plain
        if op.startswith("fcmp_"):
            return algebra.truncated(self.floats.condition(bits), 0, 1)
        method = getattr(self, f"_{op}", None) or (self._compare if op.startswith("icmp_") else None)
        if method is None:
            raise BuildError(f"host code: {self.words(bits)}; no launch can be made of it")
        term: Term = method(bits, *args)
        return term

    def _argument(self, bits: Bits) -> Term:
        if bits.args[0] not in self._arguments:
            raise BuildError(f"host code: a number is made of {bits.args[0]}, of which a launch record makes none")
        term = self._arguments[bits.args[0]]
        bound = 1 << bits.width - 1
        if 1 < bits.width < 64 and not (-bound <= term.low and term.high < bound):
            return self.guard(term, -bound, bound - 1)
        return term

    def _shl(self, bits: Bits, a: Bits, b: Bits) -> Term:
        return self.algebra.mul(self.lower(a), self._power(b, bits.width))

    def _lshr(self, bits: Bits, a: Bits, b: Bits) -> Term:
        return self.algebra.floordiv(self.unsigned(a), self._power(b, bits.width))

    def _ashr(self, bits: Bits, a: Bits, b: Bits) -> Term:
        return self.algebra.floordiv(self.signed(a), self._power(b, bits.width))

    def _udiv(self, bits: Bits, a: Bits, b: Bits) -> Term:
        return self.algebra.floordiv(self.unsigned(a), self._positive(self.unsigned(b)))

    def _urem(self, bits: Bits, a: Bits, b: Bits) -> Term:
        return self.algebra.mod(self.unsigned(a), self._positive(self.unsigned(b)))

    def _zext(self, bits: Bits, a: Bits) -> Term:
        return self.unsigned(a)

    def _ctlz(self, bits: Bits, a: Bits) -> Term:
        return self.algebra.sub(self.algebra.const(a.width), self.algebra.bit_length(self.unsigned(a)))

    def _power(self, exponent: Bits, width: int) -> Term:
        term = self.unsigned(exponent)
        if term.high >= width:
            term = self.guard(term, 0, width - 1)
        return self.algebra.exp2(term)

    def _positive(self, term: Term) -> Term:
        """A divisor: at least 1."""
        return term if term.low >= 1 else self.guard(term, 1, term.high)

    def _sdiv(self, bits: Bits, a: Bits, b: Bits) -> Term:
        return self._towards_zero(self.algebra.floordiv, a, b)

    def _srem(self, bits: Bits, a: Bits, b: Bits) -> Term:
        return self._towards_zero(self.algebra.mod, a, b)

    def _towards_zero(self, operation: Callable[[Term, Term], Term], a: Bits, b: Bits) -> Term:
        """`operation` of magnitudes, with the sign of the dividend."""
        algebra, x, d = self.algebra, self.signed(a), self._positive(self.signed(b))
        if x.low >= 0:
            return operation(x, d)
        below = algebra.scale(operation(algebra.scale(x, -1), d), -1)
        return algebra.choose(algebra.less(x, algebra.const(0)), below, operation(x, d))

    def _and(self, bits: Bits, a: Bits, b: Bits) -> Term:
        if bits.width == 1:
            return self.algebra.both(self.condition(a), self.condition(b))
        if a.is_const:
            a, b = b, a
        if not b.is_const:
            raise BuildError(f"host code: {self.words(bits)}; an `and` is known with a constant only")
        term, total = self.lower(a), self.algebra.const(0)
        for low, high in _runs(b.number):  # of the mask's ones
            upper = self.algebra.mod(term, self.algebra.const(1 << high))
            lower = self.algebra.mod(term, self.algebra.const(1 << low))
            total = self.algebra.add(total, self.algebra.sub(upper, lower))
        return total

    def _or(self, bits: Bits, a: Bits, b: Bits) -> Term:
        if bits.width == 1:
            return self.algebra.either(self.condition(a), self.condition(b))
        x, y = self.lower(a), self.lower(b)
        for above, below in ((x, y), (y, x)):
            zeros = above.divisor & -above.divisor if above.divisor else 1 << bits.width
            if below.low >= 0 and below.high < zeros:  # they share no bits
                return self.algebra.add(above, below)
        raise BuildError(f"host code: {self.words(bits)}; an `or` is known of values that share no bits only")

    def _xor(self, bits: Bits, a: Bits, b: Bits) -> Term:
        if bits.width == 1:
            x, y = self.condition(a), self.condition(b)
            return self.algebra.choose(x, self.algebra.negation(y), y)
        for mask, other in ((a, b), (b, a)):
            if mask.is_const and mask.signed == -1:
                return self.algebra.sub(self.algebra.const(-1), self.lower(other))
        raise BuildError(f"host code: {self.words(bits)}; an `xor` is known of conditions only")

    def condition(self, bits: Bits) -> Term:
        """A value of one bit as a term that is 0 or 1."""
        term = self.lower(bits)
        return term if term.is_boolean else self.algebra.mod(term, self.algebra.const(2))

    def _compare(self, bits: Bits, a: Bits, b: Bits) -> Term:
        algebra, predicate = self.algebra, bits.op[5:]
        if predicate in ("eq", "ne"):
            half = 1 << a.width - 1
            narrow = all(-half <= term.low and term.high < half for term in (self.lower(a), self.lower(b)))
            read = self.signed if narrow and a.width > 1 else self.condition if a.width == 1 else self.unsigned
            same = algebra.equal(read(a), read(b))
            return same if predicate == "eq" else algebra.negation(same)
        read = self.signed if predicate[0] == "s" else self.unsigned
        x, y = read(a), read(b)
        if predicate[1:] in ("gt", "ge"):
            x, y = y, x
        return algebra.less(x, y) if predicate[2] == "t" else algebra.at_most(x, y)

    def _select(self, bits: Bits, condition: Bits, a: Bits, b: Bits) -> Term:
        algebra, known = self.algebra, self.condition(condition)
        if known.is_const:
            return self.lower(a if known.value else b)
        path = self._path
        self._path = path | {known}
        first = self.lower(a)
        self._path = path | {algebra.negation(known)}
        second = self.lower(b)
        self._path = path
        return algebra.choose(known, first, second)

    def _sext(self, bits: Bits, a: Bits) -> Term:
        return self.algebra.scale(self.condition(a), -1) if a.width == 1 else self.signed(a)

    def _trunc(self, bits: Bits, a: Bits) -> Term:
        term = self.lower(a)
        return self.algebra.mod(term, self.algebra.const(2)) if bits.width == 1 else term

    def _fptosi(self, bits: Bits, a: Bits) -> Term:
        half = 1 << bits.width - 1
        return self._of_float(a, max(-half, 1 - _FAR), min(half, _FAR) - 1)

    def _fptoui(self, bits: Bits, a: Bits) -> Term:
        return self._of_float(a, 0, min(1 << bits.width, _FAR) - 1)

    def _of_float(self, a: Bits, low: int, high: int) -> Term:
        """A float without its fraction. LLVM leaves open what one beyond [low, high] becomes, and processors differ:
        such arguments are refused.
        """
        term = self.algebra.truncated(self.floats.lower(a), -_FAR, _FAR - 1)
        return self.algebra.within(self.guard(term, low, high), low, high)

    def _abs(self, bits: Bits, a: Bits) -> Term:
        term = self.signed(a)
        return self.algebra.maximum(term, self.algebra.scale(term, -1))

    def _doublings(self, bits: Bits, limit: Bits, exponent: int, most: int, predicate: str) -> Term:
        """How often 2**exponent is doubled until it is at least `limit`."""
        algebra = self.algebra
        term = self.signed(limit) if predicate == "slt" else self.unsigned(limit)
        if term.high > 1 << most:
            term = self.guard(term, min(term.low, 0), 1 << most)
        length = algebra.bit_length(algebra.maximum(algebra.plus(term, -1), algebra.const(0)))
        return algebra.maximum(algebra.plus(length, -exponent), algebra.const(0))


def _number(term: Term) -> int:
    return term.number


def _operands(term: Term) -> tuple[Term, ...]:
    if term.op == "sum":
        return tuple(part for part, _ in term.args[1])
    return tuple(item for item in term.args if isinstance(item, Term))


def _runs(mask: int) -> list[tuple[int, int]]:
    """[low, high) of each run of ones."""
    runs, at = [], 0
    while mask >> at:
        low = at + ((mask >> at & -(mask >> at)).bit_length() - 1)
        inverted = ~(mask >> low)
        at = low + (inverted & -inverted).bit_length() - 1
        runs.append((low, at))
    return runs
