"""The C loader of bundles: the proof of its launches, what it says of kernels, and what it refuses to do."""

from __future__ import annotations

import math
import shutil
from ctypes import c_char_p
from dataclasses import replace
from functools import partial

import pytest

from fusekit.cabi import Exported, generate_loader
from fusekit.share import bundle as form
from fusekit.share.bundle_import import import_bundle
from fusekit.share.loader import derived, export_bundle
from fusekit.share.selection import select
from fusekit.store import Store
from tests.cubins import cubin_of
from tests.runtime.samples import over_x
from tests.soak import sample

from .bundles import BundleLauncher, Loader, arguments, bundle_of, entry_of, name_of, publish, tensor
from .launcher import (
    BAD_BUNDLE,
    CUBIN,
    CUDA_ERROR,
    FILE_ERROR,
    INVALID_ARGUMENT,
    LANGUAGES,
    MISMATCH,
    NOT_FOUND,
    OK,
    WRONG_ARCH,
    build,
    complete,
)
from .proof import prove, prove_refusals
from .recorder import Recorder
from .samples import samples


@pytest.fixture(scope="module", params=sample(sorted(LANGUAGES), "c11"))
def shared(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("loader"), generate_loader("demo"), "demo", request.param)


@pytest.fixture(scope="module")
def kernels():
    return samples()


@pytest.fixture(scope="module")
def bundle(kernels, tmp_path_factory):
    return bundle_of(tmp_path_factory.mktemp("bundle"), kernels)


def test_the_loader_and_the_runtime_launch_the_same(shared, kernels, bundle):
    prove(kernels, lambda index, recorder: BundleLauncher(shared, bundle, kernels[index], recorder=recorder))


def test_the_loader_refuses_what_the_runtime_refuses(shared, kernels, bundle):
    prove_refusals(kernels, lambda index, recorder: BundleLauncher(shared, bundle, kernels[index], recorder=recorder))


def test_what_a_bundle_says_of_itself(shared, kernels, bundle):
    loader = Loader(shared)
    status, handle = loader.open(bundle)
    assert status == OK, str(loader.error)
    assert loader.names(handle) == sorted((kernel.name, kernel.record.arch) for kernel in kernels)
    store = Store(bundle.parent / "store")
    again = export_bundle(store, select(store), bundle.parent / "again.tar")
    assert loader.digest(handle) == again.digest
    assert (bundle.parent / "again.tar").read_bytes() == bundle.read_bytes()
    assert loader.verify(handle) == OK, str(loader.error)
    loader.close(handle)


@pytest.fixture
def loaded(shared, kernels, bundle):
    launcher = BundleLauncher(shared, bundle, kernels[-1], name="sample/every-field")
    assert launcher.load() == OK, str(launcher.error)
    yield launcher
    assert launcher.unload() == OK


def test_what_a_kernel_says_of_its_arguments(loaded):
    result = {argument.name.decode(): argument for argument in loaded.described()}
    assert list(result) == [argument.name for argument in loaded.record.arguments]
    assert [result[name].rank for name in result] == [2, 3, 1, 2, -1, -1, -1]
    assert (result["y"].written, result["x"].written, result["offsets"].alignment) == (1, 0, 4)
    assert (result["act_limit"].has_default, result["act_limit"].default_value) == (1, math.inf)
    assert (result["act_alpha"].has_default, result["shift"].default_value) == (0, 3)
    assert (
        loaded.function("kernel_name", type(loaded.kernel), result=c_char_p)(loaded.kernel) == b"sample/every-field@1"
    )


def usual(**changes):
    """The tensors of a call, in any order, without padding."""
    given = {
        "offsets": ("i32", (4,)), "y": ("bf16", (96, 160)), "x": ("bf16", (96, 128)), "w": ("bf16", (4, 320, 128)),
    }  # fmt: skip
    return [
        tensor(name, **{"address": 0x10_0000_0000 * number, "dtype": dtype, "shape": shape, **changes.get(name, {})})
        for number, (name, (dtype, shape)) in enumerate(given.items(), start=1)
        if changes.get(name, {}) is not None
    ]


