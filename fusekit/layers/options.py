"""The table of a layer, for people and for frameworks: launching reads none of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


class LayerOptions:
    """The table of a layer's spec, each of its fields an attribute."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._table = dict(table)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_table"][name]
        except KeyError:
            raise AttributeError(f"a layer's table has no {name}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerOptions) and self._table == other._table

    def __hash__(self) -> int:
        return hash((self.file, self.name))

    def __repr__(self) -> str:
        return f"<LayerOptions {self.file}/{self.name}>"

    def canonical(self) -> dict[str, Any]:
        """The table in JSON types."""
        return copy.deepcopy(self._table)

    @property
    def weights(self) -> str:
        """How the projections' weights lie in memory; "none" in records from before there was another way."""
        return str(self._table.get("weights", "none"))

    @property
    def residual(self) -> bool:
        """Whether a residual is added to the results; records of layers without one do not say so."""
        return bool(self._table.get("residual", False))

    @property
    def recompute_fp8(self) -> bool:
        """Whether the backward pass makes the FP8 weights that it reads; records of layers without it do not say so."""
        return bool(self._table.get("recompute_fp8", False))

    @property
    def projections(self) -> str:
        """Type of the projections' weights."""
        coded = {"fp8-block": "e4m3", "mxfp4": "u8"}
        return coded.get(self.weights) or str(self.weight_dtype or self.dtype)

    @property
    def local(self) -> int:
        """The experts of a rank."""
        return int(self.experts // self.ranks)

    @property
    def gated(self) -> bool:
        """Whether two columns of z make one of the activation's."""
        return bool(self.glu_layout != "none")

    @property
    def trained(self) -> bool:
        """Whether there is a backward pass."""
        return bool(self.keep != "none")
