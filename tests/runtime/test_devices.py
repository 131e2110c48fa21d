"""Several GPUs in one process: what is of one device stays there, and whatever context is current stays current."""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import pytest

from fusekit.errors import ArchMismatchError, ArgumentError, DriverError
from fusekit.runtime import Devices, Driver, Kernel
from tests.runtime import samples
from tests.runtime.fake import CUresult, FakeDriver
from tests.runtime.samples import CUBIN, Torchlike, fake_for, load, record, tensors
from tests.threads import at_once

STREAM = 77  # of device 1
OTHER = 50  # of device 0


def two(**changes: Any) -> FakeDriver:
    """Two devices that differ in multiprocessors."""
    given = {"devices": 2, "sm_counts": {1: 100}, "stream_contexts": {STREAM: 1001, STREAM + 1: 1001}} | changes
    return fake_for(with_workspace(), **given)


with_workspace = partial(samples.with_workspace, attributes={"preferred_shared_memory_carveout": 50})


def on(device: int) -> dict[str, Any]:
    return {
        name: Torchlike(tensor.shape, tensor.dtype, tensor.address, tensor.strides, device)
        if isinstance(tensor, Torchlike)
        else tensor
        for name, tensor in tensors().items()
    }


def workspace(launched: Any) -> int:
    return int(struct.unpack("<Q", launched.parameters[-1])[0])


def owner(fake: FakeDriver, address: int) -> int:
    """The device whose memory an address lies in."""
    base = max(base for base in fake.memory if base <= address)
    return fake.owner[base]


def test_grid_workspace_and_code_are_the_devices_own() -> None:
    kernel, fake = load(with_workspace(), two())
    for device, stream in ((0, OTHER), (1, STREAM), (0, OTHER), (1, STREAM + 1)):
        kernel(**on(device), stream=stream)
    zero, one, again, third = fake.launches
    assert [launched.grid[0] for launched in fake.launches] == [132, 100, 132, 100]
    assert [launched.context for launched in fake.launches] == [1000, 1001, 1000, 1001]
    assert [owner(fake, workspace(launched)) for launched in fake.launches] == [0, 1, 0, 1]
    assert workspace(zero) == workspace(again)
    assert workspace(one) != workspace(third)
    for device in (0, 1):
        assert fake.settings["CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", device] == 200_000
        assert fake.settings["CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT", device] == 50
    assert fake.loaded == 1  # one library serves both
    kernel.unload()
    assert (fake.memory, fake.loaded) == ({}, 0)


def test_a_default_stream_is_the_devices_own() -> None:
    """Three handles, each of them another stream on each device; whatever context is current."""
    kernel, fake = load(with_workspace(), two())
    for current in ([], [1000], [1001]):
        fake.stack[:] = current
        for device in (0, 1):
            for stream in (None, 1, 2):
                kernel(**on(device), stream=stream)
                assert fake.launches[-1].context == 1000 + device
                assert fake.stack == current
    by_device = [{workspace(each) for each in fake.launches if each.context == 1000 + device} for device in (0, 1)]
    assert [len(got) for got in by_device] == [2, 2]  # legacy, and this thread's own
    assert not by_device[0] & by_device[1]


@pytest.mark.parametrize("current", [[], [1000], [1001]])
def test_whatever_context_is_current_stays_so(current: list[int]) -> None:
    fake = two()
    fake.stack[:] = current
    kernel, _ = load(with_workspace(), fake)
    launch = kernel.bind(**on(1))
    launch(STREAM)
    launch.update(y=Torchlike((96, 160), address=0x5000_0000, device=1))(STREAM)
    kernel(**on(0), stream=OTHER)
    assert fake.stack == current
    kernel.unload()
    assert fake.stack == current


@pytest.mark.parametrize("current", [[], [1000]])
def test_a_launch_beside_another_devices_context(current: list[int]) -> None:
    """Where the driver wants the stream's context to be current it is made so; a launch that it takes pays nothing."""
    fake = two(strict=True)
    kernel, _ = load(with_workspace(), fake)
    launch = kernel.bind(**on(1))
    fake.stack[:] = current
    launch(STREAM)
    kernel(**on(1), stream=STREAM)
    assert [launched.context for launched in fake.launches] == [1001, 1001]
    assert fake.stack == current
    fake.stack[:] = [1001]
    fake.calls.clear()
    launch(STREAM)
    assert fake.calls == ["cuLaunchKernelEx"]


def test_a_failure_of_another_kind_is_not_tried_again() -> None:
    kernel, fake = load(with_workspace(), two())
    launch = kernel.bind(**on(1))
    launch(STREAM)
    fake.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    fake.calls.clear()
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        launch(STREAM)
    assert fake.calls.count("cuLaunchKernelEx") == 1


