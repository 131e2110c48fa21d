"""Layers over ranks, exported as C and in bundles: each rank has Python's launches, byte for byte, in its streams."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import replace
from typing import Any

import pytest

from fusekit.cabi import generate, generate_loader
from fusekit.cabi.layout import RANKS
from fusekit.exchange import Ranks as PythonRanks
from fusekit.layers.ranked import RankedLayer
from fusekit.library import Library
from fusekit.plan.exchange import MOST_RANKS
from fusekit.runtime import Driver
from fusekit.share import loader as loading
from fusekit.share.loader import export_bundle
from fusekit.share.selection import select
from tests.exchange.test_windows import PeerDriver
from tests.layers.samples import library
from tests.plan.test_layer_ranks import over
from tests.soak import sample

from .launcher import BAD_BUNDLE, INVALID_ARGUMENT, MISMATCH, OK, Error, build
from .layers import CLayer, Memory, Ranks, Sizes, Window, exported, ladder_record
from .test_layer_bundles import NamedLayer, forged
from .test_layers import by_c, by_python, call

RANKS_OF = {"choices-overlap": 4, "fp8-choices": 2, "recompute-overlap": 2, "deepseek": 2}
SMALL = 128
CALLS = 8  # of each pass on each rank
STREAM, TIMEOUT = 77, 1234
SIZES = c_void_p, POINTER(Ranks), c_int64, POINTER(Sizes), POINTER(Error)
WINDOW_SIZES = c_void_p, POINTER(Ranks), POINTER(c_size_t), POINTER(Error)
# What a pass may ask of the driver while its stream is captured.
CAPTURABLE = {
    "cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuEventRecord",
    "cuStreamWaitEvent",
}  # fmt: skip


class WaitingDriver(PeerDriver):
    """What streams wait for as the C tests' driver has it: after how many launches, which stream for which."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recorded: dict[int, int] = {}

    def cuEventRecord(self, event: int, stream: int) -> Any:  # noqa: N802
        self.recorded[event] = stream
        return super().cuEventRecord(event, stream)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:  # noqa: N802
        result = super().cuStreamWaitEvent(stream, event, flags)
        self.waits[-1] = (len(self.launches), stream, self.recorded[event])  # type: ignore[call-overload]
        return result


class Both:
    """A layer over ranks in Python, for any limits, and what it is exported from."""

    def __init__(self, root: Any, name: str) -> None:
        self.name, self.ranks = f"layers/{name}", RANKS_OF[name]
        opened, fake = library(root / name, replace(over(self.ranks, name), name=name), variants=2)
        self.store = opened.store
        self.fake = WaitingDriver(devices=self.ranks, symbol="", others=fake.others)
        self.library = Library(opened.store, Driver(self.fake))
        by_part: dict[str, list[str]] = {}
        for listed in opened.store.names(self.name):
            part = listed.record.name.partition("@")[0].rpartition(".")[2]
            by_part.setdefault(part, []).append(listed.record.name)
        self.stored = opened.layer(self.name)

        def choose(part: str, tokens: int) -> str:  # a pass without ranks has no capacity to choose for
            return by_part[part][tokens > SMALL and not part.startswith("quantise-w")]

        self.record = ladder_record(opened, self.stored, choose)
        self.exported, self.kernels = exported(opened, RankedLayer(opened, self.record))
        self.layer: Any = None
        self.typed: Any = None
        self.named: Any = None
        self.texts: dict[str, str] = {}

    def open(self, tokens: int, rows: int | None, record: Any = None) -> list[RankedLayer]:
        groups = PythonRanks.in_process(self.library.devices, range(self.ranks), timeout=TIMEOUT)
        opened = [
            RankedLayer(self.library, record or self.record, ranks=each, tokens=tokens, rows=rows) for each in groups
        ]
        for layer in opened:
            layer.connect()
        return opened


