"""Specs of the operations between router and grouped GEMM: row order, rows to experts and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.dtypes import DTYPES
from fusekit.spec.keys import Key
from fusekit.spec.model import ARCHES
from fusekit.spec.router import MAX_EXPERTS, MAX_TOPK, ROUTER_DTYPES
from fusekit.spec.token import TokenProblem, TokenSpec

INDEX, PERMUTE, UNPERMUTE, CHECK = "moe-index", "moe-permute", "moe-unpermute", "moe-check"
PERMUTE_BACKWARD, UNPERMUTE_BACKWARD = "moe-permute-bwd", "moe-unpermute-bwd"
BACKWARDS = (PERMUTE_BACKWARD, UNPERMUTE_BACKWARD)
PERMUTATION_OPS = (INDEX, PERMUTE, UNPERMUTE, *BACKWARDS, CHECK)
INDEX_WARPS = 32
VECTOR_BYTES = 16

_NAME = Key("name", "string", "The kernel's name in this file.", required=True)
_SUMMARY = Key("summary", "string", "One line about the kernel; default: the file's.")
_ARCH = Key("arch", "choice", "Target architecture.", choices=ARCHES, required=True, sweep=True)
_TOPK = Key("topk", "int", f"Choices of a token, K, {MAX_TOPK} at most.", minimum=1, required=True)
_TOKENS = Key("T", "int", "Tokens.", required=True)
_HIDDEN = Key("H", "int", "Elements of a row.", minimum=1, required=True)
_ROWS = (
    _NAME,
    _SUMMARY,
    _ARCH,
    _TOPK,
    Key("dtype", "choice", "Type of the rows; weights and their gradient are f32.", choices=ROUTER_DTYPES,
        default="bf16"),
    Key("warps", "int", "Warps of a thread block, 1, 2, 4 or 8.", minimum=1, default=8, sweep=True),
    Key("problem", "table", "The shape that run and benchmarks use.", keys=(_TOKENS, _HIDDEN)),
)  # fmt: skip
_WEIGHTED = Key("weighted", "bool", "Takes weights[T, K]: unpermute multiplies by them, permute gives row_scale[M].",
                default=False)  # fmt: skip
_SCALED = Key("scaled", "bool", "Multiplies rows by weights[T, K], for router weights that scale the experts' input.",
              default=False)  # fmt: skip
PERMUTATION_KEYS = {
    INDEX: (
        _NAME,
        _SUMMARY,
        _ARCH,
        _TOPK,
        Key("experts", "int", f"Experts whose rows are ordered, {MAX_EXPERTS} at most.", minimum=1, required=True),
        Key("tokens", "bool", "Also says each row's token, which a GEMM gathers its rows by.", default=False),
        Key("warps", "int", f"Warps of a thread block: {INDEX_WARPS}.", minimum=1, default=INDEX_WARPS, sweep=True),
        Key("problem", "table", "The shape that run and benchmarks use.", keys=(_TOKENS,)),
    ),
    PERMUTE: (*_ROWS, _WEIGHTED, _SCALED),
    UNPERMUTE: (*_ROWS, _WEIGHTED),
    **dict.fromkeys(BACKWARDS, _ROWS),
    CHECK: (
        _NAME,
        _SUMMARY,
        _ARCH,
        Key("warps", "int", "Warps of a thread block: 1.", minimum=1, default=1, sweep=True),
        Key("problem", "table", "The shape that run and benchmarks use.", keys=(_TOKENS,)),
    ),
}

Broken = tuple[str, Any, str]  # key, its value, the rule


@dataclass(frozen=True, slots=True)
class PermutationSpec(TokenSpec):
    """One kernel, every sweep resolved. Two specs with equal `device_spec()` share a cubin.

    A key that the operation lacks has its neutral value: experts and topk 0, dtype "none". Backward operations are
    weighted, moe-permute-bwd is scaled.
    """

    file: str
    kernel: str
    op: str
    arch: str
    dtype: str
    experts: int
    topk: int
    weighted: bool
    scaled: bool
    tokens: bool
    warps: int
    problem: TokenProblem | None
    summary: str

    def device_spec(self) -> dict[str, Any]:
        """As ever, without `tokens` where they are not asked for."""
        made = TokenSpec.device_spec(self)
        return {key: value for key, value in made.items() if key != "tokens" or value}

    def defaults(self) -> dict[str, float | int]:
        """Scalars that a launch may leave out: there are none."""
        return {}


def make(file: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> PermutationSpec:
    """The spec of one kernel. values: by key, complete; choice: what the sweep takes."""
    return PermutationSpec(
        file=file,
        kernel=values["name"],
        op=values["op"],
        arch=choice["arch"],
        dtype=values.get("dtype", "none"),
        experts=values.get("experts", 0),
        topk=values.get("topk", 0),
        weighted=values.get("weighted", values["op"] in BACKWARDS),
        scaled=values.get("scaled", values["op"] == PERMUTE_BACKWARD),
        tokens=values.get("tokens", False),
        warps=choice["warps"],
        problem=TokenProblem(**values["problem"]) if values["problem"] else None,
        summary=values["summary"],
    )


def broken_permutation_rules(spec: PermutationSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be built."""
    found: list[Broken] = []
    if spec.experts > MAX_EXPERTS:
        found.append(("experts", spec.experts, f"at most {MAX_EXPERTS} experts are ordered; say fewer"))
    if spec.topk > MAX_TOPK:
        found.append(("topk", spec.topk, f"must be from 1 to {MAX_TOPK}"))
    if spec.op == PERMUTE and spec.scaled and spec.weighted:
        rule = "rows that are scaled have their weights, and fc2's row_scale would be a second time; leave one out"
        found.append(("scaled", True, rule))
    warps = {INDEX: (INDEX_WARPS,), CHECK: (1,)}.get(spec.op, (1, 2, 4, 8))
    if spec.warps not in warps:
        found.append(("warps", spec.warps, f"must be {' or '.join(map(str, warps))}"))
    if spec.problem and spec.op not in (INDEX, CHECK):
        row = spec.problem.H * DTYPES[spec.dtype].bytes
        if row % VECTOR_BYTES:
            found.append(("problem.H", spec.problem.H, f"a row has {row} bytes, which must be a multiple of 16"))
    return found
