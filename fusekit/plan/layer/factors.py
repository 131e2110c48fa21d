"""The operands of a layer's products: tensors as they are; or by the recipe "fp8-block" FP8 values and their scales; or
with `weights = "fp8-block"` or "mxfp4" rows as they are and weights as a checkpoint has them.

    product       reads                          product      reads, along the tokens
    fc1           rows of x, w1                  fc2-wgrad    dy, activation
    fc2           rows of the activation, w2     fc1-wgrad    dz, x
    fc2-dgrad     rows of dy, w2 transposed
    fc1-dgrad     rows of dz, w1 transposed

FP8 values of rows are made from rows in the order of the experts, so a product gathers nothing. The products make those
of the activation, which is then not stored in another form, and where `Blocks.turns` those of dz, and of the activation
along the tokens. Those of weights are the caller's: `QUANTISE` makes them of w, in both orientations; with
`recompute_fp8` only those that forward products read, and the backward pass makes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fusekit.abi.layer_pass import ARGUMENT, SCRATCH
from fusekit.plan.layer.program import QUANTISE, WGRAD
from fusekit.plan.quant import BLOCK, FP8_W, MX_SIDE, MX_W, NONE, PACKED, SIDE
from fusekit.plan.quantise import MOST_TOPK, SQUARE

if TYPE_CHECKING:
    from fusekit.plan.layer.passes import Passes

E4M3 = "e4m3"
MXFP4 = "mxfp4"
Which = str | tuple[str, ...]  # one or more passes of a layer


@dataclass(frozen=True, slots=True)
class Given:
    """Keys of a kernel's table for an operand or a result, and what its arguments read and write."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    reads: Mapping[str, str] = field(default_factory=dict)
    writes: Mapping[str, str] = field(default_factory=dict)

    def __or__(self, other: Given) -> Given:
        return Given({**self.keys, **other.keys}, {**self.reads, **other.reads}, {**self.writes, **other.writes})


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor whose rows products read or make. extent: "M", rows of experts, or "T", tokens, where its rows are of
    neither expert. index: what chooses M rows of a tensor of tokens, "" for those of the tensor itself. inverse: what
    says which of them each token's are, "" if nothing does. fp8: begins the names of its FP8 values; default:
    its own name. arrivals: where a window says which rows have come, while products run that read them by index; "":
    all have. squares: 128 tokens of 128 columns have one scale, not 128 of a column.
    """

    name: str
    columns: int
    extent: str
    index: str = ""
    inverse: str = ""
    fp8: str = ""
    arrivals: str = ""
    squares: bool = False

    @property
    def base(self) -> str:
        return self.fp8 or self.name


class Factors(Protocol):
    """The operands of a layer's products, and the results that are operands of others, by a recipe."""

    def stored(self, *shape: int) -> tuple[int, ...]:
        """The shape in memory of a weight of `shape`."""

    def weight(self, name: str, major: str, *shape: int) -> None:
        """Adds the step that quantises the weight `name`, which lies by `major`."""

    def product(self, which: Which, rows: Rows, weight: str, major: str, *, backward: bool = False) -> Given:
        """The operands x and w of a product, and the steps that quantise them in the passes `which`. major: of the
        weight; backward: takes a gradient through it.
        """

    def tokens(self, argument: str, rows: Rows) -> Given:
        """The operand `argument` of a weight gradient, "dy" or "x", after the products that read the same rows."""

    def activation(self, rows: Rows) -> Given:
        """The outputs of a product with an activation; its keys overrule those of `product`."""

    def gradient(self, dz: Rows, rows: Rows) -> Given:
        """The outputs of a product with a backward activation: dz, and the activation's rows recomputed."""


def factors(passes: Passes) -> Factors:
    """The operands of the layer's recipe, or with weights as a checkpoint has them."""
    if passes.options.weights != NONE:
        return (PackedWeights if passes.options.weights == MXFP4 else CodedWeights)(passes)
    return Plain(passes) if passes.options.recipe == NONE else Blocks(passes)


