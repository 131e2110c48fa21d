"""From a name to a loaded kernel: what is checked before the driver sees anything, and what each failure says."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusekit.abi import IntegerParameter
from fusekit.errors import ArchMismatchError, ArgumentError, DriverError, IntegrityError, NotBuiltError, UsageError
from fusekit.library import Library, open_library
from fusekit.runtime import Devices, Driver, Kernel
from fusekit.runtime.devices import archs_of
from tests.cubins import cubin_of
from tests.runtime.fake import CUresult, FakeDriver
from tests.runtime.samples import CUBIN, fake_for, library, load, publish, record, tensors


def test_a_name_becomes_a_kernel(tmp_path: Path) -> None:
    opened, fake = library(publish(tmp_path))
    kernel = opened.load("sample/fc1@128x160-c2x1")
    kernel(**tensors())
    assert kernel.name == "sample/fc1@128x160-c2x1"
    assert kernel.arch == "sm_90a"
    assert len(fake.launches) == 1
    opened.close()
    assert fake.calls[-1] == "cuDevicePrimaryCtxRelease"


def test_a_copy_opens_store_and_driver_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path)
    monkeypatch.setenv("FUSEKIT_STORE", str(tmp_path))
    opened = open_library()
    assert len(opened.store.names("*/*")) == 1
    for copied in (pickle.loads(pickle.dumps(opened)), copy.deepcopy(opened)):
        assert copied is not opened and copied.store is not opened.store
        assert [each.record for each in copied.store.names("*/*")] == [
            each.record for each in opened.store.names("*/*")
        ]


def test_a_name_without_variant_takes_the_cheapest(tmp_path: Path) -> None:
    publish(tmp_path, "sample/fc1@128x160-c2x1", record(dynamic_shared=1000))
    store = publish(tmp_path, "sample/fc1@128x256-c2x1", record(dynamic_shared=2000), tile=[128, 256])
    opened, _ = library(store)
    assert opened.load("sample/fc1").name == "sample/fc1@128x160-c2x1"
    assert opened.find("sample/fc1", problem={"E": 1, "M": 65536, "N": 512, "K": 64}).name == "sample/fc1@128x256-c2x1"


@pytest.mark.parametrize(
    ("device", "sms", "variant"), [("NVIDIA H200", 132, "128x192-c2x1"), ("NVIDIA H20", 78, "128x128-c1x2")]
)
def test_the_device_decides_which_variant_is_the_cheapest(tmp_path: Path, device: str, sms: int, variant: str) -> None:
    more: dict[str, Any] = {"schedule": "dynamic", "mainloop": "pingpong"}
    publish(tmp_path, "sample/fc1@128x192-c2x1", tile=[128, 192], **more)
    store = publish(tmp_path, "sample/fc1@128x128-c1x2", tile=[128, 128], cluster=[1, 2], **more)
    opened, fake = library(store, sm_count=sms)
    fake.cuDeviceGetName = lambda length, handle: (0, device.encode())  # type: ignore[method-assign]
    assert opened.find("sample/fc1", problem={"E": 8, "M": 16384, "N": 4096, "K": 4096}).name == f"sample/fc1@{variant}"


WRONG_PROBLEMS = [
    *((value, r"problem is .*; it must be a dict of extents by name, such as \{'M': 4096\}, or left out")
      for value in (5, 4096.0, "M", [("M", 5)], [], {"M"}, True)),
    *(({name: 5}, rf"problem has {name!r}; the extents of sample/fc1 are E, M, N, K; leave it out")
      for name in ("T", "H", "m", "rows", "", 5, None)),
    *(({"M": value}, r"problem has M = .*; it must be a whole number from 0 to [0-9]+; give that, or leave M out for")
      for value in (-1, 2**63, 10**400, 1.0, float("nan"), "5", None, True, [5])),
    ({"E": 1, "M": 5, "N": 5, "K": 5, "I": 5}, "problem has 'I'"),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "text"), WRONG_PROBLEMS, ids=range(len(WRONG_PROBLEMS)))
def test_a_problem_that_is_none(tmp_path: Path, problem: Any, text: str) -> None:
    """Also where there is nothing to choose from, and before anything is loaded."""
    publish(tmp_path, "sample/fc1@128x160-c2x1", record(dynamic_shared=1000))
    store = publish(tmp_path, "sample/fc1@128x256-c2x1", record(dynamic_shared=2000), tile=[128, 256])
    opened, fake = library(store)
    for name in ("sample/fc1", "sample/fc1@128x256-c2x1"):
        for ask in (opened.load, opened.find):
            with pytest.raises(ArgumentError, match=text) as caught:
                ask(name, problem=problem)
            assert caught.value.argument == "problem"
    assert not fake.loaded


@pytest.mark.parametrize("name", ["E", "M", "N", "K"])
@pytest.mark.parametrize("value", [0, 1, 2**31, 2**63 - 1, np.int64(7)])
def test_a_problem_may_say_some_extents_alone(tmp_path: Path, name: str, value: int) -> None:
    publish(tmp_path, "sample/fc1@128x160-c2x1", record(dynamic_shared=1000))
    store = publish(tmp_path, "sample/fc1@128x256-c2x1", record(dynamic_shared=2000), tile=[128, 256])
    opened, _ = library(store)
    assert opened.find("sample/fc1", problem={name: value}) == opened.find("sample/fc1", problem={name: int(value)})
    assert opened.find("sample/fc1", problem={}) == opened.find("sample/fc1")


def test_a_device_that_is_none_is_refused_before_the_driver_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[Any] = []
    monkeypatch.setattr("fusekit.library.Waking", lambda ordinal: woken.append(ordinal))
    for device in (0.0, False, "0", [0]):
        with pytest.raises(ArgumentError, match=r"device is .*; it must be the ordinal of a GPU, a whole number"):
            Library(publish(tmp_path)).load("sample/fc1", device=device)  # type: ignore[arg-type]
    assert not woken
    opened, _ = library(publish(tmp_path))
    assert type(opened.load("sample/fc1", device=np.int64(0)).device) is int  # type: ignore[arg-type]


def test_a_variant_left_from_another_spec_is_not_taken(tmp_path: Path) -> None:
    publish(tmp_path, "sample/fc1@128x160-c2x1")
    store = publish(tmp_path, "sample/fc1@128x256-c2x1", tile=[128, 256], bias=True)
    opened, _ = library(store)
    with pytest.raises(UsageError, match=r"fc1@128x160-c2x1 and .*fc1@128x256-c2x1 .* differ in bias; .* full name"):
        opened.load("sample/fc1")
    assert opened.load("sample/fc1@128x256-c2x1").name == "sample/fc1@128x256-c2x1"


def test_what_is_not_built_says_how_to_build_it(tmp_path: Path) -> None:
    opened, fake = library(publish(tmp_path))
    fake.calls.clear()
    with pytest.raises(NotBuiltError, match=r"from its spec file: fusekit build other\.toml/fc1"):
        opened.load("other/fc1")
    with pytest.raises(
        NotBuiltError, match=r"\(there are sample/fc1@128x160-c2x1\); no .* fusekit build sample\.toml/fc1$"
    ):
        opened.load("sample/fc1@zz")
    assert fake.calls == [], "a missing name needs no driver"
    with pytest.raises(NotBuiltError, match=r"only for sm_90a.*--arch sm_100a"):
        opened.load("sample/fc1", arch="sm_100a")


@pytest.mark.parametrize("name", [None, 3, ["sample/fc1"], b"sample/fc1", Path("sample/fc1")])
def test_a_name_is_text(tmp_path: Path, name: Any) -> None:
    opened, _ = library(publish(tmp_path))
    for ask in (opened.load, opened.find, opened.layer):
        with pytest.raises(ArgumentError, match=r"name = .*; it must be text such as 'quickstart/linear'"):
            ask(name)
    with pytest.raises(ArgumentError, match=r"config = .*; it must be a fusekit\.Config"):
        open_library("/some/store")  # type: ignore[arg-type]


def test_another_arch_is_refused_before_the_driver_loads(tmp_path: Path) -> None:
    opened, fake = library(publish(tmp_path), capability=(10, 0))
    with pytest.raises(ArchMismatchError, match=r"expected a device of sm_90a, found device 0 .*sm_100a\)") as caught:
        opened.load("sample/fc1")
    assert (caught.value.expected, caught.value.found) == ("sm_90a", "sm_100a")
    with pytest.raises(ArchMismatchError, match=r"is for sm_90a, device 0 .* is not; expected sm_90a, found sm_100a"):
        opened.load("sample/fc1", arch="sm_90a")
    assert "cuLibraryLoadData" not in fake.calls


def test_find_needs_no_driver_where_the_arch_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: Any) -> Any:
        raise DriverError("no NVIDIA driver")

    monkeypatch.setattr("fusekit.library.Driver", missing)
    opened = Library(publish(tmp_path))
    assert {opened.find("sample/fc1", arch).name for arch in (None, "sm_90a")} == {"sample/fc1@128x160-c2x1"}
    with pytest.raises(NotBuiltError, match="sm_100a"):
        opened.find("sample/fc1", "sm_100a")
    with pytest.raises(DriverError, match="no NVIDIA driver"):
        opened.load("sample/fc1")
    with pytest.raises(DriverError, match="no NVIDIA driver"):
        opened.find("sample/fc1", device=0)
    publish(tmp_path, "sample/fc1@128x160-c2x1", record(arch="sm_100a"))
    assert opened.find("sample/fc1", "sm_90a").arch == "sm_90a"
    with pytest.raises(DriverError, match="no NVIDIA driver"):
        opened.find("sample/fc1")


def test_every_arch_a_device_runs() -> None:
    assert archs_of((8, 0)) == ("sm_80",)
    assert archs_of((9, 0)) == ("sm_90a", "sm_90")
    assert archs_of((10, 3)) == ("sm_103a", "sm_103f", "sm_103")


@pytest.mark.parametrize(
    ("arch", "capability", "fits"),
    [
        ("sm_90a", (9, 0), True), ("sm_90", (9, 0), True), ("sm_80", (8, 6), True), ("sm_86", (8, 0), False),
        ("sm_100a", (10, 3), False), ("sm_100f", (10, 3), True), ("sm_90", (10, 0), False), ("sm_120a", (12, 0), True),
    ],
)  # fmt: skip
def test_which_cubin_runs_where(arch: str, capability: tuple[int, int], fits: bool) -> None:
    launch_record = record(arch=arch)
    fake = fake_for(launch_record, capability=capability)
    if fits:
        assert load(launch_record, fake)[0].arch == arch
    else:
        with pytest.raises(ArchMismatchError):
            load(launch_record, fake)
        assert fake.loaded == 0


def test_an_old_driver_says_expected_and_found() -> None:
    with pytest.raises(DriverError, match=r"supports CUDA 11\.8; fusekit expects CUDA 12\.4 or newer"):
        Driver(FakeDriver(version=11080))
    cubin = bytearray(CUBIN)
    cubin[8] = 8
    launch_record = record()
    for version, fine in ((12090, False), (13000, True)):
        fake = fake_for(launch_record, version=version)
        devices = Devices(Driver(fake))
        if fine:
            Kernel(devices, "sample/fc1", launch_record, bytes(cubin), {}, 0)
            continue
        with pytest.raises(DriverError, match=r"supports CUDA 12\.9; .*CUDA 13's format.* expects CUDA 13\.0"):
            Kernel(devices, "sample/fc1", launch_record, bytes(cubin), {}, 0)
        assert "cuLibraryLoadData" not in fake.calls


def test_an_older_driver_takes_the_build_that_it_reads(tmp_path: Path) -> None:
    older = publish(tmp_path).find_name("sample/fc1@128x160-c2x1", "sm_90a")
    store = publish(tmp_path, cubin=cubin_of("kernel", abi=8))
    newer = store.find_name("sample/fc1@128x160-c2x1", "sm_90a")
    assert older is not None and newer is not None and older.key != newer.key
    for version, key in ((13000, newer.key), (12080, older.key)):
        opened, _ = library(store, version=version)
        for name in ("sample/fc1", "sample/fc1@128x160-c2x1"):
            assert opened.find(name).key == key
            assert opened.load(name).digest == store.load(key)[0].cubin_sha256  # type: ignore[index]
    assert opened.load_record(newer).digest == store.load(older.key)[0].cubin_sha256  # type: ignore[index]
    assert opened.find("sample/fc1").spec == newer.spec


def test_no_build_for_the_driver_says_what_there_is(tmp_path: Path) -> None:
    store = publish(tmp_path, cubin=cubin_of("kernel", abi=8))
    opened, _ = library(store, version=12080)
    for name in ("sample/fc1", "sample/fc1@128x160-c2x1"):
        with pytest.raises(DriverError, match=r"supports CUDA 12\.8; .*for CUDA 13\.0 or newer.*update the driver, or"):
            opened.load(name)
    publish(tmp_path, "sample/fc1@128x256-c2x1", tile=[128, 256])
    assert opened.load("sample/fc1").name == "sample/fc1@128x256-c2x1"
    with pytest.raises(DriverError, match="load sample/fc1@128x256-c2x1, which this driver reads, or update the"):
        opened.load("sample/fc1@128x160-c2x1")


def test_no_driver_and_no_device() -> None:
    class NoLibrary:
        def cuDriverGetVersion(self) -> Any:  # noqa: N802
            raise RuntimeError("libcuda.so.1 not found.")

    with pytest.raises(DriverError, match=r"no NVIDIA driver .*libcuda\.so\.1 not found.*CUDA 12\.4 or newer"):
        Driver(NoLibrary())
    with pytest.raises(DriverError, match="the driver sees no GPU"):
        Devices(Driver(FakeDriver(devices=0)))
    with pytest.raises(DriverError, match=r"cuInit failed: CUDA_ERROR_NOT_FOUND \(text of 500\)") as caught:
        Driver(FakeDriver(fail={"cuInit": CUresult.CUDA_ERROR_NOT_FOUND}))
    assert (caught.value.name, caught.value.text) == ("CUDA_ERROR_NOT_FOUND", "text of 500")
    with pytest.raises(DriverError, match="device 3; this process sees devices 0 to 1"):
        Devices(Driver(FakeDriver(devices=2))).get(3)


def test_a_cubin_of_another_build_is_caught_by_its_parameters(tmp_path: Path) -> None:
    launch_record = record()
    fake = fake_for(launch_record)
    fake.parameters[-1] = (296, 4)
    opened = Library(publish(tmp_path), Driver(fake))
    with pytest.raises(IntegrityError, match=r"alpha@288\+4.*296\+4.*two builds"):
        opened.load("sample/fc1")
    assert fake.loaded == 0
    more = record(parameters=(*launch_record.parameters, IntegerParameter("more", "i32", 1, 292)))
    for one, other in ((launch_record, more), (more, launch_record)):
        fake = fake_for(other)
        cubin = cubin_of("kernel", parameters={"kernel": len(other.parameters)})
        with pytest.raises(IntegrityError, match="two builds"):
            Kernel(Devices(Driver(fake)), "sample/fc1", one, cubin, {}, 0)
        assert (fake.loaded, fake.failed) == (0, [])


@pytest.mark.parametrize("listed", [{}, {"kernel": 8}])
def test_no_call_of_a_load_fails(listed: dict[str, int]) -> None:
    """compute-sanitizer reports each."""
    fake = fake_for(record())
    Kernel(Devices(Driver(fake)), "sample/fc1", record(), cubin_of("kernel", parameters=listed), {}, 0)
    assert (fake.calls.count("cuKernelGetParamInfo"), fake.failed) == (8, [])


def test_a_list_of_parameters_that_is_cut_short() -> None:
    cubin = cubin_of("kernel", parameters={"kernel": 8}).replace(bytes.fromhex("04170c00"), bytes.fromhex("04170d00"))
    with pytest.raises(IntegrityError, match=r"sample/fc1: cubin: attribute .* of \.nv\.info is cut short"):
        Kernel(Devices(Driver(fake_for(record()))), "sample/fc1", record(), cubin, {}, 0)


def test_a_symbol_that_is_not_there() -> None:
    fake = fake_for(record(), symbol="other")
    with pytest.raises(DriverError, match="cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND"):
        load(record(), fake)
    assert fake.loaded == 0


def test_bytes_that_are_no_cubin() -> None:
    launch_record = record()
    with pytest.raises(IntegrityError, match="sample/fc1: its cubin: begins with 3c68746d6c3e; a 64-bit"):
        Kernel(Devices(Driver(fake_for(launch_record))), "sample/fc1", launch_record, b"<html>", {}, 0)


def test_the_runtime_imports_no_framework_and_no_driver() -> None:
    code = (
        "import sys, fusekit.runtime; print([m for m in ('cutlass', 'torch', 'numpy', 'cuda', 'click', 'rich',"
        " 'platformdirs') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_real_cuda_bindings_without_a_driver_is_a_driver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    try:
        bindings.cuDriverGetVersion()
    except Exception:
        with pytest.raises(DriverError, match="no NVIDIA driver"):
            Driver()
    else:
        pytest.skip("this machine has a driver")
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())
    with pytest.raises(DriverError, match=r"cuda\.bindings cannot be imported.*pip install"):
        Driver()
