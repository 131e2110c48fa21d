"""The proof of a C launcher: on the same arguments it hands the driver what the Python runtime hands it, byte for byte,
and it refuses what the runtime refuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusekit.abi import (
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    RecordError,
    ScalarArgument,
    TensorArgument,
    evaluate,
)
from fusekit.abi.tensormap import TensorMap, encode
from fusekit.cabi import Exported
from fusekit.compiler.samples import ArgumentSet, argument_sets
from fusekit.errors import ArgumentError
from fusekit.runtime import Devices, Driver, Kernel
from fusekit.spec import find, parse_file
from tests.records import read_record
from tests.runtime.fake import CUresult, CUtensorMap, FakeDriver
from tests.runtime.samples import CUBIN as FAKE_CUBIN
from tests.runtime.samples import Torchlike, record

from .launcher import CUBIN, INVALID_ARGUMENT, OK, complete
from .recorder import STOCK_STEP, WORKSPACE, Recorder

SETS = 48
BACKWARD = Path(__file__).parents[1] / "gpu" / "matrix_backward.toml"
TORCH = {"bf16": "bfloat16", "fp16": "float16", "f32": "float32", "i32": "int32"}
ENUMS = {
    "dtype": {"BFLOAT16": "bf16", "FLOAT16": "fp16", "FLOAT32": "f32"},
    "swizzle": {"NONE": "none", "32B": "32B", "64B": "64B", "128B": "128B"},
    "promotion": {"NONE": "none", "64B": "64B", "128B": "128B", "256B": "256B"},
}


def samples() -> list[Exported]:
    """Records of every shape there is: GEMMs as they are built, and one with whatever a record may hold."""
    model = [find([f"gpt-oss-20b/{name}"])[0] for name in ("fc1-fwd", "fc2-fwd")]
    specs = [*find(["quickstart"]), *model]
    exported = [Exported(spec.full_name, complete(read_record(spec)), CUBIN, spec.defaults()) for spec in specs]
    sums = next(spec for spec in parse_file(BACKWARD) if spec.dprob and spec.dbias)  # with scratch
    exported.append(Exported(sums.full_name, complete(read_record(sums)), CUBIN, sums.defaults()))
    base = record()
    everything = record(
        arguments=(*base.arguments, ScalarArgument("shift", "i32", 3)),
        parameters=(
            *base.parameters, PointerParameter("counters", "workspace", 296), IntegerParameter("shifted", "i64",
            ("add", "shift", ("mod", ("sub", "M", "shift"), 7)), 304), PointerParameter("partial", "scratch", 312),
        ),
        constraints=(*base.constraints,),
        workspace=("mul", "sm_count", 64), workspace_zeroed=True,
        scratch=("mul", 4, ("mul", "M", ("min", "sm_count", "I"))),
        attributes={"cooperative": 1, "programmatic_stream_serialization": 1, "preferred_shared_memory_carveout": 50,
                    "non_portable_cluster_size_allowed": 1},
    )  # fmt: skip
    return [*exported, Exported("sample/every-field@1", complete(everything), CUBIN, {"cluster_margin": 4})]


class EncodingDriver(FakeDriver):
    """A fake driver for the Python runtime whose tensor maps are real descriptors."""

    def cuTensorMapEncodeTiled(self, *fields: Any) -> Any:  # noqa: N802
        result = super().cuTensorMapEncodeTiled(*fields)
        if result[0]:
            return result
        dtype, _, address, dims, strides, box, steps, _, swizzle, promotion, _ = fields
        made = TensorMap(
            address, ENUMS["dtype"][dtype.rpartition("_")[2]], tuple(dims), tuple(strides), tuple(box), tuple(steps),
            swizzle=ENUMS["swizzle"][swizzle.rpartition("_")[2]],
            l2_promotion=ENUMS["promotion"][promotion.rpartition("_")[2]],
        )  # fmt: skip
        try:
            return result[0], CUtensorMap(encode(made))
        except RecordError:
            return CUresult.CUDA_ERROR_INVALID_VALUE, None

    def cuMemAlloc(self, size: int) -> Any:  # noqa: N802
        return super().cuMemAlloc(min(size, 1 << 16))  # nothing is computed, and scratch may be of any size


def without_own(made: LaunchRecord, parameters: Sequence[bytes], theirs: Callable[[int], bool]) -> list[bytes]:
    """The parameters with a word in place of each address of a workspace or of scratch: each driver allocates where it
    likes. theirs: whether it did so.
    """
    found = list(parameters)
    for index, item in enumerate(sorted(made.parameters, key=lambda parameter: parameter.offset)):
        if isinstance(item, PointerParameter) and item.argument in ("workspace", "scratch"):
            address = int.from_bytes(found[index], "little")
            assert address % 256 == 0 and theirs(address), hex(address)
            found[index] = item.argument.encode()
    return found


def launched_by_python(kernel: Exported, arguments: ArgumentSet) -> Any:
    """What the runtime hands the driver, or None where it refuses."""
    made, values = kernel.record, arguments.values
    fake = EncodingDriver([(item.offset, item.size) for item in made.parameters], sm_count=values["sm_count"])
    loaded = Kernel(Devices(Driver(fake)), kernel.name, made, FAKE_CUBIN, kernel.defaults, 0)
    given: dict[str, Any] = dict(arguments.floats)
    for argument in made.arguments:
        if isinstance(argument, TensorArgument):
            shape = tuple(evaluate(extent, values) for extent in argument.shape)
            strides = tuple(values[argument.stride_variable(index)] for index in range(argument.rank))
            given[argument.name] = Torchlike(
                shape, f"torch.{TORCH[argument.dtype]}", values[f"{argument.name}.address"], strides
            )
        elif argument.name in values:
            given[argument.name] = values[argument.name]
    try:
        loaded(**given, stream=arguments.stream, cluster_margin=values["cluster_margin"])
    except ArgumentError:
        return None
    if not fake.launches:
        return "skipped"
    (launch,) = fake.launches
    parameters = without_own(made, launch.parameters, lambda address: any(address >= base for base in fake.memory))
    names = {"CLUSTER_DIMENSION": "cluster", "COOPERATIVE": "cooperative"}
    attributes = {
        names.get(key.removeprefix("CU_LAUNCH_ATTRIBUTE_"), "serialization"): value
        for key, value in launch.attributes.items()
    }
    return launch.grid, launch.block, launch.shared, launch.stream, attributes, parameters


def launched_by_c(launcher: Any, arguments: ArgumentSet) -> Any:
    launcher.recorder.launches.clear()
    status = launcher.launch(launcher.arguments(arguments.values, arguments.floats), arguments.stream)
    if status == INVALID_ARGUMENT:
        return None
    assert status == OK, str(launcher.error)
    if not launcher.recorder.launches:
        return "skipped"
    (launch,) = launcher.recorder.launches
    parameters = without_own(
        launcher.record, launch.parameters, lambda address: (address - WORKSPACE) % STOCK_STEP < 1 << 16
    )
    return launch.grid, launch.block, launch.shared, launch.stream, launch.attributes, parameters


def damaged(record: LaunchRecord, arguments: ArgumentSet, source: random.Random) -> ArgumentSet:
    """An argument set with one value off: most are refused, by both or by none."""
    values = dict(arguments.values)
    names = [name for name in values if name not in ("sm_count", "workspace.address") and "." not in name]
    names += [tensor.stride_variable(i) for tensor in record.tensors for i in range(tensor.rank)
              if tensor.reads_stride(i)]  # fmt: skip
    names += [f"{tensor.name}.address" for tensor in record.tensors]
    scalars = {scalar.name for scalar in record.scalars}
    name = source.choice([name for name in names if name not in scalars])
    if name.endswith(".address"):
        other = values[f"{source.choice(record.tensors).name}.address"]
        values[name] = source.choice([0, values[name] + 1, values[name] + 8, other, other + 64])
    elif "." in name:
        values[name] = source.choice([1, 8, 16, values[name] + 1, values[name] + 8, -8, 2**41, 2**54])
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


# Makes a launcher of kernel `index` over a recorder: an export's, or one that reads a bundle.
Make = Callable[[int, Recorder], Any]


def prove(kernels: Sequence[Exported], make: Make) -> None:
    """Random arguments of every kernel, launched by both; each launcher is loaded and unloaded for each of them."""
    launches = 0
    for index, kernel in enumerate(kernels):
        for arguments in argument_sets(kernel.record, f"{kernel.name} in C", SETS):
            recorder = Recorder(kernel.record, sm_count=arguments.values["sm_count"])
            launcher = make(index, recorder)
            assert launcher.load() == OK, str(launcher.error)
            by_c, by_python = launched_by_c(launcher, arguments), launched_by_python(kernel, arguments)
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
        launcher = make(index, Recorder(kernel.record, sm_count=132))
        assert launcher.load() == OK
        for arguments in argument_sets(kernel.record, f"{kernel.name} damaged", 40):
            arguments.values["sm_count"] = 132
            case = damaged(kernel.record, arguments, source)
            if any(case.values[dim.name] < 0 for dim in kernel.record.dims):
                assert launched_by_c(launcher, case) is None  # no tensor has such a shape
                continue
            by_c = launched_by_c(launcher, case)
            assert by_c == launched_by_python(kernel, case), f"{kernel.name}: {case}: {launcher.error}"
            refused += by_c is None
    assert refused > 30
