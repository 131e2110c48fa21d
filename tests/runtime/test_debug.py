"""FUSEKIT_DEBUG=1: an error names the launch that caused it; without it, errors say how to find out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusekit.config import Config
from fusekit.errors import DriverError
from fusekit.library import Library
from fusekit.runtime import Devices, Driver, Kernel
from fusekit.runtime import driver as driver_module
from tests.runtime.fake import CUresult, FakeDriver
from tests.runtime.samples import CUBIN, Torchlike, fake_for, load, publish, record, tensors

STREAM = 77
ILLEGAL = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


def debugged(name: str = "sample/fc1") -> tuple[Kernel, FakeDriver]:
    fake = fake_for(record())
    return Kernel(Devices(Driver(fake, debug=True)), name, record(), CUBIN, {}, 0), fake


def broken(fake: FakeDriver) -> None:
    """From the next launch on, waiting fails."""
    fake.on_launch = lambda launched: fake.fail.update(cuStreamSynchronize=ILLEGAL)


@pytest.mark.parametrize("stream", [0, STREAM])
def test_an_error_names_the_launch_its_shapes_and_those_before(stream: int) -> None:
    kernel, fake = debugged()
    launch = kernel.bind(**tensors())
    for rows in range(20):
        kernel(**(tensors() | {"x": Torchlike((rows + 1, 128)), "y": Torchlike((rows + 1, 160), address=0x4000_0000)}))
    broken(fake)
    with pytest.raises(DriverError) as caught:
        launch(stream)
    first, _, *last = str(caught.value).splitlines()
    assert first == (
        "sample/fc1 on x bf16[96, 128], w bf16[4, 320, 128], offsets i32[4], y bf16[96, 160], grid 132x1x1, device 0"
        f" (FAKE H200, sm_90a), stream {stream:#x} failed: CUDA_ERROR_ILLEGAL_ADDRESS (text of 700); compute-sanitizer"
        " shows the instruction"
    )
    assert caught.value.name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert [line.split()[3] for line in last] == [f"bf16[{rows}," for rows in (*range(6, 21), 96)]
    assert len(fake.launches) == 21
    assert fake.stack == []


def test_an_error_of_work_before_a_launch_is_not_put_on_it() -> None:
    kernel, fake = debugged()
    fake.fail["cuStreamSynchronize"] = ILLEGAL
    with pytest.raises(DriverError, match=r"^work before sample/fc1 on .*not one of fusekit's(.|\n)*last: none$"):
        kernel(**tensors(), stream=STREAM)
    assert not fake.launches


@pytest.mark.parametrize("mode", ["CU_STREAM_CAPTURE_MODE_GLOBAL", "CU_STREAM_CAPTURE_MODE_RELAXED"])
def test_a_captured_launch_is_not_waited_for_and_the_capture_lives_on(mode: str) -> None:
    kernel, fake = debugged()
    launch = kernel.bind(**tensors())
    fake.cuStreamBeginCapture(STREAM, mode)
    fake.calls.clear()
    launch(STREAM)
    assert "cuStreamSynchronize" not in fake.calls
    launch(STREAM + 1)
    assert fake.calls.count("cuStreamSynchronize") == 2
    assert fake.cuStreamEndCapture(STREAM)[1] == "graph"


def test_a_refused_launch_is_reported_as_without_debug() -> None:
    kernel, fake = debugged()
    fake.fail["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DriverError, match=r"sample/fc1: cuLaunchKernelEx on device 0 .*: CUDA_ERROR_OUT_OF_MEMORY"):
        kernel(**tensors(), stream=STREAM)


@pytest.mark.parametrize("status", [ILLEGAL, CUresult.CUDA_ERROR_MISALIGNED_ADDRESS, CUresult.CUDA_ERROR_LAUNCH_FAILED])
def test_without_debug_a_later_error_says_how_to_find_the_launch(status: CUresult) -> None:
    kernel, fake = load()
    fake.fail = {"cuLaunchKernelEx": status, "cuCtxSynchronize": status}
    devices = kernel._devices
    for call in (lambda: kernel(**tensors(), stream=STREAM), lambda: devices.synchronize(devices.get(0))):
        with pytest.raises(DriverError, match=r"an earlier launch.*FUSEKIT_DEBUG=1, or run compute-sanitizer$"):
            call()
    _, fake = debugged()
    assert "FUSEKIT_DEBUG" not in str(Driver(fake, debug=True).error(status, "cuMemAlloc"))


@pytest.mark.parametrize("debug", [False, True])
def test_the_configuration_of_a_library_decides(debug: bool, tmp_path: Path, monkeypatch: Any) -> None:
    fake = fake_for(record())
    monkeypatch.setattr(driver_module, "_import_bindings", lambda: fake)
    publish(tmp_path)
    config = Config.from_environment(tmp_path, {"FUSEKIT_DEBUG": str(int(debug))})
    launch = Library(config).load("sample/fc1").bind(**tensors())
    fake.calls.clear()
    launch(STREAM)
    assert ("cuStreamSynchronize" in fake.calls) == debug
    assert debug or fake.calls == ["cuLaunchKernelEx"]
