"""The passes of a layer with expert parallelism; docs/layers.md defines them.

    of a token's rank    router, choices | dispatch of x                                         combine -> y
    of an expert's rank                  | index, fc1, fc2, the sum of a token's rows ---------> |

With overlap, a dispatch is two launches: rows are sent on the side stream, and the products that read them begin when
the choices are there. The backward pass has what the forward pass made of the choices, so its products begin at once,
unless they read the choices. When x is sent again, the gradients of other weights are made meanwhile.

Backward, a dispatch of dy takes the place of that of x, and a combine of dx that of y. The gradients of weights go back
with dx; or before, where the router's part of dx is made of them, or no caller asks for dx. x is sent again where a
step needs it: to keep what came would take as much memory as a window for each layer.

By a recipe, the forward pass sends FP8 values of x and their scales, which every rank would make of the same rows. The
backward pass sends x and dy in bf16: it also reads FP8 values along the tokens, whose scales are of 128 rows of an
expert, and these rows come together only at the experts' rank. Quantising FP8 values again would give others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusekit.abi.layer_pass import KEPT
from fusekit.plan.exchange import CHOICES, GRAIN, NOTHING, ROWS, of_row, parts, regions, wide, words
from fusekit.plan.layer.factors import E4M3, Blocks, Rows
from fusekit.plan.layer.options import Options
from fusekit.plan.layer.passes import Experts, Passes
from fusekit.plan.layer.program import BOTH, CHECKED, DGRAD, RECOMPUTE, WGRAD, Program
from fusekit.plan.quant import NONE
from fusekit.plan.quantise import SIDE

# Windows (IPC buffers): of FP8 values of x, of x, of dy, of sums of rows, and of gradients of weights.
WINDOWS = FP8, SENT, GRADS, SUMS, RETURNED = "fp8", "sent", "grads", "sums", "returned"
BLOCKS = 16  # that send rows while products run, each on a multiprocessor that these lack


def arrives(options: Options) -> str:
    """The window that forward sends x into: FP8 values of it, unless experts read rows that weights multiply."""
    return FP8 if options.recipe != NONE and options.router["scale"] != "input" else SENT


def stores(program: Program, which: str = "") -> dict[str, str]:
    """The windows of all passes, or of one, with the part that takes most of each."""
    chosen = [step for name, steps in program.steps.items() if which in ("", name) for step in steps]
    largest: dict[str, str] = {}
    for window in WINDOWS:
        into = [step.part for step in chosen if step.window == window]
        if into:
            largest[window] = max(into, key=lambda part: (wide(program.parts[part]), sum(parts(program.parts[part]))))
    return largest


def room(options: Options, tokens: int, rows: int | None = None) -> dict[str, int]:
    """S, M, and F, words of a window that record what has come, for at most so many tokens of each rank, and rows of a
    rank's experts; None: enough for any routing.
    """
    slots = options.ranks * -(-tokens // GRAIN) * GRAIN
    return {"S": slots, "F": words(slots), "M": slots * min(options.topk, options.local) if rows is None else rows}


def window_sizes(program: Program, options: Options) -> dict[str, int]:
    """Bytes of each window of a program that has its room."""
    sizes = {}
    for window, part in stores(program).items():
        keys: Mapping[str, Any] = program.parts[part]
        row, scales = of_row(keys, options.hidden)
        capacity = program.room["S"] // options.ranks
        sizes[window] = int(regions(capacity, row, options.ranks, *parts(keys), scales).end)
    return sizes


class RankedExperts(Experts):
    """The passes of one rank. Its own tokens are T; its experts see S places of a window."""

    dim, x, dy = "S", f"{SENT}.rows", f"{GRADS}.rows"
    weights_in, chosen, dweights = f"{SENT}.weights", f"{GRADS}.indices", "row_dweights"

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        o, p = self.o, passes
        self.again = o.keep == "x" or self.by_input  # whether the backward pass begins with x
        self.first = arrives(o)
        self.rows_dy = replace(self.rows_dy, fp8="dy")
        if not self.by_input:
            self.rows_x = replace(self.rows_x, fp8="x")
        for window in dict.fromkeys((self.first, SENT, GRADS)):
            p.buffer(f"{window}.rows", "S", o.hidden, dtype=E4M3 if window == FP8 else "", place=window)
            p.buffer(f"{window}.indices", "S", o.topk, dtype="i32", place=window)
            p.buffer(f"{window}.weights", "S", o.topk, dtype="f32", place=window)
        if self.first == FP8:
            p.buffer(f"{FP8}.scales", -(-o.hidden // SIDE), "S", dtype="f32", place=FP8)
        if o.overlap:
            for window in (SENT, GRADS):
                p.buffer(f"{window}.arrivals", "F", dtype="i32", place=window)
            self.rows_dy = replace(self.rows_dy, arrivals=f"{GRADS}.arrivals")
            if not self.by_input:
                self.rows_x = replace(self.rows_x, arrivals=f"{SENT}.arrivals")
        p.buffer("overflow", 4, dtype="i32", place=CHECKED)
        p.buffer("row_dweights", "S", o.topk, dtype="f32")

    def exchange(self, op: str, **keys: object) -> dict[str, object]:
        """The table of a kernel that all ranks launch together."""
        return self.rows(op, ranks=self.o.ranks, experts=self.o.experts, **keys)

    def dispatch(self, which: str | tuple[str, ...], x: str, window: str, chosen: bool) -> None:
        """Rows of tokens, or of their gradients, to the ranks of their experts; on the side stream where a product
        reads them.

        chosen: whether the choices are read there.
        """
        awaited = {SENT: self.rows_x, GRADS: self.rows_dy}[window].arrivals
        choices = {"indices": "indices", "weights": "weights"}
        writes = {f"window.{part}": f"{window}.{part}" for part in ("rows", "indices", "weights")}
        keys = self.exchange("moe-dispatch", weighted=True)
        if not awaited:
            self.passes.step(which, "dispatch", keys, {"x": x, **choices}, writes, window)
            return
        reads, rows = {"x": x, "indices": "indices"}, {"window.rows": f"{window}.rows"}
        rows_keys = {**keys, "sends": ROWS, "blocks": BLOCKS}
        self.passes.step(which, "dispatch-rows", rows_keys, reads, rows, window, on_side=True)
        if not chosen:
            rows_alone = {**rows, "window.arrivals": awaited}
            self.passes.step(which, "dispatch-begun", {**keys, "sends": NOTHING}, rows, rows_alone, window)
            return
        writes["window.arrivals"] = awaited
        self.passes.step(which, "dispatch-choices", {**keys, "sends": CHOICES}, choices | rows, writes, window)

    def dispatch_fp8(self) -> None:
        """FP8 values of this rank's rows, which a shared expert reads, too, to the ranks of their experts."""
        p, o = self.passes, self.o
        local = Rows("x", o.hidden, "T", fp8="shared_x" if o.shared else "own_x")
        assert isinstance(self.factors, Blocks)
        self.factors.fp8(p.firsts if o.shared else BOTH, local)
        reads = {"x": f"{local.base}_q", "x_s": f"{local.base}_s", "indices": "indices", "weights": "weights"}
        writes = {f"window.{part}": f"{FP8}.{part}" for part in ("rows", "indices", "weights", "scales")}
        keys = {**self.exchange("moe-dispatch", weighted=True), "dtype": E4M3}
        p.step(BOTH, "dispatch-fp8", keys, reads, writes, FP8)

    def index(self) -> None:
        """What came, sorted by expert; and how many of this rank's own tokens chose each expert, for the loss."""
        p, o = self.passes, self.o
        if self.first == FP8:
            self.dispatch_fp8()
        else:
            self.dispatch(BOTH, "x", SENT, True)
        reads = {"indices": f"{self.first}.indices"}
        writes = {
            "offsets": p.buffer("offsets", o.local, dtype="i32", place=KEPT),
            "order": p.buffer("order", "M", dtype="i32"),
            "inverse": p.buffer("inverse", "S", o.topk, dtype="i32", place=KEPT),
            "token": p.buffer("token", "M", dtype="i32", place=KEPT),
            "wanted": p.buffer("wanted", 1, dtype="i32"),
        }
        keys = self.router_op("moe-index", tokens=True, bounded=True, experts=o.local, weighted=not self.by_input)
        if not self.by_input:
            reads["weights"] = f"{self.first}.weights"
            writes["row_scale"] = p.buffer("row_scale", "M", dtype="f32", place=KEPT)
        p.step(BOTH, "index", keys, reads, writes)
        if self.router["aux_loss"]:
            writes = {
                "offsets": p.buffer("own_offsets", o.experts, dtype="i32"),
                "order": p.buffer("own_order", "C", dtype="i32"),
                "inverse": p.buffer("own_inverse", "T", o.topk, dtype="i32"),
                "counts": p.buffer("counts", o.experts, dtype="i32", place=KEPT),
            }
            p.step(BOTH, "counts", self.router_op("moe-index", counts=True), {"indices": "indices"}, writes)

    def forward(self) -> None:
        if self.again:
            self.dispatch(RECOMPUTE, "x", SENT, self.by_input)
        if self.first == FP8:
            assert isinstance(self.factors, Blocks)
            if self.again:
                self.factors.fp8(RECOMPUTE, self.rows_x, turned=True)
            reads = {"x": f"{FP8}.rows", "x_s": f"{FP8}.scales", "inverse": "inverse"}
            keys = {**self.rows("moe-permute"), "dtype": E4M3}
            writes = self.factors.of_rows("y", self.rows_x)
            self.passes.step(BOTH, "permute-fp8", keys, reads, {"y": writes["y_q"], "y_s": writes["y_s"]})
        super().forward()

    def through(self) -> None:
        self.dispatch(DGRAD, "dy", GRADS, self.o.bias)
        super().through()

    def rows_weights_backward(self) -> None:
        super().rows_weights_backward()
        keys = self.exchange("moe-combine", gradients=True, rows=False)
        reads = {"grad_weights": "row_dweights", "indices": "indices"}
        spared = "dx" if self.given else ""  # combine-dx brings them
        self.passes.step(DGRAD, "weights-return", keys, reads, {"returned": "dweights"}, RETURNED, spared=spared)

    def unpermute(
        self, which: str | tuple[str, ...], part: str, x: str, y: str, more: Sequence[str], weighted: bool
    ) -> None:
        """The sum of each token's rows on every rank, their sum on the token's rank, and `more`."""
        returned = which == DGRAD and self.given
        keys = self.exchange("moe-combine", weighted=weighted, addends=len(more), gradients=returned)
        keys |= {"overflow": True} if which == BOTH else {}
        reads = {"x": x, "inverse": "inverse", "indices": "indices"}
        reads |= {"weights": f"{self.first}.weights"} if weighted else {}
        reads |= {f"addend{number}": name for number, name in enumerate(more)}
        part = {"unpermute": "combine", "unpermute-dx": "combine-dx"}[part]
        reads |= {"grad_weights": "row_dweights"} if returned else {}
        reads |= {"wanted": "wanted"} if which == BOTH else {}
        writes = {"y": y, **({"returned": "dweights"} if returned else {})}
        writes |= {"overflow": "overflow"} if which == BOTH else {}
        self.passes.step(which, part, keys, reads, writes, SUMS, needs=y if returned else "")

    def weights(self) -> None:
        if not self.again:
            self.dispatch(WGRAD, "x", SENT, False)
        super().weights()
