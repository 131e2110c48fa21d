"""Specs of the operations between ranks: tokens to the ranks of their experts and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusekit.dtypes import DTYPES
from fusekit.plan.exchange import ALL, MOST_RANKS, SENDS
from fusekit.spec.keys import Key
from fusekit.spec.model import ARCHES
from fusekit.spec.permutation import CODED_DTYPE, DTYPE, MOST_ADDENDS
from fusekit.spec.router import MAX_EXPERTS, MAX_TOPK
from fusekit.spec.token import TokenProblem, TokenSpec

DISPATCH, COMBINE = "moe-dispatch", "moe-combine"
MOST_BLOCKS = 1024
WARPS = (4, 8, 16, 32)
VECTOR_BYTES = 16
TIMEOUT = 60_000  # milliseconds

_KEYS = (
    Key("name", "string", "The kernel's name in this file.", required=True),
    Key("summary", "string", "One line about the kernel; default: the file's."),
    Key("arch", "choice", "Target architecture.", choices=ARCHES, required=True, sweep=True),
    Key("ranks", "int", f"Ranks that the experts are spread over, {MOST_RANKS} at most.", minimum=1, required=True),
    Key("experts", "int", "Experts of all ranks; rank r has the r-th part of them.", minimum=1, required=True),
    Key("topk", "int", f"Choices of a token, K, {MAX_TOPK} at most.", minimum=1, required=True),
    DTYPE,
    Key("blocks", "int", "Thread blocks that send.", minimum=1, default=64),
    Key("warps", "int", "Warps of a thread block, 4, 8, 16 or 32.", minimum=1, default=16, sweep=True),
    Key("problem", "table", "The shape that benchmarks use.", keys=(
        Key("T", "int", "Tokens of a rank.", required=True),
        Key("H", "int", "Elements of a row.", minimum=1, required=True),
    )),
)  # fmt: skip
EXCHANGE_KEYS = {
    DISPATCH: (
        *(CODED_DTYPE if key is DTYPE else key for key in _KEYS),
        Key("weighted", "bool", "Takes weights[T, K], and sends them with the choices.", default=False),
        Key(
            "sends",
            "choice",
            'What it sends: "all"; "choices", with their weights; or "rows", of the tokens whose '
            "choices the launch before sent, by a kernel that is as weighted.",
            choices=SENDS,
            default=ALL,
        ),
    ),
    COMBINE: (
        *_KEYS,
        Key("weighted", "bool", "Takes weights[S, K], and multiplies rows by them.", default=False),
        Key("gradients", "bool", "Takes grad_weights[S, K], and gives them back as returned[T, K].", default=False),
        Key("rows", "bool", "Brings rows back; false: gradients of weights alone.", default=True),
        Key(
            "addends",
            "int",
            f"Tensors added to each sum, {MOST_ADDENDS} at most: addend0[T, H], addend1[T, H].",
            default=0,
        ),
    ),
}
EXCHANGE_OPS = tuple(EXCHANGE_KEYS)

Broken = tuple[str, Any, str]  # key, its value, the rule


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
    gradients: bool
    rows: bool
    sends: str
    addends: int
    blocks: int
    warps: int
    problem: TokenProblem | None
    summary: str
    layer: Any = None

    def defaults(self) -> dict[str, float | int]:
        """Scalars that a launch may leave out."""
        return {"timeout": TIMEOUT}


def make(file: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> ExchangeSpec:
    """The spec of one kernel. values: by key, complete; choice: what the sweep takes."""
    return ExchangeSpec(
        file=file,
        kernel=values["name"],
        **{key: values[key] for key in ("op", "ranks", "experts", "topk", "dtype", "weighted", "blocks", "summary")},
        gradients=values.get("gradients", False),
        rows=values.get("rows", True),
        sends=values.get("sends", ALL),
        addends=values.get("addends", 0),
        arch=choice["arch"],
        warps=choice["warps"],
        problem=TokenProblem(**values["problem"]) if values["problem"] else None,
    )


def broken_exchange_rules(spec: ExchangeSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be built."""
    found: list[Broken] = []
    if spec.ranks > MOST_RANKS:
        found.append(("ranks", spec.ranks, f"must be from 1 to {MOST_RANKS}"))
    elif spec.experts % spec.ranks:
        found.append(("experts", spec.experts, f"must be a multiple of ranks, {spec.ranks}: each has as many"))
    if spec.experts > MAX_EXPERTS * spec.ranks:
        found.append(("experts", spec.experts, f"at most {MAX_EXPERTS} for each rank; say fewer"))
    if spec.topk > MAX_TOPK:
        found.append(("topk", spec.topk, f"must be from 1 to {MAX_TOPK}"))
    if not 0 <= spec.addends <= MOST_ADDENDS:
        found.append(("addends", spec.addends, f"must be from 0 to {MOST_ADDENDS}; add the others up before"))
    if not spec.rows and (spec.weighted or spec.addends or not spec.gradients):
        found.append(("rows", False, "goes with gradients = true, and without weights and addends; leave it out"))
    if spec.warps not in WARPS:
        found.append(("warps", spec.warps, f"must be {' or '.join(map(str, WARPS))}"))
    if spec.blocks > MOST_BLOCKS:
        found.append(("blocks", spec.blocks, f"must be from 1 to {MOST_BLOCKS}"))
    if spec.problem and spec.problem.H * DTYPES[spec.dtype].bytes % VECTOR_BYTES:
        row = spec.problem.H * DTYPES[spec.dtype].bytes
        found.append(("problem.H", spec.problem.H, f"a row has {row} bytes, which must be a multiple of 16"))
    return found
