"""The tensors of a layer's passes against the arguments of its real kernels: shapes, strides, dims, constraints."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from fusekit import errors
from fusekit.abi import LaunchRecord, PointerParameter
from fusekit.compiler.identity import roots_of
from fusekit.compiler.layers import layers_of, publish_layer
from fusekit.compiler.naming import record_of as named
from fusekit.config import Config
from fusekit.library import Library
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE, QUANTISE
from fusekit.runtime import Driver
from fusekit.spec import parse_file
from fusekit.store import Store, key_of
from tests.cubins import cubin_of
from tests.layers.test_layer import TYPES
from tests.plans import plan_of
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import Torchlike
from tests.store.samples import build_entry

GPU = Path(__file__).parents[1] / "gpu"


def record_of(spec, symbol):
    """The real kernel's arguments, dims and constraints; it takes nothing but addresses."""
    real = import_module(roots_of(spec)[0]).signature(spec)
    parameters = [PointerParameter(each.name, each.name, 8 * index) for index, each in enumerate(real.tensors)]
    return LaunchRecord(
        symbol=symbol, arch=real.arch, arguments=real.arguments, dims=real.dims, constraints=real.constraints,
        parameters=tuple(parameters), grid=(1, 1, 1), block=(128, 1, 1), skip_if_zero=real.skip_if_zero,
    )  # fmt: skip


NAMES = "qwen3", "gpt-oss", "deepseek", "llama4", "choices", "mlp"


@pytest.fixture(scope="module")
def library(tmp_path_factory, soak):
    """The first variant of every kernel of fp8-layers.toml, and the layers `NAMES`; all with --soak."""
    store = Store.open(Config(store=tmp_path_factory.mktemp("store")))
    first, kernels, keys = {}, {}, {}
    for spec in parse_file(GPU / "fp8-layers.toml"):
        first.setdefault(spec.name, spec)
    for number, spec in enumerate(first.values()):
        record = record_of(spec, f"kernel_{number}")
        kernels[record.symbol] = [(each.offset, each.size) for each in record.parameters]
        entry, cubin = build_entry(number, cubin_of(record.symbol, seed=number))
        fields = {"arch": record.arch, "spec": spec.full_name}
        entry = replace(entry, key=key_of(fields), fields=fields, launch=record.to_json())
        store.publish(entry, cubin)
        store.publish_name(named(entry.key, spec))
        keys[spec.full_name] = entry.key
    for layer in layers_of((spec, keys[spec.full_name]) for spec in first.values()):
        if soak or layer.options.name in NAMES:
            assert publish_layer(store, layer)
    return Library(store, Driver(FakeDriver(symbol="", others=kernels)))


@pytest.mark.parametrize("tokens", [0, 1, 7, 128, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_take_the_tensors_of_their_layer(library, name, tokens):
    layer = library.layer(f"fp8-layers/{name}")
    dims, sizes = layer.dims(tokens), layer.sizes(tokens)
    kept, scratch = (Torchlike((size + 1,), "torch.uint8", address) for size, address in
                     ((sizes.kept, 0x7000_0000_0000), (sizes.scratch, 0x6000_0000_0000)))  # fmt: skip
    for which in (QUANTISE, FORWARD, INFERENCE, BACKWARD):
        inputs, outputs = layer.arguments(which)
        given = {
            each: Torchlike(buffer.extents(dims), TYPES[buffer.dtype], 0x100_0000_0000 + 0x1_0000_0000 * number)
            for number, (each, buffer) in enumerate((inputs | outputs).items())
        }
        memory = {"kept": kept, "scratch": scratch}
        if which == QUANTISE:
            bound = layer.bind_quantise(**given)
        elif which == BACKWARD:
            bound = layer.bind_backward(**given, **memory)
        else:
            bound = layer.bind_forward(**given, **{**memory, "kept": kept if which == FORWARD else None})
        assert len(bound.launches) == len(plan_of(layer).steps[which])


ADDRESSES = 0x100_0000_0000, 0x1_0000_0000  # of the first argument, and between two


def given(layer, which, tokens=7, begin=ADDRESSES[0]):
    """Arguments of a pass, memory included; without loads and capture they are all that a call needs."""
    inputs, outputs = layer.arguments(which)
    dims, sizes = layer.dims(tokens), layer.sizes(tokens)
    got = {
        name: Torchlike(buffer.extents(dims), TYPES[buffer.dtype], begin + ADDRESSES[1] * number)
        for number, (name, buffer) in enumerate((inputs | outputs).items())
    }
    memory = {"kept": sizes.kept, "scratch": sizes.scratch}
    for name in memory if which != INFERENCE else ("scratch",):
        got[name] = Torchlike((memory[name] + 1,), "torch.uint8", begin + ADDRESSES[1] * len(got))
    return got


def launched(library, call, *stream):
    fake = library.devices.driver.api
    fake.launches.clear()
    call(*stream)
    return [(each.function, each.grid, each.stream, each.parameters) for each in fake.launches]


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "mlp"])
def test_calls_at_other_addresses_launch_what_is_bound_there(library, name):
    layer = library.layer(f"fp8-layers/{name}")
    for which in (FORWARD, INFERENCE, BACKWARD):
        bind = layer.bind_backward if which == BACKWARD else layer.bind_forward
        call = layer.backward if which == BACKWARD else layer.forward
        first, second = given(layer, which), given(layer, which, begin=3 * ADDRESSES[0])
        mixed = {**first, "scratch": second["scratch"], **{each: second[each] for each in list(first)[1:4]}}
        for stream, arguments in ((40, first), (40, second), (50, mixed), (40, first)):
            want = launched(library, bind(**arguments), stream)
            assert want and launched(library, partial(call, **arguments, stream=stream)) == want
    assert len({id(each) for passes in layer._idle.values() for each in passes.idle}) == 3


