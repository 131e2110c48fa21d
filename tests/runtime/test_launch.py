"""From arguments to the bytes, grid and attributes that the driver is handed."""

from __future__ import annotations

import math
import struct
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fusekit.abi import PointerParameter, evaluate
from fusekit.errors import ArgumentError
from tests.runtime.samples import Torchlike, fake_for, load, record, tensors, with_workspace
from tests.threads import at_once


def test_a_call_hands_the_driver_what_the_record_says() -> None:
    kernel, fake = load()
    given = tensors()
    kernel(**given, stream=77, cluster_margin=3)
    (launched,) = fake.launches
    assert launched.grid == (126, 1, 1)
    assert launched.block == (384, 1, 1)
    assert launched.shared == 200_000
    assert launched.stream == 77
    assert launched.attributes == {"CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": (2, 1, 1)}
    x_map, w_map, offsets, y, pitch, rows, limit, alpha = launched.parameters
    assert struct.unpack_from("<Q", x_map) == (0x1000_0000,)
    assert struct.unpack_from("<Q", w_map) == (0x2000_0000 + 2 * 128,)
    assert struct.unpack("<Q", offsets) == (0x3000_0004,)
    assert struct.unpack("<Q", y) == (0x4000_0000,)
    assert struct.unpack("<q", pitch) == (160,)
    assert struct.unpack("<i", rows) == (96,)
    assert struct.unpack("<f", limit) == (math.inf,)
    assert struct.unpack("<f", alpha) == (1.5,)


def test_tensor_maps_are_encoded_from_the_records_fields() -> None:
    kernel, fake = load()
    given = tensors()
    given["x"] = Torchlike((96, 128), address=0x1000_0000, strides=(256, 1))
    kernel(**given)
    x_map, w_map = fake.encoded
    assert x_map == {
        "dtype": "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
        "rank": 2,
        "address": 0x1000_0000,
        "dims": [128, 96],
        "strides": [512],
        "box": [64, 64],
        "element_strides": [1, 1],
        "interleave": "CU_TENSOR_MAP_INTERLEAVE_NONE",
        "swizzle": "CU_TENSOR_MAP_SWIZZLE_128B",
        "promotion": "CU_TENSOR_MAP_L2_PROMOTION_L2_128B",
        "fill": "CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE",
    }
    assert w_map["dims"] == [128, 320, 4]
    assert w_map["strides"] == [256, 81920]


def test_a_signature_seen_before_costs_neither_checks_nor_encoding() -> None:
    kernel, fake = load()
    given = tensors()
    kernel(**given, stream=9)
    fake.calls.clear()
    kernel(**given, stream=9)
    assert fake.calls == ["cuStreamGetGreenCtx", "cuLaunchKernelEx"]
    assert fake.launches[0].parameters == fake.launches[1].parameters
    given["x"] = Torchlike((96, 128), address=0x5000_0000)
    fake.calls.clear()
    kernel(**given, stream=9)
    assert "cuTensorMapEncodeTiled" not in fake.calls
    assert fake.calls.count("cuLaunchKernelEx") == 1
    assert struct.unpack_from("<Q", fake.launches[2].parameters[0]) == (0x5000_0000,)


def test_a_bound_launch_is_one_driver_call() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors(), cluster_margin=1)
    fake.calls.clear()
    launch(5)
    assert fake.calls == ["cuStreamGetGreenCtx", "cuLaunchKernelEx"]
    launch(5)
    assert fake.calls[2:] == ["cuLaunchKernelEx"]
    launch(6)
    assert [launched.stream for launched in fake.launches] == [5, 5, 6]
    assert fake.launches[0].grid == (130, 1, 1)


def test_a_bound_launch_is_not_disturbed_by_later_calls() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    other = tensors() | {"y": Torchlike((96, 160), address=0x6000_0000)}
    kernel(**other)
    launch(0)
    assert struct.unpack("<Q", fake.launches[1].parameters[3]) == (0x4000_0000,)


def test_zero_rows_launch_nothing_and_touch_nothing() -> None:
    kernel, fake = load()
    empty = tensors() | {"x": Torchlike((0, 128), address=0), "y": Torchlike((0, 160), address=0)}
    fake.calls.clear()
    kernel(**empty)
    kernel.bind(**empty)(3)
    assert "cuLaunchKernelEx" not in fake.calls
    assert fake.encoded == []


def test_the_margin_defaults_to_the_specs_and_is_evaluated_by_the_grid() -> None:
    kernel, fake = load(cluster_margin=16)
    kernel(**tensors())
    kernel(**tensors(), cluster_margin=0)
    kernel(**tensors(), cluster_margin=131)
    kernel(**tensors(), cluster_margin=np.int64(16), priority=np.int32(-1))
    assert [launched.grid[0] for launched in fake.launches] == [100, 132, 2, 100]
    assert type(fake.launches[-1].attributes["CU_LAUNCH_ATTRIBUTE_PRIORITY"]) is int


