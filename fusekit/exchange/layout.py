"""How large the window of a kernel is, and where its parts lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from fusekit.dtypes import DTYPES
from fusekit.errors import ArgumentError
from fusekit.plan.exchange import CHUNK, GRAIN, coded, of_row, parts, regions, wide
from fusekit.runtime.tensors import compact_strides


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a window, row-major, as launches read a tensor: data_ptr(), stride(), shape, dtype, device."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    device: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].bytes

    def data_ptr(self) -> int:
        """The device address of the first element."""
        return self.address

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return compact_strides(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """The windows of one kernel.

    spec: its canonical form (`Kernel.spec`), of moe-dispatch or moe-combine. tokens: that a rank has at most;
    `capacity` is that rounded up, and what every launch is given. hidden: elements of a row, where rows are sent.
    """

    spec: Mapping[str, Any]
    tokens: int
    hidden: int

    def __post_init__(self) -> None:
        """Raises ArgumentError for no tokens, or no elements."""
        for name in ("tokens", "hidden"):
            number = ArgumentError.integer(name, getattr(self, name), "a whole number, 1 or more", 1)
            object.__setattr__(self, name, number)

    @property
    def capacity(self) -> int:
        """Tokens of a rank that the windows have room for."""
        return -(-self.tokens // GRAIN) * GRAIN

    @property
    def slots(self) -> int:
        """Rows of a window: S, a place for each token of each rank."""
        return int(self.spec["ranks"]) * self.capacity

    @property
    def bytes(self) -> int:
        """Bytes of a window."""
        return int(self._regions().end)

    def parts(self, address: int, device: int) -> dict[str, Part]:
        """Tensors in the window at `address` by name: rows [S, H], indices and weights [S, K] and scales
        [ceil(H / 128), S] where it has them, and flags [ranks, capacity / 16].
        """
        regions, topk = self._regions(), self.spec["topk"]
        index_bytes, weight_bytes = parts(self.spec)
        tensors = {}
        if wide(self.spec):
            tensors["rows"] = Part(address + regions.rows, (self.slots, self.hidden), self.spec["dtype"], device)
        if index_bytes:
            tensors["indices"] = Part(address + regions.indices, (self.slots, topk), "i32", device)
        if weight_bytes:
            tensors["weights"] = Part(address + regions.weights, (self.slots, topk), "f32", device)
        if coded(self.spec):
            blocks = (regions.end - regions.scales) // (4 * self.slots)
            tensors["scales"] = Part(address + regions.scales, (blocks, self.slots), "f32", device)
        flags = (self.spec["ranks"], self.capacity // CHUNK)
        return {**tensors, "flags": Part(address + regions.flags, flags, "u32", device)}

    def _regions(self) -> Any:
        row, scales = of_row(self.spec, self.hidden)
        return regions(self.capacity, row, self.spec["ranks"], *parts(self.spec), scales)
