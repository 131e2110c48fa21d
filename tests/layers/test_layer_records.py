"""The tensors of a layer's passes against the arguments of its real kernels: shapes, strides, dims, constraints."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from fusekit.abi import LaunchRecord, PointerParameter
from fusekit.compiler.families import family
from fusekit.compiler.naming import record_of as named
from fusekit.config import Config
from fusekit.library import Library
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE, QUANTISE
from fusekit.runtime import Driver
from fusekit.spec import parse_file
from fusekit.store import Store, key_of
from tests.layers.test_layer import TYPES
from tests.runtime.fake import FakeDriver
from tests.runtime.samples import Torchlike
from tests.store.samples import build_entry

GPU = Path(__file__).parents[1] / "gpu"


def record_of(spec, symbol):
    """The real kernel's arguments, dims and constraints; it takes nothing but addresses."""
    real = import_module(family(spec)).signature(spec)
    parameters = [PointerParameter(each.name, each.name, 8 * index) for index, each in enumerate(real.tensors)]
    return LaunchRecord(
        symbol=symbol, arch=real.arch, arguments=real.arguments, dims=real.dims, constraints=real.constraints,
        parameters=tuple(parameters), grid=(1, 1, 1), block=(128, 1, 1), skip_if_zero=real.skip_if_zero,
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The first variant of every kernel of fp8-layers.toml."""
    store = Store.open(Config(store=tmp_path_factory.mktemp("store")))
    first, kernels = {}, {}
    for spec in parse_file(GPU / "fp8-layers.toml"):
        first.setdefault(spec.name, spec)
    for number, spec in enumerate(first.values()):
        record = record_of(spec, f"kernel_{number}")
        kernels[record.symbol] = [(each.offset, each.size) for each in record.parameters]
        entry, cubin = build_entry(number)
        fields = {"arch": record.arch, "spec": spec.full_name}
        entry = replace(entry, key=key_of(fields), fields=fields, launch=record.to_json())
        store.publish(entry, cubin)
        store.publish_name(named(entry.key, spec))
    return Library(store, Driver(FakeDriver(symbol="", others=kernels)))


@pytest.mark.parametrize("tokens", [0, 1, 7, 128, 1000])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek", "llama4", "choices", "mlp"])
def test_kernels_take_the_tensors_of_their_layer(library, name, tokens):
    layer = library.layer(f"fp8-layers/{name}")
    dims, sizes = layer.program.dims(tokens), layer.sizes(tokens)
    kept, scratch = (Torchlike((size + 1,), "torch.uint8", address) for size, address in
                     ((sizes.kept, 0x7000_0000_0000), (sizes.scratch, 0x6000_0000_0000)))  # fmt: skip
    for which in (QUANTISE, FORWARD, INFERENCE, BACKWARD):
        inputs, outputs = layer.program.arguments(which)
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
        assert len(bound.launches) == len(layer.program.steps[which])