def test_a_call_with_nothing_but_what_is_needed(loaded):
    assert loaded.launch(arguments(usual(), {"act_alpha": 1.5}), 77) == OK, str(loaded.error)
    (launch,) = loaded.recorder.launches
    assert int.from_bytes(launch.parameters[4], "little") == 160  # y_pitch
    assert (launch.stream, launch.grid) == (77, (2 * ((132 - 2 * 4) // 2), 1, 1))  # the spec's margin is 4
    assert loaded.recorder.settings == {8: 200_000, 9: 50, 14: 1}


def test_a_bound_launch_is_one_driver_call(loaded):
    status, bound = loaded.bind(arguments(usual(), {"act_alpha": 1.5}, has_priority=1, priority=-3))
    assert status == OK
    assert loaded.run(bound, 77) == loaded.run(bound, 78) == OK  # which get scratch of their own
    loaded.recorder.launches.clear()
    loaded.recorder.calls.clear()
    assert loaded.run(bound, 77) == loaded.run(bound, 78) == OK
    assert loaded.recorder.calls == ["cuLaunchKernelEx"] * 2
    assert loaded.recorder.launches[0].attributes["priority"] == -3
    loaded.free(bound)


@pytest.mark.parametrize(
    ("changes", "scalars", "extra", "text"),
    [
        ({"x": {"dtype": "fp16"}}, {}, {}, "x is fp16; it must be bf16"),
        ({"x": {"shape": (96,)}}, {}, {}, "x has rank 1; it must have rank 2"),
        ({"y": {"shape": (97, 160)}}, {}, {}, "y has 97 at dim 0; it must have 96"),
        ({"w": {"shape": (4, 322, 128)}}, {}, {}, "w has 322 at dim 1; it must have 320"),
        ({"x": {"shape": (-1, 128)}}, {}, {}, "M is -1; it must be"),
        ({"x": {"shape": (96, 2**62)}}, {}, {}, "K is 4611686018427387904; it must be"),
        ({"x": {"strides": (0, 1)}}, {}, {}, "x has stride 0 at dim 0"),
        ({"x": {"strides": (-128, 1)}}, {}, {}, "x has stride -128 at dim 0"),
        ({"x": {"strides": (130, 1)}}, {}, {}, "x has stride 130 at dim 0"),
        ({"x": {"strides": (256, 2)}}, {}, {}, "x has stride 2 at dim 1 (elements); it must be 1"),
        ({"y": {"strides": (80, 1)}}, {}, {}, "elements of y overlap"),
        ({"y": {"address": 0}}, {}, {}, "y is NULL"),
        ({"y": {"address": 0x30_0000_0000}}, {}, {}, "overlaps"),
        ({"w": None}, {}, {}, "w is missing; it is a tensor of rank 3"),
        ({}, {"act_alpha": 1e39}, {}, "act_alpha is 1e+39; it must be an f32 number"),
        ({}, {"shift": 1.5}, {}, "shift is 1.5; it must be an i32 integer"),
        ({}, {"shift": math.nan}, {}, "it must be an i32 integer"),
        ({}, {"gamma": 1.0}, {}, "gamma is no scalar of it; it takes act_limit, act_alpha, shift"),
        ({}, {}, {"has_cluster_margin": 1, "cluster_margin": -1}, "cluster_margin is -1"),
    ],
)
def test_a_wrong_argument_is_named(loaded, changes, scalars, extra, text):
    passed = arguments(usual(**changes), {"act_alpha": 1.5} | scalars, **extra)
    assert loaded.launch(passed, 77) == INVALID_ARGUMENT
    assert text in str(loaded.error)
    assert loaded.recorder.launches == []


def test_what_is_missing_twice_or_unknown(loaded):
    assert loaded.launch(arguments(usual())) == INVALID_ARGUMENT
    assert "act_alpha must be set" in str(loaded.error)
    assert loaded.launch(arguments([*usual(), usual()[0]], {"act_alpha": 1})) == INVALID_ARGUMENT
    assert "offsets is given twice" in str(loaded.error)
    stranger = tensor("bias", 4096, "bf16", (4, 320))
    assert loaded.launch(arguments([*usual(), stranger], {"act_alpha": 1})) == INVALID_ARGUMENT
    assert "bias is no tensor of it; it takes x, w, offsets, y" in str(loaded.error)
    assert loaded.launch(arguments(usual()), kernel=0) == INVALID_ARGUMENT


def test_nothing_to_do_is_done(loaded):
    empty = usual(x={"shape": (0, 128), "address": 0}, y={"shape": (0, 160), "address": 0})
    assert loaded.launch(arguments(empty, {"act_alpha": 1}), 77) == OK, str(loaded.error)
    assert loaded.recorder.launches == []


def test_the_variant_and_the_architecture_that_suit(shared, kernels, tmp_path):
    base = kernels[-1]
    store = Store(tmp_path / "store")
    archs = {"moe/a@1": ("sm_90", "sm_90a", "sm_100f", "sm_103a"), "moe/b@1": ("sm_90a",), "moe/b@2": ("sm_90a",)}
    for name, listed in archs.items():
        for arch in listed:
            publish(store, replace(base, name=name, record=replace(base.record, arch=arch, dynamic_shared=len(arch))))
    path = tmp_path / "kernels.tar"
    export_bundle(store, select(store), path)

    def load(name, capability):
        recorder = Recorder(base.record, capability=capability)
        launcher = BundleLauncher(shared, path, base, recorder=recorder, name=name)
        status = launcher.load()
        if status == OK:
            assert launcher.unload() == OK
        return status, recorder.settings.get(8), str(launcher.error)

    assert load("moe/a", (9, 0))[:2] == (OK, len("sm_90a"))
    assert load("moe/a@1", (10, 0))[:2] == (OK, len("sm_100f"))
    assert load("moe/a", (10, 3))[:2] == (OK, len("sm_103a"))
    status, _, text = load("moe/a", (12, 0))
    assert status == WRONG_ARCH and "is in" in text and "capability 12.0" in text
    status, _, text = load("moe/b", (9, 0))
    assert status == INVALID_ARGUMENT and "has the variants @1 and @2; name one of them" in text
    assert load("moe/b@2", (9, 0))[0] == OK
    status, _, text = load("moe/c", (9, 0))
    assert status == NOT_FOUND and "has no kernel moe/c; put it in with: fusekit export FILE moe/c" in text
    assert load("moe", (9, 0))[0] == NOT_FOUND


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"fail": {"cuLibraryLoadData": 200}}, CUDA_ERROR, "loading the cubin failed: CUDA_ERROR_TEST (200)"),
        ({"fail": {"cuDeviceGet": 101}}, CUDA_ERROR, "cuDeviceGet failed"),
        ({"fail": {"cuMemAlloc_v2": 2}}, CUDA_ERROR, "workspace"),
        ({"capability": (8, 0)}, WRONG_ARCH, "device 0 is of capability 8.0"),
    ],
)
def test_a_load_that_fails_leaves_nothing_behind(shared, kernels, bundle, changes, status, text):
    recorder = Recorder(kernels[-1].record, **changes)
    launcher = BundleLauncher(shared, bundle, kernels[-1], recorder=recorder)
    assert launcher.load() == status
    assert text in str(launcher.error)
    assert not launcher.kernel
    assert (recorder.loaded, recorder.retained, recorder.allocated) == (0, 0, 0)