def test_equal_layers_load_and_plan_once(library):
    """As 48 blocks of a model; one that has a variant of its own goes its own way."""
    first, second = (library.layer("fp8-layers/qwen3") for _ in range(2))
    first.forward(**given(first, FORWARD))
    loaded = library.devices.driver.api.loaded
    second.forward(**given(second, FORWARD))
    assert library.devices.driver.api.loaded == loaded
    assert second._kernels is first._kernels
    assert first._kernels.plans.remembered == 1
    part, name = next((step.part, kernel.name) for step, kernel in first._kernels.plans.popitem()[1].steps)
    second.set_variant(part, name.partition("@")[2])
    second.forward(**given(second, FORWARD))
    assert second._kernels is not first._kernels
    assert library.layer("fp8-layers/qwen3")._kernels is first._kernels


def test_a_call_at_other_addresses_is_checked_again(library):
    layer = library.layer("fp8-layers/qwen3")
    good = given(layer, FORWARD)
    layer.forward(**good)
    wrong = {
        "scratch": (good["scratch"].address + 64, "scratch is .* at a multiple of 128"),
        "y": (good["x"].address, "the output y shares memory with x"),
        "w1_q": (good["w1_q"].address + 8, r"w1_q, of which .* makes its w: w begins at"),
    }
    for name, (address, text) in wrong.items():
        with pytest.raises(errors.ArgumentError, match=text) as caught:
            layer.forward(**{**good, name: replace(good[name], address=address)})
        assert caught.value.argument == name
        layer.forward(**good)


def test_errors_of_kernels_name_the_arguments_of_the_layer(library):
    layer = library.layer("fp8-layers/qwen3")
    good = given(layer, FORWARD)
    _, n, h = good["w1_q"].shape
    wide = replace(good["w1_q"], strides=(n * h + 8, h, 1))
    for call in (layer.bind_forward, layer.forward):
        with pytest.raises(
            errors.ArgumentError, match=r"w1_q, of which fp8-layers/qwen3.fc1.* makes its w: w has"
        ) as caught:
            call(**{**good, "w1_q": wide})
        assert caught.value.argument == "w1_q"


def test_a_pass_without_outputs_is_refused(library):
    layer = library.layer("fp8-layers/qwen3")
    for which, bind in ((BACKWARD, layer.bind_backward), (INFERENCE, layer.bind_forward)):
        outputs = layer.outputs(which)
        arguments = {name: each for name, each in given(layer, which).items() if name not in outputs}
        with pytest.raises(errors.ArgumentError, match=f"no output is given, so the {which} pass has nothing to do"):
            bind(**arguments)


def test_numbers_beyond_what_kernels_count_are_refused(library):
    layer = library.layer("fp8-layers/qwen3")
    for call in (layer.sizes, layer.load):
        with pytest.raises(errors.ArgumentError, match=r"tokens = 1099511627776; it must be .* at most"):
            call(2**40)
    with pytest.raises(errors.ArgumentError, match=r"cluster_margin is 1000000000; device 0 .* has 132 multiproc"):
        layer.bind_forward(**given(layer, FORWARD), cluster_margin=10**9)


def test_a_capture_before_kernels_are_loaded_is_refused_and_goes_on(library):
    library.layer_kernels.clear()  # those that another test has loaded
    layer = library.layer("fp8-layers/qwen3")
    fake, arguments = layer._library.devices.driver.api, given(layer, FORWARD)
    before = len(fake.calls)
    fake.cuStreamBeginCapture(60, "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL")
    with pytest.raises(errors.ArgumentError, match=r"the stream is captured, and .* is not loaded .*layer.load\(7"):
        layer.forward(**arguments, stream=60)
    assert "cuLibraryLoadData" not in fake.calls[before:] and fake.cuStreamEndCapture(60)[1] == "graph"
    layer.load(7, devices=[0])
    fake.cuStreamBeginCapture(60, "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL")
    layer.forward(**arguments, stream=60)
    assert fake.cuStreamEndCapture(60)[1] == "graph"
