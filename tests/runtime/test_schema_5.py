"""Launches under conditions, and what of a launch follows the arguments, on a fake driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusekit.errors import ArgumentError
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import fake_for, following, load, tensors


def driver() -> FakeDriver:
    return fake_for(following(), others={"second": [(0, 8)]})


def test_a_launch_under_a_condition_is_left_out_where_it_is_0() -> None:
    kernel, fake = load(following(), driver())
    kernel(**tensors(m=64), stream=9)
    kernel(**tensors(m=65), stream=9)
    alone, first, second = fake.launches
    assert (alone.grid, second.grid, second.block) == ((4, 1, 1), (4, 1, 1), (32, 1, 1))
    assert (first.block, first.shared, second.shared) == ((128, 1, 1), 8 * 160, 0)
    names = {"CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION": (4, 1, 1)}
    assert names.items() <= first.attributes.items()
    assert not names.keys() & second.attributes.keys()


def test_a_bound_launch_that_is_bound_anew_may_have_others() -> None:
    kernel, fake = load(following(), driver())
    launch = kernel.bind(**tensors(m=64))
    launch(7)
    launch.update(**{name: tensor for name, tensor in tensors(m=65).items() if name in "xy"})(7)
    launch(7)
    assert [launched.block[0] for launched in fake.launches] == [32, 128, 32, 128, 32]


def test_a_launch_without_any_is_done_at_once() -> None:
    kernel, fake = load(replace(following(), then=()), driver())
    kernel(**tensors(m=64), stream=9)
    kernel.bind(**tensors(m=64))(9)
    assert not fake.launches


def test_shared_memory_may_be_all_that_the_device_has_for_a_block() -> None:
    kernel, fake = load(following(), driver())
    kernel(**tensors(m=65), stream=9)
    most = 232448 - 1024
    assert fake.settings["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 0] in (most, 0)
    with pytest.raises(ArgumentError, match=rf"shared memory is \d+ bytes a block for .*I = 28944.* has 0 to {most}"):
        kernel(**tensors(m=65, i=28944), stream=9)


def test_a_block_that_is_too_large_is_refused() -> None:
    kernel, fake = load(following(), driver())
    with pytest.raises(ArgumentError, match=r"the block is 1056x1x1 threads for .*E = 40.* at most 1024"):
        kernel(**tensors(m=65, e=40), stream=9)
    given: dict[str, Any] = tensors(m=64, e=40)
    kernel(**given, stream=9)  # of the launch that is left out nothing is asked
    assert len(fake.launches) == 1
