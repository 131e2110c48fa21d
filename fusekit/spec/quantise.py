"""Specs of quantise: FP8 values and scales of a tensor, in one pass."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fusekit.plan.operations import Schema
from fusekit.plan.quantise import (
    AMAX,
    BLOCK,
    BLOCKS,
    LAYOUTS,
    MOST_TOPK,
    MXFP8,
    RECIPES,
    ROW,
    ROWS,
    SCALES,
    SQUARE,
    TYPES,
    WARPS,
)
from fusekit.spec.fields import Broken, Field
from fusekit.spec.token import ARCH, NAME, SUMMARY, TokenSpec, make_spec

VECTOR = 16  # FP8 values in 16 bytes

QUANTISE_FIELDS = (
    NAME, SUMMARY, ARCH,
    Field("out", "choice", "What has one scale: a row, a block, or 32 numbers; or no FP8 values, but largest numbers.",
        choices=RECIPES, required=True),
    Field("dtype", "choice", "Type of x or w. fp8-block: float32 is rounded to bf16 on its way.", choices=TYPES,
        default=TYPES[0]),
    Field("blocks", "choice", 'fp8-block: "1x128" of the rows of tokens, "128x128" of weights.', choices=BLOCKS,
        default=BLOCKS[0]),
    Field("scales", "choice",
        "Rule of the scales: powers of two, or largest / 448.", choices=SCALES, default=SCALES[0]),
    Field("transpose", "bool", "fp8-block: also the transpose; that of tokens have blocks of their own. mxfp8: "
        "also FP8 values in blocks along the tokens, which lie as x does.", default=False),
    Field("transpose_blocks", "choice", "fp8-block, 1x128: what has one scale of the transpose, columns by tokens.",
        choices=BLOCKS, default=BLOCKS[0]),
    Field("rows", "bool", "fp8-block: FP8 values as x or w lies; false: the transpose alone.", default=True),
    Field("groups", "bool", "fp8-block: the transpose of tokens is of groups, and w is [E, N, K]; false: all rows "
        "are one, without offsets, and w is [N, K].", default=True),
    Field("gather", "bool", "fp8-block, 1x128: the argument index[M] chooses the rows of an x [T, K]; -1: zeros.",
        default=False),
    Field("topk", "int", "fp8-block, 1x128: rows of x_q that each row of an x [T, K] becomes; the argument "
        "inverse[T, topk] has their numbers, -1: none. 0: its own row alone.", default=0),
    Field("scale_layout", "choice", "mxfp8: scales row by row, or swizzled as block-scaled tensor cores take them.",
        choices=LAYOUTS, default=LAYOUTS[0]),
    Field("rht_amax", "bool", "amax: also the largest number after the rotation of 16 tokens.", default=False),
    Field("warps", "int", f"Warps of a thread block: {WARPS}.", minimum=1, default=WARPS, sweep=True),
    Field("problem", "table", "The shape that run and benchmarks use.", fields=(
        Field("E", "int", "Groups.", minimum=1, default=1),
        Field("M", "int", "Rows of each matrix.", required=True),
        Field("K", "int", "Columns.", minimum=1, required=True),
        Field("T", "int", "Rows of an x that is gathered, or has topk; default: M, or M / topk.", default=0),
    )),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantiseProblem:
    """The shape that `run` and the benchmarks use: M rows (of each of E squares' matrices) of K columns; E groups.

    T: the rows of an x that is gathered, or has topk; 0 for M, or M / topk.
    """

    M: int
    K: int
    E: int = 1
    T: int = 0


@dataclass(frozen=True, slots=True)
class QuantiseSpec(TokenSpec):
    """One kernel, every sweep resolved. Two specs with equal `device_spec()` share a cubin."""

    file: str
    kernel: str
    op: str
    arch: str
    out: str
    dtype: str
    blocks: str
    scales: str
    transpose: bool
    transpose_blocks: str
    rows: bool
    groups: bool
    gather: bool
    topk: int
    scale_layout: str
    rht_amax: bool
    warps: int
    problem: QuantiseProblem | None
    summary: str
    layer: Any = None

    PROBLEM: ClassVar[type] = QuantiseProblem


def make(file: str, values: Mapping[str, Any], choice: Mapping[str, Any]) -> QuantiseSpec:
    """The spec of one kernel. values: by field, complete; choice: what the sweep takes."""
    return make_spec(QuantiseSpec, file, values, choice)


def broken_quantise_rules(spec: QuantiseSpec) -> list[Broken]:
    """Every rule that an expanded spec breaks; empty when it can be built."""
    refusals: list[Broken] = []
    allowed = {"dtype": (BLOCK,), "blocks": (BLOCK,), "scales": (ROW, BLOCK), "transpose": (BLOCK, MXFP8),
            "transpose_blocks": (BLOCK,), "rows": (BLOCK,), "groups": (BLOCK,), "gather": (BLOCK,),
            "topk": (BLOCK,), "scale_layout": (MXFP8,), "rht_amax": (AMAX,)}  # fmt: skip
    usual = {field.name: field.default for field in QUANTISE_FIELDS}
    for name, recipes in allowed.items():
        value = getattr(spec, name)
        if value == usual[name]:
            continue
        if spec.out not in recipes:
            one = " or ".join(f'"{recipe}"' for recipe in recipes)
            has = "takes bf16 alone" if name == "dtype" else "has none"
            refusals.append((name, value, f"{spec.out} {has}; say out = {one}, or leave {name} out"))
        elif spec.blocks == SQUARE and name in ("transpose_blocks", "gather", "topk"):
            rule = f'is said of rows of tokens; say blocks = "{ROWS}", or leave {name} out'
            refusals.append((name, value, rule))
        elif name in _TURNED[spec.blocks] and not spec.transpose:
            refusals.append((name, value, f"is for kernels that transpose; say transpose = true, or leave {name} out"))
        elif name == "topk" and not 1 <= value <= MOST_TOPK:
            refusals.append((name, value, f"must be from 1 to {MOST_TOPK}, or 0 for none"))
        elif name == "topk" and (spec.gather or spec.transpose):
            other = "gather" if spec.gather else "transpose"
            refusals.append((name, value, f"rows that become several lie in their own order; leave it or {other} out"))
    if spec.warps != WARPS:
        refusals.append(("warps", spec.warps, f"must be {WARPS}"))
    if spec.problem:
        sizes = {"K": spec.problem.K}
        if spec.blocks == SQUARE and spec.transpose:
            sizes["M"] = spec.problem.M
        for name, size in sizes.items():
            if size % VECTOR:
                rule = f"a row has {size} FP8 values of one byte, which must be a multiple of {VECTOR}"
                refusals.append((f"problem.{name}", size, rule))
    return refusals


_TURNED = {ROWS: ("transpose_blocks", "rows", "groups"), SQUARE: ("rows",)}  # said of kernels that transpose
SCHEMA = Schema(QUANTISE_FIELDS, ("arch", "warps"), make, broken_quantise_rules)
