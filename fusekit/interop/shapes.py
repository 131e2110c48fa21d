"""Shapes of outputs from shapes of inputs, for frameworks whose operators allocate what they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusekit.abi import LaunchRecord
from fusekit.errors import ArgumentError


def dims_of(record: LaunchRecord, shapes: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The value of every dim of `record`, from the shapes of some of its tensors.

    A dim that is an extent itself is read; one that is only part of a multiple, as I in w [E, 2I, K], is
    divided out. Extents may be a framework's symbols: they are only divided. Raises ArgumentError for a tensor of
    another rank and for a dim that these shapes do not determine.
    """
    dims: dict[str, Any] = {}
    scaled: list[tuple[int, str, Any]] = []
    for tensor in record.tensors:
        if tensor.name not in shapes:
            continue
        shape = shapes[tensor.name]
        if len(shape) != tensor.rank:
            raise ArgumentError(
                f"{tensor.name} has rank {len(shape)}, shape {list(shape)}; it must have rank {tensor.rank}",
                argument=tensor.name,
            )
        for extent, value in zip(tensor.shape, shape, strict=True):
            if isinstance(extent, str):
                dims.setdefault(extent, value)
            elif isinstance(extent, tuple) and extent[0] == "mul" and len(extent) == 3:
                factors = [item for item in extent[1:] if isinstance(item, int)]
                names = [item for item in extent[1:] if isinstance(item, str)]
                if len(factors) == len(names) == 1 and factors[0] > 0:
                    scaled.append((factors[0], names[0], value))
    for factor, name, value in scaled:
        dims.setdefault(name, value // factor)
    missing = [dim.name for dim in record.dims if dim.name not in dims]
    if missing:
        raise ArgumentError(
            f"the shapes of {', '.join(shapes)} do not determine {', '.join(missing)}; call the kernel directly, with"
            " outputs of your own"
        )
    return dims
