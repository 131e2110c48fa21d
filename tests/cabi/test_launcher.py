"""The exported launcher against the Python runtime: the same launches, byte for byte, and the same refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fusekit.abi import IntegerParameter, ScalarArgument
from fusekit.cabi import Exported
from tests.cubins import cubin_of
from tests.runtime.samples import record
from tests.soak import sample

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
from .proof import prove, prove_refusals
from .recorder import NO_TENSOR_MAPS, Recorder
from .samples import samples


@pytest.fixture(scope="module", params=sample(sorted(LANGUAGES), "c11"))
def exported(request, tmp_path_factory):
    kernels = samples()
    return compile_shared(tmp_path_factory.mktemp("c"), kernels, "demo", request.param), kernels


def test_the_c_launcher_and_the_runtime_launch_the_same(exported):
    shared, kernels = exported
    prove(kernels, lambda index, recorder: Launcher(shared, kernels, index, "demo", recorder))


def test_the_c_launcher_refuses_what_the_runtime_refuses(exported):
    shared, kernels = exported
    prove_refusals(kernels, lambda index, recorder: Launcher(shared, kernels, index, "demo", recorder))


@pytest.mark.parametrize(("exponent", "status"), [(62, OK), (63, INVALID_ARGUMENT), (-1, INVALID_ARGUMENT)])
def test_the_largest_power_of_two(powers, exponent, status):
    """What a signed 64-bit number holds, in C as in Python."""
    shared, kernels = powers
    launcher = Launcher(shared, kernels, 0, "powers")
    assert launcher.load() == OK, str(launcher.error)
    values = usual_values(launcher) | {"shift": exponent}
    assert launcher.launch(launcher.arguments(values, {"act_alpha": 1.5}), 9) == status, str(launcher.error)
    if status == OK:
        assert launcher.recorder.launches[-1].parameters[-1] == (2**exponent).to_bytes(8, "little")


@pytest.mark.parametrize(("blocks", "status"), [(6, OK), (5, INVALID_ARGUMENT), (0, INVALID_ARGUMENT)])
def test_a_grid_is_of_whole_clusters(powers, blocks, status):
    shared, kernels = powers
    launcher = Launcher(shared, kernels, 1, "powers")
    assert launcher.load() == OK, str(launcher.error)
    values = usual_values(launcher) | {"shift": blocks}
    assert launcher.launch(launcher.arguments(values, {"act_alpha": 1.5}), 9) == status
    if status != OK:
        assert f"grid x is {blocks} blocks; it must be 1 to 2147483647, a multiple of 2 (the cluster)" in str(
            launcher.error
        )


@pytest.fixture(scope="module")
def powers(tmp_path_factory):
    base = record()
    changed = replace(
        base, arguments=(*base.arguments, ScalarArgument("shift", "i32", 3)),
        parameters=(*base.parameters, IntegerParameter("power", "i64", ("exp2", "shift"), 296)),
    )  # fmt: skip
    pairs = replace(changed, grid=("shift", 1, 1), cluster=(2, 1, 1))
    kernels = [
        Exported("sample/powers@1", complete(changed), CUBIN, {}),
        Exported("sample/pairs@1", complete(pairs), CUBIN, {}),
    ]
    return compile_shared(tmp_path_factory.mktemp("powers"), kernels, "powers", "c11"), kernels


@pytest.fixture
def loaded(exported):
    shared, kernels = exported
    launcher = Launcher(shared, kernels, len(kernels) - 1, "demo")
    assert launcher.load() == OK, str(launcher.error)
    return launcher


def usual_values(launcher: Launcher) -> dict[str, int]:
    values = {"M": 96, "K": 128, "E": 4, "I": 160, "cluster_margin": 0}
    for number, tensor in enumerate(launcher.record.tensors):
        values[f"{tensor.name}.address"] = 0x10_0000_0000 * (number + 1)
        values.update((tensor.stride_variable(index), 0) for index in range(tensor.rank))
    return values


def usual(launcher: Launcher) -> Any:
    return launcher.arguments(usual_values(launcher), {"act_alpha": 1.5})


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
    assert loaded.run(bound, 77) == loaded.run(bound, 78) == OK  # which get scratch of their own
    loaded.recorder.launches.clear()
    loaded.recorder.calls.clear()
    assert loaded.run(bound, 77) == loaded.run(bound, 78) == OK
    assert loaded.recorder.calls == ["cuLaunchKernelEx"] * 2
    assert [launch.stream for launch in loaded.recorder.launches] == [77, 78]
    assert int.from_bytes(loaded.recorder.launches[1].parameters[3], "little") == args.y - 4096
    loaded.free(bound)


@pytest.fixture
def several(exported):
    """The record of schema 2, which has three launches."""
    shared, kernels = exported
    launcher = Launcher(shared, kernels, len(kernels) - 2, "demo", Recorder(kernels[-2].record, active_clusters=61))
    assert launcher.load() == OK, str(launcher.error)
    return launcher


def test_one_bound_launch_queues_every_launch(several):
    assert several.recorder.asked == [(2, (1, 1, 1), (32, 2, 1), 0)]  # how many clusters of the last are active
    status, bound = several.bind(usual(several))
    assert status == OK, str(several.error)
    for stream in (77, 78):
        assert several.run(bound, stream) == OK
    several.recorder.launches.clear()
    several.recorder.calls.clear()
    assert several.run(bound, 77) == several.run(bound, 78) == OK
    assert several.recorder.calls == ["cuLaunchKernelEx"] * 6
    done = several.recorder.launches
    assert [launch.function for launch in done] == [0, 1, 2] * 2
    assert [launch.stream for launch in done] == [77] * 3 + [78] * 3
    assert [launch.grid for launch in done[:3]] == [(132, 1, 1), (122, 1, 4), (3, 1, 1)]
    assert done[0].parameters != done[3].parameters  # workspaces of their own
    several.free(bound)
    assert several.unload() == OK
    assert (several.recorder.loaded, several.recorder.retained, several.recorder.allocated) == (0, 0, 0)


@pytest.mark.parametrize("stream", [0, 77])
def test_every_launch_is_in_the_kernels_context(several, stream):
    several.recorder.contexts.append(NO_TENSOR_MAPS)
    several.recorder.strict = True
    assert several.launch(usual(several), stream) == OK, str(several.error)
    assert [launch.context for launch in several.recorder.launches] == [0x1000] * 3
    assert several.recorder.contexts == [NO_TENSOR_MAPS]


def test_a_guard_refuses_in_its_words_before_the_first_launch(several):
    args = usual(several)
    args.shift = 0
    assert several.launch(args, 77) == INVALID_ARGUMENT
    assert "shift must be at least 1; got M = 96, K = 128, E = 4, I = 160" in str(several.error)
    args = usual(several)
    args.m = 2**20
    assert several.launch(args, 77) == INVALID_ARGUMENT
    assert "at most 5000 tiles of 128 rows; got M = 1048576" in str(several.error)
    args = usual(several)
    args.m, args.e = 70_000, 2**18
    assert several.launch(args, 77) == INVALID_ARGUMENT
    assert "rows_of_tile is 70000; it does not fit into 16 bits without sign" in str(several.error)
    assert several.recorder.launches == []


def test_a_launch_that_fails_is_reported_and_ends_the_row(several):
    args = usual(several)
    several.recorder.most_launches = 1
    assert several.launch(args, 77) == CUDA_ERROR
    assert len(several.recorder.launches) == 1


def test_the_default_stream_gets_the_kernels_context(loaded):
    loaded.recorder.contexts.append(0x9999)
    assert loaded.launch(usual(loaded), 0) == OK
    assert loaded.recorder.contexts == [0x9999]
    assert "cuCtxPushCurrent_v2" in loaded.recorder.calls[loaded.recorder.calls.index("cuTensorMapEncodeTiled") :]


@pytest.mark.parametrize("stream", [0, 77])
def test_another_devices_context_may_be_current(loaded, stream):
    loaded.recorder.contexts.append(NO_TENSOR_MAPS)
    loaded.recorder.strict = True
    assert loaded.launch(usual(loaded), stream) == OK, str(loaded.error)
    assert loaded.recorder.contexts == [NO_TENSOR_MAPS]
    assert len(loaded.recorder.launches) == 1


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


def test_a_cubin_of_another_build_is_refused(tmp_path):
    original = samples()[-1].record
    last = original.parameters[-1]
    extra = IntegerParameter("extra", "i64", 0, last.offset + last.size)
    cases = (
        (original.parameters[:-1], "has 10 parameters, the record 11"),
        ((*original.parameters, extra), "has 12 parameters, the record 11"),
        ((*original.parameters[:-1], replace(last, offset=last.offset + 8)), "is 312+8 in the record and 320+8"),
        (original.parameters, "has 0 parameters, the record 11"),  # its list is cut short
        (original.parameters, None),
    )
    symbols = [step.symbol for step in original.launches]
    kernels = [
        Exported(f"two/builds@{n}", original, cubin_of(*symbols, parameters={original.symbol: len(parameters)}))
        for n, (parameters, _) in enumerate(cases)
    ]
    whole, cut = bytes.fromhex("04170c00"), bytes.fromhex("04170d00")
    kernels[3] = replace(kernels[3], cubin=kernels[3].cubin.replace(whole, cut))
    shared = compile_shared(tmp_path, kernels, "demo")
    for index, (parameters, text) in enumerate(cases):
        recorder = Recorder(replace(original, parameters=parameters))
        launcher = Launcher(shared, kernels, index, "demo", recorder)
        if text is None:
            assert launcher.load() == OK
        else:
            assert launcher.load() == MISMATCH
            assert text in str(launcher.error)
            assert (recorder.loaded, recorder.retained) == (0, 0)
        assert recorder.failed == []  # compute-sanitizer reports each call that fails


def test_a_launch_that_the_driver_refuses_says_so(loaded):
    loaded.recorder.fail["cuLaunchKernelEx"] = 719
    assert loaded.launch(usual(loaded), 77) == CUDA_ERROR
    assert loaded.error.cuda == 719
    assert "cuLaunchKernelEx failed: CUDA_ERROR_TEST (719) a test" in str(loaded.error)