def test_a_stream_of_the_other_device_is_named() -> None:
    kernel, fake = load(with_workspace(), two())
    for device, stream in ((0, STREAM), (1, OTHER)):
        with pytest.raises(ArgumentError, match=f"not of the primary context of device {device}") as caught:
            kernel(**on(device), stream=stream)
        assert caught.value.argument == "stream"
    assert fake.launches == []


def test_tensors_of_two_devices_are_refused() -> None:
    kernel, _ = load(with_workspace(), two())
    with pytest.raises(ArgumentError, match="y is on device 1, x on device 0"):
        kernel(**on(0) | {"y": on(1)["y"]})


def test_tensor_maps_need_a_device_that_has_them() -> None:
    """Beside an older device, whose context is current when a launch for the newer one is worked out."""
    fake = fake_for(record(), devices=2, capabilities={0: (8, 0)}, stream_contexts={STREAM: 1001})
    fake.stack[:] = [1000]
    kernel = Kernel(Devices(Driver(fake)), "sample/fc1@1", record(), CUBIN, {}, 1)
    launch = kernel.bind(**on(1))
    launch(STREAM)
    assert len(fake.encoded) == fake.calls.count("cuTensorMapEncodeTiled") == 2  # no call fails: tools count those
    assert fake.stack == [1000]
    launch.update(x=Torchlike((96, 128), address=0x1100_0000, device=1))(STREAM)
    assert struct.unpack_from("<Q", fake.launches[-1].parameters[0]) == (0x1100_0000,)
    with pytest.raises(ArchMismatchError, match="is for sm_90a, device 0"):
        kernel(**on(0))
    assert len(fake.launches) == 2


def test_an_update_may_move_a_launch_to_the_other_device() -> None:
    kernel, fake = load(with_workspace(), two())
    launch = kernel.bind(**on(0))
    launch(OTHER)
    with pytest.raises(ArgumentError, match="on one device"):
        launch.update(x=on(1)["x"])
    launch(OTHER)
    launch.update(**{name: tensor for name, tensor in on(1).items() if isinstance(tensor, Torchlike)})
    launch(STREAM)
    assert [launched.grid[0] for launched in fake.launches] == [132, 132, 100]
    assert owner(fake, workspace(fake.launches[-1])) == 1


def test_devices_are_loaded_once_from_many_threads() -> None:
    """Twelve threads on two devices at once: nothing is left over, and no two streams share a workspace."""
    fake = two(stream_contexts={100 + number: 1000 + number % 2 for number in range(12)})
    kernel, _ = load(with_workspace(), fake)

    def work(number: int) -> None:
        for _ in range(5):
            kernel(**on(number % 2), stream=100 + number)

    at_once(12, work)
    assert len(fake.launches) == 60
    places = {(launched.stream, workspace(launched)) for launched in fake.launches}
    assert len(places) == len({address for _, address in places}) == 12
    assert all(owner(fake, address) == stream % 2 for stream, address in places)
    assert sorted(fake.owner[base] for base in fake.memory) == [0, 1]  # what losers of a race made is given back


def test_contexts_are_retained_once_and_given_back() -> None:
    fake = two()
    devices = Devices(Driver(fake))
    kernel = Kernel(devices, "sample/fc1@1", with_workspace(), CUBIN, {}, 0)
    for device, stream in ((0, OTHER), (1, STREAM)):
        kernel(**on(device), stream=stream)
    assert fake.retained == {0: 1, 1: 1}
    kernel.unload()
    devices.close()
    assert fake.retained == {0: 0, 1: 0}


@pytest.mark.parametrize("ordinal", [-1, 2, 2**70])
def test_an_ordinal_of_no_device(ordinal: int) -> None:
    kernel, fake = load(fake=fake_for(record(), devices=2))
    with pytest.raises(DriverError, match=r"device .*; this process sees devices 0 to 1; choose one of them"):
        kernel.prepare(ordinal)
    assert {device for _, device in fake.settings} == {0}


@pytest.mark.parametrize("ordinal", [True, False, 0.0, 1.0, "0", None, []])
def test_what_is_no_ordinal(ordinal: Any) -> None:
    """Also where 0.0 and False would be found instead of 0."""
    kernel, fake = load(fake=fake_for(record(), devices=2))
    with pytest.raises(ArgumentError, match=r"device is .*; it must be the ordinal of a GPU, a whole number such as 0"):
        kernel.prepare(ordinal)
    kernel.prepare(1)
    assert {device for _, device in fake.settings} == {0, 1}
