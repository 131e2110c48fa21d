"""Ends of groups: what they must be, and what moe-check says of those that are not."""

from __future__ import annotations

from typing import Any

import numpy as np


def first_wrong(offsets: Any, rows: int) -> tuple[int, int, int] | None:
    """(group, where it begins, where it ends) of the first group that is wrong; None where none is.

    offsets: int32 [E], ends of groups. A group begins where the one before it ends, the first one at 0; it must end
    there or later, and at `rows` at the latest.
    """
    ends = np.asarray(offsets, dtype=np.int64)
    begins = np.concatenate([[0], ends[:-1]])
    wrong = np.flatnonzero((ends < begins) | (ends > rows))
    if not wrong.size:
        return None
    group = int(wrong[0])
    return group, int(begins[group]), int(ends[group])
