"""Which elements to compare when the reference of all would take too long."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fusekit.reference.formats import Array

GROUPS = 12


def sample_rows(offsets: Array, count: int, seed: int = 0) -> NDArray[np.int64]:
    """About ``count`` rows worth checking when all are too many, ascending, from at most ``GROUPS`` groups.

    Of the first, last, smallest, largest and some random nonempty groups: the first and last row and random ones.
    Few groups keep the cost down, since each one's weights are widened to float64.
    """
    ends: NDArray[np.int64] = np.asarray(offsets, dtype=np.int64)
    sizes = np.diff(ends, prepend=0)
    rng = np.random.default_rng(seed)
    chosen = _groups(sizes, rng)
    if not chosen:
        return np.empty(0, dtype=np.int64)
    rows = []
    for group in chosen:
        start, end = ends[group] - sizes[group], ends[group]
        rows += [np.array([start, end - 1]), rng.integers(start, end, max(count // len(chosen) - 2, 0))]
    return np.unique(np.concatenate(rows))


def sample_weights(
    offsets: Array, shape: tuple[int, int, int], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(rows e N + n, columns k) of dw [E, N, K] worth comparing, about ``count`` rows and columns of each group.

    Of the groups that ``sample_rows`` would take, and of an empty one: the first and last of each and random ones.
    """
    ends: NDArray[np.int64] = np.asarray(offsets, dtype=np.int64)
    sizes = np.diff(ends, prepend=0)
    rng = np.random.default_rng(0)
    chosen = np.array([*_groups(sizes, rng), *np.flatnonzero(sizes == 0)[:1]], dtype=np.int64)
    down, across = (
        np.unique([0, extent - 1, *rng.integers(0, extent, max(count - 2, 0))]).astype(np.int64) for extent in shape[1:]
    )
    return np.unique(chosen[:, None] * shape[1] + down), across


def _groups(sizes: NDArray[np.int64], rng: np.random.Generator) -> list[int]:
    """At most ``GROUPS`` groups with rows: the first, the last, the smallest, the largest, then random ones."""
    full = np.flatnonzero(sizes)
    if not full.size:
        return []
    by_size = full[np.argsort(sizes[full], kind="stable")]
    first = [full[0], full[-1], by_size[0], by_size[-1]]
    return list(dict.fromkeys([*first, *rng.permutation(full)]))[:GROUPS]
