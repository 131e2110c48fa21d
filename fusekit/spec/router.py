"""Specs of the MoE router's operations: their fields, the frozen value, and what cannot be built."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.plan.operations import Schema
from fusekit.spec.fields import KERNEL_ONLY, Bounded, Broken, Field
from fusekit.spec.token import ARCH, NAME, PROBLEM, SUMMARY, TokenProblem, TokenSpec, make_spec

FORWARD, BACKWARD, AUX, AUX_BACKWARD = "router-topk", "router-topk-bwd", "router-aux-score", "router-aux-score-bwd"
AUX_LOSS, AUX_LOSS_BACKWARD = "moe-aux-loss", "moe-aux-loss-bwd"
ROUTER_OPS = (FORWARD, BACKWARD, AUX, AUX_BACKWARD, AUX_LOSS, AUX_LOSS_BACKWARD)
SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
ROUTER_DTYPES = ("f32", "bf16")
MAX_EXPERTS, MAX_TOPK, MAX_GROUPS = 4096, 64, 64
LONG_ROW = 1024  # experts from which on fewer warps a block are better: their registers are many

_COMMON = (
    ARCH,
    Field("dtype", "choice", "Type of logits and grad_logits.", choices=ROUTER_DTYPES, default="f32"),
    Field("out_dtype", "choice", "Type of probs, scores and their gradients; default: dtype.", choices=ROUTER_DTYPES),
    Field("experts", "int", f"Experts X, {MAX_EXPERTS} at most.", minimum=1, required=True),
    Bounded("topk", "int", f"Experts chosen for a token, K, {MAX_TOPK} at most.", minimum=1,
            maximum=MAX_TOPK, required=True),
    Field("score_function", "choice", "What makes a score of a logit.", choices=SCORE_FUNCTIONS, default="softmax"),
    Field("warps", "int",
        "Warps of a thread block, 1, 2, 4 or 8; a token takes one; default: 8, from 1024 experts on 4.",
        minimum=1, sweep=True),
    PROBLEM,
)  # fmt: skip
_PRE_SOFTMAX = Field("pre_softmax", "bool", "softmax over all experts, not over the chosen ones.", default=False)
_OUTPUTS = Field("outputs", "choice", '"dense": probs[T, X] and routing_map; "compact": indices[T, K], weights[T, K].',
               choices=("dense", "compact"), default="dense")  # fmt: skip
_MAP = Field("routing_map", "choice", '"bytes": u8[T, X]; "bits": i32[T, ceil(X / 32)]; default: "bytes".',
           choices=("bytes", "bits"))  # fmt: skip
_SCALE = Field("scaling_factor", "float", "Factor of probabilities and weights; may be changed at launch.", default=1.0)
_LIMITS = (
    Field("expert_bias", "bool", "Selects by score + expert_bias[X]; sigmoid and sqrtsoftplus only.", default=False),
    Field("num_groups", "int", f"Groups of neighbouring experts, {MAX_GROUPS} at most; 0: no groups.", default=0),
    Field("group_topk", "int", "Groups that a token's experts may come from; 0: no groups.", default=0),
)

_GRADIENT = (
    Field("grad_dtype", "choice", "Type of grad_logits; default: dtype.", choices=ROUTER_DTYPES),
    Field("addend", "bool", "Adds addend[T, X], f32, such as the gradient of the load-balancing loss.", default=False),
)
_LOSS = (
    NAME, SUMMARY,
    *(field for field in _COMMON if field.name not in ("dtype", "out_dtype", "score_function")),
    Field("dtype", "choice", "Type of scores and grad_scores.", choices=ROUTER_DTYPES, default="f32"),
    Field("coefficient", "float", "Factor of the loss; may be changed at launch.", default=1.0),
    Field("scalars", "choice", '"launch": coefficient and total_tokens are arguments by value; "device": tensors [1].',
        choices=("launch", "device"), default="launch"),
)  # fmt: skip

# The options of each operation.
ROUTER_FIELDS = {
    FORWARD: (NAME, SUMMARY, *_COMMON, _PRE_SOFTMAX, *_LIMITS, _OUTPUTS, _MAP, _SCALE),
    BACKWARD: (NAME, SUMMARY, *_COMMON, _PRE_SOFTMAX, _OUTPUTS, _MAP, _SCALE, *_GRADIENT),
    AUX: (NAME, SUMMARY, *_COMMON, _MAP),
    AUX_BACKWARD: (NAME, SUMMARY, *_COMMON),
    AUX_LOSS: _LOSS,
    AUX_LOSS_BACKWARD: _LOSS,
}
SWEEP_FIELDS = ("arch", "warps")


@dataclass(frozen=True, slots=True)
class RouterSpec(TokenSpec):
    """One router kernel, every sweep resolved. Two specs with equal `device_spec()` share a cubin.

    A field that the operation lacks has its neutral value: `routing_map` "none", `outputs` "dense", no groups.
    """

    file: str
    kernel: str
    op: str
    arch: str
    warps: int
    summary: str
    dtype: str
    out_dtype: str
    grad_dtype: str
    experts: int
    topk: int
    routing_map: str
    problem: TokenProblem | None = None
    score_function: str = "softmax"
    pre_softmax: bool = False
    expert_bias: bool = False
    num_groups: int = 0
    group_topk: int = 0
    outputs: str = "dense"
    scaling_factor: float = 1.0
    coefficient: float = 1.0
    addend: bool = False
    scalars: str = "launch"
    layer: Any = None

    APART = (*TokenSpec.APART, "scaling_factor", "coefficient")

    @property
    def scaled(self) -> bool:
        """Whether the kernel takes a scaling factor."""
        return self.op in (FORWARD, BACKWARD)

    def defaults(self) -> dict[str, float | int]:
        """Scalars that a launch may leave out."""
        if self.op in (AUX_LOSS, AUX_LOSS_BACKWARD):
            return {"coefficient": self.coefficient} if self.scalars == "launch" else {}
        return {"scaling_factor": self.scaling_factor} if self.scaled else {}


def make(file: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> RouterSpec:
    """The spec of one kernel. values: by field, complete; choice: what the sweep takes."""
    compact = values.get("outputs") == "compact"
    mapped = values["op"] in (FORWARD, BACKWARD, AUX) and not compact
    return make_spec(
        RouterSpec,
        file,
        values,
        choice,
        out_dtype=values.get("out_dtype") or ("f32" if compact else values["dtype"]),
        grad_dtype=values.get("grad_dtype") or values["dtype"],
        routing_map=values.get("routing_map") or ("bytes" if mapped else "none"),
        warps=choice["warps"] or (4 if values["experts"] >= LONG_ROW else 8),
    )


def broken_router_rules(spec: RouterSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be built."""
    refusals: list[Broken] = []
    if spec.experts > MAX_EXPERTS:
        refusals.append(("experts", spec.experts, f"a warp's registers hold {MAX_EXPERTS} experts at most; say fewer"))
    if spec.topk > min(MAX_TOPK, spec.experts):
        most = min(MAX_TOPK, spec.experts)
        refusals.append(("topk", spec.topk, f"must be from 1 to {most}, the lesser of {MAX_TOPK} and the experts"))
    if spec.warps not in (1, 2, 4, 8):
        refusals.append(("warps", spec.warps, "must be 1, 2, 4 or 8"))
    if spec.pre_softmax and spec.score_function != "softmax":
        refusals.append(("pre_softmax", True, f"only softmax has it, not {spec.score_function}; leave it out"))
    if spec.expert_bias and spec.score_function == "softmax":
        refusals.append(("expert_bias", True, "only sigmoid and sqrtsoftplus have it, not softmax; leave it out"))
    if spec.outputs == "compact" and spec.routing_map != "none":
        refusals.append(("routing_map", spec.routing_map, 'outputs = "compact" has no map; leave it out'))
    if spec.outputs == "compact" and spec.out_dtype != "f32":
        refusals.append(("out_dtype", spec.out_dtype, "weights are float32, as a GEMM's row_scale; leave it out"))
    if spec.scalars == "device" and spec.coefficient != 1.0:
        refusals.append(("coefficient", spec.coefficient, 'scalars = "device" reads it from a tensor; leave it out'))
    return refusals + _groups(spec)


