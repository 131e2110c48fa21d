"""Layers of a bundle, launched by the C loader: the same launches as Python's, byte for byte."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_void_p
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fusekit.abi import LaunchRecord
from fusekit.abi.layer_record import LayerRecord
from fusekit.cabi import generate_loader
from fusekit.cabi.layout import PASSES
from fusekit.share import loader as loading
from fusekit.share.bundle_import import import_bundle
from fusekit.share.loader import export_bundle
from fusekit.share.selection import select
from fusekit.store import Store
from tests.layers.samples import library
from tests.plan.test_layer_program import CASES, options

from .bundles import Loader, Tensor, tensor
from .launcher import BAD_BUNDLE, INVALID_ARGUMENT, MISMATCH, NOT_FOUND, OK, Error, build
from .layers import Memory, Settings, Sizes
from .recorder import Recorder
from .test_layers import by_c, by_python, call

NAMES = ("gpt-oss", "fp8-choices")
CALLS = 24


class LayerArguments(ctypes.Structure):
    _fields_ = (
        ("tensors", POINTER(Tensor)), ("tensor_count", c_int), ("kept", Memory), ("scratch", Memory),
        ("settings", Settings), ("ranks", c_void_p),
    )  # fmt: skip


class NamedLayer:
    """A layer of a bundle over a `Recorder`."""

    def __init__(self, shared: Any, bundle: Any, store: Store, name: str) -> None:
        entries = [entry for listed in store.names(f"{name}.*") if (entry := store.find_entry(listed.record.key))]
        launches = [step for each in entries for step in LaunchRecord.from_json(dict(each.launch)).launches]
        self.symbols = [step.symbol for step in launches]
        self.recorder = Recorder(SimpleNamespace(launches=launches))  # type: ignore[arg-type]
        self.loader, self.name, self.source = Loader(shared), name, bundle
        self.error, self.driver, self.layer = self.loader.error, c_void_p(), c_void_p()

    def load(self, name: str = "") -> int:
        types = type(self.recorder.lookup), c_void_p, POINTER(c_void_p), POINTER(Error)
        opened = self.loader.function("driver_open_with", *types)
        assert opened(self.recorder.lookup, None, byref(self.driver), byref(self.error)) == OK
        status, bundle = self.loader.open(self.source)
        assert status == OK, str(self.error)
        types = c_void_p, c_void_p, c_char_p, c_int, POINTER(c_void_p), POINTER(Error)
        loaded = self.loader.function("layer_load", *types)
        title = (name or self.name).encode()
        result: int = loaded(self.driver, bundle, title, 0, byref(self.layer), byref(self.error))
        self.loader.close(bundle)
        return result

    def arguments(
        self, record: LayerRecord, given: dict[str, Any], kept: Any, scratch: Any, margin: Any, in_place: bool,
        ranks: Any = None,
    ) -> LayerArguments:  # fmt: skip
        tensors = [
            tensor(name, each.address, record.buffers[name].dtype, each.shape, each.strides)
            for name, each in given.items()
        ]
        return LayerArguments(
            (Tensor * max(len(tensors), 1))(*tensors[::-1]), len(tensors), Memory(kept.address, kept.shape[0]),
            Memory(scratch.address, scratch.shape[0]), Settings(margin is not None, margin or 0, in_place), ranks,
        )  # fmt: skip

    def run(self, which: str, args: LayerArguments, stream: int = 0) -> int:
        types = c_void_p, c_int, POINTER(LayerArguments), c_void_p, POINTER(Error)
        launch = self.loader.function("layer_launch", *types)
        status: int = launch(self.layer, PASSES.index(which), byref(args), stream, byref(self.error))
        return status

    def run_bound(self, which: str, args: LayerArguments, stream: int) -> int:
        bound, types = c_void_p(), (c_void_p, c_int, POINTER(LayerArguments), POINTER(c_void_p), POINTER(Error))
        bind = self.loader.function("layer_bind", *types)
        assert bind(self.layer, PASSES.index(which), byref(args), byref(bound), byref(self.error)) == OK
        run = self.loader.function("pass_run", c_void_p, c_void_p, POINTER(Error))
        status: int = run(bound, stream, byref(self.error))
        self.loader.function("pass_free", c_void_p, result=None)(bound)
        return status

    def sizes(self, tokens: int) -> Sizes:
        sizes = Sizes()
        call = self.loader.function("layer_sizes", c_void_p, c_int64, POINTER(Sizes), POINTER(Error))
        assert call(self.layer, tokens, byref(sizes), byref(self.error)) == OK
        return sizes

    def unload(self) -> int:
        status: int = self.loader.function("layer_unload", c_void_p, POINTER(Error))(self.layer, byref(self.error))
        self.loader.function("driver_close", c_void_p, result=None)(self.driver)
        return status


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return build(tmp_path_factory.mktemp("loader"), generate_loader("demo"), "demo")


@pytest.fixture(scope="module", params=NAMES)
def both(request, shared, tmp_path_factory):
    """Python's layer, its fake driver, the C loader's, not loaded, and the store."""
    folder = tmp_path_factory.mktemp("layer")
    opened, fake = library(folder / "store", replace(options(**CASES[request.param]), name=request.param), variants=2)
    name = f"layers/{request.param}"
    bundle = folder / "layer.tar"
    export_bundle(opened.store, select(opened.store), bundle)
    named = NamedLayer(shared, bundle, opened.store, name)
    return SimpleNamespace(
        layer=opened.layer(name), fake=fake, c=named, store=opened.store, bundle=bundle, name=name, shared=shared
    )


def test_the_passes_launch_what_python_launches(both):
    rng, layer = random.Random(both.name), both.c
    assert layer.load() == OK, str(layer.error)
    passes = [which for which, each in both.layer.record.passes.items() if each.steps]
    counts = dict.fromkeys(passes, 0)
    for trial in range(CALLS):
        which = passes[trial % len(passes)]
        tokens = 0 if which == "quantise" else rng.choice([0, 1, int(2 ** rng.uniform(0, 14))])
        given, kept, scratch = call(both.layer, which, tokens, rng)
        margin, in_place = rng.choice([None, 0, 5]), which == "backward" and rng.random() < 0.5
        margin = None if which == "quantise" else margin
        want = by_python(both, which, given, kept, scratch, margin, in_place)
        args = layer.arguments(both.layer.record, given, kept, scratch, margin, in_place)
        layer.recorder.launches.clear()
        assert by_c(layer, layer.run(which, args, 77)) == want, (which, tokens, sorted(given), str(layer.error))
        if want is not None:
            layer.recorder.launches.clear()
            assert by_c(layer, layer.run_bound(which, args, 77)) == want
            counts[which] += len(want)
    assert all(counts.values()), counts
    for tokens in (0, 1, 512):
        want, got = both.layer.sizes(tokens), layer.sizes(tokens)
        assert (got.kept, got.forward, got.inference, got.backward) == (
            want.kept, want.forward, want.inference, want.backward,
        )  # fmt: skip
    assert layer.unload() == OK
    assert (layer.recorder.loaded, layer.recorder.retained, layer.recorder.allocated) == (0, 0, 0)


def test_a_wrong_call_is_refused_in_words(both):
    layer = both.c
    assert layer.load("layers/other") == NOT_FOUND
    assert "has no layer layers/other; put it in with: fusekit export FILE layers/other" in str(layer.error)
    assert layer.load() == OK
    given, kept, scratch = call(both.layer, "forward", 64, random.Random(1))
    given = {name: replace(each, strides=None) for name, each in given.items()}

    def refused(text, **changes):
        args = layer.arguments(both.layer.record, {**given, **changes}, kept, scratch, None, False)
        assert layer.run("forward", args) == INVALID_ARGUMENT and text in str(layer.error), str(layer.error)
        assert not layer.recorder.launches

    x = given["x"]
    layer.recorder.launches.clear()
    refused("x has 1 at dim 1; it must have", x=replace(x, shape=(64, 1)))
    refused("x has rank 1 and type 9; it must have rank 2 and be bf16", x=replace(x, shape=(64,)))
    refused("x has stride 0 at dim 0; it must be positive", x=replace(x, strides=(0, 1)))
    args = layer.arguments(both.layer.record, given, kept, scratch, None, False)
    args.tensors[0].name = b"other"
    assert layer.run("forward", args) == INVALID_ARGUMENT
    assert "other is no tensor of its forward pass" in str(layer.error)
    assert layer.unload() == OK


def test_a_tensor_without_elements_needs_no_address(both):
    """PyTorch gives none of one."""
    layer, rng = both.c, random.Random(4)
    assert layer.load() == OK
    given, kept, scratch = call(both.layer, "forward", 0, rng)
    given = {name: replace(each, address=0 if 0 in each.shape else each.address) for name, each in given.items()}
    given["y"] = replace(given["x"], strides=None)
    assert not given["x"].address and not given["y"].address
    layer.recorder.launches.clear()
    args = layer.arguments(both.layer.record, given, kept, scratch, None, False)
    assert layer.run("forward", args) == OK, str(layer.error)
    assert len(layer.recorder.launches) == len(both.layer.record.launched("forward", ["y"], 0))
    assert layer.unload() == OK


def test_a_bundle_with_layers_is_verified_and_imported(both, tmp_path):
    status, bundle = both.c.loader.open(both.bundle)
    assert status == OK and both.c.loader.verify(bundle) == OK, str(both.c.error)
    both.c.loader.close(bundle)
    store = Store(tmp_path / "other")
    import_bundle(store, both.bundle)
    export_bundle(store, select(store), tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == both.bundle.read_bytes()


def forged(rng: random.Random) -> Callable[..., tuple[bytes, str]]:
    """Writes layer records with a word or two of others, or cut."""
    honest = loading._layer

    def written(*args: Any) -> tuple[bytes, str]:
        data, row = honest(*args)
        words = bytearray(data)
        for _ in range(rng.randrange(1, 3)):
            at = 8 * rng.randrange(min(len(words) // 8, rng.choice([8, 64, 1 << 20])))
            words[at : at + 8] = struct.pack("<q", rng.choice([0, 1, -1, 2, 63, 255, 1 << 20, 1 << 40, -(1 << 63)]))
        return bytes(words[: rng.choice([len(words), len(words), len(words) // 16 * 8])]), row

    return written


def test_a_forged_layer_record_is_refused(both, monkeypatch, tmp_path, soak):
    """Digests are right and words are not: the loader says so, and touches nothing outside."""
    outcomes: set[int] = set()
    monkeypatch.setattr(loading, "_layer", forged(random.Random(both.name)))
    for trial in range(40 if soak else 12):
        path = tmp_path / f"{trial}.tar"
        export_bundle(both.store, select(both.store), path)
        status, bundle = both.c.loader.open(path)
        assert status == OK
        outcomes.add(both.c.loader.verify(bundle))
        both.c.loader.close(bundle)
        forger = NamedLayer(both.shared, path, both.store, both.name)
        outcomes.add(forger.load())
        assert forger.unload() == OK
    assert outcomes <= {OK, BAD_BUNDLE, MISMATCH, INVALID_ARGUMENT} and BAD_BUNDLE in outcomes
