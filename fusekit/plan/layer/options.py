"""The layer in a spec file: its fields, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from fusekit.plan.activations import DERIVATIVE, kinds, no_gate
from fusekit.plan.activations import kind as kind_of
from fusekit.plan.arch import ARCHES, arch_hint
from fusekit.plan.exchange import MOST_RANKS
from fusekit.plan.fields import Field, type_hint
from fusekit.plan.gemm import SEGMENT
from fusekit.plan.quant import BLOCK, MX_SIDE, NONE, PACKED, SIDE, W_FORMAT
from fusekit.plan.quantise import BLOCKS, ROWS
from fusekit.plan.tiles import CLUSTERS, GLU_LAYOUTS

MOE, MLP = "moe", "mlp"
KINDS = (MOE, MLP)
X, LOGITS, CHOICES = "x", "logits", "choices"
F32, NOTHING, MXFP4 = "f32", "none", "mxfp4"
SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
TOKENS = 8192  # of a layer without a problem
DECODED = (1, 64, 128, 256)  # further ones, of a layer for inference alone
FP8_ROW = 16  # bytes of a row of FP8 values, or a multiple
_LATER = ("residual", "recompute_fp8")
MOST_COLUMNS = 2**22  # of a tensor: quantise counts four times as many, gates and ups are two

ROUTER_FIELDS = (
    Field("input", "choice", 'What the layer is given: "x" alone (the logits come from its parameter router [X, H]); '
        '"logits" [T, X] as well; or "choices": indices and weights [T, K].', choices=(X, LOGITS, CHOICES), default=X),
    Field("bias", "bool", "The logits have a bias: the parameter router_bias [X].", default=False),
    Field("weight_dtype", "choice", "Type of router, router_bias and their gradients; default: dtype, and grad_dtype.",
        choices=("bf16", F32)),
    Field("score_function", "choice", "What makes a score of a logit.", choices=SCORE_FUNCTIONS, default="softmax"),
    Field("pre_softmax", "bool", "softmax over all experts, not over the chosen ones.", default=False),
    Field("expert_bias", "bool", "Chooses by score + expert_bias [X]; sigmoid and sqrtsoftplus only.", default=False),
    Field("num_groups", "int", "Groups of neighbouring experts; 0: no groups.", default=0),
    Field("group_topk", "int", "Groups that a token's experts may come from; 0: no groups.", default=0),
    Field("scaling_factor", "float", "Factor of the weights.", default=1.0),
    Field("scale", "choice", "What the weights multiply: the experts' output, or their input.",
        choices=("output", "input"), default="output"),
    Field("aux_loss", "bool",
        "The forward pass gives the load-balancing loss, and the backward pass takes its gradient.",
        default=False),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """A layer. Members are those of `LAYER_FIELDS`, complete; of an mlp experts and topk are 0."""

    file: str
    name: str
    kind: str
    dtype: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    router: Mapping[str, Any]
    activation: Mapping[str, Any]
    glu_layout: str
    bias: bool
    b_major: str
    shared: int
    keep: str
    grad_dtype: str
    accumulate: bool
    tokens: int
    ranks: int = 1
    recipe: str = NONE
    x_blocks: str = ROWS
    weight_dtype: str = ""
    overlap: bool = False
    shared_gate: bool = False
    weights: str = NONE
    residual: bool = False
    recompute_fp8: bool = False

    @property
    def projections(self) -> str:
        """Type of the projections' weights."""
        coded = {BLOCK: W_FORMAT, MXFP4: PACKED}
        return coded.get(self.weights) or self.weight_dtype or self.dtype

    @property
    def local(self) -> int:
        """The experts of a rank."""
        return self.experts // self.ranks

    @property
    def gated(self) -> bool:
        """Whether two columns of z make one of the activation's."""
        return kind_of(self.activation["kind"]).gated

    @property
    def trained(self) -> bool:
        """Whether there is a backward pass."""
        return self.keep != NOTHING

    @property
    def sides(self) -> int:
        """Columns of z for each of the activation's."""
        return 2 if self.gated else 1

    def squared(self, major: str) -> str:
        """What has squares along the tokens, as x of a weight gradient: "rows", their "gradients" or "" for nothing,
        with weights that lie by `major`.
        """
        if self.x_blocks == ROWS:
            return ""
        return "rows" if major == "k" else "gradients"

    def canonical(self) -> dict[str, Any]:
        """The options in JSON types; without those of `_LATER` that are off, as before there were such options."""
        unsaid = [name for name in _LATER if not getattr(self, name)]
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in unsaid}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def layer_fields(activation: tuple[Field, ...], dtypes: tuple[str, ...]) -> tuple[Field, ...]:
    """The fields of a layer's table. activation: those of an activation."""
    return (
        Field("name", "string", "The layer's name in this file; its kernels are name.part.", required=True),
        Field("summary", "string", "One line about the layer; default: the file's."),
        Field("kind", "choice", 'A layer: "moe", or "mlp", the dense MLP.', choices=KINDS, required=True),
        Field("arch", "choice", "Target architecture.", choices=ARCHES, required=True, sweep=True, hint=arch_hint),
        Field("dtype", "choice", "Type of x, y, the weights and biases.", choices=dtypes, default="bf16",
            hint=type_hint),
        Field("hidden", "int", "H, elements of a token.", minimum=1, required=True),
        Field("intermediate", "int", "I, the columns between both projections.", minimum=1, required=True),
        Field("experts", "int", "X, the experts.", minimum=1),
        Field("topk", "int", "K, the experts of a token.", minimum=1),
        Field("router", "table", "How experts are chosen.", fields=ROUTER_FIELDS),
        Field("activation", "table", 'Between the projections; a string is its kind; default: "swiglu".',
            fields=activation, short="kind"),
        Field("glu_layout", "choice", 'How gate and up lie in w1; default: "concat" for a gated activation.',
            choices=("none", *GLU_LAYOUTS)),
        Field("bias", "bool", "Both projections have biases: b1 [X, N], b2 [X, H].", default=False),
        Field("b_major", "choice", '"k": w1 [X, N, H], w2 [X, H, I]; "n": w1 [X, H, N], w2 [X, I, H].',
            choices=("k", "n"), default="k"),
        Field("shared", "int",
            "J, the columns of a shared expert, which sees every token; 0: there is none.", default=0),
        Field("shared_gate", "bool", "The shared expert's rows are multiplied by sigmoid(x . shared_gate), "
            "shared_gate [1, H].", default=False),
        Field("residual", "bool", "residual [T, H], as x, is added to the results before they are rounded.",
            default=False),
        Field("keep", "choice", 'What stays for the backward pass besides x and the choices: "z", the first '
            'projection\'s result; "x", nothing: z is computed once more; or "none", for inference alone: there is no '
            "backward pass, and none of its kernels.", choices=("z", "x", NOTHING), default="z"),
        Field("grad_dtype", "choice",
            "Type of the weights' gradients; default: weight_dtype.", choices=(*dtypes, "f32")),
        Field("accumulate", "bool", "Weights' gradients are added to what is there.", default=False),
        Field("weight_dtype", "choice", 'Type of w1, w2 and the shared expert\'s weights; default: dtype. "f32" with a '
            "recipe, which reads their FP8 values alone.", choices=(*dtypes, F32)),
        Field("recipe", "choice",
            'What the products of the projections read: "none", tensors of dtype; or "fp8-block", '
            "e4m3 values with a scale for 128 elements, of weights for 128 x 128.",
            choices=(NONE, BLOCK), default=NONE),
        Field("weights", "choice",
            'How w1, w2 and the shared expert\'s weights lie in memory: "none", as weight_dtype says; "fp8-block", '
            "as FP8 checkpoints have them: e4m3 values with a float32 scale for 128 x 128, w1_s and so on; or "
            '"mxfp4", as those of gpt-oss: bytes of two e2m1 values, [X, N, H / 32, 16], with a scale of a byte for 32 '
            'of a row. Tokens stay bf16. With keep = "none" alone.',
            choices=(NONE, BLOCK, MXFP4), default=NONE),
        Field("x_blocks", "choice", 'With a recipe: "128x128", one scale for 128 tokens of 128 columns of what the '
            'gradients of w1 and w2 read as x, which then take less time: x and the activation (b_major = "n": dz and '
            "dy).",
            choices=BLOCKS, default=ROWS),
        Field("recompute_fp8", "bool",
            "With a recipe: the backward pass makes the FP8 weights that it reads itself, in memory that the weights' "
            "gradients take later; from forward to backward no FP8 weights are kept.",
            default=False),
        Field("tile", "pair", "CTA tiles of every GEMM, each a variant; those that a GEMM cannot have are left out. "
            "Default: chosen for the problem.", sweep=True),
        Field("cluster", "pair", "Clusters of every GEMM, likewise.", choices=CLUSTERS, sweep=True),
        Field("schedule", "choice", "How tiles of every GEMM are dealt to clusters. Left out: dynamic.",
            choices=("static", "dynamic"), sweep=True),
        Field("ranks", "int", f"R, the ranks that the experts are spread over, {MOST_RANKS} at most.", minimum=1,
            default=1),
        Field("overlap", "bool",
            "Over ranks: products begin while the rows that they read still come; else they wait for"
            " all.", default=False),
        Field("problem", "table", "The tokens that variants are chosen for.",
            fields=(Field("T", "int", "Tokens; of a list, variants for each.", minimum=1, required=True, alias="tokens",
                sweep=True),)),
    )  # fmt: skip


