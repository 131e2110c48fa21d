"""The definitions of moe-dispatch and moe-combine, over all ranks at once.

Rank r has experts [r L, (r + 1) L), L = experts / ranks. A place of a window is (source, token): S = ranks *
capacity of them, row-major. Values of ranks are in lists, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusekit.plan.exchange import ALL, CHOICES, NOTHING, ROWS
from fusekit.reference.formats import Array, encode, held, values


def owners(indices: Array, experts: int, ranks: int) -> Array:
    """bool[T, ranks]: whether a rank has an expert that the token chose (indices [T, K])."""
    known = (indices >= 0) & (indices < experts)
    rank = np.where(known, indices, 0) // (experts // ranks)
    return np.stack([(known & (rank == target)).any(axis=1) for target in range(ranks)], axis=1)


def dispatch(
    spec: Mapping[str, Any], x: Sequence[Array], indices: Sequence[Array], weights: Sequence[Array] | None,
    capacity: int, scales: Sequence[Array] | None = None,
) -> list[dict[str, Array]]:  # fmt: skip
    """The received tensors of each rank: rows [S, H], bool `sent` [S] (others stay as they were), indices [S, K]
    counted from its first expert and -1 where it has none, and weights [S, K], 0 there, unless None. For FP8 also
    scales [ceil(H / 128), S], 0 at a place that has no token. Of a dispatch that sends less, only what it sends.

    x: [T, H] of each rank, held as `held` says; indices, weights: [T, K]; scales: of FP8, [ceil(H / 128), T]. T may
    differ from rank to rank.
    """
    ranks, experts, topk = spec["ranks"], spec["experts"], spec["topk"]
    local, hidden = experts // ranks, x[0].shape[1]
    received = []
    for target in range(ranks):
        rows = np.zeros((ranks, capacity, hidden), held(spec["dtype"]))
        sent = np.zeros((ranks, capacity), bool)
        chosen = np.full((ranks, capacity, topk), -1, np.int32)
        factors = np.zeros((ranks, capacity, topk), np.float32)
        for source, (tokens_, choices) in enumerate(zip(x, indices, strict=True)):
            tokens = len(tokens_)
            rows[source, :tokens] = tokens_
            sent[source, :tokens] = owners(choices, experts, ranks)[:, target]
            here = (choices >= target * local) & (choices < (target + 1) * local)
            chosen[source, :tokens] = np.where(here, choices - target * local, -1)
            if weights is not None:
                factors[source, :tokens] = np.where(here, weights[source], 0)
        slots = ranks * capacity
        arrays = {"rows": rows.reshape(slots, hidden), "sent": sent.reshape(slots)}
        arrays["indices"] = chosen.reshape(slots, topk)
        if scales is not None:
            room = [np.pad(scale, ((0, 0), (0, capacity - scale.shape[1]))) for scale in scales]
            arrays["scales"] = np.concatenate(room, axis=1)
        arrays |= {} if weights is None else {"weights": factors.reshape(slots, topk)}
        kept = {CHOICES: ("indices", "weights"), ROWS: ("rows", "sent", "scales"), NOTHING: ()}
        sent_alone = kept.get(spec.get("sends", ALL), tuple(arrays))
        received.append({name: array_name for name, array_name in arrays.items() if name in sent_alone})
    return received


def combine(
    spec: Mapping[str, Any], x: Sequence[Array], inverse: Sequence[Array], weights: Sequence[Array] | None,
    indices: Sequence[Array], capacity: int, addends: Sequence[Sequence[Array]] = (),
) -> list[tuple[Array, Array]]:  # fmt: skip
    """For each rank y [T, H] in the rows' format, and float64 sums of magnitudes.

    x: [M, H] rows in expert order of each rank; inverse, weights: [S, K], of what it received; indices: [T, K], what
    its own tokens chose. A part is summed in float32 in the order of k and rounded; parts are so in the order of ranks.
    addends: of each rank, [T, H] each in the rows' format.
    """
    ranks, dtype = spec["ranks"], spec["dtype"]
    parts, sizes = [], []
    for rank in range(ranks):
        part, size = _part(values(x[rank], dtype), inverse[rank], None if weights is None else weights[rank])
        parts.append(values(encode(part, dtype), dtype).reshape(ranks, capacity, -1))
        sizes.append(size.reshape(ranks, capacity, -1))
    results = []
    for rank, choices in enumerate(indices):
        tokens = len(choices)
        there = owners(choices, spec["experts"], ranks)
        total = np.zeros((tokens, parts[0].shape[2]), np.float32)
        magnitude = np.zeros(total.shape)
        for source in range(ranks):
            held_there = there[:, source, None]
            total = total + np.where(held_there, parts[source][rank, :tokens], np.float32(0))
            magnitude += np.where(held_there, sizes[source][rank, :tokens], 0)
        for addend in addends[rank] if addends else ():
            total = total + values(addend, dtype)
            magnitude += np.abs(values(addend, dtype))
        results.append((encode(total, dtype), magnitude))
    return results


def returned(
    spec: Mapping[str, Any], grad_weights: Sequence[Array], indices: Sequence[Array], capacity: int
) -> list[Array]:
    """float32 [T, K] of each rank: what the rank of a choice's expert has in grad_weights [S, K]; 0 for no expert."""
    ranks, experts = spec["ranks"], spec["experts"]
    gradients = []
    for rank, choices in enumerate(indices):
        known = (choices >= 0) & (choices < experts)
        owner = np.where(known, choices, 0) // (experts // ranks)
        token, choice = np.indices(choices.shape)
        table = np.stack([table_.reshape(ranks, capacity, -1)[rank] for table_ in grad_weights])
        gradients.append(np.where(known, table[owner, token, choice], np.float32(0)).astype(np.float32))
    return gradients


def overflow(before: Array, wanted: Sequence[int], rows: Sequence[int]) -> Array:
    """int32 [4], the overflow report of every rank: the number of launches in which some rank's choices wanted more
    than its rows; of the last one, the first rank with the most rows, and these; the most rows of all.
    """
    beyond = [count if count > room else 0 for count, room in zip(wanted, rows, strict=True)]
    most = max(beyond)
    words = [before[0] + 1, beyond.index(most), most, max(before[3], most)] if most else before
    return np.array(words, np.int32)


def _part(x: Array, inverse: Array, weights: Array | None) -> tuple[Array, Array]:
    """float32 [S, H] sums, and float64 sums of magnitudes."""
    there = inverse >= 0
    total = np.zeros((len(inverse), x.shape[1]), np.float32)
    size = np.zeros(total.shape)
    for k in range(inverse.shape[1]):
        # A row of float32 at most times a float32 weight is exact in float64, and so nearly is what is added to it.
        row = np.where(there[:, k, None], x[inverse[:, k]] if len(x) else 0.0, 0.0).astype(np.float64)
        if weights is not None:
            row = row * np.where(there[:, k], weights[:, k], 0).astype(np.float64)[:, None]
        total = (total + row).astype(np.float32)
        size += np.abs(row)
    return total, size
