"""The proof of a C launcher: on the same arguments it hands the driver what the Python runtime hands it, byte for byte,
and it refuses what the runtime refuses.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusekit.abi import (
    FloatParameter,
    LaunchRecord,
    PeersArgument,
    PointerParameter,
    RecordError,
    TensorArgument,
    evaluate,
    flat,
)
from fusekit.abi.floats import is_nan
from fusekit.abi.tensormap import TensorMap, encode
from fusekit.cabi import Exported
from fusekit.compiler.samples import ArgumentSet, argument_sets
from fusekit.dtypes import MAPS, by
from fusekit.errors import ArgumentError
from fusekit.runtime import Devices, Driver, Kernel
from tests.cubins import cubin_of
from tests.runtime.fake import CUresult, CUtensorMap, FakeDriver
from tests.runtime.samples import Torchlike

from .launcher import INVALID_ARGUMENT, OK
from .recorder import STOCK_STEP, WORKSPACE, Recorder

SETS = 24
TORCH = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32", "i32": "int32"}
ENUMS = {
    "dtype": by("tensor_map", MAPS),
    "fill": {"NONE": "none", "NAN_REQUEST_ZERO_FMA": "nan_zero"},
    "swizzle": {"NONE": "none", "32B": "32B", "64B": "64B", "128B": "128B"},
    "promotion": {"NONE": "none", "64B": "64B", "128B": "128B", "256B": "256B"},
}


class EncodingDriver(FakeDriver):
    """A fake driver for the Python runtime whose tensor maps are real descriptors."""

    def cuTensorMapEncodeTiled(self, *fields: Any) -> Any:  # noqa: N802
        result = super().cuTensorMapEncodeTiled(*fields)
        if result[0]:
            return result
        dtype, _, address, dims, strides, box, steps, _, swizzle, promotion, fill = fields
        tensor_map = TensorMap(
            address, ENUMS["dtype"][dtype.removeprefix("CU_TENSOR_MAP_DATA_TYPE_")], tuple(dims),
            tuple(strides)[: len(dims) - 1], tuple(box), tuple(steps),
            swizzle=ENUMS["swizzle"][swizzle.rpartition("_")[2]],
            l2_promotion=ENUMS["promotion"][promotion.rpartition("_")[2]],
            oob_fill=ENUMS["fill"][fill.removeprefix("CU_TENSOR_MAP_FLOAT_OOB_FILL_")],
        )  # fmt: skip
        try:
            return result[0], CUtensorMap(encode(tensor_map))
        except RecordError:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None

    def cuMemAlloc(self, size: int) -> Any:  # noqa: N802
        return super().cuMemAlloc(min(size, 1 << 16))  # nothing is computed, and scratch may be of any size


def comparable(
    launched: LaunchRecord, parameters: Sequence[bytes], values: Mapping[str, int], theirs: Callable[[int], bool]
) -> list[bytes]:
    """The parameters with zeros instead of what differs: each driver allocates workspaces and scratch where it likes
    (theirs: whether it did so), and the sign of a NaN means nothing. values: what shifts are made of.
    """
    actual = [bytearray(data) for data in parameters]
    starts = sorted(parameter.offset for parameter in launched.parameters)
    for offset, item in flat(launched.parameters):
        index = bisect_right(starts, offset) - 1
        place = slice(offset - starts[index], offset - starts[index] + item.size)
        if isinstance(item, FloatParameter) and is_nan(actual[index][place], item.dtype):
            actual[index][place] = bytes(item.size)
        if isinstance(item, PointerParameter) and item.argument in ("workspace", "scratch"):
            address = (int.from_bytes(actual[index][place], "little") - evaluate(item.shift, values)) % 2**64
            assert address % 256 == 0 and theirs(address), hex(address)
            actual[index][place] = bytes(8)
    return [bytes(data) for data in actual]


def queued(record: LaunchRecord, values: Mapping[str, int]) -> list[tuple[int, LaunchRecord]]:
    """The launches that are not left out, each with its number."""
    return [(number, step) for number, step in enumerate(record.launches) if evaluate(step.when, values)]


def launched_by_python(kernel: Exported, arguments: ArgumentSet) -> Any:
    """What the runtime hands the driver for each launch, or None where it refuses."""
    record, values = kernel.record, arguments.values
    first, *others = record.launches
    fake = EncodingDriver(
        [(item.offset, item.size) for item in first.parameters], first.symbol,
        {launch.symbol: [(item.offset, item.size) for item in launch.parameters] for launch in others},
        sm_count=values["sm_count"], active_clusters=values["active_clusters"],
    )  # fmt: skip
    cubin = cubin_of(*dict.fromkeys(launch.symbol for launch in record.launches))
    loaded = Kernel(Devices(Driver(fake)), kernel.name, record, cubin, kernel.defaults, 0)
    given: dict[str, Any] = dict(arguments.floats)
    for argument in record.arguments:
        if isinstance(argument, TensorArgument):
            shape = tuple(evaluate(extent, values) for extent in argument.shape)
            strides = tuple(values[argument.stride_variable(index)] for index in range(argument.rank))
            given[argument.name] = Torchlike(
                shape, TORCH.get(argument.dtype, argument.dtype), values[f"{argument.name}.address"], strides
            )
        elif isinstance(argument, PeersArgument):
            given[argument.name] = [values[f"{tensor.name}.address"] for tensor in argument.tensors]
        elif argument.name in values:
            given[argument.name] = values[argument.name]
    try:
        loaded(**given, stream=arguments.stream, cluster_margin=values["cluster_margin"])
    except ArgumentError:
        assert not fake.launches  # all of them, or none
        return None
    names = {
        "CLUSTER_DIMENSION": "cluster", "COOPERATIVE": "cooperative", "PREFERRED_CLUSTER_DIMENSION": "preferred",
        "PROGRAMMATIC_EVENT": "programmatic", "LAUNCH_COMPLETION_EVENT": "completion",
    }  # fmt: skip
    launches = []
    for (_, step), launch in zip(queued(record, values) if fake.launches else (), fake.launches, strict=True):
        attributes = {
            names.get(key.removeprefix("CU_LAUNCH_ATTRIBUTE_"), "serialization"): value
            for key, value in launch.attributes.items()
        }
        parameters = comparable(
            step, launch.parameters, values, lambda address: any(address >= base for base in fake.memory)
        )
        launches.append((launch.grid, launch.block, launch.shared, launch.stream, attributes, parameters))
    return launches


def launched_by_c(launcher: Any, arguments: ArgumentSet) -> Any:
    launcher.recorder.launches.clear()
    status = launcher.launch(launcher.arguments(arguments.values, arguments.floats), arguments.stream)
    done = launcher.recorder.launches
    if status == INVALID_ARGUMENT:
        assert not done
        return None
    assert status == OK, str(launcher.error)
    expected = queued(launcher.record, arguments.values) if done else []
    assert [launch.function for launch in done] == [number for number, _ in expected]
    launches = []
    for (_, step), launch in zip(expected, done, strict=True):
        parameters = comparable(
            step, launch.parameters, arguments.values, lambda address: (address - WORKSPACE) % STOCK_STEP < 1 << 16
        )
        launches.append((launch.grid, launch.block, launch.shared, launch.stream, launch.attributes, parameters))
    return launches


def damaged(record: LaunchRecord, arguments: ArgumentSet, source: random.Random) -> ArgumentSet:
    """An argument set with one value off: most are refused, by both or by none."""
    values = dict(arguments.values)
    names = [*(dim.name for dim in record.dims), "cluster_margin"]
    names += [tensor.stride_variable(i) for tensor in record.tensors for i in range(tensor.rank)
              if tensor.reads_stride(i)]  # fmt: skip
    names += [f"{tensor.name}.address" for tensor in record.tensors]
    names += [scalar.name for scalar in record.scalars if scalar.bounded]
    names += 4 * sorted(record.deciding)
    name = source.choice(names)
    if name in record.deciding:
        number = source.choice([float("inf"), -1e30, 2.0**29, 2.0**31, -1.0, 0.3])  # to C a NaN is no number given
        floats = {**arguments.floats, name: number}
        return replace(arguments, floats=floats, values=record.environment(values, floats))
    if name.endswith(".address"):
        other = values[f"{source.choice(record.tensors).name}.address"]
        values[name] = source.choice([0, values[name] + 1, values[name] + 8, other, other + 64])
    elif "." in name:
        values[name] = source.choice([1, 8, 16, values[name] + 1, values[name] + 8, -8, 2**41, 2**54])
    elif name in {scalar.name for scalar in record.scalars}:
        values[name] = source.choice([-(2**31), -1, 0, 1, values[name] + 1, 2**31 - 1])
    elif name == "cluster_margin":
        values[name] = source.choice([-1, 0, 2**31 - 1])
    else:
        values[name] = source.choice([0, 1, 7, values[name] + 1, values[name] + 4, 2**31, -8])
        # Compact strides follow the dims; the typed structure has no others.
        for tensor in record.tensors:
            for index in range(tensor.rank):
                if not tensor.reads_stride(index):
                    values[tensor.stride_variable(index)] = evaluate(tensor.strides[index], values)
    return replace(arguments, values=values)


_ONCE: dict[Any, tuple[Exported, Any]] = {}  # the kernel is kept, so that its id stays its own


def once(kernel: Exported, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """What `make` gives for `kernel` and `key`, once for C, C++, exports and bundles."""
    if (id(kernel), *key) not in _ONCE:
        _ONCE[id(kernel), *key] = kernel, make()
    return _ONCE[id(kernel), *key][1]


def sets_of(kernel: Exported, use: str, count: int) -> list[ArgumentSet]:
    return list(once(kernel, (use, count), lambda: argument_sets(kernel.record, f"{kernel.name} {use}", count)))


def expected(kernel: Exported, arguments: ArgumentSet) -> Any:
    values = arguments.stream, *sorted(arguments.values.items()), *sorted(arguments.floats.items())
    return once(kernel, values, lambda: launched_by_python(kernel, arguments))


# Makes a launcher of kernel `index` over a recorder: an export's, or one that reads a bundle.
Make = Callable[[int, Recorder], Any]


def prove(kernels: Sequence[Exported], make: Make) -> None:
    """Random arguments of every kernel, launched by both; each launcher is loaded and unloaded for each of them."""
    launches = 0
    for index, kernel in enumerate(kernels):
        for arguments in sets_of(kernel, "in C", SETS):
            variables = {name: arguments.values[name] for name in ("sm_count", "active_clusters")}
            recorder = Recorder(kernel.record, **variables)
            launcher = make(index, recorder)
            assert launcher.load() == OK, str(launcher.error)
            by_c, by_python = launched_by_c(launcher, arguments), expected(kernel, arguments)
            assert by_c == by_python, f"{kernel.name}: {arguments}: {launcher.error}"
            launches += by_c is not None
            assert launcher.unload() == OK
            assert (recorder.loaded, recorder.retained, recorder.allocated, recorder.capture_mode) == (0, 0, 0, 0)
    assert launches > 0.8 * SETS * len(kernels)


def prove_refusals(kernels: Sequence[Exported], make: Make) -> None:
    """Arguments with one value off."""
    source = random.Random(11)
    refused = 0
    for index, kernel in enumerate(kernels):
        launcher = make(index, Recorder(kernel.record, sm_count=132, active_clusters=66))
        assert launcher.load() == OK
        for arguments in sets_of(kernel, "damaged", 40):
            arguments.values.update(sm_count=132, active_clusters=66)
            case = damaged(kernel.record, arguments, source)
            if any(case.values[dim.name] < 0 for dim in kernel.record.dims):
                assert launched_by_c(launcher, case) is None  # no tensor has such a shape
                continue
            by_c = launched_by_c(launcher, case)
            assert by_c == expected(kernel, case), f"{kernel.name}: {case}: {launcher.error}"
            refused += by_c is None
    assert refused > 30
