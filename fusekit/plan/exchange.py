"""The window of a rank: memory of one layout on every rank, into which the others store. See kernels/exchange.

    header    HEADER bytes: the words below
    flags     [ranks, capacity / CHUNK] u32: the launch, counted from 1, whose rows of a chunk are all there
    rows      [ranks, capacity, H]: what rank s sent for its token t lies at [s, t]; a combine may do without
    indices   [ranks, capacity, K] i32, of a dispatch: the token's experts here, counted from the rank's first; else -1
    weights   [ranks, capacity, K] f32, of a weighted dispatch, or of a combine that returns gradients
    scales    [ceil(H / 128), ranks, capacity] f32, of a dispatch of codes

`capacity`, a multiple of GRAIN, is how many tokens a rank may have at most. Launches on one window may differ in H, not
in capacity: a flag is always a flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from fusekit.dtypes import DTYPES
from fusekit.plan.quantise import SIDE

if TYPE_CHECKING:
    from fusekit.abi import Expr

CHUNK = 16  # tokens that one flag speaks of
GRAIN = 128  # every region then begins at a multiple of 128 bytes
# Words of the header, in bytes. EPOCH: launches that are done; TICKET and DONE: blocks of this launch that began, that
# ended; STATUS: what went wrong first, 0: nothing (1 + the rank that did not come, stage, launch); OPEN: of each rank,
# the last launch for which its window may be written to. MOST is the layer's: the most rows that its experts wanted.
EPOCH, TICKET, DONE, STATUS, MOST, OPEN, HEADER = 0, 4, 8, 16, 64, 128, 256
STATUS_WORDS = 3
STAGES = ("", "let its window be written to", "send its rows")
LINE = 128  # bytes that regions are aligned to
PER_LINE = LINE // 4 * CHUNK  # tokens with flags in a line
MOST_RANKS = (HEADER - OPEN) // 4


class Regions(NamedTuple):
    """Where each part of a window begins, in bytes; `end` is its size."""

    flags: Any
    rows: Any
    indices: Any
    weights: Any
    scales: Any
    end: Any


def regions(
    capacity: Any, row_bytes: Any, ranks: int, index_bytes: int, weight_bytes: int, scale_bytes: Any = 0
) -> Regions:
    """Of numbers, on the host or on the device. The bytes of a token's parts are 0 where there are none."""
    slots = capacity * ranks
    rows = HEADER + (slots + PER_LINE - 1) // PER_LINE * LINE
    indices = rows + slots * row_bytes
    weights = indices + slots * index_bytes
    scales = weights + slots * weight_bytes
    return Regions(HEADER, rows, indices, weights, scales, scales + slots * scale_bytes)


def parts(keys: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of a token's indices and weights in the window of a kernel with these keys."""
    choices = 4 * keys["topk"]
    if keys["op"] == "moe-dispatch":
        return choices, choices if keys["weighted"] else 0
    return 0, choices if keys["gradients"] else 0


def wide(keys: Mapping[str, Any]) -> bool:
    """Whether rows are sent, not gradients of weights alone."""
    return bool(keys.get("rows", True))


def coded(keys: Mapping[str, Any]) -> bool:
    """Whether rows are codes, which have scales."""
    return bool(keys["dtype"] == "e4m3")


def of_row(keys: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Bytes of a row of `hidden` elements in the window of a kernel with these keys, and of its scales."""
    row = hidden * DTYPES[keys["dtype"]].bytes if wide(keys) else 0
    return row, 4 * -(-hidden // SIDE) if coded(keys) else 0


def window_bytes(keys: Mapping[str, Any]) -> Expr:
    """The size of a window over H and capacity."""
    ranks, size = keys["ranks"], DTYPES[keys["dtype"]].bytes
    choices = ranks * sum(parts(keys))
    token = ("add", ("mul", ranks * size, "H"), choices) if wide(keys) else choices
    token = ("add", token, ("mul", 4 * ranks, ("ceildiv", "H", SIDE))) if coded(keys) else token
    flags = ("mul", LINE, ("ceildiv", ("mul", ranks, "capacity"), PER_LINE))
    return ("add", HEADER, flags, ("mul", "capacity", token))
