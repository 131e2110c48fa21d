"""Specs of the operations between ranks: tokens to the ranks of their experts and back."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fusekit.plan.exchange import ALL, MOST_RANKS, SENDERS, SENDS
from fusekit.plan.operations import Schema
from fusekit.spec.fields import Bounded, Broken, Field
from fusekit.spec.permutation import ADDENDS, CODED_DTYPE, DTYPE, HIDDEN, TOPK, broken_rows
from fusekit.spec.router import MAX_EXPERTS, MAX_TOPK, SWEEP_FIELDS
from fusekit.spec.token import ARCH, NAME, SUMMARY, TokenProblem, TokenSpec, make_spec

DISPATCH, COMBINE = "moe-dispatch", "moe-combine"
MOST_BLOCKS = 1024
WARPS = (4, 8, 16, 32)
TIMEOUT = 60_000  # milliseconds

_BLOCKS = Field("blocks", "int", "Thread blocks that send.", minimum=1, default=SENDERS[DISPATCH])
_FIELDS = (
    NAME, SUMMARY, ARCH,
    Bounded("ranks", "int", f"Ranks that the experts are spread over, {MOST_RANKS} at most.", minimum=1,
            maximum=MOST_RANKS, required=True),
    Field("experts", "int", "Experts of all ranks; rank r has the r-th part of them.", minimum=1, required=True),
    TOPK, DTYPE,
    _BLOCKS,
    Field("warps", "int", "Warps of a thread block, 4, 8, 16 or 32.", minimum=1, default=16, sweep=True),
    Field("problem", "table", "The shape that benchmarks use.",
        fields=(Field("T", "int", "Tokens of a rank.", required=True, alias="tokens"), HIDDEN)),
)  # fmt: skip
EXCHANGE_FIELDS = {
    DISPATCH: (
        *(CODED_DTYPE if field is DTYPE else field for field in _FIELDS),
        Field("weighted", "bool", "Takes weights[T, K], and sends them with the choices.", default=False),
        Field("sends", "choice", 'What it sends: "all"; "rows"; and with these, by a kernel that is as weighted, '
            '"choices", with their weights, or "nothing", where choices that came before still hold.',
            choices=SENDS, default=ALL),
    ),
    COMBINE: (
        *(replace(field, default=SENDERS[COMBINE]) if field is _BLOCKS else field for field in _FIELDS),
        Field("weighted", "bool", "Takes weights[S, K], and multiplies rows by them.", default=False),
        Field("gradients", "bool", "Takes grad_weights[S, K], and gives them back as returned[T, K].", default=False),
        Field("rows", "bool", "Brings rows back; false: gradients of weights alone.", default=True),
        ADDENDS,
        Field("overflow", "bool",
            "Takes wanted[1] of a bounded moe-index, and tells every rank in overflow[4] where one "
            "had more rows than M.", default=False),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ExchangeSpec(TokenSpec):
    """One kernel, every sweep resolved. Two specs with equal `device_spec()` share a cubin."""

    file: str
    kernel: str
    op: str
    arch: str
    ranks: int
    experts: int
    topk: int
    dtype: str
    weighted: bool
    blocks: int
    warps: int
    problem: TokenProblem | None
    summary: str
    gradients: bool = False
    rows: bool = True
    sends: str = ALL
    addends: int = 0
    overflow: bool = False
    layer: Any = None

    def defaults(self) -> dict[str, float | int]:
        """Scalars that a launch may leave out."""
        return {"timeout": TIMEOUT}


def make(file: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> ExchangeSpec:
    """The spec of one kernel. values: by field, complete; choice: what the sweep takes."""
    return make_spec(ExchangeSpec, file, values, choice)


def broken_exchange_rules(spec: ExchangeSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be built."""
    refusals: list[Broken] = []
    if spec.experts % spec.ranks:
        refusals.append(("experts", spec.experts, f"must be a multiple of ranks, {spec.ranks}: each has as many"))
    if spec.experts > MAX_EXPERTS * spec.ranks:
        refusals.append(("experts", spec.experts, f"at most {MAX_EXPERTS} for each rank; say fewer"))
    if spec.topk > MAX_TOPK:
        refusals.append(("topk", spec.topk, f"must be from 1 to {MAX_TOPK}"))
    if not spec.rows and (spec.weighted or spec.addends or spec.overflow or not spec.gradients):
        rule = "goes with gradients = true, and without weights, addends and overflow; leave it out"
        refusals.append(("rows", False, rule))
    if spec.warps not in WARPS:
        refusals.append(("warps", spec.warps, f"must be {' or '.join(map(str, WARPS))}"))
    if spec.blocks > MOST_BLOCKS:
        refusals.append(("blocks", spec.blocks, f"must be from 1 to {MOST_BLOCKS}"))
    return refusals + broken_rows(spec)


SCHEMAS = {op: Schema(fields, SWEEP_FIELDS, make, broken_exchange_rules) for op, fields in EXCHANGE_FIELDS.items()}
