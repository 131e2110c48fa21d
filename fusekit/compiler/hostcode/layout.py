"""How LLVM types lie in memory on x86-64 and on the GPU, which agree on everything that a kernel parameter holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusekit.compiler import dsl
from fusekit.errors import BuildError

POINTER_BYTES = 8


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar inside a type. kind: integer, float or pointer; width in bits."""

    offset: int
    kind: str
    width: int

    @property
    def size(self) -> int:
        return max(self.width // 8, 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Bytes and alignment of a type, and the scalars in it by ascending offset.

    parts: of an aggregate, each member's offset and layout.
    """

    size: int
    alignment: int
    leaves: tuple[Leaf, ...]
    parts: tuple[tuple[int, Layout], ...] = ()
    is_aggregate: bool = False


class Layouts:
    """Layouts by type. One for each MLIR module: types belong to its context."""

    def __init__(self) -> None:
        self._known: dict[Any, Layout] = {}

    def of(self, type_: Any) -> Layout:
        """The layout of an MLIR type; raises BuildError for one that host code is not known to have."""
        layout = self._known.get(type_)
        if layout is None:
            layout = self._known[type_] = self._make(type_)
        return layout

    def _make(self, type_: Any) -> Layout:
        ir, llvm = dsl.ir(), dsl.llvm()
        if isinstance(type_, ir.IntegerType):
            return _scalar("integer", type_.width)
        if isinstance(type_, ir.FloatType):
            return _scalar("float", type_.width)
        if isinstance(type_, llvm.PointerType):
            return _scalar("pointer", 8 * POINTER_BYTES)
        if isinstance(type_, llvm.StructType):
            return _aggregate([self.of(item) for item in type_.body], packed=type_.packed)
        if isinstance(type_, llvm.ArrayType):
            return _aggregate([self.of(type_.element_type)] * type_.num_elements)
        if isinstance(type_, ir.VectorType) and type_.has_static_shape and type_.rank == 1:
            layout = _aggregate([self.of(type_.element_type)] * type_.get_dim_size(0))
            return Layout(layout.size, max(layout.size, 1), layout.leaves, layout.parts, is_aggregate=True)
        raise BuildError(f"host code: type {type_} is not known; this fusekit cannot read a launch out of it")


def _scalar(kind: str, width: int) -> Layout:
    size = max(width // 8, 1)
    return Layout(size, size, (Leaf(0, kind, width),))


def _aggregate(items: list[Layout], packed: bool = False) -> Layout:
    end, alignment = 0, 1
    parts: list[tuple[int, Layout]] = []
    leaves: list[Leaf] = []
    for item in items:
        step = 1 if packed else item.alignment
        end = -(-end // step) * step
        parts.append((end, item))
        leaves += [Leaf(end + leaf.offset, leaf.kind, leaf.width) for leaf in item.leaves]
        end += item.size
        alignment = max(alignment, step)
    return Layout(-(-end // alignment) * alignment, alignment, tuple(leaves), tuple(parts), is_aggregate=True)