def _groups(spec: RouterSpec) -> list[Broken]:
    groups, keep = spec.num_groups, spec.group_topk
    if not groups and not keep:
        return []
    if not groups or not keep:
        missing, given = ("num_groups", "group_topk") if keep else ("group_topk", "num_groups")
        return [(given, keep or groups, f"{missing} is missing; give both, or neither")]
    if groups > MAX_GROUPS or spec.experts % groups:
        rule = f"must be from 1 to {MAX_GROUPS} and divide the {spec.experts} experts"
        return [("num_groups", groups, f"{rule}; {_divisors(spec.experts, MAX_GROUPS)} do")]
    if keep > groups or spec.topk % keep:
        rule = (
            f"must be from 1 to {groups} and divide topk = {spec.topk}: every group's best topk / group_topk are summed"
        )
        return [("group_topk", keep, f"{rule}; {_divisors(spec.topk, groups)} do")]
    size, members = spec.experts // groups, spec.topk // keep
    if members > size:
        rule = f"{spec.topk} / {keep} = {members} experts of a group are summed, and a group has {size}"
        return [("group_topk", keep, f"{rule}; keep at least {math.ceil(spec.topk / size)} groups")]
    return []


def _divisors(value: int, most: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, min(value, most) + 1) if value % divisor == 0)


# The dtype of a file's GEMMs says nothing of logits, whose rounding changes which experts are chosen.
_OWN = (*KERNEL_ONLY, "dtype", "out_dtype")
SCHEMAS = {op: Schema(fields, SWEEP_FIELDS, make, broken_router_rules, _OWN) for op, fields in ROUTER_FIELDS.items()}
