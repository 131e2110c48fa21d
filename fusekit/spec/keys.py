"""Every key of a spec file: type, allowed values, default, meaning. Parser and JSON Schema both read this table."""

from dataclasses import dataclass, replace

from fusekit.plan.activations import kinds
from fusekit.plan.keys import Broken as Broken
from fusekit.plan.keys import Key as Key
from fusekit.plan.operands import keys as operand_keys
from fusekit.plan.quant import ACCUMULATIONS, NONE, OUTPUTS, RECIPES, X_FORMATS
from fusekit.plan.quantise import BLOCKS, LAYOUTS, SCALES
from fusekit.plan.tiles import CLUSTERS, GLU_LAYOUTS, MAINLOOPS
from fusekit.spec.model import ARCHES, DTYPES, OPS, OUT_DTYPES

NAME_PATTERN = r"[a-z0-9][a-z0-9._-]{0,63}"
NAME_RULE = "a name is lower-case letters, digits, '.', '_' or '-', begins with a letter or digit, 64 at most"
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Bounded(Key):
    """An int with a bound of its own."""

    maximum: int = INT32_MAX


def most_of(key: Key) -> int:
    """The largest value of an int."""
    return key.maximum if isinstance(key, Bounded) else INT32_MAX


ACTIVATION_KEYS = (
    Key("kind", "choice", 'The function; "d" before one is its derivative, for the backward pass.',
        choices=tuple(kinds()), required=True),
    Key("approximate", "choice", "How gelu and geglu (and dgelu, dgeglu) compute gelu.", choices=("none", "tanh"),
        default="none"),
    Key("alpha", "float", "swiglu's slope in sigmoid(alpha.g); may be changed at launch.", default=1.0),
    Key("limit", "float", "Gated kinds: g <= limit and |u| <= limit; left out: no clamp. May be changed at launch."),
    Key("up_offset", "float", "Gated kinds: added to u; may be changed at launch.", default=0.0),
)  # fmt: skip

QUANT_KEYS = (
    Key("in", "choice", 'What x and w are, and the shapes of their scales; default: "none", of dtype.',
        choices=(NONE, *RECIPES), default=NONE),
    Key("x_format", "choice", "Type of x; w is e4m3.", choices=X_FORMATS, default="e4m3"),
    Key("accumulation", "choice", "Whether float32 registers take over behind every 128 of K, or one accumulator "
        "has them all, with about 13 bits.", choices=ACCUMULATIONS, default="promoted"),
    Key("out", "choice", 'What y or dz is stored as; default: "none", out_dtype. "amax": bf16, and the largest number '
        "of each group.", choices=(NONE, *OUTPUTS), default=NONE),
    Key("scales", "choice", "out, fp8-block: rule of the scales: powers of two, or largest / 448.", choices=SCALES,
        default=SCALES[0]),
    Key("transpose", "bool", "out: also the codes of the transpose, in blocks of 128 tokens; mxfp8: in blocks of 32 "
        "tokens, as y lies.", default=False),
    Key("keep", "bool", "out: also y or dz, in bf16.", default=False),
    Key("scale_layout", "choice", "mxfp8: scales row by row, or swizzled as block-scaled tensor cores take them.",
        choices=LAYOUTS, default=LAYOUTS[0]),
    Key("group_alignment", "int", "mxfp8: what the first row of every group is a multiple of, as callers promise: 1 or "
        "128.", minimum=1, default=1),
    Key("rht_amax", "bool", "amax: also the largest number behind the rotation of 16 tokens.", default=False),
    Key("x_blocks", "choice", "Weight gradients: what has one scale of x, columns by tokens.", choices=BLOCKS,
        default=BLOCKS[0]),
    Key("y_blocks", "choice", "transpose: what has one scale of the transposed codes of y, columns by tokens.",
        choices=BLOCKS, default=BLOCKS[0]),
    Key("dz_blocks", "choice", "Likewise of dz.", choices=BLOCKS, default=BLOCKS[0]),
)  # fmt: skip

PROBLEM_KEYS = (
    Key("E", "int", "Groups; 1 for a dense operation.", minimum=1, required=True),
    Key("M", "int", "Rows of x.", required=True),
    Key("N", "int", "Columns of x.w (a gated activation halves, its derivative doubles them); weight gradients: of dy.",
        minimum=1, required=True),
    Key("K", "int", "Columns of x.", minimum=1, required=True),
)  # fmt: skip

_SWEPT = {
    "arch": Key("arch", "choice", "Target architecture.", choices=ARCHES, required=True, sweep=True),
    "tile": Key("tile", "pair", "CTA tile [M, N], K is 64; weight gradients: [N, K], 64 rows a step. Left out: chosen "
                "for the problem.", sweep=True),
    "cluster": Key("cluster", "pair", "CTAs of a cluster along the tile's two dims. Left out: chosen for the problem.",
                   choices=CLUSTERS, sweep=True),
    "mainloop": Key("mainloop", "choice", "How two warpgroups share work; default: pingpong where a warpgroup can hold "
                    "the tile.", choices=MAINLOOPS, sweep=True),
    "schedule": Key("schedule", "choice", "How tiles are dealt to clusters. Left out: dynamic.",
                    choices=("static", "dynamic"), sweep=True),
}  # fmt: skip
SWEEP_KEYS = tuple(_SWEPT)

KERNEL_KEYS = (
    Key("name", "string", "The kernel's name in this file.", required=True),
    Key("summary", "string", "One line about the kernel; default: the file's."),
    Key("op", "choice", "The operation.", choices=OPS, required=True),
    _SWEPT["arch"],
    Key("dtype", "choice", "Type of x, w, bias, preactivation and dz; weight gradients: of dy and x.", choices=DTYPES,
        default="bf16"),
    Key("out_dtype", "choice", 'Type of y or dw; default: dtype. "f32": not with a backward activation.',
        choices=OUT_DTYPES),
    Key("b_major", "choice", '"k": w[E, N, K]; "n": w[E, K, N].', choices=("k", "n"), default="k"),
    *operand_keys(),
    Key("activation", "table", 'What is applied to z; default: { kind = "identity" }.', keys=ACTIVATION_KEYS),
    Key("glu_layout", "choice", 'How gate and up lie along N; default: "concat" for a gated activation, else "none".',
        choices=("none", *GLU_LAYOUTS)),
    Key("quant", "table", 'Quantisation recipe; default: "none", factors of dtype.', choices=("none",), keys=QUANT_KEYS,
        default="none"),
    *(key for key in _SWEPT.values() if key.name != "arch"),
    Key("exclude", "tables", "What a sweep leaves out: each combination that has all the values of one of the tables.",
        keys=tuple(replace(key, required=False, sweep=False) for key in _SWEPT.values())),
    Key("cluster_margin", "int", "Clusters held back for other kernels; may be changed at launch.", default=0),
    Key("problem", "table", "The shape that variants are chosen for, and that run and benchmarks use.",
        keys=PROBLEM_KEYS),
)  # fmt: skip

KERNEL_ONLY = ("name", "summary")

FILE_KEYS = (
    Key("$schema", "string", "Where an editor finds the JSON Schema of this file; fusekit ignores it."),
    Key("schema", "int", "Version of this format: 1.", required=True),
    Key("namespace", "string", "Begins the names of this file's kernels, before its stem: namespace.stem/kernel."),
    Key("summary", "string", "One line about the file."),
    Key("defaults", "table",
        "Any key of a kernel but name and summary, and a router's dtype and out_dtype; a kernel's own value wins."),
    Key("kernel", "table", "The kernels, one [[kernel]] table each.", required=True),
)  # fmt: skip
