"""The keys of a kernel spec that decide its numbers, and reading a kernel's arguments by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array
from fusekit.spec import Activation, KernelSpec

OPS = ("dense-gemm", "grouped-gemm", "grouped-wgrad")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What must decide a kernel's numbers; all else (tile, cluster, ...) must not change them."""

    op: str
    dtype: str
    out_dtype: str
    b_major: str
    alpha: str
    bias: bool
    save_preactivation: bool
    activation: Activation
    glu_layout: str
    row_scale: bool
    accumulate: bool
    recompute: bool
    dprob: bool
    dbias: bool

    @property
    def grouped(self) -> bool:
        """Whether groups own the rows; a dense-gemm's all belong together."""
        return self.op != "dense-gemm"


def meaning(spec: KernelSpec | Mapping[str, Any]) -> Meaning:
    """The ``Meaning`` of a ``KernelSpec``, or of its ``canonical()`` form as a store keeps it."""
    keys: Mapping[str, Any] = spec if isinstance(spec, Mapping) else spec.canonical()
    if keys["op"] not in OPS:
        raise ValueError(f"op {keys['op']!r}; the reference knows {', '.join(OPS)}")
    if keys["quant"] != "none":
        raise ValueError(f'quant {keys["quant"]!r}; the reference knows quant = "none" only')
    same = [name for name in Meaning.__dataclass_fields__ if name != "activation"]
    return Meaning(activation=Activation(**keys["activation"]), **{name: keys[name] for name in same})


def need(inputs: Mapping[str, Any], name: str, rank: int | None) -> Array:
    """The argument ``name``, of ``rank`` dimensions; ``ValueError`` when it is missing or has others."""
    if inputs.get(name) is None:
        raise ValueError(f"no {name!r} among the inputs ({', '.join(inputs)}); the spec asks for it")
    array = np.asarray(inputs[name])
    if rank is not None and array.ndim != rank:
        raise ValueError(f"{name} has shape {array.shape}; it must have {rank} dimensions")
    return array


def group_ends(inputs: Mapping[str, Any], rows: int, means: Meaning) -> NDArray[np.int64]:
    """int64[E]: the end row of each group; of a dense-gemm, which has one, the end of its ``rows``."""
    if not means.grouped:
        return np.array([rows], dtype=np.int64)
    ends = need(inputs, "offsets", 1).astype(np.int64)
    if (np.diff(ends, prepend=0) < 0).any() or (ends.size and ends[-1] > rows):
        raise ValueError(f"offsets {ends.tolist()}; they must not decrease nor pass the {rows} rows of x")
    return ends


def row_groups(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[owned rows]: the group that owns each row, from the groups' end rows."""
    return np.repeat(np.arange(ends.size), np.diff(ends, prepend=0))