@pytest.mark.parametrize("given", [True, False])
def test_a_margin_leaves_one_multiprocessor(given: bool) -> None:
    kernel, fake = load(cluster_margin=0 if given else 132)
    with pytest.raises(ArgumentError, match=r"is 132; .* has 132 multiprocessors, so it must be 0 to 131"):
        kernel(**tensors(), **({"cluster_margin": 132} if given else {}))
    assert not fake.launches


@pytest.mark.parametrize("margin", [-1, 1.5, "2", True])
def test_a_margin_that_is_none(margin: Any) -> None:
    kernel, _ = load()
    with pytest.raises(ArgumentError, match=r"cluster_margin is .* integer from 0") as caught:
        kernel(**tensors(), cluster_margin=margin)
    assert caught.value.argument == "cluster_margin"


def test_scalars_default_to_the_specs_then_the_records() -> None:
    kernel, fake = load(act_alpha=1.702, act_limit="inf")
    given = tensors()
    del given["act_alpha"]
    kernel(**given)
    kernel(**given, act_limit=7)
    limits = [struct.unpack("<f", launched.parameters[6])[0] for launched in fake.launches]
    assert limits == [math.inf, 7.0]
    assert struct.unpack("<f", fake.launches[0].parameters[7])[0] == pytest.approx(1.702)


def test_streams_of_any_owner() -> None:
    kernel, fake = load()
    streams = [
        None,
        1,
        SimpleNamespace(__cuda_stream__=lambda: (0, 21)),
        SimpleNamespace(__cuda_stream__=(0, 22)),
        SimpleNamespace(cuda_stream=23),
        SimpleNamespace(ptr=24),
    ]
    for stream in streams:
        kernel(**tensors(), stream=stream)
    assert [launched.stream for launched in fake.launches] == [0, 1, 21, 22, 23, 24]
    with pytest.raises(ArgumentError, match="stream is a str"):
        kernel(**tensors(), stream="main")


def test_the_default_stream_takes_the_tensors_device_and_leaves_the_context_as_it_was() -> None:
    kernel, fake = load(fake=fake_for(record(), devices=2))
    on_one = {
        name: Torchlike(value.shape, value.dtype, value.address, device=1) if isinstance(value, Torchlike) else value
        for name, value in tensors().items()
    }
    fake.cuCtxPushCurrent(1000)
    kernel(**tensors())
    kernel(**on_one)
    assert [launched.context for launched in fake.launches] == [1000, 1001]
    assert fake.stack == [1000]
    assert fake.settings == {("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", device): 200_000 for device in (0, 1)}


def test_a_thread_without_a_context_may_launch() -> None:
    kernel, fake = load()
    thread = threading.Thread(target=lambda: kernel(**tensors()))
    thread.start()
    thread.join()
    assert [launched.context for launched in fake.launches] == [1000]


def test_a_stream_of_another_device_is_named() -> None:
    kernel, _ = load(fake=fake_for(record(), stream_contexts={50: 1001}))
    with pytest.raises(ArgumentError, match="stream 0x32 is not of the primary context of device 0") as caught:
        kernel(**tensors(), stream=50)
    assert caught.value.argument == "stream"


def test_many_threads_share_a_kernel() -> None:
    kernel, fake = load()

    def work(number: int) -> None:
        given = tensors() | {"y": Torchlike((96, 160), address=0x4000_0000 + number * 0x10_0000)}
        for _ in range(50):
            kernel(**given, stream=100 + number)

    at_once(4, work)
    assert len(fake.launches) == 200
    for launched in fake.launches:
        assert struct.unpack("<Q", launched.parameters[3])[0] == 0x4000_0000 + (launched.stream - 100) * 0x10_0000


def test_every_stream_has_a_workspace_of_its_own() -> None:
    kernel, fake = load(with_workspace())
    bound = kernel.bind(**tensors())
    allocated = fake.calls.count("cuMemAlloc")
    for stream in (9, 10, 9, 0, 1):
        kernel(**tensors(), stream=stream)
        bound(stream)
    addresses = [struct.unpack("<Q", launched.parameters[8])[0] for launched in fake.launches]
    assert addresses[::2] == addresses[1::2]
    nine, ten, again, legacy, one = addresses[::2]
    assert (nine, legacy) == (again, one)
    assert len({nine, ten, legacy}) == 3
    assert all(address % 256 == 0 for address in addresses)
    assert fake.calls.count("cuMemAlloc") == allocated == 1
    kernel.unload()
    assert not fake.memory


