"""The tensors of an operation that works token by token, for numbers of tokens and of elements in a row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fusekit.plan.token_operation import INPUT, PEERS, SCALAR, TokenOperand
from fusekit.plan.tokens import TOKENS

if TYPE_CHECKING:
    from fusekit.spec import PermutationSpec, RouterSpec

Shapes = dict[str, tuple[tuple[int, ...], str]]


def canonical(spec: RouterSpec | PermutationSpec | Mapping[str, Any]) -> Mapping[str, Any]:
    """A spec in canonical form."""
    return spec if isinstance(spec, Mapping) else spec.canonical()


GROUPS = 61  # of a launch that says how many there are


def token_tensors(
    keys: Mapping[str, Any], *, T: int, H: int = 0
) -> Iterator[tuple[TokenOperand, tuple[int, ...], str]]:
    """Each tensor of a launch, its shape and its dtype; there is a row for every choice, or every term. keys: of the
    spec.
    """
    sizes = {"T": T, "M": T * (keys["topk"] or keys.get("terms", 0)), "H": H, "E": GROUPS}
    for operand in TOKENS[keys["op"]].of(keys):
        if operand.role not in (SCALAR, PEERS):
            shape = tuple(_extent(extent, sizes) for extent in operand.extents(keys))
            yield operand, shape, operand.dtype_of(keys)


def _extent(extent: Any, sizes: Mapping[str, int]) -> int:
    if isinstance(extent, list):
        operation, left, right = extent
        first, second = _extent(left, sizes), _extent(right, sizes)
        return first * second if operation == "mul" else -(-first // second)
    return int(sizes[extent] if isinstance(extent, str) else extent)


def token_output_shapes(spec: RouterSpec | PermutationSpec | Mapping[str, Any], *, T: int, H: int = 0) -> Shapes:
    """The shape and dtype of each tensor that is written."""
    tensors = token_tensors(canonical(spec), T=T, H=H)
    return {operand.name: (shape, dtype) for operand, shape, dtype in tensors if operand.role != INPUT}
