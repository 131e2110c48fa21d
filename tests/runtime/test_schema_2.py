"""Records of schema 2 on a fake driver: several launches, structs, values, guards, maps that the launcher writes."""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from fusekit.abi import Constraint, FloatParameter, IntegerParameter, TensorMapParameter
from fusekit.abi.tensormap import TensorMap, encode_raw
from fusekit.errors import ArgumentError
from tests.abi.test_schema_2 import step, whole
from tests.runtime.fake import CUresult, FakeDriver
from tests.runtime.samples import Torchlike, fake_for, load, tensors


def driver(launch_record=None) -> FakeDriver:
    return fake_for(whole() if launch_record is None else launch_record, others={"second": [(0, 8)]})


def test_one_call_queues_every_launch() -> None:
    kernel, fake = load(whole(), driver())
    kernel(**tensors(m=300), stream=9)
    first, second = fake.launches
    assert (first.grid, second.grid) == ((132, 1, 1), (3, 1, 1))
    assert (second.block, second.stream) == ((32, 1, 1), 9)
    assert second.parameters == [struct.pack("<Q", 0x4000_0000)]
    base, count, log, scale = struct.unpack("<QIB3xf4x", first.parameters[-1])
    assert (base, count, log, scale) == (0x3000_0004 + 16, 3, 2, 2.25)
    fake.calls.clear()
    kernel(**tensors(m=300), stream=9)
    assert fake.calls == ["cuStreamGetGreenCtx", "cuLaunchKernelEx", "cuLaunchKernelEx"]
    assert [launched.parameters for launched in fake.launches[:2]] == [x.parameters for x in fake.launches[2:]]


def test_a_bound_launch_queues_every_launch_and_follows_its_tensors() -> None:
    kernel, fake = load(whole(), driver())
    launch = kernel.bind(**tensors())
    launch(7)
    fake.calls.clear()
    fake.launches.clear()
    launch(7)
    assert fake.calls == ["cuLaunchKernelEx", "cuLaunchKernelEx"]
    launch.update(y=Torchlike((96, 160), address=0x5000_0000))(7)
    assert fake.launches[3].parameters == [struct.pack("<Q", 0x5000_0000)]
    launch.update(y=Torchlike((500, 160), address=0x5000_0000), x=Torchlike((500, 128), address=0x1000_0000))(7)
    assert fake.launches[5].grid == (4, 1, 1)
    launch.update(act_alpha=2.0)(7)
    assert struct.unpack_from("<f", fake.launches[6].parameters[-1], 16) == (3.0,)


@pytest.mark.parametrize("bound", [False, True])
def test_threads_do_not_come_between_the_launches_of_a_call(monkeypatch: pytest.MonkeyPatch, bound: bool) -> None:
    """They may share a stream, and with it scratch memory that one launch leaves for the next."""
    kernel, fake = load(whole(), driver())
    original = fake.cuLaunchKernelEx

    def slow(*given: Any) -> Any:
        time.sleep(0.002)  # in which others may run
        return original(*given)

    def work() -> None:
        call = kernel.bind(**tensors()) if bound else (lambda stream: kernel(**tensors(), stream=stream))
        for _ in range(10):
            call(9)

    monkeypatch.setattr(fake, "cuLaunchKernelEx", slow)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [launched.block for launched in fake.launches] == [launched.block for launched in fake.launches[:2]] * 40


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("rows", [96, 97])
def test_an_update_that_the_second_launch_refuses_changes_neither(
    monkeypatch: pytest.MonkeyPatch, rows: int, several: bool
) -> None:
    """rows: as before, so that addresses are replaced, or others, so that it is bound afresh."""
    y_map = TensorMapParameter("y_map", "y", 0, dims=("I", "M"), strides=(("mul", 2, "y.stride0"),), box=(64, 64))
    last = replace(step(), parameters=(replace(step().parameters[0], offset=128), y_map))
    kernel, fake = load(replace(whole(), then=(last,)), fake_for(whole(), others={"second": [(0, 128), (128, 8)]}))
    launch = kernel.bind(**tensors())
    launch(7)
    before = [launched.parameters for launched in fake.launches]

    def refusing(original: Any) -> Any:
        def called(self: FakeDriver, *given: Any) -> Any:
            return (CUresult.CUDA_ERROR_INVALID_VALUE, None) if 0x5000_0000 in given else original(self, *given)

        return called

    for name in ("cuTensorMapReplaceAddress", "cuTensorMapEncodeTiled"):
        monkeypatch.setattr(FakeDriver, name, refusing(getattr(FakeDriver, name)))
    x = {"x": Torchlike((rows, 128), address=0x7000_0000)}
    with pytest.raises(ArgumentError, match="y_map"):
        launch.update(y=Torchlike((rows, 160), address=0x5000_0000), **(x if several or rows != 96 else {}))
    launch(7)
    assert [launched.parameters for launched in fake.launches[2:]] == before
    launch.update(y=Torchlike((rows, 160), address=0x6000_0000), **x)(7)
    assert fake.launches[-1].parameters[1] == struct.pack("<Q", 0x6000_0000)
    assert struct.unpack_from("<Q", fake.launches[-2].parameters[0]) == (0x7000_0000,)


