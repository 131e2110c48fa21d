"""The quantisation recipe of a GEMM: what its factors are, and how their products are added up.

A spec has it as text, each key of the table `quant` that is not left out and not the default: `in=fp8-row`, or "none".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

NONE, TENSOR, ROW, BLOCK = "none", "fp8-tensor", "fp8-row", "fp8-block"
RECIPES = (TENSOR, ROW, BLOCK)
SIDE = 128  # of a block
X_FORMATS = ("e4m3", "e5m2")
W_FORMAT = "e4m3"
ACCUMULATIONS = ("promoted", "fast")


@dataclass(frozen=True, slots=True)
class Quant:
    """inputs: of the factors, "none" for those of the spec's dtype. x_format: type of x. accumulation: "promoted" where
    float32 registers take over behind every 128 of K, "fast" where one wgmma accumulator has them all.
    """

    inputs: str = NONE
    x_format: str = X_FORMATS[0]
    accumulation: str = ACCUMULATIONS[0]

    @property
    def promoted(self) -> bool:
        """Whether float32 registers take over behind every 128 of K."""
        return bool(self) and self.accumulation == ACCUMULATIONS[0]

    @property
    def by_block(self) -> bool:
        """Whether the scales change along K."""
        return self.inputs == BLOCK

    def __bool__(self) -> bool:
        return self.inputs != NONE


_NAMES = {"in": "inputs", "x_format": "x_format", "accumulation": "accumulation"}


def text(table: Mapping[str, Any] | str) -> str:
    """The table of a spec file as a spec has it."""
    if isinstance(table, str):
        return table
    usual = Quant()
    told = (
        f"{key}={table[key]}"
        for key, name in _NAMES.items()
        if table.get(key, getattr(usual, name)) != getattr(usual, name)
    )
    return " ".join(told) or NONE


@cache
def quant(told: str) -> Quant:
    """What `text` says."""
    if told == NONE:
        return Quant()
    return Quant(**{_NAMES[key]: value for key, _, value in (each.partition("=") for each in told.split())})
