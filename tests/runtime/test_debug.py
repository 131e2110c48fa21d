"""Errors that name launches (FUSEKIT_DEBUG=1), ranges of a profiler (FUSEKIT_NVTX=1), and the log."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusekit.config import Config
from fusekit.errors import DriverError, UsageError
from fusekit.library import Library
from fusekit.runtime import Devices, Driver, Kernel
from fusekit.runtime import driver as driver_module
from tests.runtime.fake import CUresult, FakeDriver
from tests.runtime.samples import CUBIN, Torchlike, fake_for, library, load, publish, record, tensors

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
    launch(STREAM)
    fake.calls.clear()
    launch(STREAM)
    assert ("cuStreamSynchronize" in fake.calls) == debug
    assert debug or fake.calls == ["cuLaunchKernelEx"]


class Ranges:
    """The package nvtx, as far as fusekit calls it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    @contextmanager
    def annotate(self, message: str, domain: str) -> Iterator[None]:
        self.events.append(("push", f"{domain}: {message}"))
        yield
        self.events.append(("pop", f"{domain}: {message}"))


@pytest.mark.parametrize("debug", [False, True])
def test_a_launch_is_an_nvtx_range(debug: bool, monkeypatch: Any) -> None:
    nvtx, fake = Ranges(), fake_for(record())
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    driver = Driver(fake, debug=debug, nvtx=True)
    launch = Kernel(Devices(driver), "sample/fc1@128x160", record(), CUBIN, {}, 0).bind(**tensors())
    fake.on_launch = lambda launched: nvtx.events.append(("launch", ""))
    fake.calls.clear()
    launch(STREAM)
    assert nvtx.events == [
        ("push", "fusekit: sample/fc1@128x160"),
        ("launch", ""),
        ("pop", "fusekit: sample/fc1@128x160"),
    ]
    assert ("cuStreamSynchronize" in fake.calls) == debug


def test_nvtx_without_its_package(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(UsageError, match=r"FUSEKIT_NVTX=1 needs the package nvtx.*pip install nvtx, or unset it$"):
        Driver(fake_for(record()), nvtx=True)


def test_the_log_says_what_was_loaded_and_why_and_each_new_plan(tmp_path: Path, caplog: Any) -> None:
    publish(tmp_path)
    opened, _ = library(publish(tmp_path, "sample/fc1@128x192-c2x1", tile=[128, 192]))
    caplog.set_level(logging.DEBUG, "fusekit")
    kernel = opened.load("sample/fc1", problem={"M": 4096})
    for _ in range(2):
        kernel(**tensors(), stream=STREAM)
    kernel(**tensors(m=0), stream=STREAM)
    chosen, loading, *plans = [log.getMessage() for log in caplog.records]
    assert chosen == f"{kernel.name} (sm_90a): the fastest by the model among 2, for {{'M': 4096}}"
    assert re.fullmatch(rf"loading {kernel.name} \(sm_90a\) on device 0: entry [0-9a-f]+ of {tmp_path}", loading)
    assert [plan.partition(" on ")[2].partition(",")[0] for plan in plans] == ["x bf16[96", "x bf16[0"]
    assert {log.name for log in caplog.records} == {"fusekit"}
    assert not logging.getLogger("fusekit").handlers


def test_a_process_that_does_not_log_does_not_import_logging() -> None:
    code = "import sys, fusekit.library, fusekit.runtime.kernel, fusekit.store; sys.exit('logging' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