class Plain:
    """Tensors of the layer's dtype; its methods are those of `Factors`."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes

    def stored(self, *shape: int) -> tuple[int, ...]:
        return shape

    def weight(self, name: str, major: str, *shape: int) -> None:
        """Nothing to quantise."""

    def product(self, which: Which, rows: Rows, weight: str, major: str, *, backward: bool = False) -> Given:
        other = "n" if major == "k" else "k"
        given = self.tokens("x", rows) | Given({"b_major": other if backward else major}, {"w": weight})
        return given | Given({"awaits": True}, {"arrivals": rows.arrivals}) if rows.arrivals else given

    def tokens(self, argument: str, rows: Rows) -> Given:
        if not rows.index:
            return Given({}, {argument: rows.name})
        return Given({"gather": argument}, {argument: rows.name, "index": rows.index})

    def activation(self, rows: Rows) -> Given:
        return Given(writes={"y": self.passes.buffer(rows.name, rows.extent, rows.columns)})

    def gradient(self, dz: Rows, rows: Rows) -> Given:
        return Given(writes={"dz": self.passes.buffer(dz.name, dz.extent, dz.columns)}) | self.activation(rows)


class CodedWeights(Plain):
    """Tensors of the layer's dtype times FP8 weights, of which NAME_s has the scales."""

    kind = FP8_W

    def weight(self, name: str, major: str, *shape: int) -> None:
        """As in `Factors`: the scales are an argument."""
        *experts, rows, columns = shape
        blocks = [-(-size // SIDE) for size in (rows, columns)]
        self.passes.buffer(f"{name}_s", *experts, *blocks, dtype="f32", place=ARGUMENT)

    def product(self, which: Which, rows: Rows, weight: str, major: str, *, backward: bool = False) -> Given:
        """As in `Factors`."""
        given = super().product(which, rows, weight, major, backward=backward)
        return given | Given({"quant": {"in": self.kind}}, {"w_s": f"{weight}_s"})


class PackedWeights(CodedWeights):
    """Likewise of MXFP4 weights [..., N, K / 32, 16] with a scale of a byte for 32 of K."""

    kind = MX_W

    def stored(self, *shape: int) -> tuple[int, ...]:
        """As in `Factors`: bytes of two values."""
        return (*shape[:-1], shape[-1] // MX_SIDE, MX_SIDE // 2)

    def weight(self, name: str, major: str, *shape: int) -> None:
        """As in `Factors`: the scales are an argument."""
        self.passes.buffer(f"{name}_s", *shape[:-1], shape[-1] // MX_SIDE, dtype=PACKED, place=ARGUMENT)


class Blocks:
    """FP8 values: NAME_q of rows, with the scales NAME_s; NAME_t and NAME_ts along the tokens, or transposed."""

    def __init__(self, passes: Passes) -> None:
        self.passes, self.options = passes, passes.options
        self.plain = Plain(passes)
        self._shapes: dict[str, tuple[int, ...]] = {}  # of weights

    def stored(self, *shape: int) -> tuple[int, ...]:
        return shape

    def weight(self, name: str, major: str, *shape: int) -> None:
        """As in `Factors`: FP8 values in both orientations, by a pass of their own; without those that only gradients
        read where there are none, or where the backward pass makes them.
        """
        self._shapes[name] = shape
        if self.options.recompute_fp8:
            self._weight(QUANTISE, name, name, _end(major), ARGUMENT)
        else:
            ends = "qt" if self.options.trained or major == "n" else "q"
            self._weight(QUANTISE, name, name, ends, ARGUMENT)

    def _weight(self, which: Which, part: str, name: str, ends: str, place: str) -> None:
        """Adds a step that makes FP8 values of a weight. ends: "q" as it lies, "t" transposed, or both."""
        *experts, rows, columns = self._shapes[name]
        blocks = [-(-size // SIDE) for size in (rows, columns)]
        writes: dict[str, str] = {}
        if "q" in ends:
            writes |= self._buffers("w", name, "q", (*experts, rows, columns), (*experts, *blocks), place=place)
        if "t" in ends:
            writes |= self._buffers("w", name, "t", (*experts, columns, rows), (*experts, *blocks[::-1]), place=place)
        problem = {"E": (experts or [1])[0], "M": rows, "K": columns}
        keys = {"blocks": SQUARE, "transpose": "t" in ends, "groups": bool(experts), "problem": problem}
        keys |= {"rows": False} if "q" not in ends else {}
        keys |= {"dtype": self.options.weight_dtype} if self.options.weight_dtype else {}
        self._step(which, part, keys, {"w": name}, writes)

    def product(self, which: Which, rows: Rows, weight: str, major: str, *, backward: bool = False) -> Given:
        """As in `Factors`. A pass over a gradient also makes its FP8 values along the tokens."""
        self.fp8(which, rows, turned=backward)
        fp8 = _end(major, backward=backward)
        scales = "s" if fp8 == "q" else "ts"
        if backward and self.options.recompute_fp8:  # right before: most of the pass needs no memory for them
            self._weight(which, f"{weight}-dgrad", weight, fp8, SCRATCH)
        reads = {"x": f"{rows.base}_q", "x_s": f"{rows.base}_s"}
        return Given({"quant": {"in": BLOCK}}, {**reads, "w": f"{weight}_{fp8}", "w_s": f"{weight}_{scales}"})

    def tokens(self, argument: str, rows: Rows) -> Given:
        self.fp8(WGRAD, rows, by_row=False, turned=True)
        reads = {f"{argument}_t": f"{rows.base}_t", f"{argument}_ts": f"{rows.base}_ts"}
        return Given({"quant": {"in": BLOCK} | ({"x_blocks": SQUARE} if rows.squares else {})}, reads)

    def activation(self, rows: Rows) -> Given:
        """As in `Factors`: FP8 values of rows alone."""
        return Given({"quant": {"in": BLOCK, "out": BLOCK}}, {}, self.of_rows("y", rows))

    def gradient(self, dz: Rows, rows: Rows) -> Given:
        """As in `Factors`: FP8 values, where it `turns`."""
        if not self.turns(dz):
            return self.plain.gradient(dz, rows)
        writes = self.of_rows("dz", dz) | self._turned("dz", dz) | self._turned("y", rows)
        squares = {f"{name}_blocks": SQUARE for name, rows_of in (("dz", dz), ("y", rows)) if rows_of.squares}
        return Given({"quant": {"in": BLOCK, "out": BLOCK, "transpose": True, **squares}}, {}, writes)

    def turns(self, dz: Rows) -> bool:
        """Whether the product that makes dz makes all FP8 values of it.

        A block of its columns has no gates next to ups. Without rows it writes nothing, where a dense weight gradient
        reads a block of zeros.
        """
        whole = self.options.glu_layout != "concat" or dz.columns % (2 * SIDE) == 0
        return dz.extent == "M" and whole

    def fp8(self, which: Which, rows: Rows, *, by_row: bool = True, turned: bool = False) -> None:
        """Adds the step that quantises what no step has quantised yet, of rows and along the tokens."""
        o, columns, base = self.options, rows.columns, rows.base
        by_row, turned = (
            asked and f"{base}_{end}" not in self.passes.buffers for asked, end in ((by_row, "q"), (turned, "t"))
        )
        if not by_row and not turned:
            return
        grouped, copies = rows.extent == "M", rows.inverse and not turned and o.topk <= MOST_TOPK
        writes = (self.of_rows("x", rows) if by_row else {}) | (self._turned("x", rows) if turned else {})
        reads = {"x": rows.name}
        reads |= {"inverse": rows.inverse} if copies else {"index": rows.index} if rows.index else {}
        reads |= {"offsets": "offsets"} if turned and grouped else {}
        keys: dict[str, Any] = {
            "rows": by_row,
            "transpose": turned,
            "gather": bool(rows.index and not copies),
            "topk": o.topk if copies else 0,
            "groups": grouped or not turned,
        }
        keys |= {"transpose_blocks": SQUARE} if turned and rows.squares else {}
        problem = {"E": o.local if grouped else 1, "M": o.tokens * (o.topk if grouped else 1), "K": columns}
        problem |= {"T": o.tokens} if rows.index else {}
        self._step(which, base if by_row else f"{base}-turned", {**keys, "problem": problem}, reads, writes)

    def of_rows(self, argument: str, rows: Rows) -> dict[str, str]:
        """FP8 values of rows, and their scales, by the arguments of a kernel."""
        shape = rows.extent, rows.columns
        return self._buffers(argument, rows.base, "q", shape, (-(-rows.columns // SIDE), rows.extent))

    def _turned(self, argument: str, rows: Rows) -> dict[str, str]:
        """FP8 values along the tokens, likewise."""
        padded, blocks = f"{rows.extent}_padded", f"{rows.extent}_blocks"
        scaled = -(-rows.columns // SIDE) if rows.squares else rows.columns
        return self._buffers(argument, rows.base, "t", (rows.columns, padded), (blocks, scaled))

    def _buffers(
        self,
        argument: str,
        name: str,
        end: str,
        fp8: tuple[int | str, ...],
        scales: tuple[int | str, ...],
        **place: str,
    ) -> dict[str, str]:
        """The FP8 values NAME_q or NAME_t, and their scales, by the arguments of a kernel."""
        scaled = "s" if end == "q" else "ts"
        return {
            f"{argument}_{end}": self.passes.buffer(f"{name}_{end}", *fp8, dtype=E4M3, **place),
            f"{argument}_{scaled}": self.passes.buffer(f"{name}_{scaled}", *scales, dtype="f32", **place),
        }

    def _step(
        self, which: Which, part: str, keys: Mapping[str, Any], reads: Mapping[str, str], writes: Mapping[str, str]
    ) -> None:
        table = {"op": "quantise", "out": BLOCK, **keys}
        self.passes.step(which, f"quantise-{part.replace('_', '-')}", table, reads, writes)


def _end(major: str, *, backward: bool = False) -> str:
    """Which FP8 values of a weight that lies by `major` a product reads: "q" as it lies, "t" transposed."""
    return "q" if (major == "k") is not backward else "t"
