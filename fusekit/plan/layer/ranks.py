"""The passes of a layer whose experts are spread over ranks; what they mean stands in layers.md.

    of a token's rank    router, choices | dispatch of x                                         combine -> y
    of an expert's rank                  | index, fc1, fc2, the sum of a token's rows ---------> |

With overlap, a dispatch is two launches: rows are sent aside, and the products that read them begin when the choices
are there. When x is sent again, the gradients of other weights are made meanwhile.

Backward, a dispatch of dy takes the place of that of x, and a combine of dx that of y. The gradients of weights go back
before, since the router's part of dx is made of them. x is sent again where a step needs it: to keep what came would
take as much memory as a window for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusekit.dtypes import DTYPES
from fusekit.plan.exchange import CHOICES, GRAIN, ROWS, parts, regions, wide, words
from fusekit.plan.layer.options import Options
from fusekit.plan.layer.passes import Experts, Passes
from fusekit.plan.layer.program import AGAIN, BOTH, KEPT, THROUGH, WEIGHTS, Program

# Windows: of x, of dy, of sums of rows, and of gradients of weights; and parts that store into each, the first of a
# program.
SENT, GRADS, SUMS, RETURNED = "sent", "grads", "sums", "returned"
SENDING = ("dispatch", "dispatch-rows")
WINDOWS = {SENT: SENDING, GRADS: SENDING, SUMS: ("combine",), RETURNED: ("weights-return",)}
BLOCKS = 16  # that send rows while products run, each on a multiprocessor that these lack
TRAINING = (GRADS, RETURNED)  # that only a backward pass needs


def room(options: Options, tokens: int, rows: int | None = None) -> dict[str, int]:
    """S, M, and F, words of a window that say what has come, for at most so many tokens of each rank, and rows of a
    rank's experts; None: enough for any routing.
    """
    slots = options.ranks * -(-tokens // GRAIN) * GRAIN
    return {"S": slots, "F": words(slots), "M": slots * min(options.topk, options.local) if rows is None else rows}


def window_sizes(program: Program, options: Options) -> dict[str, int]:
    """Bytes of each window of a program that has its room."""
    made = {}
    for window, keys in stored(program).items():
        row = options.hidden * DTYPES[options.dtype].bytes if wide(keys) else 0
        made[window] = int(regions(program.room["S"] // options.ranks, row, options.ranks, *parts(keys)).end)
    return made


def stored(program: Program) -> dict[str, Mapping[str, Any]]:
    """The windows of a program, and the keys of a kernel that stores rows into each."""
    used = {step.window for steps in program.steps.values() for step in steps}
    found = {window: [part for part in named if part in program.parts] for window, named in WINDOWS.items()}
    return {window: program.parts[named[0]] for window, named in found.items() if window in used}


class RankedExperts(Experts):
    """The passes of one rank. Its own tokens are T; its experts see S places of a window."""

    dim, x, dy = "S", f"{SENT}.rows", f"{GRADS}.rows"
    weights_in, chosen, dweights = f"{SENT}.weights", f"{GRADS}.indices", "row_dweights"

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        o, p = self.o, passes
        self.again = o.keep == "x" or self.by_input  # whether the backward pass begins with x
        for window in (SENT, GRADS):
            p.buffer(f"{window}.rows", "S", o.hidden, place=window)
            p.buffer(f"{window}.indices", "S", o.topk, dtype="i32", place=window)
            p.buffer(f"{window}.weights", "S", o.topk, dtype="f32", place=window)
        if o.overlap:
            for window in (SENT, GRADS):
                p.buffer(f"{window}.arrivals", "F", dtype="i32", place=window)
            self.rows_dy = replace(self.rows_dy, arrivals=f"{GRADS}.arrivals")
            if not self.by_input:
                self.rows_x = replace(self.rows_x, arrivals=f"{SENT}.arrivals")
        p.buffer(f"{SENT}.most", 1, dtype="i32", place=SENT)
        p.buffer("row_dweights", "S", o.topk, dtype="f32")

    def exchange(self, op: str, **keys: object) -> dict[str, object]:
        """The table of a kernel that all ranks launch together."""
        return self.rows(op, ranks=self.o.ranks, experts=self.o.experts, **keys)

    def dispatch(self, which: str | tuple[str, ...], x: str, window: str) -> None:
        """Rows of tokens, or of their gradients, to the ranks of their experts; aside where a product reads them."""
        awaited = {SENT: self.rows_x, GRADS: self.rows_dy}[window].arrivals
        choices = {"indices": "indices", "weights": "weights"}
        made = {f"window.{part}": f"{window}.{part}" for part in ("rows", "indices", "weights")}
        keys = self.exchange("moe-dispatch", weighted=True)
        if not awaited:
            self.passes.step(which, "dispatch", keys, {"x": x, **choices}, made, window)
            return
        reads, rows = {"x": x, "indices": "indices"}, {"window.rows": f"{window}.rows"}
        aside = {**keys, "sends": ROWS, "blocks": BLOCKS}
        self.passes.step(which, "dispatch-rows", aside, reads, rows, window, aside=True)
        made["window.arrivals"] = awaited
        self.passes.step(which, "dispatch-choices", {**keys, "sends": CHOICES}, choices | rows, made, window)

    def index(self) -> None:
        """What came, sorted by expert; and how many of this rank's own tokens chose each expert, for the loss."""
        p, o = self.passes, self.o
        self.dispatch(BOTH, "x", SENT)
        reads = {"indices": f"{SENT}.indices"}
        made = {
            "offsets": p.buffer("offsets", o.local, dtype="i32", place=KEPT),
            "order": p.buffer("order", "M", dtype="i32"),
            "inverse": p.buffer("inverse", "S", o.topk, dtype="i32", place=KEPT),
            "token": p.buffer("token", "M", dtype="i32", place=KEPT),
            "most": f"{SENT}.most",
        }
        keys = self.router_op("moe-index", tokens=True, bounded=True, experts=o.local, weighted=not self.by_input)
        if not self.by_input:
            reads["weights"] = f"{SENT}.weights"
            made["row_scale"] = p.buffer("row_scale", "M", dtype="f32", place=KEPT)
        p.step(BOTH, "index", keys, reads, made)
        if self.router["aux_loss"]:
            made = {
                "offsets": p.buffer("own_offsets", o.experts, dtype="i32"),
                "order": p.buffer("own_order", "C", dtype="i32"),
                "inverse": p.buffer("own_inverse", "T", o.topk, dtype="i32"),
                "counts": p.buffer("counts", o.experts, dtype="i32", place=KEPT),
            }
            p.step(BOTH, "counts", self.router_op("moe-index", counts=True), {"indices": "indices"}, made)

    def forward(self) -> None:
        if self.again:
            self.dispatch(AGAIN, "x", SENT)
        super().forward()

    def through(self) -> None:
        self.dispatch(THROUGH, "dy", GRADS)
        super().through()

    def rows_weights_backward(self) -> None:
        super().rows_weights_backward()
        keys = self.exchange("moe-combine", gradients=True, rows=False)
        reads = {"grad_weights": "row_dweights", "indices": "indices"}
        self.passes.step(THROUGH, "weights-return", keys, reads, {"returned": "dweights"}, RETURNED)

    def unpermute(
        self, which: str | tuple[str, ...], part: str, x: str, y: str, more: Sequence[str], weighted: bool
    ) -> None:
        """The sum of each token's rows on every rank, their sum on the token's rank, and `more`."""
        keys = self.exchange("moe-combine", weighted=weighted, addends=len(more), gradients=False)
        reads = {"x": x, "inverse": "inverse", "indices": "indices"}
        reads |= {"weights": self.weights_in} if weighted else {}
        reads |= {f"addend{number}": name for number, name in enumerate(more)}
        part = {"unpermute": "combine", "unpermute-dx": "combine-dx"}[part]
        self.passes.step(which, part, keys, reads, {"y": y}, SUMS)

    def weights(self) -> None:
        if not self.again:
            self.dispatch(WEIGHTS, "x", SENT)
        if self.o.bias:  # a product with what no rank sent is 0, unless that is no number
            reads, made = {"indices": self.chosen}, {"rows": self.dy}
            self.passes.step(WEIGHTS, "blank", self.rows("moe-blank"), reads, made)
        super().weights()