def test_a_cubin_of_another_build_is_refused(shared, kernels, tmp_path):
    original = kernels[-1].record
    for listed, text in ((10, "has 10 parameters, the record 11"), (11, "")):
        cubin = cubin_of(*(step.symbol for step in original.launches), parameters={original.symbol: listed})
        kernel = replace(kernels[-1], cubin=cubin)
        (tmp_path / str(listed)).mkdir()
        recorder = Recorder(original)
        launcher = BundleLauncher(shared, bundle_of(tmp_path / str(listed), [kernel]), kernel, recorder=recorder)
        assert launcher.load() == (MISMATCH if text else OK)
        assert text in str(launcher.error)
        assert recorder.failed == []


def test_files_that_are_none(shared, tmp_path):
    loader = Loader(shared)
    for path, text in ((tmp_path / "none.tar", "cannot be opened"), (tmp_path, "no plain file")):
        status, handle = loader.open(path)
        assert (status, bool(handle)) == (FILE_ERROR, False)
        assert text in str(loader.error)


def test_a_bundle_that_was_not_exported_for_the_loader(shared, kernels, bundle, tmp_path):
    """As fusekit wrote them before, and as a program in Python may."""
    store = Store(bundle.parent / "store")
    form.export_bundle(store, select(store), tmp_path / "kernels.tar")
    launcher = BundleLauncher(shared, tmp_path / "kernels.tar", kernels[-1])
    assert launcher.load() == BAD_BUNDLE
    assert "was not exported for this loader" in str(launcher.error)
    assert "write it again with: fusekit export FILE NAME" in str(launcher.error)


