"""Launches under conditions, and what of a launch follows the arguments, on a fake driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusekit.abi import Constraint, LaunchEvent, LaunchRecord, ScalarArgument, Truncated
from fusekit.errors import ArgumentError
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import fake_for, following, load, record, tensors


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


def by_limit() -> LaunchRecord:
    """As many blocks as twice act_limit has whole numbers; one launch for 1 / act_limit above 0."""
    blocks = Truncated(("fmul", "act_limit", 2.0))
    rule = Constraint(("max", 0, ("sub", "blocks", 1000)), "int(act_limit * 2.0) must be at most 1000")
    positive = Truncated(("flt", 0.0, ("fdiv", 1.0, "act_limit")))
    return replace(
        record(), values={"blocks": blocks, "positive": positive}, grid=(("max", 1, "blocks"), 1, 1),
        cluster=(1, 1, 1), when="positive", constraints=(*record().constraints, rule),
    )  # fmt: skip


def test_a_float_may_decide_the_grid() -> None:
    kernel, fake = load(by_limit())
    given = {**tensors(), "act_alpha": 1.0}
    for limit in (1.5, 1.9999, 2.0, 1.5, 2):
        kernel(**given, act_limit=limit, stream=9)
    launch = kernel.bind(**given, act_limit=30.0)
    launch(9)
    launch.update(act_limit=31.0)(9)
    assert [launched.grid[0] for launched in fake.launches] == [3, 3, 4, 3, 4, 60, 62]
    assert kernel.plans_made == 5  # 2.0 and 2 are one


def test_a_float_that_makes_no_grid_is_refused_in_words() -> None:
    kernel, fake = load(by_limit())
    with pytest.raises(
        ArgumentError, match=r"int\(act_limit \* 2.0\) must be at most 1000; got M = .*, act_limit = 500.5"
    ):
        kernel(**{**tensors(), "act_limit": 500.5}, stream=9)
    assert not fake.launches


def test_zeros_of_both_signs_and_nan_decide_each_for_itself() -> None:
    kernel, fake = load(by_limit())
    for limit in (0.0, -0.0, float("nan"), 0.0):
        kernel(**{**tensors(), "act_limit": limit}, stream=9)
    assert len(fake.launches) == 2


def test_each_launch_records_the_events_that_it_is_given() -> None:
    handle = ScalarArgument("done", "i64", None, 1, 2**63 - 1)
    events = LaunchEvent("programmatic", "done", 0, 1), LaunchEvent("launch_completion", "done", 1)
    kernel, fake = load(replace(record(), arguments=(*record().arguments, handle), events=events))
    launch = kernel.bind(**tensors(), done=2**40)
    launch(9)
    launch.update(done=2**41)(9)
    kernel(**tensors(), done=2**40, stream=9)
    names = [f"CU_LAUNCH_ATTRIBUTE_{kind}_EVENT" for kind in ("PROGRAMMATIC", "LAUNCH_COMPLETION")]
    assert [[launched.attributes[name] for name in names] for launched in fake.launches] == [
        [(handle, 0, 1), (handle, 1, 0)] for handle in (2**40, 2**41, 2**40)
    ]
    with pytest.raises(ArgumentError, match="done is 0; it must be"):
        kernel(**tensors(), done=0, stream=9)