def token_counts(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that the variants of one table are chosen for, the most first."""
    few = DECODED if values["keep"] == NOTHING else ()
    return tuple(sorted((values["problem"] or {}).get("T", (*few, TOKENS)), reverse=True))


def make(file: str, values: Mapping[str, Any]) -> Options:
    """The options of one table; values: by field, complete."""
    activation = dict(values["activation"] or {"kind": "swiglu"})
    gated = kind_of(activation["kind"]).gated
    router = {field.name: field.default for field in ROUTER_FIELDS} | dict(values["router"] or {})
    router["weight_dtype"] = router["weight_dtype"] or values["dtype"]
    weights = values["weight_dtype"] or ("" if values["weights"] != NONE else values["dtype"])
    plain = ("name", "kind", "dtype", "hidden", "intermediate", "bias", "b_major", "shared", "keep", "accumulate",
             "ranks", "recipe", "x_blocks", "overlap", "shared_gate", "weights", "residual",
             "recompute_fp8")  # fmt: skip
    return Options(
        file=file,
        **{field: values[field] for field in plain},
        experts=values["experts"] or 0,
        topk=values["topk"] or 0,
        router=router if values["kind"] == MOE else dict(values["router"] or {}),
        activation=activation,
        glu_layout=values["glu_layout"] or ("concat" if gated else "none"),
        grad_dtype=values["grad_dtype"] or weights or values["dtype"],
        tokens=token_counts(values)[0],
        weight_dtype="" if weights == values["dtype"] and values["weights"] == NONE else weights,
    )


def broken(options: Options) -> Iterator[tuple[str, Any, str]]:
    """The rules that a layer breaks, next to those of its kernels: (field, its value, rule)."""
    for field in ("hidden", "intermediate", "shared"):
        if getattr(options, field) > MOST_COLUMNS:
            rule = f"not all kernels of a layer take rows of so many elements; say {MOST_COLUMNS} at most"
            yield field, getattr(options, field), rule
    if options.kind == MOE:
        for field in ("experts", "topk"):
            if getattr(options, field) < 1:
                yield field, getattr(options, field), f"a layer of experts needs it; say {field}, 1 at least"
        if options.dtype != "bf16":
            yield "dtype", options.dtype, 'the kernels that move rows and choose experts take bf16; say dtype = "bf16"'
        if options.topk > options.experts > 0:
            yield "topk", options.topk, f"a token cannot have more than all {options.experts} experts; say fewer"
        if not 1 <= options.ranks <= MOST_RANKS or options.experts % max(options.ranks, 1):
            rule = f"each rank has as many of the {options.experts} experts"
            yield "ranks", options.ranks, f"{rule}; say a divisor of them from 1 to {MOST_RANKS}"
        if options.router["scale"] == "input" and options.bias:
            rule = 'the weights multiply the experts\' input (scale = "input"), and b2 has no row to belong to'
            yield "bias", True, f"{rule}; leave one of the two out"
        if options.bias and options.ranks > 1 and options.experts % options.ranks == 0 and options.local % 8:
            rule = "dy . b2, of which the router weights' gradients are made, has a column for each of a rank's experts"
            yield "ranks", options.ranks, f"{rule}; say a number of ranks that leaves each a multiple of 8"
        if options.experts % 8 and options.bias and options.keep != NONE:
            rule = "dy . b2, of which the router weights' gradients are made, has a column for each expert"
            yield "experts", options.experts, f"{rule}; say a multiple of 8"
        elif options.experts % 8 and options.router["input"] == X:
            rule = "the product that makes the logits has a multiple of 8 columns; say such a number"
            yield "experts", options.experts, f'{rule}, or router = {{ input = "logits" }}, and make them yourself'
        if options.router["input"] != X and options.router["weight_dtype"] == F32:
            rule = f"with input = \"{options.router['input']}\" the router's weights are not the layer's; leave it out"
            yield "router.weight_dtype", options.router["weight_dtype"], rule
        if options.router["input"] == CHOICES:
            for field in ("bias", "expert_bias", "aux_loss"):
                if options.router[field]:
                    yield f"router.{field}", True, 'needs logits, and input = "choices" gives none; leave it out'
    else:
        for field in ("experts", "topk", "shared", "residual", "router"):
            if getattr(options, field):
                yield field, getattr(options, field), 'of kind = "moe" alone; leave it out'
        if options.ranks != 1:
            yield "ranks", options.ranks, 'of kind = "moe" alone; leave it out'
    if options.shared_gate and not options.shared:
        yield "shared_gate", True, "there is no shared expert; say shared, its columns, or leave it out"
    if options.overlap and options.recipe != NONE:
        yield "overlap", True, "FP8 operands are quantised from rows that are all there; leave recipe or overlap out"
    if options.overlap and options.ranks == 1:
        yield "overlap", True, "rows of one GPU come from nowhere; say ranks, or leave overlap out"
    kind = options.activation["kind"]
    if options.trained and f"{DERIVATIVE}{kind}" not in kinds():
        yield "activation.kind", kind, 'it has no backward activation; say another one, or keep = "none"'
    if options.kind == MLP and options.bias and options.b_major == "n" and options.trained:
        rule = "b2's gradient is the sum of dy, which that of w2 [I, H] cannot give as well"
        yield "b_major", "n", f'{rule}; say b_major = "k" or keep = "none", or leave bias out'
    if not options.gated and options.glu_layout != "none":
        yield "glu_layout", options.glu_layout, no_gate(kind)
    for field in ("hidden", "intermediate", "shared"):
        size = getattr(options, field)
        if size % 8:
            yield field, size, "a row must be a multiple of 16 bytes; say a multiple of 8"
        elif field != "hidden" and options.glu_layout == "interleaved-32" and size % 32:
            yield field, size, "interleaved-32 alternates 32 gate and 32 up columns; say a multiple of 32"
    if options.weight_dtype and options.weights == NONE and (options.weight_dtype != F32 or options.recipe == NONE):
        rule = f'products read weights of dtype = "{options.dtype}"; "f32" weights need FP8 operands'
        remedy = f'recipe = "{BLOCK}"' + (' and dtype = "bf16"' if options.dtype != "bf16" else "")
        yield "weight_dtype", options.weight_dtype, f"{rule}: say {remedy}, or leave it out"
    if options.weights != NONE:
        yield from _broken_weights(options)
    if options.recipe != NONE:
        yield from _broken_recipe(options)
    if options.x_blocks != ROWS and (options.recipe == NONE or not options.trained):
        rule = "is about FP8 values that a backward pass reads, and there are none"
        yield "x_blocks", options.x_blocks, f'{rule}; say recipe = "{BLOCK}" and keep something, or leave it out'
    if options.recompute_fp8 and (options.recipe == NONE or options.keep != "z"):
        rule = "is about FP8 weights that a backward pass reads and its forward pass does not"
        yield "recompute_fp8", True, f'{rule}; say recipe = "{BLOCK}" and keep = "z", or leave it out'
    if options.accumulate and options.grad_dtype != "f32":
        yield "accumulate", True, 'sums of many steps want float32; say grad_dtype = "f32"'


def _broken_weights(options: Options) -> Iterator[tuple[str, Any, str]]:
    """Rules of a layer whose weights are FP8 or MXFP4 values as a checkpoint has them."""
    packed = options.weights == MXFP4
    what = "MXFP4" if packed else "FP8"
    three = (
        f'weights = "{options.weights}": a checkpoint has {what} weights, tokens stay bf16; recipe = "{BLOCK}": '
        "bf16 or float32 weights and tokens are quantised, for training too; weight_dtype: the type of weights that "
        "recipe quantises"
    )
    if options.recipe != NONE:
        yield "weights", options.weights, f"goes with no recipe; say one of the two. {three}"
    elif options.weight_dtype:
        yield "weights", options.weights, f"goes with no weight_dtype; leave that out. {three}"
    if options.trained:
        rule = "a backward pass reads weights that an optimiser has changed, and these have no optimiser"
        yield "keep", options.keep, f'{rule}; say keep = "{NOTHING}", or recipe = "{BLOCK}" instead of weights'
    if options.dtype != "bf16" and options.kind != MOE:
        yield "dtype", options.dtype, f'bf16 is made of {what} weights; say dtype = "bf16", or leave weights out'
    if options.b_major != "k":
        yield "b_major", options.b_major, f'{what} checkpoints have w1 [X, N, H] and w2 [X, H, I]; say b_major = "k"'
    if packed:
        for field in ("hidden", "intermediate", "shared"):
            if getattr(options, field) % (2 * MX_SIDE):
                rule = f"a step of a product reads two scales of {MX_SIDE} values; say a multiple of {2 * MX_SIDE}"
                yield field, getattr(options, field), rule
        return
    yield from _broken_rows(options, SIDE, f"a scale of w1 is of {SIDE} columns of gates alone, or of ups")


def _broken_recipe(options: Options) -> Iterator[tuple[str, Any, str]]:
    """Rules of a layer with FP8 operands."""
    if options.dtype != "bf16" and options.kind != MOE:
        yield "dtype", options.dtype, 'FP8 operands are quantised from bf16; say dtype = "bf16", or leave recipe out'
    if options.kind == MLP and options.bias:
        rule = "b2's gradient is the sum of dy, which a weight gradient with FP8 operands does not read"
        yield "bias", True, f"{rule}; leave bias or recipe out"
    yield from _broken_rows(options, SEGMENT, f"{SEGMENT} columns of gate or up have one scale of w1")


def _broken_rows(options: Options, side: int, rule: str) -> Iterator[tuple[str, Any, str]]:
    """Rules of sizes in rows of FP8 values, and of gates and ups that each begin a scale of `side` columns: `rule`."""
    for field in ("hidden", "intermediate", "shared"):
        size = getattr(options, field)
        if size % FP8_ROW:
            yield field, size, f"a row of FP8 values must be a multiple of {FP8_ROW} bytes; say a multiple of {FP8_ROW}"
        elif field != "hidden" and options.glu_layout == "concat" and size % side:
            yield field, size, f"{rule}; say a multiple of {side}, or another layout"