def test_a_kernel_beyond_the_launchers_limits_is_for_python_alone(shared, kernels, tmp_path):
    """The others in its bundle load, and all of them are imported."""
    base = kernels[-1]
    large = replace(base, name="sample/large@1")
    document = base.record.to_json()
    odd = replace(base, name="sample/odd@1")
    store = Store(tmp_path / "store")
    publish(store, base)
    for kernel, launch in ((large, document | {"dynamic_shared": 2**31}), (odd, {"schema": 7})):
        entry = entry_of(kernel, launch=launch)
        store.publish(entry, kernel.cubin)
        store.publish_name(name_of(kernel, entry))
    export_bundle(store, select(store), tmp_path / "kernels.tar")
    for name, text in (
        ("sample/large", "sample/large@1 is for Python alone: dynamic_shared: 2147483648 bytes; launchers take"),
        ("sample/odd", "sample/odd@1 is for Python alone: schema: 7; this fusekit reads"),
    ):  # fmt: skip
        launcher = BundleLauncher(shared, tmp_path / "kernels.tar", base, name=name)
        assert launcher.load() == BAD_BUNDLE
        assert text in str(launcher.error)
    launcher = BundleLauncher(shared, tmp_path / "kernels.tar", base)
    assert launcher.load() == OK, str(launcher.error)
    assert launcher.unload() == OK
    _, handle = launcher.loader.open(tmp_path / "kernels.tar")
    assert launcher.loader.verify(handle) == OK, str(launcher.loader.error)
    launcher.loader.close(handle)
    assert import_bundle(Store(tmp_path / "other"), tmp_path / "kernels.tar").names == 3


def test_the_defaults_of_the_spec_come_first(shared, kernels, tmp_path):
    """Among them one that only correct rounding gives, and the locale's decimal point plays no part."""
    numbers = (0.1, -1.702, 1e-30, 0.7978845608028654, 16777217.0, 3.4028234e38, 1e23, -0.0, 5e-324)
    for index, number in enumerate(numbers):
        kernel = replace(kernels[-1], defaults={"act_alpha": number, "act_limit": -math.inf, "shift": -7})
        folder = tmp_path / str(index)
        launcher = BundleLauncher(shared, bundle_of(folder, [kernel]), kernel)
        assert launcher.load() == OK, str(launcher.error)
        result = {argument.name.decode(): argument.default_value for argument in launcher.described()}
        assert result["act_alpha"].hex() == float(number).hex()
        assert (result["act_limit"], result["shift"]) == (-math.inf, -7)
        assert launcher.unload() == OK


def test_the_text_depends_on_the_prefix_alone():
    assert generate_loader("demo") == generate_loader("demo")
    text = "".join(generate_loader("demo").values())
    assert "fusekit_" not in text.lower()
    assert "fusekit_bundle_open(" in generate_loader()["fusekit.h"]


def test_a_bundle_with_signatures(shared, kernels, tmp_path):
    pytest.importorskip("cryptography")
    from fusekit.store.signature import generate

    generate(tmp_path / "key", "test")
    store = Store(tmp_path / "store", signing_key=tmp_path / "key")
    publish(store, kernels[-1])
    export_bundle(store, select(store), tmp_path / "kernels.tar")
    launcher = BundleLauncher(shared, tmp_path / "kernels.tar", kernels[-1])
    assert launcher.load() == OK, str(launcher.error)
    assert launcher.unload() == OK
    _, handle = launcher.loader.open(tmp_path / "kernels.tar")
    assert launcher.loader.verify(handle) == OK, str(launcher.error)
    launcher.loader.close(handle)


def test_the_object_exports_its_prefix_and_has_no_state(tmp_path):
    from .test_generate import check_names, check_no_state

    if shutil.which("gcc") is None or shutil.which("nm") is None:
        pytest.skip("gcc or nm is not installed")
    check_names(build(tmp_path, generate_loader("mylib"), "mylib"), "mylib")
    check_no_state(tmp_path, generate_loader("mylib"), "mylib")


def test_a_bundle_whose_loader_refuses_outputs_in_place_is_imported(tmp_path):
    """As fusekit wrote them before C launched a kernel over its own input."""
    kernel = Exported("sample/over@1", complete(over_x()), CUBIN, {})
    store = Store(tmp_path / "store")
    publish(store, kernel)
    selection = select(store)
    names = [(named, entry_of(kernel)) for named, _ in selection.records]
    written = []
    for in_place in (True, False):
        path = tmp_path / f"{in_place}.tar"
        form.export_bundle(store, selection, path, partial(derived, names, [], in_place=in_place))
        assert import_bundle(Store(tmp_path / f"to-{in_place}"), path).names == 1
        written.append(path.read_bytes())
    assert written[0] != written[1]
