"""Tensor maps that host code has the driver encode: the call's arguments replace the descriptor's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusekit.abi import RecordError
from fusekit.abi.tensormap import MAX_RANK, encoder_modes
from fusekit.compiler.hostcode.bits import Bits, Graph, Pointer
from fusekit.errors import BuildError

if TYPE_CHECKING:
    from fusekit.compiler.hostcode.machine import Call

ENCODE = "_cuTensorMapEncodeTiled"
"""The driver's function of that name, without the underscore."""

WORD = "tensor_map"
"""The operation of a descriptor's word: its arguments are an `Encoded` and the word's number."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One call. dims, strides, box, element_strides: innermost first, strides in bytes without the innermost one;
    modes: of a `TensorMap`, by name.
    """

    address: Bits
    dims: tuple[Bits, ...]
    strides: tuple[Bits, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    modes: dict[str, str]


def words(graph: Graph, call: Call, count: int) -> list[Bits]:
    """The words of the descriptor that `call` makes. Raises BuildError for one that no tensor map of a record is."""
    _, dtype, rank, address, dims, strides, box, steps, *modes = call.arguments
    number = _constant(rank, call)
    if not 1 <= number <= MAX_RANK or not isinstance(address, Bits):
        raise BuildError(f"host code: a tensor map of rank {number}, of memory of the host's: {call.at.place}")
    try:
        named = encoder_modes(*(_constant(item, call) for item in (dtype, *modes)))
    except RecordError as error:
        raise BuildError(f"host code: {error}: {call.at.place}") from error
    encoded = Encoded(
        address,
        _array(call, dims, number, 8),
        _array(call, strides, number - 1, 8),
        tuple(_constant(item, call) for item in _array(call, box, number, 4)),
        tuple(_constant(item, call) for item in _array(call, steps, number, 4)),
        named,
    )
    return [graph.make(WORD, 64, encoded, index) for index in range(count)]


def _array(call: Call, at: Any, count: int, size: int) -> tuple[Bits, ...]:
    cells = [call.cell(at, size * index) if isinstance(at, Pointer) else None for index in range(count)]
    values = tuple(item for item in cells if isinstance(item, Bits))
    if len(values) != count:
        raise BuildError(f"host code: a tensor map whose extents are not filled in: {call.at.place}")
    return values


def _constant(bits: Any, call: Call) -> int:
    if not isinstance(bits, Bits) or not bits.is_const:
        raise BuildError(
            f"host code: rank, type, box or another mode of a tensor map depends on the arguments: {call.at.place}; a"
            " launch record has constants there"
        )
    return bits.number
