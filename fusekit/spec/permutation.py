"""Specs of the operations around router and grouped GEMM: row order, rows to experts and back, float32 weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusekit.dtypes import DTYPES
from fusekit.plan.operands.pdl import PDL
from fusekit.plan.operations import Schema
from fusekit.spec.fields import Bounded, Broken, Field
from fusekit.spec.router import MAX_EXPERTS, MAX_TOPK, ROUTER_DTYPES, SWEEP_FIELDS
from fusekit.spec.token import ARCH, NAME, PROBLEM, SUMMARY, TOKENS_FIELD, TokenProblem, TokenSpec, make_spec

INDEX, PERMUTE, UNPERMUTE, CHECK = "moe-index", "moe-permute", "moe-unpermute", "moe-check"
PERMUTE_BACKWARD, UNPERMUTE_BACKWARD = "moe-permute-bwd", "moe-unpermute-bwd"
BACKWARDS = (PERMUTE_BACKWARD, UNPERMUTE_BACKWARD)
WEIGHTS_BACKWARD, BIAS_BACKWARD = "moe-weights-bwd", "moe-bias-bwd"
SPLIT, SUM, ZERO = "router-split", "router-sum", "moe-zero"
GATE, GATE_BACKWARD = "moe-gate", "moe-gate-bwd"
NORM, NORM_BACKWARD, NORM_WEIGHTS = "rms-norm", "rms-norm-bwd", "rms-norm-wgrad"
INDEX_WARPS = 32
VECTOR_BYTES = 16
MOST_ADDENDS = 2
MOST_TERMS = 3  # which are all bits of a float32

_HEAD = (NAME, SUMMARY, ARCH)
TOPK = Bounded("topk", "int", f"Choices of a token, K, {MAX_TOPK} at most.", minimum=1, maximum=MAX_TOPK, required=True)
HIDDEN = Field("H", "int", "Elements of a row.", minimum=1, required=True, alias="hidden")
_EXPERTS = Field("experts", "int", f"Experts, {MAX_EXPERTS} at most.", minimum=1, required=True)
_WARPS = Field("warps", "int", "Warps of a thread block, 1, 2, 4 or 8.", minimum=1, default=8, sweep=True)
DTYPE = Field("dtype", "choice", "Type of the rows; weights and their gradient are f32.", choices=ROUTER_DTYPES,
            default="bf16")  # fmt: skip
CODED_DTYPE = replace(DTYPE, doc="Type of the rows, e4m3 for FP8 with scales; weights are f32.",
                      choices=(*ROUTER_DTYPES, "e4m3"))  # fmt: skip
ADDENDS = Field("addends", "int", f"Tensors added to each sum, {MOST_ADDENDS} at most: addend0[T, H], addend1[T, H].",
              default=0)  # fmt: skip
ZERO_DTYPE = replace(DTYPE, doc="Type of the rows.", choices=(*ROUTER_DTYPES, "fp16"))
_MOVED = Field("problem", "table", "The shape that run and benchmarks use.", fields=(TOKENS_FIELD, HIDDEN))
_ROWS = (*_HEAD, TOPK, DTYPE, _WARPS, _MOVED)
_WEIGHTED = Field("weighted", "bool", "Takes weights[T, K]: unpermute multiplies by them, permute gives row_scale[M].",
                default=False)  # fmt: skip
_SCALED = Field("scaled", "bool", "Multiplies rows by weights[T, K], for router weights that scale the experts' input.",
              default=False)  # fmt: skip
_TERMS = Bounded("terms", "int", f"Terms of each number, {MOST_TERMS} at most: 3 are all of a float32.", minimum=1,
                 maximum=MOST_TERMS, default=MOST_TERMS)  # fmt: skip
_INDEX = (
    *_HEAD, TOPK,
    Field("experts", "int", f"Experts whose rows are ordered, {MAX_EXPERTS} at most.", minimum=1, required=True),
    Field("counts", "bool", "Gives counts[X]: how many choices each expert has.", default=False),
    Field("tokens", "bool", "Gives token[T K], which a GEMM gathers its rows by.", default=False),
    Field("weighted", "bool", "Takes weights[T, K], and gives row_scale[T K].", default=False),
    Field("bounded", "bool", "Rows end at M: order, token and row_scale have M elements, and a choice whose row would "
        "lie beyond has none.", default=False),
    Field("warps", "int", f"Warps of a thread block: {INDEX_WARPS}.", minimum=1, default=INDEX_WARPS, sweep=True),
    PDL, PROBLEM,
)  # fmt: skip
_ADDEND = Field("addend", "bool", "Adds addend[t, indices[t, k]], the gradient by another way.", default=False)
_NORM_ADDEND = replace(_ADDEND, doc="Adds addend[T, H]: the gradient that reaches x by another way.")
_RESIDUAL = Field("residual", "bool", "Takes residual[T, H], and gives sum[T, H]: the norm is of x + residual.",
                default=False)  # fmt: skip
_ROUNDED = Field("rounded", "bool", "The normalised row is rounded before w multiplies it, as in Llama's code.",
               default=False)  # fmt: skip
_EPS = Field("eps", "float", "Added to the mean of the squares; may be changed at launch.", default=1e-6)
_WEIGHTS_DTYPE = replace(DTYPE, doc="Type of w and its gradient.")
_BIAS = Field("bias", "bool", "Adds bias[X], f32.", default=False)
_ONE_WARP = Field("warps", "int", "Warps of a thread block: 1.", minimum=1, default=1, sweep=True)
PERMUTATION_FIELDS = {
    INDEX: _INDEX,
    PERMUTE: (*(CODED_DTYPE if field is DTYPE else field for field in _ROWS), _WEIGHTED, _SCALED),
    UNPERMUTE: (*_ROWS, _WEIGHTED, ADDENDS, PDL),
    **dict.fromkeys(BACKWARDS, _ROWS),
    WEIGHTS_BACKWARD: (*_HEAD, TOPK, _EXPERTS, _ADDEND, _WARPS, PROBLEM),
    BIAS_BACKWARD: (*_HEAD, TOPK, _EXPERTS, DTYPE, _WARPS, _MOVED),
    **dict.fromkeys((GATE, GATE_BACKWARD), (*_HEAD, DTYPE, _WARPS, _MOVED)),
    NORM: (*_HEAD, DTYPE, _RESIDUAL, _ROUNDED, _EPS, _WARPS, _MOVED),
    NORM_BACKWARD: (*_HEAD, DTYPE, _NORM_ADDEND, _WARPS, _MOVED),
    NORM_WEIGHTS: (*_HEAD, _WEIGHTS_DTYPE, _WARPS, _MOVED),
    ZERO: (*_HEAD, ZERO_DTYPE, _WARPS, _MOVED),
    SPLIT: (*_HEAD, _TERMS, _WARPS, _MOVED),
    SUM: (*_HEAD, _EXPERTS, _TERMS, _BIAS, _WARPS, PROBLEM),
    CHECK: (*_HEAD, _ONE_WARP, PROBLEM),
}


@dataclass(frozen=True, slots=True)
class PermutationSpec(TokenSpec):
    """One kernel, every sweep resolved. Two specs with equal `device_spec()` share a cubin.

    A field that the operation lacks has its default. Backward operations are weighted, moe-permute-bwd is scaled;
    router-split gives bf16.
    """

    file: str
    kernel: str
    op: str
    arch: str
    warps: int
    summary: str
    problem: TokenProblem | None = None
    dtype: str = "none"
    experts: int = 0
    topk: int = 0
    weighted: bool = False
    scaled: bool = False
    addend: bool = False
    counts: bool = False
    tokens: bool = False
    bounded: bool = False
    addends: int = 0
    terms: int = 0
    bias: bool = False
    residual: bool = False
    rounded: bool = False
    eps: float = 1e-6
    pdl: bool = False
    layer: Any = None

    APART = (*TokenSpec.APART, "eps")

    def device_spec(self) -> dict[str, Any]:
        """As of any such kernel; without `pdl` where it is not asked for, so that a symbol stays as it was before."""
        device_fields = TokenSpec.device_spec(self)
        return device_fields if self.pdl else {name: value for name, value in device_fields.items() if name != "pdl"}

    def defaults(self) -> dict[str, float | int]:
        """eps, of a norm."""
        return {"eps": self.eps} if self.op == NORM else {}


def make(file: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> PermutationSpec:
    """The spec of one kernel. values: by field, complete; choice: what the sweep takes."""
    op = values["op"]
    derived: dict[str, Any] = {"weighted": True, "scaled": op == PERMUTE_BACKWARD} if op in BACKWARDS else {}
    derived |= {"dtype": "bf16"} if op == SPLIT else {}
    return make_spec(PermutationSpec, file, values, choice, **derived)


def broken_permutation_rules(spec: PermutationSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be built."""
    refusals: list[Broken] = []
    if spec.experts > MAX_EXPERTS:
        refusals.append(("experts", spec.experts, f"at most {MAX_EXPERTS} experts are ordered; say fewer"))
    if spec.topk > MAX_TOPK:
        refusals.append(("topk", spec.topk, f"must be from 1 to {MAX_TOPK}"))
    if spec.op == PERMUTE and spec.scaled and spec.weighted:
        rule = "rows that are scaled have their weights, and fc2's row_scale would be a second time; leave one out"
        refusals.append(("scaled", True, rule))
    if spec.scaled and spec.dtype == "e4m3":
        refusals.append(("scaled", True, "FP8 values are moved as they are; scale the rows before they are quantised"))
    if spec.op == NORM and not 0 < spec.eps < 1:
        refusals.append(("eps", spec.eps, "must be above 0, so that a row of zeros has a norm, and below 1"))
    if spec.bounded and not spec.tokens:
        refusals.append(("bounded", True, "the rows' tokens say where rows end; say tokens = true"))
    warps = {INDEX: (INDEX_WARPS,), CHECK: (1,)}.get(spec.op, (1, 2, 4, 8))
    if spec.warps not in warps:
        refusals.append(("warps", spec.warps, f"must be {' or '.join(map(str, warps))}"))
    return refusals + broken_rows(spec)


def broken_rows(spec: Any) -> list[Broken]:
    """Rows of the spec's problem, if it has one, are moved 16 bytes at a time; addends are few."""
    refusals: list[Broken] = []
    if not 0 <= spec.addends <= MOST_ADDENDS:
        refusals.append(("addends", spec.addends, f"must be from 0 to {MOST_ADDENDS}; add the others up before"))
    if spec.problem and spec.problem.H:
        row = spec.problem.H * DTYPES[spec.dtype].bytes
        if row % VECTOR_BYTES:
            refusals.append(("problem.H", spec.problem.H, f"a row has {row} bytes, which must be a multiple of 16"))
    return refusals


SCHEMAS = {
    op: Schema(fields, SWEEP_FIELDS, make, broken_permutation_rules) for op, fields in PERMUTATION_FIELDS.items()
}
