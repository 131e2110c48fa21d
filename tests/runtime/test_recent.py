"""What is kept of signatures: those used last."""

from __future__ import annotations

import pytest

from fusekit.runtime.recent import Recent
from tests.runtime.samples import load, tensors
from tests.threads import at_once


def test_what_is_used_stays():
    """However many others come, as long as fewer than `size` of them come between two uses."""
    kept: Recent[int, int] = Recent(8)
    kept.remember(0, 0)
    for number in range(1, 1000):
        kept.remember(number, number)
        assert number % 7 or kept[0] == 0
        assert len(kept) + len(kept.old) <= 16
    assert kept.remembered == 1000
    assert kept[999] == 999
    with pytest.raises(KeyError):
        kept[900]
    assert kept.get(900) is None


def test_so_many_shapes_in_turn_are_all_known():
    kernel, _ = load()
    shapes = [tensors(m=8 * number) for number in range(1, 513)]
    for _ in range(3):
        for given in shapes:
            kernel(**given)
    assert kernel.plans_made == len(shapes)


def test_a_shape_of_every_step_is_never_forgotten():
    kernel, _ = load()
    for number in range(1, 2000):
        kernel(**tensors(m=8 * number))
        kernel(**tensors(m=4))
    assert kernel.plans_made == 2000
    kernel.unload()
    assert not kernel._plans
    assert not kernel._plans.old


def test_threads_that_share_one():
    kept: Recent[int, int] = Recent(4)

    def work(number: int) -> None:
        for step in range(3000):
            key = (step * (number + 1)) % 13
            value = kept.get(key)
            assert value in (None, key)
            if value is None:
                kept.remember(key, key)

    at_once(8, work)
