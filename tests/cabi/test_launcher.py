"""The C launcher against the Python runtime: the same launches, byte for byte, and the same refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from fusekit.abi import (
    IntegerParameter,
    LaunchRecord,
    PointerParameter,
    ScalarArgument,
    TensorArgument,
    evaluate,
)
from fusekit.abi.tensormap import TensorMap, encode
from fusekit.cabi import Exported
from fusekit.compiler.gemm import record as gemm_record
from fusekit.compiler.samples import ArgumentSet, argument_sets
from fusekit.errors import ArgumentError
from fusekit.runtime import Devices, Driver, Kernel
from fusekit.spec import find
from tests.runtime.fake import CUtensorMap, FakeDriver
from tests.runtime.samples import CUBIN as FAKE_CUBIN
from tests.runtime.samples import Torchlike, record

from .launcher import (
    CUBIN,
    CUDA_ERROR,
    INVALID_ARGUMENT,
    LANGUAGES,
    MISMATCH,
    NO_DRIVER,
    OK,
    WRONG_ARCH,
    Launcher,
    compile_shared,
    complete,
)
from .recorder import Recorder

SETS = 48
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
    exported = [Exported(spec.full_name, complete(gemm_record(spec)), CUBIN, spec.defaults()) for spec in specs]
    base = record()
    everything = record(
        arguments=(*base.arguments, ScalarArgument("shift", "i32", 3)),
        parameters=(
            *base.parameters, PointerParameter("scratch", "workspace", 296), IntegerParameter("shifted", "i64",
            ("add", "shift", ("mod", ("sub", "M", "shift"), 7)), 304),
        ),
        constraints=(*base.constraints,),
        workspace=("mul", "sm_count", 64), workspace_zeroed=True,
        attributes={"cooperative": 1, "programmatic_stream_serialization": 1, "preferred_shared_memory_carveout": 50,
                    "non_portable_cluster_size_allowed": 1},
    )  # fmt: skip
    return [*exported, Exported("sample/every-field@1", complete(everything), CUBIN, {"cluster_margin": 4})]


@pytest.fixture(scope="module", params=sorted(LANGUAGES))
def exported(request, tmp_path_factory):
    kernels = samples()
    return compile_shared(tmp_path_factory.mktemp("c"), kernels, "demo", request.param), kernels


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
        return result[0], CUtensorMap(encode(made))


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
    parameters = list(launch.parameters)
    if made.workspace != 0:  # each driver allocates where it likes
        (base,) = fake.memory
        address = next(base + at for at in range(0, 1 << 17, 256) if (base + at).to_bytes(8, "little") in parameters)
        parameters = [
            data.replace(address.to_bytes(8, "little"), (0xABC000).to_bytes(8, "little")) for data in parameters
        ]
    names = {"CLUSTER_DIMENSION": "cluster", "COOPERATIVE": "cooperative"}
    attributes = {
        names.get(key.removeprefix("CU_LAUNCH_ATTRIBUTE_"), "serialization"): value
        for key, value in launch.attributes.items()
    }
    return launch.grid, launch.block, launch.shared, launch.stream, attributes, parameters


def launched_by_c(launcher: Launcher, arguments: ArgumentSet) -> Any:
    launcher.recorder.launches.clear()
    status = launcher.launch(launcher.arguments(arguments.values, arguments.floats), arguments.stream)
    if status == INVALID_ARGUMENT:
        return None
    assert status == OK, str(launcher.error)
    if not launcher.recorder.launches:
        return "skipped"
    (launch,) = launcher.recorder.launches
    return launch.grid, launch.block, launch.shared, launch.stream, launch.attributes, launch.parameters


def test_the_c_launcher_and_the_runtime_launch_the_same(exported):
    shared, kernels = exported
    launches = 0
    for index, kernel in enumerate(kernels):
        for arguments in argument_sets(kernel.record, f"{kernel.name} in C", SETS):
            recorder = Recorder(kernel.record, sm_count=arguments.values["sm_count"])
            launcher = Launcher(shared, kernels, index, "demo", recorder)
            assert launcher.load() == OK, str(launcher.error)
            by_c, by_python = launched_by_c(launcher, arguments), launched_by_python(kernel, arguments)
            assert by_c == by_python, f"{kernel.name}: {arguments}: {launcher.error}"
            launches += by_c is not None
            assert launcher.unload() == OK
            assert (recorder.loaded, recorder.retained, recorder.allocated) == (0, 0, 0)
    assert launches > 0.8 * SETS * len(kernels)


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


def test_the_c_launcher_refuses_what_the_runtime_refuses(exported):
    shared, kernels = exported
    source = random.Random(11)
    refused = 0
    for index, kernel in enumerate(kernels):
        launcher = Launcher(shared, kernels, index, "demo", Recorder(kernel.record, sm_count=132))
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


@pytest.fixture
def loaded(exported):
    shared, kernels = exported
    launcher = Launcher(shared, kernels, len(kernels) - 1, "demo")
    assert launcher.load() == OK, str(launcher.error)
    return launcher


def usual(launcher: Launcher) -> Any:
    values = {"M": 96, "K": 128, "E": 4, "I": 160, "cluster_margin": 0}
    for number, tensor in enumerate(launcher.record.tensors):
        values[f"{tensor.name}.address"] = 0x10_0000_0000 * (number + 1)
        values.update((tensor.stride_variable(index), 0) for index in range(tensor.rank))
    return launcher.arguments(values, {"act_alpha": 1.5})


def test_strides_of_zero_are_compact_and_defaults_are_the_specs(loaded):
    args = loaded.defaults()
    assert args.act_limit == math.inf and math.isnan(args.act_alpha)
    assert (args.shift, args.cluster_margin, args.has_priority) == (3, 4, 0)
    assert loaded.launch(usual(loaded), 77) == OK, str(loaded.error)
    (launch,) = loaded.recorder.launches
    assert int.from_bytes(launch.parameters[4], "little") == 160  # y_pitch
    assert launch.stream == 77
    assert loaded.recorder.settings == {8: 200_000, 9: 50, 14: 1}


def test_a_scalar_without_default_must_be_set(loaded):
    args = usual(loaded)
    args.act_alpha = math.nan
    assert loaded.launch(args) == INVALID_ARGUMENT
    assert "act_alpha must be set" in str(loaded.error)


def test_a_bound_launch_is_one_driver_call_and_keeps_its_arguments(loaded):
    args = usual(loaded)
    status, bound = loaded.bind(args)
    assert status == OK
    args.y += 4096
    loaded.recorder.calls.clear()
    assert loaded.run(bound, 77) == loaded.run(bound, 78) == OK
    assert loaded.recorder.calls == ["cuLaunchKernelEx"] * 2
    assert [launch.stream for launch in loaded.recorder.launches] == [77, 78]
    assert int.from_bytes(loaded.recorder.launches[1].parameters[3], "little") == args.y - 4096
    loaded.free(bound)


def test_the_default_stream_gets_the_kernels_context(loaded):
    loaded.recorder.contexts.append(0x9999)
    assert loaded.launch(usual(loaded), 0) == OK
    assert loaded.recorder.contexts == [0x9999]
    assert "cuCtxPushCurrent_v2" in loaded.recorder.calls[loaded.recorder.calls.index("cuTensorMapEncodeTiled") :]


def test_a_priority_of_the_launchs_own(loaded):
    args = usual(loaded)
    args.has_priority, args.priority = 1, -3
    assert loaded.launch(args, 77) == OK
    assert loaded.recorder.launches[0].attributes["priority"] == -3


def test_nothing_to_do_is_done(loaded):
    args = usual(loaded)
    args.m, args.x, args.y = 0, 0, 0
    assert loaded.launch(args, 77) == OK
    assert loaded.recorder.launches == []


def test_a_handle_that_is_none_or_of_another_kernel(exported, loaded):
    assert loaded.launch(usual(loaded), kernel=0) == INVALID_ARGUMENT
    shared, kernels = exported
    other = Launcher(shared, kernels, 0, "demo")
    assert other.load() == OK
    assert loaded.launch(usual(loaded), kernel=other.kernel) == INVALID_ARGUMENT
    assert "load it first" in str(loaded.error)


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"version": 12030}, NO_DRIVER, "supports CUDA 12.3; 12.4 or newer"),
        ({"missing": "cuTensorMapEncodeTiled"}, NO_DRIVER, "no cuTensorMapEncodeTiled"),
        ({"capability": (10, 0)}, WRONG_ARCH, "sm_90a; device 0 is of capability 10.0"),
        ({"fail": {"cuLibraryLoadData": 200}}, CUDA_ERROR, "loading the cubin failed: CUDA_ERROR_TEST (200)"),
        ({"fail": {"cuInit": 100}}, CUDA_ERROR, "cuInit failed"),
        ({"fail": {"cuMemAlloc_v2": 2}}, CUDA_ERROR, "workspace"),
    ],
)
def test_a_load_that_fails_leaves_nothing_behind(exported, changes, status, text):
    shared, kernels = exported
    recorder = Recorder(kernels[-1].record, **changes)
    launcher = Launcher(shared, kernels, len(kernels) - 1, "demo", recorder)
    assert launcher.load() == status
    assert text in str(launcher.error)
    assert launcher.error.status == status
    assert launcher.error.cuda == next(iter(changes.get("fail", {"": 0}).values()))
    assert (recorder.loaded, recorder.retained, recorder.allocated) == (0, 0, 0)
    assert not recorder.contexts


def test_a_cubin_of_another_build_is_refused(exported):
    shared, kernels = exported
    made = kernels[-1].record
    last = made.parameters[-1]
    extra = IntegerParameter("extra", "i64", 0, last.offset + last.size)
    for parameters, text in (
        (made.parameters[:-1], "has 9 parameters, the record 10"),
        ((*made.parameters, extra), "more than the record's 10 parameters"),
        ((*made.parameters[:-1], replace(last, offset=last.offset + 8)), "is 304+8 in the record and 312+8"),
    ):
        recorder = Recorder(replace(made, parameters=parameters))
        launcher = Launcher(shared, kernels, len(kernels) - 1, "demo", recorder)
        assert launcher.load() == MISMATCH
        assert text in str(launcher.error)
        assert (recorder.loaded, recorder.retained) == (0, 0)


def test_a_launch_that_the_driver_refuses_says_so(loaded):
    loaded.recorder.fail["cuLaunchKernelEx"] = 719
    assert loaded.launch(usual(loaded), 77) == CUDA_ERROR
    assert loaded.error.cuda == 719
    assert "cuLaunchKernelEx failed: CUDA_ERROR_TEST (719) a test" in str(loaded.error)
