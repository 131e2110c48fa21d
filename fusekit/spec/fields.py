"""Every field of a spec file: type, allowed values, default, meaning. Parser and JSON Schema both read this table."""

from dataclasses import dataclass, replace

from fusekit.plan.activations import kinds
from fusekit.plan.arch import arch_hint
from fusekit.plan.fields import Broken as Broken
from fusekit.plan.fields import Field as Field
from fusekit.plan.fields import type_hint
from fusekit.plan.operands import fields as operand_fields
from fusekit.plan.quant import ACCUMULATIONS, NONE, OUTPUTS, RECIPES, X_FORMATS
from fusekit.plan.quantise import BLOCKS, LAYOUTS, SCALES
from fusekit.plan.tiles import CLUSTERS, GLU_LAYOUTS, MAINLOOPS
from fusekit.spec.model import ARCHES, DTYPES, OPS, OUT_DTYPES

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
NAME_RULE = "a name is lower-case letters, digits, '.', '_' or '-', begins with a letter or digit, 64 at most"
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Bounded(Field):
    """An int with a bound of its own."""

    maximum: int = INT32_MAX


def most_of(field: Field) -> int:
    """The largest value of an int."""
    return field.maximum if isinstance(field, Bounded) else INT32_MAX


def _same_function(word: str, choices: tuple[str, ...]) -> str:
    """How a spec names the function that `word` is elsewhere. A name that is merely similar is another function's."""
    from fusekit.spec.hf_model import GATED, PLAIN  # only where an error is being written
    from fusekit.spec.values import show

    if word.lower() in choices:
        return f"; say {show(word.lower())}"
    plain, gated = PLAIN.get(word), GATED.get(word)
    forms = [*([show(plain)] if plain else []), *([f"with a gate {show(gated)}"] if gated else [])]
    return f"; Hugging Face's {show(word)} is {', '.join(forms)}" if forms else ""


ACTIVATION_FIELDS = (
    Field("kind", "choice", 'The function; "d" before one is its derivative, for the backward pass.',
        choices=tuple(kinds()), required=True, synonyms=(("relu2", "srelu"), ("drelu2", "dsrelu")),
        hint=_same_function),
    Field("approximate", "choice", "How gelu and geglu (and dgelu, dgeglu) compute gelu.", choices=("none", "tanh"),
        default="none"),
    Field("alpha", "float", "swiglu's slope in sigmoid(alpha.g); may be changed at launch.", default=1.0),
    Field("limit", "float", "Gated kinds: g <= limit and |u| <= limit; left out: no clamp. May be changed at launch."),
    Field("up_offset", "float", "Gated kinds: added to u; may be changed at launch.", default=0.0),
)  # fmt: skip

QUANT_FIELDS = (
    Field("in", "choice", 'What x and w are, and the shapes of their scales; default: "none", of dtype; "fp8-weights": '
        'x of dtype, w e4m3; "mxfp4-weights": w e2m1.',
        choices=(NONE, *RECIPES), default=NONE),
    Field("x_format", "choice", "Type of x; w is e4m3.", choices=X_FORMATS, default="e4m3"),
    Field("accumulation", "choice", "Whether float32 registers take over after every 128 of K, or one accumulator "
        "has them all, with about 13 bits.", choices=ACCUMULATIONS, default="promoted"),
    Field("out", "choice",
        'What y or dz is stored as; default: "none", out_dtype. "amax": bf16, and the largest number '
        "of each group.", choices=(NONE, *OUTPUTS), default=NONE),
    Field("scales", "choice", "out, fp8-block: rule of the scales: powers of two, or largest / 448.", choices=SCALES,
        default=SCALES[0]),
    Field("transpose", "bool", "out: also the FP8 transpose, in blocks of 128 tokens; mxfp8: in blocks of 32 "
        "tokens, as y lies.", default=False),
    Field("keep", "bool", "out: also y or dz, in bf16.", default=False),
    Field("scale_layout", "choice", "mxfp8: scales row by row, or swizzled as block-scaled tensor cores take them.",
        choices=LAYOUTS, default=LAYOUTS[0]),
    Field("group_alignment", "int",
        "mxfp8: what the first row of every group is a multiple of, as callers promise: 1 or "
        "128.", minimum=1, default=1),
    Field("rht_amax", "bool", "amax: also the largest number after the rotation of 16 tokens.", default=False),
    Field("x_blocks", "choice", "Weight gradients: what has one scale of x, columns by tokens.", choices=BLOCKS,
        default=BLOCKS[0]),
    Field("y_blocks", "choice", "transpose: what has one scale of the transposed FP8 y, columns by tokens.",
        choices=BLOCKS, default=BLOCKS[0]),
    Field("dz_blocks", "choice", "Likewise of dz.", choices=BLOCKS, default=BLOCKS[0]),
)  # fmt: skip