def test_nothing_is_queued_when_there_is_nothing_to_do() -> None:
    kernel, fake = load(whole(), driver())
    kernel(**tensors(m=0))
    kernel.bind(**tensors(m=0))()
    assert not fake.launches


def test_a_guard_refuses_in_its_words_before_the_first_launch() -> None:
    kernel, fake = load(whole(), driver())
    with pytest.raises(ArgumentError, match="too many tiles; got M = 6400"):
        kernel(**tensors(m=6400))
    launch_record = replace(whole(), constraints=(Constraint(("max", 0, ("sub", 200, "sm_count")), "a larger device"),))
    kernel, fake = load(launch_record, driver())
    with pytest.raises(ArgumentError, match="a larger device"):
        kernel.bind(**tensors())
    assert not fake.launches


def test_what_cannot_be_computed_is_an_argument_error() -> None:
    launch_record = replace(whole(), values=whole().values | {"rest": ("floordiv", 8, ("sub", "M", 96))})
    kernel, fake = load(launch_record, driver())
    with pytest.raises(ArgumentError, match="floordiv of 8 by 0; a divisor must be positive"):
        kernel(**tensors(m=96))
    kernel(**tensors(m=97))
    assert len(fake.launches) == 2


def test_an_integer_is_refused_where_it_does_not_fit() -> None:
    narrow = replace(whole(), parameters=(*whole().parameters, IntegerParameter("n", "u8", "M", 320)))
    kernel, _ = load(narrow, driver(narrow))
    with pytest.raises(ArgumentError, match="parameter n = 300; it does not fit into 8 bits"):
        kernel(**tensors(m=300))


def test_the_driver_says_how_many_clusters_are_active() -> None:
    launch_record = replace(whole(), then=(step(grid=(("mul", 2, "active_clusters"), 1, 1), cluster=(2, 1, 1)),))
    fake = driver()
    fake.active_clusters = 61
    kernel, fake = load(launch_record, fake)
    assert fake.calls.count("cuOccupancyMaxActiveClusters") == 1
    kernel(**tensors())
    kernel(**tensors(m=97))
    assert fake.launches[1].grid == (122, 1, 1)
    assert fake.calls.count("cuOccupancyMaxActiveClusters") == 1


def test_a_raw_tensor_map_is_written_and_moved_without_the_driver() -> None:
    launch_record = whole()
    maps = tuple(
        replace(item, encoding="raw") if isinstance(item, TensorMapParameter) else item
        for item in launch_record.parameters
    )
    kernel, fake = load(replace(launch_record, parameters=maps), driver())
    launch = kernel.bind(**tensors())
    launch(7)
    launch.update(x=Torchlike((96, 128), address=0x7000_0000))(7)
    assert "cuTensorMapEncodeTiled" not in fake.calls

    def expected(address: int) -> bytes:
        return encode_raw(
            TensorMap(address, "bf16", (128, 96), (256,), (64, 64), (1, 1), swizzle="128B", l2_promotion="128B")
        )

    assert fake.launches[0].parameters[0] == expected(0x1000_0000)
    assert fake.launches[2].parameters[0] == expected(0x7000_0000)


def test_a_constant_float_needs_no_scalar() -> None:
    launch_record = replace(whole(), parameters=(*whole().parameters, FloatParameter("one", "", 320, 1.0)))
    kernel, fake = load(launch_record, driver(launch_record))
    kernel(**tensors())
    assert fake.launches[0].parameters[-1] == struct.pack("<f", 1.0)
