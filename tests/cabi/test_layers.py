"""Layers exported as C against Python's: the same launches, byte for byte, the same memory, and the same refusals."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from fusekit.cabi import generate
from fusekit.errors import ArgumentError
from tests.layers.samples import library
from tests.layers.test_layer import KEPT, SCRATCH, TYPES
from tests.plan.test_layer_program import CASES, FEW, SERVED, options
from tests.runtime.samples import Torchlike
from tests.soak import sample

from .launcher import INVALID_ARGUMENT, LANGUAGES, OK, build
from .layers import CLayer, exported, with_ladders

NAMES = ("gpt-oss", "deepseek", "fp8-choices", "mlp-as-stored", "served")
CALLS = 40
SMALL = 99
COUNTS = (FEW, FEW + 1, SMALL, SMALL + 1)


class Both:
    """One layer in Python and its export."""

    def __init__(self, root: Any, name: str) -> None:
        table = replace(options(**CASES.get(name, SERVED)), name=name)
        opened, self.fake = library(root / name, table, variants=2)
        self.layer = opened.layer(f"layers/{name}")
        by_part: dict[str, list[str]] = {}
        for listed in opened.store.names(self.layer.name):
            part = listed.record.name.partition("@")[0].rpartition(".")[2]
            by_part.setdefault(part, []).append(listed.record.name)

        def choose(part: str, tokens: int) -> str:
            return by_part[part][tokens > SMALL]

        self.layer = with_ladders(opened, self.layer, choose)
        self.exported, self.kernels = exported(opened, self.layer)


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    root = tmp_path_factory.mktemp("layers")
    return {name: Both(root, name) for name in NAMES}


@pytest.fixture(scope="module", params=sample(sorted(LANGUAGES), "c11"))
def opened(request, layers, tmp_path_factory):
    """The layers of one export, loaded."""
    kernels = [kernel for both in layers.values() for kernel in both.kernels]
    texts = generate(kernels, "demo", [both.exported for both in layers.values()])
    shared = build(tmp_path_factory.mktemp("c"), texts, "demo", request.param, ("-O0",))
    names = [*(kernel.name for kernel in kernels), *(both.exported.record.name for both in layers.values())]
    result = {}
    for name, both in layers.items():
        result[name] = CLayer(shared, both.exported, both.kernels, names)
        assert result[name].load() == OK, str(result[name].error)
    return result


def call(layer: Any, which: str, tokens: int, rng: random.Random) -> tuple[dict[str, Any], Any, Any]:
    """Arguments of a pass, some outputs left out, some with a padding; kept and scratch memory."""
    inputs, outputs = layer.arguments(which)
    dims, sizes = layer.dims(tokens), layer.sizes(tokens)
    asked = {name for name in outputs if rng.random() < 0.7} or {*outputs}
    if which == "quantise":
        chosen = [name for name in inputs if rng.random() < 0.7]
        asked = {name for name in outputs if name.rpartition("_")[0] in chosen}
    given = {}
    for number, (name, buffer) in enumerate((inputs | outputs).items()):
        shape = buffer.extents(dims)
        wide = name in outputs and len(shape) == 2 and which != "quantise" and rng.random() < 0.3
        strides = (shape[1] + 64, 1) if wide else None
        if name in inputs or name in asked:
            given[name] = Torchlike(shape, TYPES[buffer.dtype], 0x100_0000_0000 * (number + 1), strides)
    kept, scratch = (Torchlike((size + 1,), "torch.uint8", at) for size, at in
                     ((sizes.kept, KEPT << 16), (sizes.scratch, SCRATCH << 16)))  # fmt: skip
    return given, kept, scratch


def by_python(both: Both, which: str, given: Any, kept: Any, scratch: Any, margin: Any, in_place: bool) -> Any:
    """What Python hands the driver, or None where it refuses."""
    layer, settings = both.layer, {} if margin is None else {"cluster_margin": margin}
    both.fake.launches.clear()
    try:
        if which == "quantise":
            layer.bind_quantise(**given)(77)
        elif which == "backward":
            layer.bind_backward(**given, kept=kept, scratch=scratch, in_place=in_place, **settings)(77)
        else:
            layer.bind_forward(**given, kept=kept if which == "forward" else None, scratch=scratch, **settings)(77)
    except ArgumentError:
        return None
    return [
        (each.function[0], each.grid, each.block, each.shared, each.stream, each.parameters,
         {key.removeprefix("CU_LAUNCH_ATTRIBUTE_"): value for key, value in each.attributes.items()})
        for each in both.fake.launches
    ]  # fmt: skip


def by_c(layer: CLayer, status: int) -> Any:
    if status == INVALID_ARGUMENT:
        assert not layer.recorder.launches
        return None
    assert status == OK, str(layer.error)
    names = {"cluster": "CLUSTER_DIMENSION"}
    return [
        (layer.symbols[each.function], each.grid, each.block, each.shared, each.stream, each.parameters,
         {names.get(key, key): value for key, value in each.attributes.items()})
        for each in layer.recorder.launches
    ]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_c_passes_launch_what_python_launches(layers, opened, name):
    both, layer, rng = layers[name], opened[name], random.Random(name)
    counts = dict.fromkeys(layer.types, 0)
    for trial in range(CALLS):
        which = [*layer.types][trial % len(layer.types)]
        tokens = 0 if which == "quantise" else rng.choice([0, 1, *COUNTS, int(2 ** rng.uniform(0, 14))])
        given, kept, scratch = call(both.layer, which, tokens, rng)
        margin, in_place = rng.choice([None, 0, 5]), which == "backward" and rng.random() < 0.5
        margin = None if which == "quantise" else margin
        want = by_python(both, which, given, kept, scratch, margin, in_place)
        args = layer.arguments(which, tokens, given, kept, scratch, cluster_margin=margin, in_place=in_place)
        layer.recorder.launches.clear()
        layer.recorder.calls.clear()
        assert by_c(layer, layer.run(which, args, 77)) == want, (which, tokens, sorted(given), str(layer.error))
        if want is None:
            continue
        assert layer.recorder.calls == ["cuLaunchKernelEx"] * len(want)
        counts[which] += len(want)
        status, bound = layer.bind(which, args)
        assert status == OK
        layer.recorder.launches.clear()
        assert by_c(layer, layer.run_bound(bound, 77)) == want
        layer.free(bound)
    assert all(counts.values()), counts


@pytest.mark.parametrize("name", NAMES)
def test_the_c_sizes_are_pythons(layers, opened, name):
    python, layer, rng = layers[name].layer, opened[name], random.Random(name)
    for tokens in (0, 1, 7, 64, 512, 8192):
        want, got = python.sizes(tokens), layer.sizes(tokens)
        assert (got.kept, got.forward, got.inference, got.backward) == (
            want.kept, want.forward, want.inference, want.backward,
        )  # fmt: skip
        if "backward" not in layer.types:
            continue
        outputs = [*python.outputs("backward")]
        asked = [each for each in outputs if rng.random() < 0.5] or outputs
        like = layer.types["backward"]()
        for each in asked:
            setattr(like, each, 1)
        like.settings.in_place = in_place = rng.random() < 0.5
        assert layer.sizes(tokens, like).backward == python.sizes(tokens, asked, in_place=in_place).backward


def test_a_wrong_call_is_refused_in_words(layers, opened):
    both, layer = layers["gpt-oss"], opened["gpt-oss"]
    given, kept, scratch = call(both.layer, "forward", 64, random.Random(1))
    given = {name: replace(tensor, strides=None) for name, tensor in given.items()}
    given["y"] = Torchlike(given["x"].shape, "torch.bfloat16", 0x7F00_0000_0000)

    def refused(text, stream=0, handle=None, **changes):
        args = layer.arguments("forward", 64, given, kept, scratch)
        for key, value in changes.items():
            target, _, name = key.rpartition("__")
            setattr(getattr(args, target) if target else args, name, value)
        layer.recorder.launches.clear()
        assert layer.run("forward", args, stream, handle) == INVALID_ARGUMENT
        assert text in str(layer.error) and not layer.recorder.launches

    refused("the forward pass needs w1, too; it is NULL", w1=None)
    refused("scratch has 5 bytes; the pass needs", scratch__bytes=5)
    refused("kept begins at", kept__data=kept.address + 64)
    refused("kept has 0 bytes; the pass needs", kept__data=None)
    refused("the output y shares memory with x", y=given["x"].address + 128)
    refused("-1 tokens; there must be 0 or more", tokens=-1)
    refused("cluster_margin is 132; it must be 0 to 131", settings__has_cluster_margin=1, settings__cluster_margin=132)
    refused("the handle is of no such layer; load it first", handle=opened["mlp-as-stored"].layer)
    args = layer.arguments("inference", 64, {**given, "y": replace(given["y"], address=0)}, kept, scratch)
    assert layer.run("inference", args) == INVALID_ARGUMENT
    assert "no output is given, so the inference pass has nothing to do" in str(layer.error)


def test_a_load_that_fails_leaves_nothing_behind(layers, opened):
    layer = opened["gpt-oss"]
    recorder = type(layer.recorder)(layer.recorder.record, fail={"cuKernelGetFunction": 2})
    again = CLayer.__new__(CLayer)
    again.__dict__ |= vars(layer) | {"recorder": recorder, "layer": type(layer.layer)(), "error": type(layer.error)()}
    assert again.load() != OK
    assert (recorder.loaded, recorder.retained, recorder.allocated) == (0, 0, 0) and not again.layer
