"""The quantisation recipe of a GEMM: what its factors are, how their products are added up, what is stored as FP8
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusekit.plan.quantise import AMAX, BLOCKS, LAYOUTS, MXFP8, SCALES, SQUARE, SWIZZLED
from fusekit.plan.quantise import SIDE as SIDE

NONE, TENSOR, ROW, BLOCK = "none", "fp8-tensor", "fp8-row", "fp8-block"
FP8_W, MX_W = "fp8-weights", "mxfp4-weights"
RECIPES = (TENSOR, ROW, BLOCK, FP8_W, MX_W)
OUTPUTS = (BLOCK, MXFP8, AMAX)
X_FORMATS = ("e4m3", "e5m2")
W_FORMAT = E4M3 = "e4m3"
PACKED = "u8"  # two e2m1 values, the low nibble first
MX_SIDE = 32  # values that have one scale, along K
ACCUMULATIONS = ("promoted", "fast")


@dataclass(frozen=True, slots=True)
class Quant:
    """inputs: of the factors, "none" for those of the spec's dtype; "fp8-weights", "mxfp4-weights": x has it, w is FP8
    or MXFP4 values. x_format: type of x. accumulation: "promoted" where float32 registers take over after every 128 of
    K, "fast" where one accumulator of the tensor cores has them all.

    out: what y or dz is stored as, "none" for its dtype; "amax": in its dtype, and of each group the largest number;
    keep: in its dtype too. scales: the rule of their scales. transpose: FP8 values along the tokens, too. x_blocks: of
    a weight gradient, what has one scale of x. y_blocks, dz_blocks: what has one of those transposed FP8 values.

    scale_layout, group_alignment: of MXFP8, how scales lie, and what every group's first row is a multiple of.
    rht_amax: the largest number after a rotation of 16 tokens, too. All of it is defined in fusekit/plan/quantise.py.
    """

    inputs: str = NONE
    x_format: str = X_FORMATS[0]
    accumulation: str = ACCUMULATIONS[0]
    out: str = NONE
    scales: str = SCALES[0]
    transpose: bool = False
    keep: bool = False
    x_blocks: str = BLOCKS[0]
    y_blocks: str = BLOCKS[0]
    dz_blocks: str = BLOCKS[0]
    scale_layout: str = LAYOUTS[0]
    group_alignment: int = 1
    rht_amax: bool = False

    @property
    def promoted(self) -> bool:
        """Whether float32 registers take over after every 128 of K."""
        return self.coded_inputs and self.accumulation == ACCUMULATIONS[0]

    @property
    def by_block(self) -> bool:
        """Whether the scales change along K."""
        return self.inputs == BLOCK

    @property
    def square(self) -> bool:
        """Whether the factor x of a weight gradient has a scale for 128 tokens of 128 columns."""
        return self.x_blocks == SQUARE

    def turned_square(self, name: str) -> bool:
        """Whether the transposed FP8 values of `name`, "y" or "dz", have one scale for 128 tokens of 128 columns."""
        return str(getattr(self, f"{name}_blocks")) == SQUARE

    @property
    def coded(self) -> bool:
        """Whether y or dz is stored as FP8 values."""
        return self.by_blocks or self.mx

    @property
    def by_blocks(self) -> bool:
        """Whether it is stored as FP8 values of 128 numbers with a float32 scale."""
        return self.out == BLOCK

    @property
    def mx(self) -> bool:
        """Whether it is stored as MXFP8: FP8 values of 32 numbers with a scale of a byte."""
        return self.out == MXFP8

    @property
    def largest(self) -> bool:
        """Whether the largest numbers of groups are stored next to it."""
        return self.out == AMAX

    @property
    def swizzled(self) -> bool:
        """Whether scales of MXFP8 lie as tensor cores that multiply it take them."""
        return self.scale_layout == SWIZZLED

    @property
    def wide(self) -> bool:
        """Whether y or dz is stored in its dtype."""
        return self.keep or not self.coded

    @property
    def coded_inputs(self) -> bool:
        """Whether both factors of the product are FP8 values."""
        return self.inputs not in (NONE, FP8_W, MX_W)

    @property
    def weights_alone(self) -> bool:
        """Whether w is FP8 values, with a scale for 128 x 128, or MXFP4, and x is not."""
        return self.inputs in (FP8_W, MX_W)

    @property
    def mx_weights(self) -> bool:
        """Whether w is MXFP4: two e2m1 values a byte, and a scale of a byte for 32 of a row."""
        return self.inputs == MX_W

    @property
    def w_format(self) -> str:
        """Type of the elements of w, where it is not dtype's."""
        return PACKED if self.mx_weights else W_FORMAT

    def canonical(self) -> str:
        """As a spec has it in JSON: each key of the table that is not its default, `in=fp8-row`; "none" for none."""
        usual = Quant()
        pairs = (
            f"{key}={str(getattr(self, name)).lower()}"
            for key, name in _NAMES.items()
            if getattr(self, name) != getattr(usual, name)
        )
        return " ".join(pairs) or NONE

    @classmethod
    def of(cls, table: Mapping[str, Any] | str) -> Quant:
        """The recipe of the table `quant` of a spec file, or of its canonical text."""
        return _parsed(table) if isinstance(table, str) else cls(**{_NAMES[key]: table[key] for key in table})


# As keys and as attributes.
_SAME = (
    "x_format", "accumulation", "out", "scales", "transpose", "keep", "x_blocks", "y_blocks", "dz_blocks",
    "scale_layout", "group_alignment", "rht_amax",
)  # fmt: skip
_NAMES = {"in": "inputs"} | {name: name for name in _SAME}
_WORDS = {"true": True, "false": False}


@cache
def _parsed(text: str) -> Quant:
    if text == NONE:
        return Quant()
    pairs = (pair.partition("=") for pair in text.split())
    values = {_NAMES[key]: int(value) if value.isdigit() else _WORDS.get(value, value) for key, _, value in pairs}
    return Quant(**values)  # type: ignore[arg-type]
