"""The passes of a layer, launch by launch; the formulas are in fusekit.reference.layer.

Backward, dx comes before the gradients of weights, so that a step that waits for it can start. A step that no output
needs is not launched (`Program.needed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH
from fusekit.plan.layer.factors import Plain, Rows, factors
from fusekit.plan.layer.gate import GRAD_SCALE, SCALE, gate, gate_backward
from fusekit.plan.layer.logits import logits, rounded
from fusekit.plan.layer.mlp import mlp
from fusekit.plan.layer.options import CHOICES, LOGITS, MLP, Options, X
from fusekit.plan.layer.program import (
    BACKWARD,
    BOTH,
    DGRAD,
    FORWARD,
    INFERENCE,
    QUANTISE,
    RECOMPUTE,
    WGRAD,
    Buffer,
    Program,
    Step,
)
from fusekit.plan.operands.choices import MOST
from fusekit.plan.operands.split import parts
from fusekit.plan.quant import NONE

ROUTER = ("score_function", "pre_softmax", "scaling_factor")
CHOICE = (*ROUTER, "expert_bias", "num_groups", "group_topk")
Names = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Table:
    """Options that can be looked up by their `text`."""

    text: str
    options: Options = field(compare=False)


def program(options: Options) -> Program:
    """The kernels, buffers and launches of a layer; equal options have one, for its memory takes long to lay out."""
    return _program(_Table(repr(options.canonical()), options))


@lru_cache(maxsize=64)
def _program(table: _Table) -> Program:
    options = table.options
    passes = Passes(options)
    if options.kind == MLP:
        passes.buffer("x", "T", options.hidden, place=ARGUMENT)
        passes.buffer("dy", "T", options.hidden, place=ARGUMENT)
        mlp(passes, "", options.intermediate, "y", "dx")
    else:
        from fusekit.plan.layer.ranks import RankedExperts, room  # a subclass of what is here

        (Experts if options.ranks == 1 else RankedExperts)(passes).write()
    backward = [step for which in (RECOMPUTE, DGRAD, WGRAD) for step in passes.steps[which]]
    steps = {which: tuple(passes.steps[which]) for which in BOTH} | {BACKWARD: tuple(backward)}
    if not options.trained:
        steps |= {FORWARD: steps[INFERENCE], BACKWARD: ()}
    if passes.steps[QUANTISE]:
        steps = {QUANTISE: tuple(passes.steps[QUANTISE])} | steps
    return Program(
        passes.parts, passes.buffers, steps, options.topk, options.local, tokens=options.tokens,
        room_for=partial(room, options) if options.ranks > 1 else None, few=passes.few, many=passes.many,
    )  # fmt: skip


class Passes:
    """Collects the parts, buffers and steps of a program."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.parts: dict[str, dict[str, Any]] = {}
        self.buffers: dict[str, Buffer] = {}
        self.steps: dict[str, list[Step]] = {which: [] for which in (QUANTISE, *BOTH, RECOMPUTE, DGRAD, WGRAD)}
        self.factors = factors(self)
        self.early = {"pdl": True} if options.ranks == 1 and not options.trained and options.recipe == NONE else {}
        self.few: dict[str, int] = {}  # by part, the most tokens that it is launched for
        self.many: dict[str, int] = {}  # the most that it is not launched for
        self.firsts = BOTH if options.keep == "z" else (*BOTH, RECOMPUTE)  # passes that launch the first projection

    def buffer(self, name: str, *shape: int | str, dtype: str = "", place: str = SCRATCH) -> str:
        """A buffer, of the layer's dtype unless `dtype` is given; its name."""
        place = SCRATCH if place == KEPT and not self.options.trained else place
        self.buffers[name] = Buffer(name, dtype or self.options.dtype, shape, place)
        return name

    def step(
        self, which: str | tuple[str, ...], part: str, keys: Mapping[str, Any], reads: Names, writes: Names,
        window: str = "", on_side: bool = False, needs: str = "", spared: str = "",
    ) -> None:  # fmt: skip
        """A launch of `part`, whose table has `keys`, in the passes `which`; the rest as in `Step`."""
        passes = (which,) if isinstance(which, str) else which
        passes = passes if self.options.trained else tuple(name for name in passes if name in (QUANTISE, INFERENCE))
        if passes:
            self.parts[part] = dict(keys)
        for name in passes:
            self.steps[name].append(Step(part, dict(reads), dict(writes), window, on_side, needs, spared))

    def gemm(self, op: str, n: int, k: int, **keys: Any) -> dict[str, Any]:
        """The table of a GEMM of N by K."""
        o = self.options
        dense = op.startswith("dense")
        problem = {"E": 1 if dense else o.local, "M": o.tokens * (1 if dense else o.topk), "N": n, "K": k}
        return {"op": op, "dtype": o.dtype, **self.early, **keys, "problem": problem}

    def activation(self, before: str = "") -> dict[str, Any]:
        """The keys of the activation, or of its derivative."""
        o = self.options
        keys: dict[str, Any] = {"activation": {**o.activation, "kind": before + o.activation["kind"]}}
        return keys | ({"glu_layout": o.glu_layout} if o.gated else {})

    def parameter(self, name: str, *shape: int, grad: str = "", dtype: str = "", major: str = "") -> tuple[str, str]:
        """A parameter and its gradient. major: of a projection's weight."""
        stored = self.factors.stored(*shape) if major else shape
        argument = self.buffer(name, *stored, dtype=self.options.projections if major else dtype, place=ARGUMENT)
        if major:
            self.factors.weight(name, major, *shape)
        return argument, self.buffer(f"d{name}", *shape, dtype=grad or self.options.grad_dtype, place=ARGUMENT)

    def first(self, part: str, keys: Mapping[str, Any], reads: Names, a: Rows, z: str) -> None:
        """The first projection of both passes, with the keys of its product, and the activation; z is kept, or
        recomputed before the backward pass reads it.
        """
        coded = self.factors.activation(a)
        whole = {**keys, **self.activation(), **coded.keys}
        if self.buffers[z].place == KEPT:
            writes = {**coded.writes, "preactivation": z}
            self.step(FORWARD, f"{part}-fwd", {**whole, "save_preactivation": True}, reads, writes)
            self.step(INFERENCE, f"{part}-infer", whole, reads, coded.writes)
            return
        self.step(BOTH, f"{part}-infer", whole, reads, coded.writes)
        self.step(RECOMPUTE, f"{part}-recompute", keys, reads, {"y": z})

    def wgrad(
        self, part: str, op: str, rows: Rows, columns: Rows, major: str, writes: Names, also: Names | None = None, *,
        plain: bool = False,
    ) -> None:  # fmt: skip
        """A weight gradient: [rows, columns] where N lies before K in the weights, else the other way about.

        plain: reads tensors as they are, whatever the recipe.
        """
        dy, x = (rows, columns) if major == "k" else (columns, rows)
        read = Plain(self) if plain else self.factors
        given = read.tokens("dy", dy) | read.tokens("x", x)
        output = {"out_dtype": self.options.grad_dtype, "accumulate": self.options.accumulate}
        keys = {**self.gemm(op, dy.columns, x.columns), **output, **given.keys}
        keys |= {"dbias": True} if "dbias" in writes else {}
        if op == "dense-wgrad" and "quant" not in keys and parts(keys["problem"]) > 1:
            keys["split"] = True
        self.step(WGRAD, part, keys, {**given.reads, **(also or {})}, writes)