def given_to_c(layer: RankedLayer) -> Ranks:
    """What a program gives for the rank of a layer in Python."""
    windows = [layer._window(name) for name in layer.record.windows]
    rows = (Window * len(windows))(*(Window((c_void_p * len(each.peers))(*each.peers), each.size) for each in windows))
    side = layer._ranks.side_stream(layer.devices)
    checked = layer._in_window("overflow").address
    return Ranks(
        rows, layer._ranks.rank, TIMEOUT, layer.capacity, layer.rows, Memory(checked, 16), side._stream,
        (c_void_p * 2)(side._begin, side._end),
    )  # fmt: skip


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    return build(tmp_path_factory.mktemp("loader"), generate_loader("demo"), "demo", options=("-O0",))


@pytest.fixture(scope="module", params=sample(RANKS_OF, "choices-overlap", "fp8-choices"))
def both(request, loader, tmp_path_factory):
    """The layer in Python; `typed`: its export, loaded; `named`: the same out of a bundle."""
    folder = tmp_path_factory.mktemp("ranks")
    both = Both(folder, request.param)
    texts = generate(both.kernels, "demo", [both.exported])
    both.texts = texts
    shared = build(folder, texts, "demo", "c11", ("-O0",))
    names = [*(kernel.name for kernel in both.kernels), both.name]
    both.typed = CLayer(shared, both.exported, both.kernels, names)
    bundle = folder / "layer.tar"
    export_bundle(both.store, select(both.store), bundle)
    both.named = NamedLayer(loader, bundle, both.store, both.name)
    for each in (both.typed, both.named):
        assert each.load() == OK, str(each.error)
    return both


only_overlap = pytest.mark.parametrize("both", ["choices-overlap"], indirect=True)