PROBLEM_FIELDS = (
    Field("E", "int", "Groups, such as experts; left out: 1, of a dense operation.", minimum=1, alias="experts"),
    Field("M", "int", "Rows of x.", required=True, alias="tokens"),
    Field("N", "int",
        "Columns of x.w (a gated activation halves, its derivative doubles them); weight gradients: of dy.",
        minimum=1, required=True),
    Field("K", "int", "Columns of x.", minimum=1, required=True),
)  # fmt: skip

_SWEPT = {
    "arch": Field("arch", "choice", "Target architecture.", choices=ARCHES, required=True, sweep=True, hint=arch_hint),
    "tile": Field("tile", "pair",
        "CTA tile [M, N], K is 64; weight gradients: [N, K], 64 rows a step. Left out: chosen "
                "for the problem.", sweep=True),
    "cluster": Field("cluster", "pair",
        "CTAs of a cluster along the tile's two dims. Left out: chosen for the problem.",
                   choices=CLUSTERS, sweep=True),
    "mainloop": Field("mainloop", "choice",
        "How two warpgroups share work; default: swap-ab for tiles of 16 or 32 rows, which multiply w by x^T; pingpong "
                    "where a warpgroup can hold the tile.", choices=MAINLOOPS, sweep=True),
    "schedule": Field("schedule", "choice", "How tiles are dealt to clusters. Left out: dynamic.",
                    choices=("static", "dynamic"), sweep=True),
}  # fmt: skip
SWEEP_FIELDS = tuple(_SWEPT)

KERNEL_FIELDS = (
    Field("name", "string", "The kernel's name in this file.", required=True),
    Field("summary", "string", "One line about the kernel; default: the file's."),
    Field("op", "choice", "The operation.", choices=OPS, required=True),
    _SWEPT["arch"],
    Field("dtype", "choice", "Type of x, w, bias, preactivation and dz; weight gradients: of dy and x.", choices=DTYPES,
        default="bf16", hint=type_hint),
    Field("out_dtype", "choice", 'Type of y or dw; default: dtype. "f32": not with a backward activation.',
        choices=OUT_DTYPES),
    Field("b_major", "choice", '"k": w[E, N, K]; "n": w[E, K, N].', choices=("k", "n"), default="k"),
    *operand_fields(),
    Field("activation", "table", 'What is applied to z; a string is its kind; default: "identity".',
        fields=ACTIVATION_FIELDS, short="kind"),
    Field("glu_layout", "choice", 'How gate and up lie along N; default: "concat" for a gated activation, else "none".',
        choices=("none", *GLU_LAYOUTS)),
    Field("quant", "table",
        'Quantisation recipe; default: "none", factors of dtype.', choices=("none",), fields=QUANT_FIELDS,
        default="none"),
    *(field for field in _SWEPT.values() if field.name != "arch"),
    Field("exclude", "tables",
        "What a sweep leaves out: each combination that has all the values of one of the tables.",
        fields=tuple(replace(field, required=False, sweep=False) for field in _SWEPT.values())),
    Field("cluster_margin", "int", "Clusters of SMs left to other kernels; may be changed at launch.", default=0),
    Field("problem", "table", "The shape that variants are chosen for, and that run and benchmarks use.",
        fields=PROBLEM_FIELDS),
)  # fmt: skip

KERNEL_ONLY = ("name", "summary")

FILE_FIELDS = (
    Field("$schema", "string", "Where an editor finds the JSON Schema of this file; fusekit ignores it."),
    Field("schema", "int", "Version of this format: 1.", required=True),
    Field("namespace", "string", "Begins the names of this file's kernels, before its stem: namespace.stem/kernel."),
    Field("summary", "string", "One line about the file."),
    Field("defaults", "table",
        "Any field of a kernel but name and summary, and a router's dtype and out_dtype; a kernel's own value wins."),
    Field("kernel", "table", "The kernels, one [[kernel]] table each.", required=True),
)  # fmt: skip
