"""Where gate and up values lie along N: ``glu_layout`` as index maps.

N = 2I columns of the pre-activation (and of the weights) hold I gate columns g and I up columns u:

- ``concat``: ``g0 .. g(I-1) u0 .. u(I-1)``, as checkpoints have it;
- ``interleaved``: ``g0 u0 g1 u1 ...``;
- ``interleaved-32``: 32 columns of g, the 32 columns of u that belong to them, and so on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array

BLOCKS = {"concat": None, "interleaved": 1, "interleaved-32": 32}


def gate_columns(layout: str, width: int) -> NDArray[np.int64]:
    """int64[width]: the column of the pre-activation that holds the gate of each of the ``width`` = I outputs."""
    return _columns(layout, width, up=False)


def up_columns(layout: str, width: int) -> NDArray[np.int64]:
    """int64[width]: the column of the pre-activation that holds the up value of each of the ``width`` = I outputs."""
    return _columns(layout, width, up=True)


def columns_of(layout: str, width: int, chosen: NDArray[np.int64] | None) -> tuple[NDArray[np.int64] | None, str]:
    """Which columns of the pre-activation belong to the ``chosen`` of ``width`` outputs, and in which layout they are.

    None is all of them, in the layout they have. Layout "none" is that of a plain activation.
    """
    if chosen is None or layout == "none":
        return chosen, layout
    return np.concatenate([gate_columns(layout, width)[chosen], up_columns(layout, width)[chosen]]), "concat"


def split(z: Array, layout: str) -> tuple[Array, Array]:
    """``z`` [..., 2I] in ``layout`` as (g, u), each [..., I]."""
    if z.shape[-1] % 2:
        raise ValueError(f"a gated pre-activation has {z.shape[-1]} columns; gate and up need an even number")
    width = z.shape[-1] // 2
    return z[..., gate_columns(layout, width)], z[..., up_columns(layout, width)]


def join(g: Array, u: Array, layout: str) -> Array:
    """The inverse of ``split``: g and u [..., I] as one array [..., 2I] in ``layout``."""
    if g.shape != u.shape:
        raise ValueError(f"gate {g.shape} and up {u.shape} differ in shape; they must be equal")
    width = g.shape[-1]
    z = np.empty((*g.shape[:-1], 2 * width), dtype=np.result_type(g, u))
    z[..., gate_columns(layout, width)] = g
    z[..., up_columns(layout, width)] = u
    return z


def _columns(layout: str, width: int, *, up: bool) -> NDArray[np.int64]:
    if layout not in BLOCKS:
        raise ValueError(f"glu_layout {layout!r}; it is one of {', '.join(BLOCKS)}")
    block = BLOCKS[layout] or max(width, 1)
    if width % block:
        raise ValueError(f"{layout} with I = {width}; I must be a multiple of {block}")
    output = np.arange(width, dtype=np.int64)
    return output // block * (2 * block) + output % block + (block if up else 0)
