"""Floats of host code as expressions of a launch record; the integers in them are terms until they are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fusekit.compiler.hostcode.bits import FLOAT_OPERATIONS, Bits
from fusekit.dtypes import ROUNDINGS
from fusekit.errors import BuildError

if TYPE_CHECKING:
    from fusekit.compiler.hostcode.lower import Lowering

_INVERSE = {"ueq": "one", "ugt": "ole", "uge": "olt", "ult": "oge", "ule": "ogt", "une": "oeq", "uno": "ord"}
_EXACT = 2**53
_OF_ONE = {"fneg": "neg", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "fabs": "abs"}


class Floats:
    """Lowers floats. scalars: by the name of an argument of the graph, the record's scalar that it is."""

    def __init__(self, lowering: Lowering, scalars: Mapping[str, str]) -> None:
        self._lowering, self._scalars = lowering, scalars

    def lower(self, bits: Bits) -> Any:
        """`bits` as a float expression. Raises BuildError for what none is."""
        op, args = bits.op, bits.args
        if op == "argument" and args[0] in self._scalars:
            return self._scalars[args[0]]
        if op == "float":
            value = float("nan") if args[0] == "nan" else float.fromhex(args[0])
            return value if value - value == 0 else str(value)
        letter = {32: "f", 64: "d"}.get(bits.width, "")
        if letter and (op in FLOAT_OPERATIONS or op == "sqrt"):
            return (letter + op.removeprefix("f"), *map(self.lower, args))
        if letter and op in ("sitofp", "uitofp"):
            return self._integer(letter, args[0], op == "sitofp")
        if op in ROUNDINGS:
            return (op, self.lower(args[0]))
        if op == "fpext":
            return self.lower(args[0])
        if op in _OF_ONE:
            return (_OF_ONE[op], self.lower(args[0]))
        if op == "select":
            return ("fif", self.condition(args[0]), self.lower(args[1]), self.lower(args[2]))
        raise BuildError(
            f"host code: {self._lowering.words(bits)}; a launch record computes sums, products, quotients, square"
            " roots, comparisons and conversions of float32 and float64"
        )

    def _integer(self, letter: str, bits: Bits, signed: bool) -> Any:
        if bits.width == 1:
            term = self._lowering.condition(bits)
            if signed:
                term = self._lowering.algebra.scale(term, -1)
        else:
            term = self._lowering.signed(bits) if signed else self._lowering.unsigned(bits)
        if term.is_const and abs(term.value) < _EXACT:
            return float(term.value)
        return (f"{letter}int", term)

    def condition(self, bits: Bits) -> Any:
        """1 where a value of one bit is 1, else 0."""
        op, args = bits.op, bits.args
        if op.startswith("fcmp_"):
            return _compared(op[5:], self.lower(args[0]), self.lower(args[1]))
        if op in ("and", "or", "xor") and any(_compares(item) for item in args):
            a, b = (self.condition(item) for item in args)
            return {"and": ("fif", a, b, 0), "or": ("fif", a, 1, b), "xor": ("fif", a, _negation(b), b)}[op]
        term = self._lowering.condition(bits)
        return term.value if term.is_const else ("dint", term)


def _compares(bits: Bits) -> bool:
    return bits.op.startswith("fcmp_") or (bits.op in ("and", "or", "xor") and any(map(_compares, bits.args)))


def _compared(predicate: str, a: Any, b: Any) -> Any:
    if predicate in _INVERSE:
        return _negation(_compared(_INVERSE[predicate], a, b))
    if predicate in ("false", "true"):
        return int(predicate == "true")
    return {
        "oeq": ("feq", a, b), "ogt": ("flt", b, a), "oge": ("fle", b, a), "olt": ("flt", a, b), "ole": ("fle", a, b),
        "one": ("fif", ("flt", a, b), 1, ("flt", b, a)), "ord": ("fif", ("feq", a, a), ("feq", b, b), 0),
    }[predicate]  # fmt: skip


def _negation(condition: Any) -> Any:
    return ("fif", condition, 0, 1)
