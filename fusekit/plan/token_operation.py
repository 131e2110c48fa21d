"""What an operation that works token by token is made of: operands, and the kernel that takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fusekit.plan.quantise import SIDE

if TYPE_CHECKING:
    from fusekit.abi import Expr

Keys = Mapping[str, Any]
Extent = int | str | list[Any]
Rule = tuple[Any, str]  # of a constraint of the launch record: an expression that must be 0, and the rule in words
ROUTER, PERMUTATION, EXCHANGE, CHECK = "router", "permutation", "exchange", "check"
NORM_TOKENS = 32  # of a row of `partial` of rms-norm-bwd
INPUT, OUTPUT, INOUT, SCALAR, PEERS = "input", "output", "inout", "scalar", "peers"


@dataclass(frozen=True, slots=True)
class TokenOperand:
    """A tensor, or a scalar, or the windows of all ranks; these have no shape.

    dtype: a type, or the key of the spec that says it. shape: dims in a row. T tokens, M rows, H elements of a row, B
    blocks of 128 of them, P blocks of a norm's tokens and E groups are known at a launch; X experts, K choices of a
    token, TK choices of all tokens, NX terms of X numbers, W words of a routing map and numbers when a kernel is built.
    when: whether a kernel with these keys has it. sparse: whether only the chosen experts' elements of [T, X] are read.
    bounds: minimum, maximum and divisor of a scalar. size: bytes of a window.
    """

    name: str
    role: str
    dtype: str
    shape: str
    words: str
    when: Callable[[Keys], Any] = bool
    sparse: bool = False
    bounds: Callable[[Keys], tuple[int, int, int]] | None = None
    size: Callable[[Keys], Expr] | None = None

    def extents(self, keys: Keys) -> tuple[Extent, ...]:
        """The shape: numbers, names of dims, and an expression for TK."""
        experts, topk = keys["experts"], keys["topk"]
        known: dict[str, Extent] = {"X": experts, "K": topk, "W": -(-experts // 32), "TK": ["mul", topk, "T"]}
        known |= {"NX": keys.get("terms", 0) * experts, "B": ["ceildiv", "H", SIDE], "P": ["ceildiv", "T", NORM_TOKENS]}
        return tuple(int(dim) if dim.isdigit() else known.get(dim, dim) for dim in self.shape.split())

    def dtype_of(self, keys: Keys) -> str:
        """Its type in a kernel with these keys."""
        return str(keys.get(self.dtype, self.dtype))


@dataclass(frozen=True, slots=True)
class TokenOperation:
    """One operation. kernel: MODULE:CLASS, of which `of(spec)` gives what is traced. long_row: see `Operation`.

    constraints: of the launch record.
    """

    name: str
    family: str
    kernel: str
    operands: tuple[TokenOperand, ...]
    long_row: int = 0
    constraints: Callable[[Keys], tuple[Rule, ...]] | None = None

    @property
    def wide(self) -> bool:
        """Whether rows have H elements."""
        return any("H" in operand.shape.split() for operand in self.operands)

    def of(self, keys: Keys) -> tuple[TokenOperand, ...]:
        """The operands of a kernel with these keys, in the order of its host function, scalars last."""
        return tuple(operand for operand in self.operands if operand.when(keys))

    def facts(self, keys: Keys) -> dict[str, Any]:
        """In JSON types, all that a kernel with these keys is made from: a key holds that, and not this file."""
        operands = [
            _facts(operand, keys) | {"dtype": operand.dtype_of(keys), "extents": list(operand.extents(keys))}
            for operand in self.operands
        ]
        return _facts(self, keys) | {"wide": self.wide, "operands": operands}


def _facts(row: TokenOperand | TokenOperation, keys: Keys) -> dict[str, Any]:
    """Its fields, what depends on the keys as it is with these; but for what reaches no kernel."""
    facts = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in ("words", "long_row")}
    return {name: _plain(value(keys) if callable(value) else value) for name, value in facts.items()}


def _plain(value: Any) -> Any:
    """In JSON types."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
