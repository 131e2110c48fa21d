"""The window (IPC buffer, symmetric memory) of a rank: one layout on every rank; the others store into it.

    header    HEADER bytes: the words below
    flags     [ranks, capacity / CHUNK] u32: the launch, counted from 1, whose rows of a chunk are all there
    choice_flags  [ranks, CHOICE_SENDERS] u32, of a dispatch: the launch whose choices a block of the rank has sent
    indices   [ranks, capacity, K] i32, of a dispatch: the token's experts here, counted from the rank's first; else -1
    weights   [ranks, capacity, K] f32, of a weighted dispatch, or of a combine that returns gradients
    rows      [ranks, capacity, H]: what rank s sent for its token t lies at [s, t]; a combine may do without
    scales    [ceil(H / 128), ranks, capacity] f32, of a dispatch of FP8 values

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
# Words of the header, in bytes. EPOCH: launches of which all blocks took leave; TICKET and DONE: blocks of this launch
# that began, that took leave, some of them to wait for rows; STATUS: what went wrong first, 0: nothing (1 + the rank
# that did not come, stage, launch), the same in all windows that NEXT joins in a ring: the address of the STATUS of
# another window of this rank, 0: none. OPEN: of each rank, the last launch for which its window may be written to.
# OVER: of each rank, the rows that its experts wanted in a launch where these were more than it has room for, else 0;
# in turns for launches of even and of odd numbers, since a rank may open one launch before the last one ends elsewhere.
# For kernels that read rows while they come, a dispatch leaves LOCAL_TOKENS, the first place of the rank's own tokens
# and their end, and WAIT, the milliseconds to wait. Of a launch that sends rows apart: BEGUN, CAME, the last of which
# all blocks began, and all rows are here; and what TICKET and DONE are, since a launch of choices or of nothing runs
# meanwhile. DRAWN: chunks that blocks drew of this launch, those that send to other ranks, and those that copy.
EPOCH, TICKET, DONE, STATUS, CAME, LOCAL_TOKENS, WAIT = 0, 4, 8, 16, 28, 32, 40
BEGUN, ROWS_TICKET, ROWS_DONE, DRAWN, NEXT, OPEN, OVER, HEADER = 44, 48, 52, 56, 64, 128, 256, 512
STATUS_WORDS = 3
STAGES = ("", "let its window be written to", "send its rows", "launch the kernel that sends rows")
OPENING, SENDING, BEGINNING = 1, 2, 3
CHOICE_SENDERS = 64  # blocks of a rank that send choices, at most
ALL, CHOICES, ROWS, NOTHING = "all", "choices", "rows", "nothing"  # what a dispatch sends
SENDS = (ALL, CHOICES, ROWS, NOTHING)
SENDERS = {"moe-dispatch": 64, "moe-combine": 48}  # blocks that send, unless the spec says otherwise
LINE = 128  # bytes that regions are aligned to
PER_LINE = LINE // 4 * CHUNK  # tokens with flags in a line
MOST_RANKS = (OVER - OPEN) // 4


class Regions(NamedTuple):
    """Where each part of a window begins, in bytes; `end` is its size."""

    flags: Any
    choice_flags: Any
    indices: Any
    weights: Any
    rows: Any
    scales: Any
    end: Any


def regions(
    capacity: Any, row_bytes: Any, ranks: int, index_bytes: int, weight_bytes: int, scale_bytes: Any = 0
) -> Regions:
    """The regions of a window, from numbers of the host or of the device. The bytes of a token's parts are 0 where
    there are none.
    """
    slots = capacity * ranks
    choice_flags = HEADER + (slots + PER_LINE - 1) // PER_LINE * LINE
    indices = choice_flags + (ranks * CHOICE_SENDERS * 4 if index_bytes else 0)
    weights = indices + slots * index_bytes
    rows = weights + slots * weight_bytes
    scales = rows + slots * row_bytes
    return Regions(HEADER, choice_flags, indices, weights, rows, scales, scales + slots * scale_bytes)


def parts(keys: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of a token's indices and weights in the window of a kernel with these keys."""
    choices = 4 * keys["topk"]
    if keys["op"] == "moe-dispatch":
        return choices, choices if keys["weighted"] else 0
    return 0, choices if keys["gradients"] else 0


def wide(keys: Mapping[str, Any]) -> bool:
    """Whether rows are sent, not gradients of weights or choices alone."""
    return bool(keys.get("rows", True)) and keys.get("sends", ALL) in (ALL, ROWS)


def coded(keys: Mapping[str, Any]) -> bool:
    """Whether rows are FP8 values, which have scales."""
    return bool(keys["dtype"] == "e4m3" and wide(keys))


def of_row(keys: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Bytes of a row of `hidden` elements in the window of a kernel with these keys, and of its scales."""
    row = hidden * DTYPES[keys["dtype"]].bytes if wide(keys) else 0
    return row, 4 * -(-hidden // SIDE) if coded(keys) else 0


def window_bytes(keys: Mapping[str, Any]) -> Expr:
    """The size of a window over H and capacity, as far as the kernel reaches."""
    ranks, size = keys["ranks"], DTYPES[keys["dtype"]].bytes
    choices = ranks * sum(parts(keys))
    token = ("add", ("mul", ranks * size, "H"), choices) if wide(keys) else choices
    token = ("add", token, ("mul", 4 * ranks, ("ceildiv", "H", SIDE))) if coded(keys) else token
    flags = ("mul", LINE, ("ceildiv", ("mul", ranks, "capacity"), PER_LINE))
    flag_bytes = ranks * CHOICE_SENDERS * 4 if parts(keys)[0] else 0
    return ("add", HEADER + flag_bytes, flags, ("mul", "capacity", token))


def waiting(keys: Mapping[str, Any], capacity: int) -> int:
    """The blocks of a launch that wait for other ranks."""
    senders = int(keys.get("blocks", SENDERS[keys["op"]]))
    return senders + (capacity // CHUNK if keys["op"] == "moe-combine" else 1)


def words(slots: Any) -> Any:
    """32-bit words of the header and the flags of so many places, which a kernel that waits for rows is given."""
    return HEADER // 4 + slots // CHUNK