class Experts:
    """The passes of a layer of experts.

    x, dy, weights_in, chosen: buffers in which the experts find the rows of tokens, their gradients, the weights of
    their choices and, in the backward pass, the choices; dim: of as many tokens. dweights: the gradients of weights.
    """

    dim, x, dy, weights_in, chosen, dweights = "T", "x", "dy", "weights", "indices", "dweights"

    def __init__(self, passes: Passes) -> None:
        self.passes, self.o, self.factors = passes, passes.options, passes.factors
        self.router = self.o.router
        self.by_input = self.router["scale"] == "input"
        self.given = self.router["input"] == CHOICES
        self.n = self.o.sides * self.o.intermediate
        h = self.o.hidden
        rows, gradients = (self.o.squared(self.o.b_major) == side for side in ("rows", "gradients"))
        rows_x = Rows("rows", h, "M") if self.by_input else Rows(self.x, h, "M", "token", "inverse")
        self.rows_x = replace(rows_x, squares=rows)
        self.rows_dy = Rows(self.dy, h, "M", "token", squares=gradients)
        self.rows_a = Rows("a", self.o.intermediate, "M", squares=rows)
        self.rows_dz = Rows("dz", self.n, "M", squares=gradients)

    def write(self) -> None:
        """Adds all steps, forward before backward."""
        p, o = self.passes, self.o
        for name in ("x", "dy", "y", "dx"):
            p.buffer(name, "T", o.hidden, place=ARGUMENT)
        self.choose()
        if self.router["aux_loss"]:
            self.loss()
        if o.shared:
            if o.shared_gate:
                gate(p)
                mlp(p, "shared_", o.shared, "shared_y", "shared_rows_dx", scale=SCALE, grad_scale=GRAD_SCALE)
                gate_backward(p, "shared_rows_dx", "shared_dx")
            else:
                mlp(p, "shared_", o.shared, "shared_y", "shared_dx")
        self.parameters()
        self.forward()
        if not o.trained:
            return
        self.through()
        self.choices_backward()
        self.sum_dx()
        self.weights()

    # -- tables

    def token(self, op: str, **keys: Any) -> dict[str, Any]:
        """The table of an operation that works token by token."""
        return {"op": op, "topk": self.o.topk, **keys, "problem": {"T": self.o.tokens}}

    def router_op(self, op: str, **keys: Any) -> dict[str, Any]:
        """The table of a router's operation."""
        return self.token(op, **{"experts": self.o.experts, **keys})

    def rows(self, op: str, **keys: Any) -> dict[str, Any]:
        """The table of an operation that moves rows."""
        o = self.o
        return self.token(op, dtype=o.dtype, **keys) | {"problem": {"T": o.tokens, "H": o.hidden}}

    # -- routing

    def choose(self) -> None:
        """Logits, choices, and the rows of the choices."""
        p, o, r = self.passes, self.o, self.router
        place = ARGUMENT if self.given else KEPT
        p.buffer("indices", "T", o.topk, dtype="i32", place=place)
        p.buffer("weights", "T", o.topk, dtype="f32", place=place)
        if r["input"] == X:
            p.buffer("logits", "T", o.experts, dtype="f32", place=KEPT)
            logits(p)
        elif r["input"] == LOGITS:
            p.buffer("logits", "T", o.experts, dtype="f32", place=ARGUMENT)
        if not self.given:
            reads = {"logits": "logits"}
            if r["expert_bias"]:
                reads["expert_bias"] = p.buffer("expert_bias", o.experts, dtype="f32", place=ARGUMENT)
            keys = self.router_op("router-topk", outputs="compact", **{name: r[name] for name in CHOICE})
            p.step(BOTH, "router-topk", keys, reads, {"indices": "indices", "weights": "weights"})
        self.index()

    def index(self) -> None:
        """The rows of the choices, sorted by expert."""
        p, o = self.passes, self.o
        keys, reads = self.router_op("moe-index", tokens=True, **p.early), {"indices": "indices"}
        writes = {
            "offsets": p.buffer("offsets", o.experts, dtype="i32", place=KEPT),
            "order": p.buffer("order", "M", dtype="i32"),
            "inverse": p.buffer("inverse", "T", o.topk, dtype="i32", place=KEPT),
            "token": p.buffer("token", "M", dtype="i32", place=KEPT),
        }
        if not self.by_input and o.trained:
            keys["weighted"] = True
            reads["weights"] = "weights"
            writes["row_scale"] = p.buffer("row_scale", "M", dtype="f32", place=KEPT)
        if self.router["aux_loss"]:
            keys["counts"] = True
            writes["counts"] = p.buffer("counts", o.experts, dtype="i32", place=KEPT)
        p.step(BOTH, "index", keys, reads, writes)

    def loss(self) -> None:
        """The load-balancing loss; the backward pass recomputes the scores."""
        p, o = self.passes, self.o
        writes = {
            "scores": p.buffer("scores", "T", o.experts, dtype="f32"),
            "routing_map": p.buffer("routing_map", "T", o.experts, dtype="u8"),
        }
        sums = {}
        if self.router["score_function"] != "softmax":
            sums = {"score_sum": p.buffer("score_sum", "T", dtype="f32")}
        function = {"score_function": self.router["score_function"]}
        keys = self.router_op("router-aux-score", **function)
        p.step((*BOTH, RECOMPUTE), "aux-score", keys, {"logits": "logits"}, writes | sums)
        factors = {
            "total_tokens": p.buffer("total_tokens", 1, dtype="i32", place=ARGUMENT),
            "coefficient": p.buffer("aux_coefficient", 1, dtype="f32", place=ARGUMENT),
            "counts": "counts",
        }
        keys = self.router_op("moe-aux-loss", scalars="device")
        loss = p.buffer("loss", 1, dtype="f32", place=ARGUMENT)
        p.step(BOTH, "aux-loss", keys, {"scores": "scores", **factors}, {"loss": loss})
        reads = {"grad_loss": p.buffer("dloss", 1, dtype="f32", place=ARGUMENT), **factors}
        writes = {"grad_scores": p.buffer("dscores", "T", o.experts, dtype="f32")}
        keys = self.router_op("moe-aux-loss-bwd", scalars="device")
        p.step(DGRAD, "aux-loss-bwd", keys, reads, writes)
        reads = {"scores": "scores", **sums, **writes}
        writes = {"grad_logits": p.buffer("aux_dlogits", "T", o.experts, dtype="f32")}
        p.step(DGRAD, "aux-score-bwd", self.router_op("router-aux-score-bwd", **function), reads, writes)

    # -- experts

    def parameters(self) -> None:
        """The experts' weights, and the rows between the projections."""
        p, o = self.passes, self.o
        n, h, i = self.n, o.hidden, o.intermediate
        first, second = ((n, h), (h, i)) if o.b_major == "k" else ((h, n), (i, h))
        p.parameter("w1", o.local, *first, major=o.b_major)
        p.parameter("w2", o.local, *second, major=o.b_major)
        if o.bias:
            p.parameter("b1", o.local, n, grad="f32")
            p.parameter("b2", o.local, h, grad="f32")
        p.buffer("z", "M", n, place=KEPT if o.keep == "z" else SCRATCH)
        for name in ("o", "drows"):
            p.buffer(name, "M", h)

    def forward(self) -> None:
        """Rows of tokens through both projections, and back to their tokens."""
        p, o = self.passes, self.o
        if self.by_input:  # rows times their weights, which no GEMM can take by index
            p.buffer("rows", "M", o.hidden)
            permuted = {"x": self.x, "inverse": "inverse", "weights": self.weights_in}
            p.step((*BOTH, RECOMPUTE), "permute", self.rows("moe-permute", scaled=True), permuted, {"y": "rows"})
        given = self.factors.product(p.firsts, self.rows_x, "w1", o.b_major)
        reads = {**given.reads, "offsets": "offsets", **({"bias": "b1"} if o.bias else {})}
        keys = {**p.gemm("grouped-gemm", self.n, o.hidden, bias=o.bias), **given.keys}
        p.first("fc1", keys, reads, self.rows_a, "z")
        if not o.trained and self.orders:
            self.few_choices()
        given = self.factors.product(BOTH, self.rows_a, "w2", o.b_major)
        reads = {**given.reads, "offsets": "offsets", **({"bias": "b2"} if o.bias else {})}
        keys = {**p.gemm("grouped-gemm", o.hidden, o.intermediate, bias=o.bias), **given.keys}
        p.step(BOTH, "fc2", keys, reads, {"y": "o"})
        more = ["shared_y"] * bool(o.shared)
        if o.residual:  # its gradient is dy
            more.append(p.buffer("residual", "T", o.hidden, place=ARGUMENT))
        self.unpermute(BOTH, "unpermute", "o", "y", more, not self.by_input)

    @property
    def orders(self) -> bool:
        """Whether the first projection can put few choices in order itself: it gathers, and no other launch before it
        reads or makes more than the order.
        """
        o = self.o
        return o.ranks == 1 and o.recipe == NONE and o.topk <= MOST and not (self.by_input or self.router["aux_loss"])

    def few_choices(self) -> None:
        """For few tokens, the first projection with the choices put in order, in place of both launches."""
        p, o = self.passes, self.o
        most = MOST // o.topk
        (plain,) = (step for step in p.steps[INFERENCE] if step.part == "fc1-infer")
        order = {"offsets": "offsets", "index": "token", "inverse": "inverse"}
        keys = {**p.parts[plain.part], "choices": o.topk}
        keys["problem"] = {**keys["problem"], "M": min(o.tokens, most) * o.topk}
        reads = {name: buffer for name, buffer in plain.reads.items() if name not in order} | {"indices": "indices"}
        p.step(INFERENCE, "fc1-few", keys, reads, {**plain.writes, **order})
        p.few["fc1-few"] = p.many["index"] = p.many[plain.part] = most

    def unpermute(
        self, which: str | tuple[str, ...], part: str, x: str, y: str, more: Sequence[str], weighted: bool
    ) -> None:
        """The sum of each token's rows, and of `more`."""
        keys = self.rows("moe-unpermute", weighted=weighted, addends=len(more), **self.passes.early)
        reads = {"x": x, "inverse": "inverse", **({"weights": "weights"} if weighted else {})}
        reads |= {f"addend{number}": name for number, name in enumerate(more)}
        self.passes.step(which, part, keys, reads, {"y": y})

    def through(self) -> None:
        """Dgrad: from dy to the gradients of the rows of x, and of each row's weight."""
        p, o = self.passes, self.o
        given = self.factors.product(DGRAD, self.rows_dy, "w2", o.b_major, backward=True)
        given |= self.factors.gradient(self.rows_dz, self.rows_a)
        keys = {**p.gemm("grouped-gemm", o.intermediate, o.hidden), **p.activation("d"), **given.keys}
        keys |= {"recompute": True, "dbias": o.bias}
        reads = {**given.reads, "preactivation": "z", "offsets": "offsets"}
        writes = {**given.writes, **({"dbias": "db1"} if o.bias else {})}
        if not self.by_input:
            keys |= {"row_scale": True, "dprob": True}
            reads["row_scale"] = "row_scale"
            writes["dprob"] = p.buffer("dprob", "M", dtype="f32")
        p.step(DGRAD, "fc2-dgrad", keys, reads, writes)
        given = self.factors.product(DGRAD, self.rows_dz, "w1", o.b_major, backward=True)
        keys = {**p.gemm("grouped-gemm", o.hidden, self.n), **given.keys}
        p.step(DGRAD, "fc1-dgrad", keys, {**given.reads, "offsets": "offsets"}, {"y": "drows"})

    def rows_weights_backward(self) -> None:
        """The gradient of each row's weight, by token."""
        p, o = self.passes, self.o
        if self.by_input:
            p.buffer("rows_dx", self.dim, o.hidden)
            reads = {"x": self.x, "grad_y": "drows", "inverse": "inverse", "weights": self.weights_in}
            writes = {"grad_x": "rows_dx", "grad_weights": self.dweights}
            p.step(DGRAD, "permute-bwd", self.rows("moe-permute-bwd"), reads, writes)
            return
        reads = {"dprob": "dprob", "inverse": "inverse"}
        if o.bias:  # y = r (a . w2 + b2): what dprob lacks is dy . b2
            p.buffer("dy_b2", self.dim, o.local, dtype="f32")
            keys = p.gemm("dense-gemm", o.local, o.hidden, out_dtype="f32")
            p.step(DGRAD, "dy-b2", keys, {"x": self.dy, "w": "b2"}, {"y": "dy_b2"})
            reads |= {"indices": self.chosen, "addend": "dy_b2"}
        keys = self.router_op("moe-weights-bwd", addend=o.bias, experts=o.local)
        p.step(DGRAD, "weights-bwd", keys, reads, {"grad_weights": self.dweights})

    def choices_backward(self) -> None:
        """The gradients of the weights, of the logits, and through the router."""
        p, o, r = self.passes, self.o, self.router
        p.buffer("dweights", "T", o.topk, dtype="f32", place=ARGUMENT if self.given else SCRATCH)
        self.rows_weights_backward()
        if self.given:
            return
        of_x = r["input"] == X
        kind = o.dtype if of_x else "f32"
        p.buffer("dlogits", "T", o.experts, dtype=kind, place=SCRATCH if of_x else ARGUMENT)
        reads = {"logits": "logits", "indices": "indices", "grad_weights": "dweights"}
        reads |= {"addend": "aux_dlogits"} if r["aux_loss"] else {}
        keys = {"outputs": "compact", "grad_dtype": kind, "addend": r["aux_loss"], **{name: r[name] for name in ROUTER}}
        p.step(DGRAD, "router-topk-bwd", self.router_op("router-topk-bwd", **keys), reads, {"grad_logits": "dlogits"})
        if of_x:
            p.buffer("router_dx", "T", o.hidden)
            w = rounded(p, DGRAD)
            keys = p.gemm("dense-gemm", o.hidden, o.experts, b_major="n")
            p.step(DGRAD, "router-dgrad", keys, {"x": "dlogits", "w": w}, {"y": "router_dx"})

    def sum_dx(self) -> None:
        """dx: the sum of all its parts."""
        more = [name for name in ("router_dx", "shared_dx") if name in self.passes.buffers]
        self.unpermute(DGRAD, "unpermute-dx", "drows", "dx", more, self.by_input)

    def weights(self) -> None:
        """The gradients of the parameters."""
        p, o, offsets = self.passes, self.o, {"offsets": "offsets"}
        p.wgrad("fc2-wgrad", "grouped-wgrad", self.rows_dy, self.rows_a, o.b_major, {"dw": "dw2"}, offsets)
        if o.bias:
            keys = self.rows("moe-bias-bwd", experts=o.local)
            reads = {"grad_y": self.dy, "token": "token", "row_scale": "row_scale", **offsets}
            p.step(WGRAD, "b2-grad", keys, reads, {"grad_bias": "db2"})
        p.wgrad("fc1-wgrad", "grouped-wgrad", self.rows_dz, self.rows_x, o.b_major, {"dw": "dw1"}, offsets)
        if self.router["input"] == X:
            writes = {"dw": "drouter", **({"dbias": "drouter_bias"} if self.router["bias"] else {})}
            dlogits, x = Rows("dlogits", o.experts, "T"), Rows("x", o.hidden, "T")
            p.wgrad("router-wgrad", "dense-wgrad", dlogits, x, "k", writes, plain=True)
            p.parts["router-wgrad"] |= {"out_dtype": p.buffers["drouter"].dtype}
