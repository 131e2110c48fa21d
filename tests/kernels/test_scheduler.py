"""Which rows a group has, on plain integers in the place of registers."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusekit.kernels.gemm.sm90 import scheduler
from tests.kernels.plain import plain
from tests.plans import gemm_plan

PLACES = (40, 90)  # of the rank's own tokens


class Memory:
    """What `arrivals` points at."""

    def toint(self):
        return 0


SCHEDULER = plain(
    scheduler,
    divide=lambda a, b: a // b,
    load_below=lambda index, row, end: index[row] if row < end else -1,
    load_word=lambda address: PLACES[(address - scheduler.LOCAL_TOKENS) // 4],
    cute=SimpleNamespace(arch=SimpleNamespace(vote_any_sync=bool)),
)
PARTS = (-64, -32, 0)  # how the first 32 groups are counted, three times


def parts(tile, offsets, index):
    """(begin, end) of each group's three parts, and of the whole group."""
    plan = gemm_plan(tile=(tile, 128))
    early, whole = SCHEDULER.LocalRowsFirst(plan), SCHEDULER.Scheduler(plan)
    source = SCHEDULER.LocalRows(offsets, index, Memory())
    groups, rows = len(offsets), len(index)
    return [
        (
            [early.rows_of_lane(source, first, groups, rows, lane) for first in PARTS],
            whole.rows_of_lane(offsets, 0, groups, rows, lane),
        )
        for lane in range(groups)
    ]


@pytest.mark.parametrize("tile", [64, 128])
@settings(max_examples=200, deadline=None)
@given(
    offsets=st.lists(st.integers(-50, 700), min_size=1, max_size=9),
    rows=st.integers(0, 650),
    seed=st.randoms(use_true_random=False),
)
@example(offsets=[300, 200, 500], rows=500, seed=None)
@example(offsets=[300, 700, 600], rows=500, seed=None)
def test_parts_of_a_group_are_its_rows_once_and_whole_tiles(tile, offsets, rows, seed):
    """Also where offsets fall: such a group has no rows, and none of its parts has."""
    index = [0 if seed is None else seed.randrange(130) for _ in range(rows)]
    for begin, end in itertools.pairwise([0, *offsets]):
        index[max(begin, 0) : end] = sorted(index[max(begin, 0) : end])
    for three, (begin, end) in parts(tile, offsets, index):
        worked = sorted(item for item in three if item[0] < item[1])
        covered = [row for first, last in worked for row in range(first, last)]
        assert covered == list(range(begin, end))
        assert all((first - begin) % tile == 0 for first, _ in worked)
        low, high = three[0]
        if sorted(index[begin:end]) == index[begin:end]:
            assert all(PLACES[0] <= place < PLACES[1] for place in index[low:high])
