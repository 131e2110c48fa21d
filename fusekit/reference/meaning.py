"""The keys of a kernel spec that decide its numbers, and reading a kernel's arguments by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.plan.operands import BACKWARD, FORWARD, WGRAD
from fusekit.plan.operands import fields as operand_fields
from fusekit.plan.operations import OPERATIONS
from fusekit.plan.quant import Quant
from fusekit.reference.formats import Array
from fusekit.spec import Activation, KernelSpec
from fusekit.spec.model import OPS


class Meaning:
    """What must decide a kernel's numbers; all else (tile, cluster, ...) must not change them.

    operands: the value of each operand's key, by name.
    """

    def __init__(self, keys: Mapping[str, Any]) -> None:
        operation = OPERATIONS[keys["op"]]
        self.op, self.dtype, self.out_dtype = str(keys["op"]), str(keys["dtype"]), str(keys["out_dtype"])
        self.b_major, self.glu_layout = str(keys["b_major"]), str(keys["glu_layout"])
        self.activation = Activation(**keys["activation"])
        self.grouped = bool(operation.ragged)  # else all rows belong together
        self.quant = Quant.of(str(keys["quant"]))
        self.factors = (self.dtype, self.quant.w_format if self.quant.weights_alone else self.dtype)
        if self.quant.coded_inputs:
            self.factors = (self.quant.x_format, self.quant.w_format)
        self.epilogue = FORWARD
        if operation.reduces_rows or self.activation.backward:
            self.epilogue = WGRAD if operation.reduces_rows else BACKWARD
        self.operands: Mapping[str, Any] = {key.name: keys.get(key.name, key.default) for key in operand_fields()}


def meaning(spec: KernelSpec | Mapping[str, Any]) -> Meaning:
    """The ``Meaning`` of a ``KernelSpec``, or of its ``canonical()`` form as a store keeps it."""
    keys: Mapping[str, Any] = spec if isinstance(spec, Mapping) else spec.canonical()
    if keys["op"] not in OPS:
        raise ValueError(f"op {keys['op']!r}; the reference knows {', '.join(OPS)}")
    return Meaning(keys)


def need(inputs: Mapping[str, Any], name: str, rank: int | None) -> Array:
    """The argument ``name``, of ``rank`` dimensions; ``ValueError`` when it is missing or has others."""
    if inputs.get(name) is None:
        raise ValueError(f"no {name!r} among the inputs ({', '.join(inputs)}); the spec asks for it")
    array = np.asarray(inputs[name])
    if rank is not None and array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}; it must have {rank} dimensions")
    return array


def group_ends(inputs: Mapping[str, Any], rows: int, means: Meaning) -> NDArray[np.int64]:
    """int64[E]: the end row of each group; of a dense operation, which has one, the end of its ``rows``."""
    if not means.grouped:
        return np.array([rows], dtype=np.int64)
    ends = need(inputs, "offsets", 1).astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any() or (ends.size and ends[-1] > rows):
        raise ValueError(f"offsets {ends.tolist()}; they must not decrease nor pass the {rows} rows of x")
    return ends


def indices(what: str, chosen: Sequence[int] | Array | None, count: int, owner: str) -> NDArray[np.int64] | None:
    """The ``chosen`` rows or columns; None: all. ``owner``, for an error, says whose they are, ``count`` in all."""
    if chosen is None:
        return None
    numbers = np.asarray(chosen, dtype=np.int64).reshape(-1)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= count):
        raise ValueError(f"{what} {numbers.min()}..{numbers.max()}; {owner} {what} 0..{count - 1} only")
    return numbers


def row_groups(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[owned rows]: the group that owns each row, from the groups' end rows."""
    return np.repeat(np.arange(ends.size), np.diff(ends, prepend=0))