def test_more_streams_than_the_stock_allocate_more() -> None:
    kernel, fake = load(with_workspace())
    for stream in range(9, 80):
        kernel(**tensors(), stream=stream)
    addresses = [struct.unpack("<Q", launched.parameters[8])[0] for launched in fake.launches]
    assert len(set(addresses)) == len(addresses)
    assert fake.calls.count("cuMemAlloc") > 1
    assert fake.calls.count("cuMemsetD8Async") == fake.calls.count("cuMemAlloc")
    kernel.unload()
    assert not fake.memory


def with_scratch() -> Any:
    base = record()
    parameters = (*base.parameters, PointerParameter("parts", "scratch", 296))
    return record(parameters=parameters, scratch=("mul", "M", 65536))


def test_scratch_is_a_streams_own_and_grows_with_its_launches() -> None:
    kernel, fake = load(with_scratch())
    assert "cuMemAlloc" not in fake.calls
    for stream in (9, 10, 9, 0, 1):
        kernel(**tensors(), stream=stream)
    nine, ten, again, legacy, one = (struct.unpack("<Q", launched.parameters[8])[0] for launched in fake.launches)
    assert (nine, legacy) == (again, one)
    assert len({nine, ten, legacy}) == 3
    assert {len(memory) >> 20 for memory in fake.memory.values()} == {6}  # MiB: 96 rows of 64 KiB
    bound = kernel.bind(**tensors())
    bound(9)
    assert fake.calls.count("cuMemAlloc") == 3
    more = {"x": Torchlike((97, 128)), "y": Torchlike((97, 160), address=0x5000_0000)}
    kernel(**(tensors() | more), stream=9)
    assert fake.calls.count("cuMemAlloc") == 4
    assert max(len(memory) >> 20 for memory in fake.memory.values()) == 10  # half as much again, in steps of 2 MiB
    bound(9)  # what was bound before still has its own
    kernel(**tensors(), stream=9)
    before, larger, bound_again, smaller = (
        struct.unpack("<Q", launched.parameters[8])[0] for launched in fake.launches[-4:]
    )
    assert before == bound_again == nine
    assert larger not in (nine, ten, legacy)
    assert smaller in (nine, larger)
    kernel.unload()
    assert not fake.memory


@pytest.mark.parametrize("record_of", [with_workspace, with_scratch])
def test_threads_on_the_per_thread_default_stream_share_no_memory(record_of: Any) -> None:
    """Nor does one that begins when another has ended, whose launches may be pending: it may get the same ident."""
    kernel, fake = load(record_of())
    bound = kernel.bind(**tensors())
    bound(2)
    for _ in range(4):
        thread = threading.Thread(target=lambda: (bound(2), bound(2)))
        thread.start()
        thread.join()
    got = [launched.parameters[8] for launched in fake.launches]
    assert len(set(got)) == 5 and got[1::2] == got[2::2]
    kernel._devices._thread = threading.local()  # of a thread that C made, Python forgets this between two calls
    bound(2)
    assert fake.launches[-1].parameters[8] == got[0]


def test_unloading_gives_everything_back_and_is_noticed() -> None:
    kernel, fake = load()
    launch = kernel.bind(**tensors())
    kernel.unload()
    kernel.unload()
    assert fake.loaded == 0
    with pytest.raises(ArgumentError, match="unloaded; load it again"):
        launch(0)
    with pytest.raises(ArgumentError, match="unloaded; load it again"):
        kernel(**tensors())


def test_attributes_become_launch_attributes_and_kernel_settings() -> None:
    launch_record = record(
        attributes={
            "cooperative": 1,
            "programmatic_stream_serialization": 1,
            "non_portable_cluster_size_allowed": 1,
            "preferred_shared_memory_carveout": 100,
        }
    )
    kernel, fake = load(launch_record)
    kernel(**tensors())
    assert fake.launches[0].attributes == {
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": (2, 1, 1),
        "CU_LAUNCH_ATTRIBUTE_COOPERATIVE": 1,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 1,
    }
    assert fake.settings["CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 0] == 1
    assert fake.settings["CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT", 0] == 100


def test_a_grid_that_cannot_be_launched_is_refused() -> None:
    launch_record = record(grid=("M", 1, 1))
    kernel, _ = load(launch_record)
    with pytest.raises(ArgumentError, match=r"grid x is 97 blocks for .*M = 97.*multiple of 2"):
        kernel(**tensors(m=97))
    assert evaluate(launch_record.grid[0], {"M": 97}) == 97


def test_a_scalar_parameter_that_overflows_is_refused() -> None:
    base = record()
    rows = type(base.parameters[5])("rows", "i32", ("mul", "M", 2**30), 280)
    launch_record = record(parameters=(*base.parameters[:5], rows, *base.parameters[6:]))
    kernel, _ = load(launch_record)
    with pytest.raises(ArgumentError, match=r"parameter rows = .* does not fit into 32 bits"):
        kernel(**tensors())