def rounds(both: Both, record: Any, run: Callable[..., tuple[int, Any]]) -> None:
    """run: (status, the C layer) of a pass on a stream, with what a program gives."""
    rng, counts, waits = random.Random(both.name), dict.fromkeys(record.passes, 0), 0
    for tokens, part in ((100, 1), (700, 3)):
        any_rows = both.open(tokens, None, record)
        ranked = any_rows if part == 1 else both.open(tokens, any_rows[0].rows // part, record)
        for trial in range(CALLS * len(counts)):
            which = [*counts][trial % len(counts)]
            layer = both.layer = ranked[rng.randrange(both.ranks)]
            count = rng.choice([0, 1, layer.capacity, rng.randrange(layer.capacity)])
            given, kept, scratch = call(layer, which, count, rng)
            at = {"device": layer._ranks.device}
            given = {key: replace(each, **at) for key, each in given.items()}
            kept, scratch = replace(kept, **at), replace(scratch, **at)
            margin, in_place = rng.choice([None, 0, 5]), which == "backward" and rng.random() < 0.5
            margin = None if which == "quantise" else margin
            both.fake.waits.clear()
            both.fake.stream_contexts[STREAM] = 1000 + layer._ranks.device
            want = by_python(both, which, given, kept, scratch, margin, in_place)
            for bound in (False, True):
                args = given_to_c(layer), which, count, given, kept, scratch, margin, in_place
                status, c = run(bound, *args)
                assert by_c(c, status) == want, (which, count, sorted(given), str(c.error))
                assert want is None or c.recorder.waits == both.fake.waits
            counts[which] += len(want or ())
            waits += len(both.fake.waits)
        for each in {id(layer._ranks): layer._ranks for layer in (*any_rows, *ranked)}.values():
            each.close()
    assert all(counts.values()), counts
    assert bool(waits) == ("overlap" in both.name)


def test_every_rank_launches_what_python_launches(both):
    layer = both.typed

    def run(bound, ranks, which, tokens, given, kept, scratch, margin, in_place):
        args = layer.arguments(which, tokens, given, kept, scratch, cluster_margin=margin, in_place=in_place)
        if which != "quantise":
            args.ranks = ctypes.addressof(ranks)
        layer.recorder.launches.clear()
        layer.recorder.waits.clear()
        layer.recorder.calls.clear()
        if not bound:
            status = layer.run(which, args, STREAM)
            assert set(layer.recorder.calls) <= CAPTURABLE
            return status, layer
        status, handle = layer.bind(which, args)
        if status == OK:
            status = layer.run_bound(handle, STREAM)
            layer.free(handle)
        return status, layer

    rounds(both, both.record, run)


def test_every_rank_launches_it_out_of_a_bundle(both):
    layer, record = both.named, both.stored.record

    def run(bound, ranks, which, tokens, given, kept, scratch, margin, in_place):
        args = layer.arguments(
            record, given, kept, scratch, margin, in_place, (which != "quantise" and ctypes.addressof(ranks)) or None
        )
        layer.recorder.launches.clear()
        layer.recorder.waits.clear()
        if not bound or by_c(layer, layer.run(which, args, STREAM)) is None:
            return layer.run(which, args, STREAM), layer
        layer.recorder.launches.clear()
        layer.recorder.waits.clear()
        return layer.run_bound(which, args, STREAM), layer

    rounds(both, record, run)


def test_sizes_are_pythons(both):
    layer, rng = both.typed, random.Random(both.name)
    sizes_of = both.named.loader.function("layer_rank_sizes", *SIZES)
    of_windows = both.named.loader.function("layer_windows", *WINDOW_SIZES)
    title = both.named.loader.function("layer_window", c_void_p, c_int, result=c_char_p)
    windows = [title(both.named.layer, number).decode() for number in range(len(both.record.windows))]
    assert windows == [*both.record.windows] and title(both.named.layer, len(windows)) is None
    assert both.named.loader.function("layer_ranks", c_void_p)(both.named.layer) == both.ranks
    for tokens, rows in ((1, None), (100, 90), (512, None), (700, 300)):
        python = RankedLayer(both.library, both.record, tokens=tokens, rows=rows)
        ranks = Ranks(capacity=tokens, rows=rows or 0)
        want = python.sizes()
        got, named_bytes = (c_size_t * len(windows))(), (c_size_t * len(windows))()
        call_windows = layer.function("windows", *WINDOW_SIZES)
        assert call_windows(layer.layer, byref(ranks), got, byref(layer.error)) == OK, str(layer.error)
        assert of_windows(both.named.layer, byref(ranks), named_bytes, byref(layer.error)) == OK
        assert dict(zip(windows, got, strict=True)) == want.windows and [*got] == [*named_bytes]
        for count in (0, 1, 97, python.capacity):
            want, sizes = python.sizes(count), Sizes()
            assert sizes_of(both.named.layer, byref(ranks), count, byref(sizes), byref(layer.error)) == OK
            for each in (sizes, layer.sizes(count, ranks=ranks)):
                assert (each.kept, each.forward, each.inference, each.backward) == (
                    want.kept, want.forward, want.inference, want.backward,
                )  # fmt: skip
            outputs = [*python.outputs("backward")]
            asked = [each for each in outputs if rng.random() < 0.5] or outputs
            like = layer.types["backward"]()
            for each in asked:
                setattr(like, each, 1)
            like.settings.in_place = in_place = rng.random() < 0.5
            wanted = python.sizes(count, asked, in_place=in_place).backward
            assert layer.sizes(count, like, ranks).backward == wanted


@only_overlap
def test_what_a_rank_does_not_give_is_refused_in_words(both):
    layer = both.typed
    python = both.open(100, None)[1]
    given, kept, scratch = call(python, "forward", 64, random.Random(2))
    given = {name: replace(each, strides=None) for name, each in given.items()}
    given["y"] = replace(given["x"], address=0x7F00_0000_0000)

    def refused(text, stream=STREAM, tokens=64, **changes):
        ranks = given_to_c(python)
        for name, value in changes.items():
            where, _, member = name.rpartition("__")
            setattr(
                ranks.windows[0] if where == "windows" else getattr(ranks, where) if where else ranks, member, value
            )
        args = layer.arguments("forward", tokens, given, kept, scratch)
        args.ranks = ctypes.addressof(ranks)
        layer.recorder.launches.clear()
        assert layer.run("forward", args, stream) == INVALID_ARGUMENT
        assert text in str(layer.error) and not layer.recorder.launches, str(layer.error)

    peers = [*python._window("sent").peers]
    misplaced, missing = [peers[0] + 64, *peers[1:]], [*peers[:2], None, *peers[3:]]
    name = both.name
    args = layer.arguments("forward", 64, given, kept, scratch)
    assert layer.run("forward", args, STREAM) == INVALID_ARGUMENT
    assert f"{name} is over ranks, and they are NULL; give them" in str(layer.error)
    refused("rank is 4; it must be 0 to 3", rank=4)
    refused("timeout is -1; it must be 1 or more milliseconds, or 0 for a minute", timeout=-1)
    refused("capacity is 0; it must be the most tokens of a rank, 1 or more", capacity=0)
    refused("more rows than 2^31 - 1 may come to a rank; give a smaller one", capacity=2**30)
    refused(f"rows is {python.rows + 1}; it must be 1 to {python.rows}, or 0", rows=python.rows + 1)
    refused("129 tokens; the windows have room for 128; give every rank a larger capacity", tokens=129)
    refused("the windows are NULL; give an array of 4", windows=None)
    size = python._window("sent").size
    refused(f"the window sent has {size - 1} bytes; it must have {size}", windows__bytes=size - 1)
    refused("the window sent of rank 2 is NULL", windows__addresses=(c_void_p * 4)(*missing))
    refused(f"the window sent of rank 0 begins at {misplaced[0]:#x}", windows__addresses=(c_void_p * 4)(*misplaced))
    refused("checked has 15 bytes; the pass needs 16", checked__bytes=15)
    for side in ({"side_stream": None}, {"side_stream": 2}, {"events": (c_void_p * 2)(5, 5)}):
        refused("give it a side_stream that is no default stream, and two events", **side)
    refused("the stream is the side stream; give another one", stream=python._ranks.side_stream(python.devices)._stream)


@only_overlap
def test_a_failure_leaves_no_launch_on_the_side_stream_behind(both):
    layer = both.typed
    python = both.open(100, None)[0]
    given, kept, scratch = call(python, "backward", 64, random.Random(3))
    ranks = given_to_c(python)
    args = layer.arguments("backward", 64, given, kept, scratch)
    args.ranks = ctypes.addressof(ranks)
    layer.recorder.launches.clear()
    layer.recorder.waits.clear()
    layer.recorder.most_launches = 1
    assert layer.run("backward", args, STREAM) not in (OK, INVALID_ARGUMENT)
    layer.recorder.most_launches = 1 << 30
    side = ranks.side_stream
    assert layer.recorder.waits == [(0, side, STREAM), (1, STREAM, side)]


@only_overlap
def test_a_forged_record_is_refused_or_launched(both, loader, monkeypatch, tmp_path, soak):
    """It touches nothing outside, which the sanitizers show."""
    rng, outcomes = random.Random(5), set()
    monkeypatch.setattr(loading, "_layer", forged(rng))
    python = both.open(100, None, both.stored.record)[0]
    given, kept, scratch = call(python, "forward", 64, rng)
    ranks = given_to_c(python)
    for trial in range(150 if soak else 10):
        path = tmp_path / f"{trial}.tar"
        export_bundle(both.store, select(both.store), path)
        layer = NamedLayer(loader, path, both.store, both.name)
        outcomes.add(layer.load())
        if layer.layer:
            args = layer.arguments(python.record, given, kept, scratch, None, False, ctypes.addressof(ranks))
            outcomes.add(layer.run("forward", args, STREAM))
            sizes, windows = Sizes(), (c_size_t * 8)()
            asked = layer.loader.function("layer_rank_sizes", *SIZES)
            outcomes.add(asked(layer.layer, byref(ranks), 64, byref(sizes), byref(layer.error)))
            asked = layer.loader.function("layer_windows", *WINDOW_SIZES)
            outcomes.add(asked(layer.layer, byref(ranks), windows, byref(layer.error)))
        assert layer.unload() == OK
    assert outcomes <= {OK, BAD_BUNDLE, MISMATCH, INVALID_ARGUMENT} and OK in outcomes and BAD_BUNDLE in outcomes


@only_overlap
def test_it_is_cpp_as_well(both, tmp_path):
    for texts in (both.texts, generate_loader("demo")):
        build(tmp_path, texts, "demo", "c++17", ("-fsyntax-only",))


def test_c_has_room_for_as_many_ranks_as_there_can_be():
    assert RANKS >= MOST_RANKS
