"""What the products of a layer read: tensors as they are, or by the recipe "fp8-block" codes and their scales.

    product       reads                          product      reads, along the tokens
    fc1           rows of x, w1                  fc2-wgrad    dy, activation
    fc2           rows of the activation, w2     fc1-wgrad    dz, x
    fc2-dgrad     rows of dy, w2 turned
    fc1-dgrad     rows of dz, w1 turned

Codes of rows are made from rows in the order of the experts, so a product gathers nothing. Those of weights are the
caller's: `QUANTISE` makes them of w, in both orientations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fusekit.plan.layer.program import ARGUMENT, QUANTISE, WEIGHTS
from fusekit.plan.quant import BLOCK, NONE, SIDE

if TYPE_CHECKING:
    from fusekit.plan.layer.passes import Passes

CODES = "e4m3"
Which = str | tuple[str, ...]  # one or more passes of a layer


@dataclass(frozen=True, slots=True)
class Given:
    """What a kernel's table says of a factor, and what its arguments read."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Given) -> Given:
        return Given({**self.keys, **other.keys}, {**self.reads, **other.reads})


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor whose rows products read. extent: "M", rows of experts, or "T", tokens, where its rows are of neither
    expert. index: what chooses M rows of a tensor of tokens, "" for those of the tensor itself. codes: begins the
    names of its codes; default: its own name.
    """

    name: str
    columns: int
    extent: str
    index: str = ""
    codes: str = ""

    @property
    def base(self) -> str:
        return self.codes or self.name


class Factors(Protocol):
    """The factors of a layer's products, by a recipe."""

    def weight(self, name: str, major: str, *shape: int) -> None:
        """Makes what products read of the weight `name`, which lies by `major`."""

    def product(self, which: Which, rows: Rows, weight: str, major: str, *, backward: bool = False) -> Given:
        """x and w of a product, and makes them in the passes `which`. major: of the weight; backward: takes a gradient
        through it.
        """

    def tokens(self, argument: str, rows: Rows) -> Given:
        """The factor `argument` of a weight gradient, "dy" or "x", behind the products that read the same rows."""


def factors(passes: Passes) -> Factors:
    """Those of the layer's recipe."""
    return Plain() if passes.options.recipe == NONE else Blocks(passes)


class Plain:
    """Tensors of the layer's dtype."""

    def weight(self, name: str, major: str, *shape: int) -> None:
        """There is nothing to make."""

    def product(self, which: Which, rows: Rows, weight: str, major: str, *, backward: bool = False) -> Given:
        """As in `Factors`."""
        other = "n" if major == "k" else "k"
        return self.tokens("x", rows) | Given({"b_major": other if backward else major}, {"w": weight})

    def tokens(self, argument: str, rows: Rows) -> Given:
        """As in `Factors`."""
        if not rows.index:
            return Given({}, {argument: rows.name})
        return Given({"gather": argument}, {argument: rows.name, "index": rows.index})


class Blocks:
    """Codes: NAME_q of rows, with the scales NAME_s; NAME_t and NAME_ts along the tokens, or of a weight turned."""

    def __init__(self, passes: Passes) -> None:
        self.passes, self.options = passes, passes.options

    def weight(self, name: str, major: str, *shape: int) -> None:
        """As in `Factors`: codes in both orientations, by a pass of their own; without those that only gradients read
        where there are none.
        """
        *experts, rows, columns = shape
        blocks = [-(-size // SIDE) for size in (rows, columns)]
        made = self._buffers("w", name, "q", (*experts, rows, columns), (*experts, *blocks), place=ARGUMENT)
        turned = self.options.trained or major == "n"
        if turned:
            made |= self._buffers("w", name, "t", (*experts, columns, rows), (*experts, *blocks[::-1]), place=ARGUMENT)
        problem = {"E": (experts or [1])[0], "M": rows, "K": columns}
        keys = {"blocks": "128x128", "transpose": turned, "groups": bool(experts), "problem": problem}
        self._step(QUANTISE, name, keys, {"w": name}, made)

    def product(self, which: Which, rows: Rows, weight: str, major: str, *, backward: bool = False) -> Given:
        """As in `Factors`. A pass over a gradient also makes its codes along the tokens."""
        self._codes(which, rows, turned=backward)
        codes, scales = ("q", "s") if (major == "k") is not backward else ("t", "ts")
        reads = {"x": f"{rows.base}_q", "x_s": f"{rows.base}_s"}
        return Given({"quant": {"in": BLOCK}}, {**reads, "w": f"{weight}_{codes}", "w_s": f"{weight}_{scales}"})

    def tokens(self, argument: str, rows: Rows) -> Given:
        """As in `Factors`."""
        if f"{rows.base}_t" not in self.passes.buffers:
            self._codes(WEIGHTS, rows, by_row=False, turned=True)
        reads = {f"{argument}_t": f"{rows.base}_t", f"{argument}_ts": f"{rows.base}_ts"}
        return Given({"quant": {"in": BLOCK}}, reads)

    def _codes(self, which: Which, rows: Rows, *, by_row: bool = True, turned: bool = False) -> None:
        o, columns, base = self.options, rows.columns, rows.base
        grouped, made = rows.extent == "M", dict[str, str]()
        if by_row:
            made |= self._buffers("x", base, "q", (rows.extent, columns), (-(-columns // SIDE), rows.extent))
        if turned:
            padded, blocks = f"{rows.extent}_padded", f"{rows.extent}_blocks"
            made |= self._buffers("x", base, "t", (columns, padded), (blocks, columns))
        reads = {"x": rows.name}
        reads |= {"index": rows.index} if rows.index else {}
        reads |= {"offsets": "offsets"} if turned and grouped else {}
        keys = {"rows": by_row, "transpose": turned, "gather": bool(rows.index), "groups": grouped or not turned}
        problem = {"E": o.experts if grouped else 1, "M": o.tokens * (o.topk if grouped else 1), "K": columns}
        problem |= {"T": o.tokens} if rows.index else {}
        self._step(which, base if by_row else f"{base}-turned", {**keys, "problem": problem}, reads, made)

    def _buffers(
        self,
        argument: str,
        name: str,
        end: str,
        codes: tuple[int | str, ...],
        scales: tuple[int | str, ...],
        **place: str,
    ) -> dict[str, str]:
        """The codes NAME_q or NAME_t, and their scales, by the arguments of a kernel."""
        scaled = "s" if end == "q" else "ts"
        return {
            f"{argument}_{end}": self.passes.buffer(f"{name}_{end}", *codes, dtype=CODES, **place),
            f"{argument}_{scaled}": self.passes.buffer(f"{name}_{scaled}", *scales, dtype="f32", **place),
        }

    def _step(
        self, which: Which, part: str, keys: Mapping[str, Any], reads: Mapping[str, str], writes: Mapping[str, str]
    ) -> None:
        table = {"op": "quantise", "out": BLOCK, **keys}
        self.passes.step(which, f"quantise-{part.replace('_', '-')}", table, reads, writes)
