"""The protocol between ranks is right in whatever order stores and blocks come, and its model finds mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .protocol import FAULTS, BrokenError, Machine, Setting

SETTINGS = st.builds(
    Setting,
    ranks=st.sampled_from([1, 2, 2, 3, 4, 8]),
    blocks=st.integers(1, 3),
    chunks=st.integers(1, 3),
    program=st.text("dcan", min_size=1, max_size=5),
    resident=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=25, deadline=None)
@given(SETTINGS)
def test_every_row_arrives_and_nothing_is_overwritten(setting):
    assert Machine(setting).run() > 0


@settings(max_examples=15, deadline=None)
@given(SETTINGS.filter(lambda setting: not {*"an"} & {*setting.program}))
def test_ranks_share_a_gpu_where_all_but_one_leave_room_for_a_block(setting):
    """As docs/expert-parallelism.md has it."""
    room = (setting.ranks - 1) * setting.largest + 1
    assert Machine(replace(setting, pool=room, resident=setting.largest)).run() > 0


def test_ranks_do_not_share_a_gpu_with_less_room():
    """Two ranks with two blocks each that send and two that sum, and room for three in all."""
    broken = 0
    for seed in range(20):
        try:
            Machine(Setting(2, 2, 2, "c", 4, seed, pool=3)).run()
        except BrokenError:
            broken += 1
    assert broken


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_is_found(fault):
    """In some of a few hundred orders: no order shows every mistake."""
    for seed in range(500):
        program = ("dddd", "cccc", "dcdc", "aaaa", "adca", "nnnn", "ancn")[seed % 7]
        setting = Setting(2 + seed % 3 % 2, 1 + seed % 2, 2, program, 1 + seed % 4, seed, fault)
        try:
            Machine(setting).run()
        except BrokenError:
            return
    pytest.fail(f"{fault}: not found")
