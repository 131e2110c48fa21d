"""Launches on a part of a GPU: streams of green contexts, and a number of multiprocessors that the caller gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fusekit.abi import IntegerParameter
from fusekit.errors import ArgumentError
from fusekit.runtime import Kernel
from tests.runtime.fake import GREEN, FakeDriver
from tests.runtime.samples import Torchlike, fake_for, load, record, tensors, with_workspace

STREAM, GREEN_STREAM = 9, 70


@pytest.fixture
def split() -> tuple[Kernel, FakeDriver]:
    """A kernel on a device, and a stream that has 64 of its 132 multiprocessors."""
    return load(fake=fake_for(record(), greens={GREEN_STREAM: 64}))


def grids(fake: FakeDriver) -> list[int]:
    return [launched.grid[0] for launched in fake.launches]


def test_a_call_is_as_wide_as_the_streams_green_context(split: Any) -> None:
    kernel, fake = split
    for stream in (STREAM, GREEN_STREAM, 0, GREEN_STREAM):
        kernel(**tensors(), stream=stream)
    kernel(**tensors(), stream=GREEN_STREAM, cluster_margin=2)
    assert grids(fake) == [132, 64, 132, 64, 60]
    assert kernel.plans_made == 2  # a green context is no signature of its own


def test_a_bound_launch_follows_its_stream(split: Any) -> None:
    kernel, fake = split
    launch = kernel.bind(**tensors())
    for stream in (GREEN_STREAM, GREEN_STREAM, STREAM, GREEN_STREAM, 0):
        launch(stream)
    launch.update(y=Torchlike((96, 160), address=0x6000_0000), act_alpha=2.5)(GREEN_STREAM)
    assert grids(fake) == [64, 64, 132, 64, 132, 64]
    first, *_, last = fake.launches
    kernel(**(tensors() | {"y": Torchlike((96, 160), address=0x6000_0000), "act_alpha": 2.5}), stream=GREEN_STREAM)
    assert last.parameters[2:] == fake.launches[-1].parameters[2:] != first.parameters[2:]
    asked = fake.calls.count("cuStreamGetGreenCtx")
    launch(GREEN_STREAM)
    assert fake.calls.count("cuStreamGetGreenCtx") == asked


def test_a_parameter_that_reads_the_multiprocessors_is_the_parts(split: Any) -> None:
    launch_record = record(parameters=(*record().parameters, IntegerParameter("sms", "i32", "sm_count", 292)))
    kernel, fake = load(launch_record, fake_for(launch_record, greens={GREEN_STREAM: 64}))
    kernel(**tensors(), stream=STREAM)
    kernel(**tensors(), stream=GREEN_STREAM)
    kernel.bind(**tensors(), sm_count=20)(GREEN_STREAM)
    assert [int.from_bytes(launched.parameters[8], "little") for launched in fake.launches] == [132, 64, 20]


@pytest.mark.parametrize("grid", [record().grid, (2, 1, 1)])
def test_a_record_of_several_launches_follows_its_stream(grid: Any) -> None:
    second = record()
    first = replace(second, grid=grid)
    launch_record = replace(first, then=(replace(second, symbol="second"),))
    others = {"second": [(parameter.offset, parameter.size) for parameter in first.parameters]}
    kernel, fake = load(launch_record, fake_for(launch_record, greens={GREEN_STREAM: 64}, others=others))
    launch = kernel.bind(**tensors())
    launch(STREAM)
    launch(GREEN_STREAM)
    launch(0)
    kernel(**tensors(), stream=GREEN_STREAM)
    assert grids(fake)[1::2] == [132, 64, 132, 64]
    assert grids(fake)[::2] == ([2] * 4 if grid[0] == 2 else [132, 64, 132, 64])


def test_a_handle_that_became_another_streams_is_asked_about_again(split: Any) -> None:
    kernel, fake = split
    kernel(**tensors(), stream=GREEN_STREAM)
    fake.greens = {}
    kernel(**tensors(), stream=GREEN_STREAM)
    fake.greens = {GREEN_STREAM: 32}
    kernel(**tensors(), stream=GREEN_STREAM)
    assert grids(fake) == [64, 132, 32]


def test_the_multiprocessors_of_a_call_count_before_the_streams(split: Any) -> None:
    kernel, fake = split
    for stream in (STREAM, GREEN_STREAM, 0):
        kernel(**tensors(), stream=stream, sm_count=20)
        kernel.bind(**tensors(), sm_count=20, cluster_margin=1)(stream)
    assert grids(fake) == [20, 18] * 3


def test_a_kernel_as_wide_as_its_active_clusters_gets_no_more_than_fit() -> None:
    launch_record = record(grid=(("mul", 2, "active_clusters"), 1, 1))
    fake = fake_for(launch_record, greens={GREEN_STREAM: 64}, active_clusters=60)
    kernel, _ = load(launch_record, fake)
    for stream, count in ((STREAM, None), (GREEN_STREAM, None), (STREAM, 128), (STREAM, 7), (STREAM, 1)):
        kernel(**tensors(), stream=stream, sm_count=count)
    assert grids(fake) == [120, 58, 116, 6, 2]


def test_a_kernel_without_a_grid_by_multiprocessors_asks_nothing() -> None:
    kernel, fake = load(launch_record := record(grid=("E", 1, 1)), fake_for(launch_record, greens={GREEN_STREAM: 64}))
    kernel(**tensors(), stream=GREEN_STREAM)
    kernel.bind(**tensors(), sm_count=3)(GREEN_STREAM)
    assert not [call for call in fake.calls if call.startswith("cuStreamGet")]


@pytest.mark.parametrize("count", [0, -1, 133, 2.0, True, "64", [8]])
def test_a_wrong_number_of_multiprocessors(split: Any, count: Any) -> None:
    kernel, fake = split
    for launch in (kernel, kernel.bind):
        with pytest.raises(ArgumentError, match=r"sm_count is .*must be (None|1 to 132)") as caught:
            launch(**tensors(), sm_count=count)
        assert caught.value.argument == "sm_count"
    assert not fake.launches


def test_a_margin_leaves_one_of_them_at_least(split: Any) -> None:
    with pytest.raises(ArgumentError, match=r"cluster_margin is 20; sm_count is 20 .*must be 0 to 19"):
        split[0](**tensors(), stream=STREAM, sm_count=20, cluster_margin=20)


def test_a_default_stream_in_a_green_context_is_refused(split: Any) -> None:
    kernel, fake = split
    fake.cuCtxPushCurrent(GREEN + GREEN_STREAM)
    fake.cuCtxGetDevice = lambda: (0, 0)  # type: ignore[method-assign]
    launch = kernel.bind(**tensors())
    for queue in (lambda: kernel(**tensors()), launch, lambda: launch("legacy"), lambda: launch(2)):
        with pytest.raises(ArgumentError, match=r"while a green context of device 0 .* is current; give a stream of"):
            queue()
    launch(GREEN_STREAM)
    assert grids(fake) == [64]


def test_a_failed_launch_in_a_green_context_names_the_failure(split: Any) -> None:
    kernel, fake = split
    fake.stream_contexts[GREEN_STREAM] = GREEN + GREEN_STREAM
    with pytest.raises(Exception, match=r"cuLaunchKernelEx on device 0 .* failed: CUDA_ERROR_INVALID_CONTEXT"):
        kernel(**tensors(), stream=GREEN_STREAM)


def test_workspaces_of_a_green_context_are_its_streams() -> None:
    launch_record = with_workspace()
    kernel, fake = load(launch_record, fake_for(launch_record, greens={GREEN_STREAM: 64}))
    for stream in (STREAM, GREEN_STREAM, STREAM, GREEN_STREAM):
        kernel(**tensors(), stream=stream)
    first, second, *again = (launched.parameters[8] for launched in fake.launches)
    assert [first, second] == again and first != second


@pytest.mark.parametrize(("affinity", "blocks"), [(None, 132), (132, 132), (40, 40), (0, 132)])
def test_a_process_under_mps_uses_what_it_is_left(affinity: int | None, blocks: int) -> None:
    kernel, fake = load(fake=fake_for(record(), affinity=affinity))
    kernel(**tensors(), stream=STREAM)
    assert grids(fake) == [blocks]
    assert fake.stack == []
