"""The checked mode over a fake driver that does what the check's kernel does."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusekit.abi import IntegerParameter, LaunchRecord, PointerParameter, TensorArgument
from fusekit.bench.trials import open_trial
from fusekit.compiler.tokens import signature
from fusekit.errors import ArgumentError, DriverError, NotBuiltError, UsageError
from fusekit.library import Library
from fusekit.reference.offsets import first_wrong
from fusekit.runtime import DeviceArray, Kernel, Launch
from fusekit.runtime.driver import Driver
from fusekit.spec import parse_text
from tests.abi.test_schema_2 import step
from tests.cabi.launcher import complete
from tests.runtime.fake import CUresult, FakeDriver
from tests.runtime.samples import Torchlike, fake_for, publish, record

NAME = "sample/fc1@128x160-c2x1"
GOOD, FALLS, BEYOND, NEGATIVE = [10, 20, 20, 96], [10, 30, 20, 96], [10, 20, 90, 97], [-1, 20, 20, 30]


def check() -> LaunchRecord:
    (spec,) = parse_text('schema = 1\n[[kernel]]\nname = "k"\nop = "moe-check"\narch = "sm_90a"\n', "s")
    launch_record = signature(spec)
    parameters = (
        PointerParameter("offsets_pointer", "offsets"), PointerParameter("report_pointer", "report"),
        IntegerParameter("groups", "i32", "E"), IntegerParameter("rows", "i32", "rows"),
    )  # fmt: skip
    record = LaunchRecord(
        launch_record.arch, launch_record.arguments, launch_record.dims, parameters, (1, 1, 1), (32, 1, 1)
    )
    return replace(complete(record), symbol="check")


def act(fake: FakeDriver) -> Any:
    """What kernels do: nothing, but for the check, which looks at memory and writes its report."""

    def launched(launch: Any) -> None:
        if launch.function[0] != "check":
            return
        offsets, report, groups, rows = (int.from_bytes(data, "little", signed=True) for data in launch.parameters)
        values = np.frombuffer(ctypes.string_at(offsets, 4 * groups), np.int32)
        got = first_wrong(values, rows)
        words = (ctypes.c_int32 * 8).from_address(report)
        if got is not None:
            words[5] += 1
            words[1], words[2], words[3], words[4] = *got, rows
            words[0] += 1

    return launched


def opened(root: Path, checked: bool = True, **changes: Any) -> tuple[Library, FakeDriver]:
    store = publish(root)
    publish(root, "checks/offsets@w1", check(), op="moe-check", warps=1)
    given = {"others": {"check": [(item.offset, item.size) for item in check().parameters]}} | changes
    fake = fake_for(record(), **given)
    fake.on_launch = act(fake)
    return Library(store, Driver(fake), checked=checked), fake


def arguments(library: Library, values: list[int], device: int = 0) -> dict[str, Any]:
    offsets = DeviceArray(library.devices, (len(values),), "i32", device)
    offsets.upload(np.array(values, np.int32))
    return {
        "x": Torchlike((96, 128), address=0x1000_0000, device=device),
        "w": Torchlike((4, 320, 128), address=0x2000_0000, device=device),
        "offsets": offsets,
        "y": Torchlike((96, 160), address=0x4000_0000, device=device),
        "act_alpha": 1.5,
    }


def kernels(fake: FakeDriver) -> list[str]:
    return [launch.function[0] for launch in fake.launches]


def test_a_library_that_is_not_checked_has_nothing_of_it(tmp_path: Path) -> None:
    library, fake = opened(tmp_path, checked=False)
    kernel = library.load(NAME)
    assert type(kernel) is Kernel
    given = arguments(library, FALLS)
    assert type(kernel.bind(**given)) is Launch
    kernel(**given)
    assert kernels(fake) == ["kernel"]
    assert fake.host_memory == {}
    with pytest.raises(UsageError, match=r"open_library\(checked=True\)"):
        library.problems()


def test_good_offsets_are_no_problem(tmp_path: Path) -> None:
    library, fake = opened(tmp_path)
    assert library.problems() == []
    kernel = library.load(NAME)
    for values in (GOOD, [0, 0, 0, 0], [96, 96, 96, 96], [0, 0, 0, 5]):
        kernel(**arguments(library, values), stream=77)
    assert kernels(fake) == ["check", "kernel"] * 4
    assert [launch.stream for launch in fake.launches] == [77] * 8
    assert library.problems() == []


def test_captured_launches_may_need_more_reports_than_the_stock_has(tmp_path: Path) -> None:
    library, fake = opened(tmp_path)
    kernel, given = library.load(NAME), arguments(library, GOOD)
    for stream in range(100, 165):
        fake.cuStreamBeginCapture(stream, "CU_STREAM_CAPTURE_MODE_GLOBAL")
        kernel(**given, stream=stream)
        assert fake.cuStreamEndCapture(stream)[0] == CUresult.CUDA_SUCCESS
    assert fake.calls.count("cuMemHostAlloc") == 2


@pytest.mark.parametrize(
    ("values", "group", "begin", "end"), [(FALLS, 2, 30, 20), (BEYOND, 3, 90, 97), (NEGATIVE, 0, 0, -1)]
)
def test_what_is_wrong_is_told(tmp_path: Path, values: list[int], group: int, begin: int, end: int) -> None:
    library, _ = opened(tmp_path)
    kernel = library.load(NAME)
    given = arguments(library, values)
    kernel(**given)
    (problem,) = library.problems()
    assert (problem.kernel, problem.device, problem.group) == (NAME, 0, group)
    assert (problem.begin, problem.end, problem.rows, problem.times) == (begin, end, 96, 1)
    assert f"offsets[{group}] is {end}; it must be {begin}" in str(problem)
    assert "to 96 (the rows)" in str(problem)
    assert library.problems() == []  # reported once


def test_a_bound_launch_and_what_it_is_updated_with(tmp_path: Path) -> None:
    library, fake = opened(tmp_path)
    kernel = library.load(NAME)
    given = arguments(library, GOOD)
    launch = kernel.bind(**given)
    launch(77)
    assert library.problems() == []
    given["offsets"].upload(np.array(FALLS, np.int32))  # as another kernel would
    launch(77)
    launch(77)
    (problem,) = library.problems()
    assert (problem.group, problem.times) == (2, 2)
    assert "2 launches had such a group" in str(problem)
    launch.update(offsets=arguments(library, BEYOND)["offsets"])(77)
    assert library.problems()[0].group == 3
    assert kernels(fake) == ["check", "kernel"] * 4


def test_no_wait_and_no_allocation_after_the_load(tmp_path: Path) -> None:
    """So that launches can be captured, in streams not seen before as well."""
    library, fake = opened(tmp_path)
    kernel = library.load(NAME)
    given = arguments(library, FALLS)
    kernel(**given, stream=77)
    launch = kernel.bind(**given)
    fake.calls.clear()
    launch(77)
    launch(78)
    kernel(**given, stream=79)
    library.problems()
    assert set(fake.calls) <= {"cuLaunchKernelEx", "cuCtxGetCurrent", "cuTensorMapEncodeTiled", "cuCtxPushCurrent",
                               "cuCtxPopCurrent", "cuTensorMapReplaceAddress", "cuStreamGetGreenCtx"}  # fmt: skip
    assert len({launch.parameters[1] for launch in fake.launches if launch.function[0] == "check"}) == 3


def test_streams_threads_and_devices_report_apart(tmp_path: Path) -> None:
    library, fake = opened(tmp_path, devices=2, stream_contexts={90: 1001})
    kernel = library.load(NAME)
    here, there = arguments(library, FALLS), arguments(library, BEYOND, 1)
    for stream in (None, 1, 77):
        kernel(**here, stream=stream)
    kernel(**there, stream=90)
    worker = threading.Thread(target=lambda: kernel(**here, stream=2))
    worker.start()
    worker.join()
    kernel(**here, stream=2)
    got = library.problems()
    assert sorted((problem.device, problem.group, problem.times) for problem in got) == [
        (0, 2, 1), (0, 2, 1), (0, 2, 1), (0, 2, 2), (1, 3, 1),
    ]  # fmt: skip
    assert len(fake.host_memory) == 2  # a page for each device


def test_a_report_that_is_being_written_waits_for_the_next_look(tmp_path: Path) -> None:
    library, fake = opened(tmp_path)
    kernel = library.load(NAME)
    kernel(**arguments(library, FALLS), stream=77)
    (address,) = {
        int.from_bytes(launch.parameters[1], "little") for launch in fake.launches if len(launch.parameters) == 4
    }
    words = (ctypes.c_int32 * 8).from_address(address)
    words[5] += 1
    assert library.problems() == []
    words[1], words[0] = 1, words[0] + 1
    (problem,) = library.problems()
    assert (problem.group, problem.times) == (1, 2)


def test_more_streams_than_one_page_holds(tmp_path: Path) -> None:
    library, fake = opened(tmp_path)
    kernel = library.load(NAME)
    given = arguments(library, FALLS)
    for stream in range(100, 170):
        kernel(**given, stream=stream)
    assert len(fake.host_memory) == 2
    assert len(library.problems()) == 70
    kernel.unload()
    library.close()
    assert (fake.host_memory, fake.loaded, fake.retained) == ({}, 0, {0: 0})


def test_a_launch_that_is_nothing_is_not_checked(tmp_path: Path) -> None:
    library, fake = opened(tmp_path)
    kernel = library.load(NAME)
    given = arguments(library, FALLS) | {"x": Torchlike((0, 128)), "y": Torchlike((0, 160))}
    kernel(**given)
    kernel.bind(**given)(77)
    assert fake.launches == []


def test_a_wrong_argument_is_refused_before_anything_is_launched(tmp_path: Path) -> None:
    library, fake = opened(tmp_path)
    kernel = library.load(NAME)
    with pytest.raises(ArgumentError, match="x begins at"):
        kernel(**arguments(library, FALLS) | {"x": Torchlike((96, 128), address=0x1000_0008)})
    assert fake.launches == []


def test_a_store_without_the_check(tmp_path: Path) -> None:
    store = publish(tmp_path)
    fake = fake_for(record())
    with pytest.raises(NotBuiltError, match=r"fusekit build .?checks/offsets"):
        Library(store, Driver(fake), checked=True).load(NAME)
    assert fake.loaded == 0


def test_memory_that_cannot_be_had(tmp_path: Path) -> None:
    library, fake = opened(tmp_path, fail={"cuMemHostAlloc": CUresult.CUDA_ERROR_OUT_OF_MEMORY})
    with pytest.raises(DriverError, match="reports of checks/offsets"):
        library.load(NAME)
    del fake.fail["cuMemHostAlloc"]
    library.load(NAME)(**arguments(library, FALLS))
    assert len(library.problems()) == 1


def test_a_kernel_without_groups_is_as_it_always_is(tmp_path: Path) -> None:
    base = record()
    launch_record = record(
        arguments=tuple(
            replace(item, name="counts") if isinstance(item, TensorArgument) and item.name == "offsets" else item
            for item in base.arguments
        ),
        parameters=tuple(
            replace(item, argument="counts") if getattr(item, "argument", "") == "offsets" else item
            for item in base.parameters
        ),
    )
    library, _ = opened(tmp_path)
    publish(tmp_path, "sample/other@128x160-c2x1", launch_record)
    assert type(library.load("sample/other@128x160-c2x1")) is Kernel


def test_it_is_not_run_by_itself(tmp_path: Path) -> None:
    library, _ = opened(tmp_path)
    with pytest.raises(UsageError, match=r"open_library\(checked=True\) uses it"):
        open_trial(library, library.load("checks/offsets"), None, 0, guarded=True)


@pytest.mark.parametrize(
    ("values", "rows", "found"),
    [(GOOD, 96, None), (GOOD, 95, (3, 20, 96)), (FALLS, 96, (2, 30, 20)), (NEGATIVE, 96, (0, 0, -1)), ([7], 7, None)],
)
def test_the_reference(values: list[int], rows: int, found: tuple[int, int, int] | None) -> None:
    assert first_wrong(values, rows) == found


def test_every_launch_of_a_record_of_several_follows_one_check(tmp_path: Path) -> None:
    launch_record = replace(record(), then=(step(grid=(2, 1, 1)),))
    store = publish(tmp_path, launch_record=launch_record)
    publish(tmp_path, "checks/offsets@w1", check(), op="moe-check", warps=1)
    others = {"check": [(item.offset, item.size) for item in check().parameters], "second": [(0, 8)]}
    fake = fake_for(launch_record, others=others)
    fake.on_launch = act(fake)
    library = Library(store, Driver(fake), checked=True)
    kernel = library.load(NAME)
    given = arguments(library, FALLS)
    kernel(**given, stream=7)
    launch = kernel.bind(**given)
    launch(7)
    launch.update(y=Torchlike((96, 160), address=0x5000_0000))(7)
    assert kernels(fake) == ["check", "kernel", "second"] * 3
    assert fake.launches[-1].parameters == [(0x5000_0000).to_bytes(8, "little")]
    assert [problem.times for problem in library.problems()] == [3]
