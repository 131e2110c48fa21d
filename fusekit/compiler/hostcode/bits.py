"""What host code computes, as a graph: each node is an LLVM operation on values of a fixed width.

Nodes are interned, so that equal ones are identical and a shared part is there once. An operation on constants is a
constant. Nothing is simplified beyond that: `lower` turns nodes into expressions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fusekit.errors import BuildError

PREDICATES = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
"""The predicates of an icmp, by number."""
FLOAT_OPERATIONS = ("fadd", "fsub", "fmul", "fdiv")
FLOAT_PREDICATES = (
    "false", "oeq", "ogt", "oge", "olt", "ole", "one", "ord", "ueq", "ugt", "uge", "ult", "ule", "une", "uno", "true",
)  # fmt: skip
"""The predicates of an fcmp, by number. The second half is true of a NaN."""


class Bits:
    """One value. op: what made it; args: nodes, or what the op needs; width in bits.

    Leaves: ``const`` (an unsigned integer), ``argument`` (a name), ``float`` (a number), ``undefined``, and ``unknown``
    (why: in words, with the place in the host code), which may be computed with but is in no launch.
    """

    __slots__ = ("args", "op", "width")

    def __init__(self, op: str, width: int, args: tuple[Any, ...]) -> None:
        self.op, self.width, self.args = op, width, args

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    @property
    def number(self) -> int:
        """The value of a constant, without a sign."""
        value: int = self.args[0]
        return value

    @property
    def signed(self) -> int:
        return signed(self.args[0], self.width)

    def __repr__(self) -> str:
        return f"{self.op}.{self.width}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address of host memory: `offset` bytes into `memory`, which an alloca made."""

    memory: int
    offset: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a global, or what was loaded from it."""

    name: str


class UndecidedError(BuildError):
    """A launch record has a constant where the host code has `on`, which depends on the arguments."""

    def __init__(self, message: str, on: Iterable[Bits] = ()) -> None:
        super().__init__(message)
        self.on = tuple(on)


class Graph:
    """Makes nodes."""

    def __init__(self) -> None:
        self._nodes: dict[Any, Bits] = {}

    def const(self, value: int, width: int) -> Bits:
        return self._node("const", width, (value & (1 << width) - 1,))

    def argument(self, name: str, width: int) -> Bits:
        return self._node("argument", width, (name,))

    def unknown(self, why: str, width: int) -> Bits:
        return self._node("unknown", width, (why,))

    def undefined(self, width: int) -> Bits:
        return self._node("undefined", width, ())

    def float(self, value: float, width: int) -> Bits:
        return self._node("float", width, (value.hex() if value == value else "nan",))

    def make(self, op: str, width: int, *args: Any) -> Bits:
        """`op` of nodes (or of a parameter that is none); folded where all are constants."""
        nodes = [item for item in args if isinstance(item, Bits)]
        if op == "select":
            if nodes[0].is_const:
                return nodes[1] if nodes[0].number else nodes[2]
            if nodes[1] is nodes[2]:
                return nodes[1]
        if nodes and all(node.is_const for node in nodes):
            value = _fold(op, width, nodes)
            if value is not None:
                return self.const(value, width)
        strange = next((node for node in nodes if node.op == "unknown"), None)
        if strange is not None:
            return self.unknown(strange.args[0], width)
        return self._node(op, width, args)

    def compare(self, predicate: str, a: Bits, b: Bits) -> Bits:
        return self.make(f"icmp_{predicate}", 1, a, b)

    def negation(self, condition: Bits) -> Bits:
        return self.make("xor", 1, condition, self.const(1, 1))

    def _node(self, op: str, width: int, args: tuple[Any, ...]) -> Bits:
        key = (op, width, *args)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Bits(op, width, args)
        return node


def words(nodes: Iterable[Bits]) -> set[str]:
    """The names of the arguments that `nodes` are made of, as far as that is known."""
    pending, seen = list(nodes), set[Bits]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [item for item in node.args if isinstance(item, Bits)]
    return {node.args[0] for node in seen if node.op == "argument"}


def signed(value: int, width: int) -> int:
    """The two's complement value of `width` bits."""
    return value - (1 << width) if value >> width - 1 else value


def _fold(op: str, width: int, nodes: list[Bits]) -> int | None:
    """The value of `op` on constants; None for what has none (a division by 0, a shift too far, no integer)."""
    if op.startswith("icmp_"):
        return int(_compare(op[5:], *nodes))
    a, b = nodes[0].number, nodes[-1].number
    s, t = nodes[0].signed, nodes[-1].signed
    if op in ("udiv", "urem", "sdiv", "srem") and b == 0:
        return None
    if op in ("shl", "lshr", "ashr") and b >= width:
        return None
    quotient = abs(s) // abs(t) * (1 if (s < 0) == (t < 0) else -1) if op in ("sdiv", "srem") else 0
    values = {
        "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b, "and": lambda: a & b, "or": lambda: a | b,
        "xor": lambda: a ^ b, "shl": lambda: a << b, "lshr": lambda: a >> b, "ashr": lambda: s >> b,
        "udiv": lambda: a // b, "urem": lambda: a % b, "sdiv": lambda: quotient, "srem": lambda: s - quotient * t,
        "zext": lambda: a, "sext": lambda: s, "trunc": lambda: a, "smin": lambda: min(s, t), "smax": lambda: max(s, t),
        "umin": lambda: min(a, b), "umax": lambda: max(a, b), "ctlz": lambda: nodes[0].width - a.bit_length(),
        "abs": lambda: abs(s),
    }  # fmt: skip
    value = values.get(op)
    return None if value is None else value()


def _compare(predicate: str, a: Bits, b: Bits) -> bool:
    x, y = (a.signed, b.signed) if predicate[0] == "s" else (a.number, b.number)
    kind = predicate if predicate in ("eq", "ne") else predicate[1:]
    return {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[kind]
