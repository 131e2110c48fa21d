"""A layer over ranks on a fake driver: windows and how ranks share them, what launches are given, what is refused."""

import ctypes
import struct
from dataclasses import replace

import numpy as np
import pytest

from fusekit.compiler.layers import Layer, publish_layer
from fusekit.errors import ArgumentError, CapacityError, PeerTimeoutError
from fusekit.exchange import Layout, Ranks
from fusekit.layers.ranked import RankedLayer
from fusekit.library import Library
from fusekit.plan.exchange import STATUS
from fusekit.plan.layer import Options
from fusekit.plan.layer.program import BACKWARD, CHECKED, FORWARD, INFERENCE
from fusekit.plan.layer.ranks import stores as window_parts
from fusekit.plan.layer.record import unproved
from fusekit.runtime import Devices, Driver
from fusekit.store import key_of
from fusekit.store.names import layer_record
from tests.exchange.test_windows import Gathering, PeerDriver, together
from tests.layers.samples import library
from tests.layers.test_layer import KEPT, SCRATCH, TYPES, opened
from tests.plan.test_layer_ranks import LAYERS, over
from tests.plans import plan_of
from tests.runtime.samples import Torchlike
from tests.soak import sample

T = 40
FIRST = 0x7F00_0000_0000  # tensors and memory of a test lie apart from windows


@pytest.fixture
def ranked(tmp_path):
    """ranked(options, **what is said) -> (the layers of both ranks, the driver)."""

    def opened(o, **said):
        libraries, fake = library(tmp_path / "store", o)
        driver = PeerDriver(devices=2, symbol="", others=fake.others)
        stores = Library(libraries.store, Driver(driver))
        ranks = Ranks.in_process(stores.devices, [0, 1], timeout=1234)
        return [stores.layer("layers/moe", ranks=each, **said) for each in ranks], driver

    return opened


def tensors(layer, which, tokens=T):
    inputs, outputs = layer.arguments(which)
    dims = layer.dims(tokens)
    return {
        name: Torchlike(
            buffer.extents(dims), TYPES[buffer.dtype], FIRST + 0x100_0000 * (number + 1), device=layer.ranks.device
        )
        for number, (name, buffer) in enumerate((inputs | outputs).items())
    }


def memory(layer):
    sizes, device = layer.sizes(), layer.ranks.device
    kept = Torchlike((sizes.kept,), "torch.uint8", FIRST + KEPT, device=device)
    return {"kept": kept, "scratch": Torchlike((sizes.scratch,), "torch.uint8", FIRST + SCRATCH, device=device)}


def needed(layer, which):
    """The steps of a pass with all outputs."""
    return plan_of(layer).needed(which, layer.outputs(which))


@pytest.mark.parametrize("name", sample(LAYERS))
def test_every_launch_is_given_the_memory_of_its_buffers(ranked, name):
    layers, fake = ranked(over(2, name), tokens=100)
    for layer in layers:
        given, backward_tensors, kept = tensors(layer, FORWARD), tensors(layer, BACKWARD), memory(layer)
        fake.launches.clear()
        layer.forward(**given, **kept, stream=0)
        layer.backward(**backward_tensors, **kept, stream=0)
        steps = [(which, step) for which in (FORWARD, BACKWARD) for step in needed(layer, which)]
        assert len(fake.launches) == len(steps)
        dims = layer.dims(T)
        places = plan_of(layer).kept(dims)[0]
        for launch, (which, step) in zip(fake.launches, steps, strict=True):
            arguments = given if which == FORWARD else backward_tensors
            scratch = plan_of(layer).scratch(which, set(layer.outputs(which)), dims)[0]
            names = {**step.reads, **step.writes}
            got = [int.from_bytes(each, "little") for each in launch.parameters]
            tensors_ = sorted(each for each in names if not each.startswith("window."))
            assert got[len(tensors_) :] == (layer._windows[step.window].peers if step.window else [])
            for address, argument in zip(got, tensors_, strict=False):
                buffer = plan_of(layer).buffers[names[argument]]
                window, _, part = buffer.name.partition(".")
                if buffer.place == CHECKED:
                    assert address == layer._parts["overflow"].address and ctypes.string_at(address, 16) == bytes(16)
                elif part:
                    begin = layer._windows[window].address
                    keys = plan_of(layer).parts[window_parts(plan_of(layer))[window]]
                    layout = Layout(keys, layer.capacity, layer.options.hidden)
                    parts = layout.parts(begin, layer.ranks.device)
                    words = {"arrivals": begin}
                    assert address == (words[part] if part in words else parts[part].address)
                    assert part in words or parts[part].shape == buffer.extents(dims)
                elif buffer.name in places:
                    assert address == FIRST + KEPT + places[buffer.name]
                elif buffer.name in scratch:
                    home, begin = scratch[buffer.name]
                    assert address == (FIRST + SCRATCH if home == "scratch" else arguments[home].address) + begin
                else:
                    assert address == arguments[buffer.name].address


def test_rows_are_sent_on_a_stream_of_the_rank(ranked):
    (layer, _), fake = ranked(over(2, "choices-overlap"), tokens=100)
    backward_tensors, kept = tensors(layer, BACKWARD), memory(layer)
    fake.stream_contexts[77] = 1000
    for backward in (
        layer.bind_backward(**backward_tensors, **kept),
        lambda stream: layer.backward(**backward_tensors, **kept, stream=stream),
    ):
        fake.launches.clear()
        fake.waits.clear()
        backward(77)
        steps = needed(layer, BACKWARD)
        streams = {step.on_side: {launch.stream for launch, one in zip(fake.launches, steps, strict=True)
                                if one.on_side == step.on_side} for step in steps}  # fmt: skip
        (side,) = streams[True]
        assert streams[False] == {77} != streams[True]
        assert [stream for stream, _ in fake.waits] == [side, 77] * sum(step.on_side for step in steps)
    first, rest = layer.bind_backward(**backward_tensors, **kept).split("dx")
    for each in (first, rest):  # which may be captured apart
        fake.waits.clear()
        each(77)
        assert [stream for stream, _ in fake.waits] == [side, 77]
    layer.ranks.close()


def test_windows_that_were_closed_are_named(ranked):
    (layer, _), fake = ranked(over(2, "choices"), tokens=100)
    layer.connect()
    layer.ranks.close()
    fake.launches.clear()
    for call in (layer.check, lambda: layer.forward(**tensors(layer, FORWARD), **memory(layer), stream=0)):
        with pytest.raises(ArgumentError, match=r"the windows of <rank 0 of 2 .* were closed; open the layer again"):
            call()
    assert not fake.launches


def test_a_layer_for_inference_makes_the_windows_that_it_needs(ranked):
    (layer, _), _ = ranked(over(2, keep="none"), tokens=100)
    layer.connect()
    assert set(layer._windows) == set(layer.sizes().windows) == {"sent", "sums"}


def test_gemms_hold_back_the_clusters_of_a_margin(ranked):
    (layer, _), fake = ranked(over(2), tokens=100)
    given, backward_tensors, kept = tensors(layer, FORWARD), tensors(layer, BACKWARD), memory(layer)
    layer.connect()
    layer.load()
    fake.launches.clear()
    layer.forward(**given, **kept, stream=0, cluster_margin=32)
    layer.bind_backward(**backward_tensors, **kept, cluster_margin=32)(0)
    assert {launch.grid[0] for launch in fake.launches} == {1, 100}
    first, rest = layer.bind_backward(**backward_tensors, **kept).split("dx")
    sent = [step.part for step in plan_of(layer).steps[BACKWARD] if step.window][-1]
    assert sent == "dispatch" and len(rest.launches) >= 3  # x is sent again for the gradients of weights
    assert len(first.launches) + len(rest.launches) == len(plan_of(layer).steps[BACKWARD])


def test_a_part_of_a_device_is_refused(ranked):
    (layer, _), fake = ranked(over(2), tokens=100)
    given, kept = tensors(layer, FORWARD), memory(layer)
    layer.connect()
    layer.load()
    fake.launches.clear()
    fake.greens[70] = 64
    for queue in (lambda: layer.forward(**given, **kept, stream=70), lambda: layer.bind_forward(**given, **kept)(70)):
        with pytest.raises(ArgumentError, match="of a green context of 64 multiprocessors; a layer over ranks needs"):
            queue()
    assert not fake.launches
    layer.forward(**given, **kept, stream=9)


def test_layers_share_windows_and_inference_needs_half_of_them(ranked):
    (layer, other), _ = ranked(over(2), tokens=100)
    again = RankedLayer(layer._library, layer.record, ranks=layer.ranks, tokens=128)
    fewer = RankedLayer(layer._library, layer.record, ranks=layer.ranks, tokens=128, rows=300)
    layer.connect(training=False)
    assert set(layer._windows) == {"sent", "sums"}
    layer.bind_forward(**tensors(layer, INFERENCE), scratch=memory(layer)["scratch"])
    for each in (layer, again, fewer, other):
        each.connect()
    assert layer._windows == again._windows == fewer._windows
    assert layer._windows["sent"].peers == other._windows["sent"].peers
    assert layer._windows["sent"].address != other._windows["sent"].address
    assert layer == RankedLayer(layer._library, layer.record, ranks=layer.ranks, tokens=100) != fewer


@pytest.mark.parametrize(
    ("name", "count", "tokens", "remedy"),
    [
        ("choices", 2, 1280, None), ("choices", 2, 1281, "tokens = 1280 or fewer"),
        ("choices", 3, 256, None), ("choices", 3, 384, "tokens = 256 or fewer"),
        ("choices", 4, 128, "a device of its own"), ("choices-overlap", 2, 128, "a device of its own"),
    ],
)  # fmt: skip
def test_ranks_share_a_device_where_all_but_one_leave_room_for_a_block(tmp_path, name, count, tokens, remedy):
    opened_library, fake = library(tmp_path / "store", over(count, name))
    stores = Library(opened_library.store, Driver(PeerDriver(devices=2, symbol="", others=fake.others)))
    ranks = Ranks.in_process(stores.devices, [0] * count)
    (layer, *_) = [stores.layer("layers/moe", ranks=each, tokens=tokens) for each in ranks]
    if remedy is None:
        layer.connect()
        return
    with pytest.raises(ArgumentError, match=rf"{count} ranks share .* all of its 132 multiprocessors; .*{remedy}$"):
        layer.connect()
    apart = Ranks.in_process(stores.devices, [0, 1] * (count // 2) if count < 4 else [0, 1, 0, 1])
    if len(apart) == count:
        stores.layer("layers/moe", ranks=apart[0], tokens=512).connect()


def test_sizes_are_said_before_anything_is_there(ranked):
    (layer, _), fake = ranked(over(2), tokens=1000)
    sizes = layer.sizes()
    assert layer.capacity == 1024 and layer.rows == 2048 * 3 and not fake.loaded
    for window, part in (("sent", "dispatch"), ("grads", "dispatch"), ("sums", "combine")):
        assert sizes.windows[window] == Layout(plan_of(layer).parts[part], 1000, layer.options.hidden).bytes
    assert sizes.windows["returned"] < 0.3 * sizes.windows["sums"]
    assert layer.sizes(1).kept < sizes.kept
    apart = layer._library.layer("layers/moe", tokens=1000, rows=2000)  # sizes want no ranks
    assert apart.sizes(apart.capacity) == apart.sizes()
    with pytest.raises(ArgumentError, match="1025 tokens; the windows have room for 1024; open the layer on every"):
        apart.sizes(1025)
    assert layer._library.layer("layers/moe", tokens=np.int32(1000), rows=np.int64(2000)).sizes() == apart.sizes()
    assert apart.rows == 2000 and apart.sizes().kept < sizes.kept and apart.sizes().windows == sizes.windows


@pytest.mark.parametrize(
    ("tokens", "device", "said", "text"),
    [
        (129, 0, {}, "129 tokens; the windows have room for 128; open the layer on every rank"),
        (40, 1, {}, "tensors on device 1; the rank's is 0"),
        (40, 0, {"tokens": 0}, "tokens = 0; it must be a whole number, 1 or more"),
        (40, 0, {"rows": -3}, "rows = -3; it must be"),
        (40, 0, {"tokens": True}, "tokens = True; it must be a whole number, 1 or more"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(ranked, tokens, device, said, text):
    with pytest.raises(ArgumentError, match=text):
        (layer, _), _ = ranked(over(2), **{"tokens": 100, **said})
        given = {name: replace(each, device=device) for name, each in tensors(layer, INFERENCE, tokens).items()}
        layer.bind_forward(**given, scratch=memory(layer)["scratch"])


def build_again(store, part):
    """The kernel of a part gets another key, as a build from other sources gives it."""
    (record,) = (listing.record for listing in store.names(f"layers/moe.{part}@*"))
    entry, cubin = store.load(record.key)
    fields = {**entry.fields, "source": f"other than {record.key}"}
    store.publish(replace(entry, key=key_of(fields), fields=fields), cubin)
    store.publish_name(replace(record, key=key_of(fields)))
    table = store.find_name(layer_record("layers/moe"), "sm_90a").spec["options"]
    assert publish_layer(store, Layer(Options(**table), "sm_90a", ()))


def test_ranks_of_a_process_open_one_build_of_a_layer(ranked):
    (layer, _), _ = ranked(over(2), tokens=100)
    library = layer._library
    first, second = Ranks.in_process(library.devices, [0, 1])
    library.layer("layers/moe", ranks=first)
    build_again(library.store, "index")  # which ranks launch alone
    library.layer("layers/moe", ranks=second)
    build_again(library.store, "dispatch")
    for ranks, text in ((second, "rank 1 opened another build of layers/moe than rank 0"),
                        (first, "rank 0 opened another build of layers/moe than it did before")):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"{text}, .* with new ones"):
            library.layer("layers/moe", ranks=ranks)
    for each in (first, second):
        each.close()
    for each in (first, second):
        opened = library.layer("layers/moe", ranks=each)
    RankedLayer(library, changed(opened, tokens=7), ranks=first)
    with pytest.raises(ArgumentError, match="another build of layers/moe"):
        RankedLayer(library, changed(opened, bias=not opened.options.bias), ranks=first)


def changed(layer, **fields):
    table, parts = Options(**layer.options.canonical() | fields), layer.record.parts
    return unproved(table, "sm_90a", lambda part, tokens: layer.record.kernel(part, tokens) if part in parts else part)


@pytest.mark.parametrize("again", ["dispatch", "combine", ""])
def test_ranks_of_processes_compare_their_layers_where_windows_are_made(tmp_path, again):
    """Rank 1 opens a layer after a build, and it shares the windows of another one, which the build left as it was."""
    opened_library, fake = library(tmp_path / "store", over(2))
    for name in ("first", "moe-again"):
        library(tmp_path / "store", replace(over(2), name=name))
    driver = PeerDriver(devices=2, symbol="", others=fake.others)
    stores, gathering = Library(opened_library.store, Driver(driver)), Gathering(2)
    ranks = together(2, lambda rank: Ranks.of_process(stores.devices, rank, rank, gathering.of(rank)))
    firsts = [stores.layer("layers/first", ranks=each) for each in ranks]
    before = stores.layer("layers/moe", ranks=ranks[0])
    if again:
        build_again(stores.store, again)
    layers = [before, stores.layer("layers/moe", ranks=ranks[1])]
    stores.layer("layers/moe-again", ranks=ranks[0])  # which is not used
    for each in (firsts, layers):
        assert together(2, lambda rank, each=each: each[rank].connect(training=False)) == [None, None]
    held = len(driver.memory)
    results = together(2, lambda rank: firsts[rank].connect())
    if not again:
        assert results == [None, None] and before._window("sums") is firsts[0]._windows["sums"]
        return
    text = "rank 1 opened other layers than rank 0, or other builds of them; close these ranks, and open the same"
    assert all(isinstance(each, ArgumentError) and text in str(each) for each in results)
    assert len(driver.memory) == held  # of the windows that were there
    together(2, lambda rank: ranks[rank].close())
    assert not driver.memory and not any(driver.opened.values())


def test_another_number_of_ranks_is_refused(ranked):
    (layer, _), _ = ranked(over(2))
    three = Ranks.in_process(layer._library.devices, [0, 1, 0])[0]
    with pytest.raises(ArgumentError, match="is over 2 ranks, and there are 3; start as many, or build"):
        layer._library.layer("layers/moe", ranks=three)
    for wrong in (3, [0, 1]):
        with pytest.raises(ArgumentError, match=r"ranks = .*; it must be one rank, of those that fusekit.exchange"):
            layer._library.layer("layers/moe", ranks=wrong)
    alone = layer._library.layer("layers/moe")
    with pytest.raises(ArgumentError, match=r"is over 2 ranks; open it with library.layer"):
        alone.forward(**tensors(layer, FORWARD), **memory(layer))
    with pytest.raises(ArgumentError, match=r"is over 2 ranks; open it with library.layer"):
        alone.connect()


def test_a_layer_of_one_gpu_takes_no_ranks(tmp_path):
    layer, _ = opened(tmp_path)
    for said in ({"tokens": 8}, {"ranks": object()}):
        with pytest.raises(ArgumentError, match="a layer of one GPU, which takes no"):
            layer._library.layer("layers/moe", **said)


def test_what_went_wrong_is_looked_at_once_a_second(ranked, monkeypatch):
    (layer, other), _ = ranked(over(2), tokens=100, rows=500)
    layer.check()  # without windows there is nothing to look at
    now = [100.0]
    monkeypatch.setattr("fusekit.layers.ranked.time.monotonic", lambda: now[0])
    given, kept = tensors(layer, FORWARD), memory(layer)
    layer.forward(**given, **kept)
    other.bind_forward(**tensors(other, FORWARD), **memory(other))
    for each in (layer, other):
        write(each._parts["overflow"].address, 1, 0, 501, 501)
    with pytest.warns(RuntimeWarning) as warned:
        for _ in range(3):
            layer.forward(**given, **kept)  # which the other ranks wait for
            now[0] += 1.1
    (line,) = [str(each.message) for each in warned]
    assert line.endswith("with rows = 501 or more, or leave rows out; layer.check() raises this")
    for each in (layer, other):
        with pytest.raises(CapacityError, match=r"rank 0 were chosen for 501 rows and have room for 500") as error:
            each.check()
        assert error.value.rows == 501
        assert each.check() is None
    write(layer._parts["overflow"].address, 4, 1, 502, 510)
    write(layer._windows["sums"].address + STATUS, 2, 1)
    with pytest.raises(CapacityError, match=r"in 3 passes, in the last of which the experts of rank 1 .* rows = 510"):
        layer.check()  # before the other rank, which may have ended because of it
    for call in (layer.check, lambda: layer.forward(**given, **kept)):
        now[0] += 1.1
        with pytest.raises(PeerTimeoutError, match=r"rank 0 waited .* for rank 1"):
            call()


def write(address, *words):
    ctypes.memmove(address, struct.pack(f"<{len(words)}i", *words), 4 * len(words))


def test_ranks_of_processes_agree_on_their_numbers():
    devices = Devices(Driver(PeerDriver(devices=2)))
    ranks = Ranks.of_process(devices, 0, 1, lambda record: [bytes(8), record])
    assert (ranks.rank, ranks.count) == (1, 2)
    with pytest.raises(ArgumentError, match=r"the ranks call themselves \[1, 1\]"):
        Ranks.of_process(devices, 0, 1, lambda record: [record, record])
    for wrong in (0, 2**31, 1.5, True):
        with pytest.raises(ArgumentError, match=f"timeout = {wrong}; it must be a whole number of milliseconds, 1 to"):
            Ranks.in_process(devices, [0, 1], timeout=wrong)
    first = np.int64(0)
    ranks = Ranks.of_process(devices, first, first, lambda record: [record], timeout=np.int32(99))
    assert [type(each) for each in (ranks.rank, ranks.device, ranks.timeout)] == [int] * 3
    with pytest.raises(ArgumentError, match="0 ranks"):
        Ranks.in_process(devices, [])


def test_no_pass_on_the_same_windows_comes_between_two_parts(ranked):
    (layer, _), fake = ranked(over(2, "choices"), tokens=100)
    given, backward_tensors, kept = tensors(layer, FORWARD), tensors(layer, BACKWARD), memory(layer)
    first, rest = layer.bind_backward(**backward_tensors, **kept).split("dx")
    forward = layer.bind_forward(**given, **kept)
    for _ in range(2):
        first(0)
        rest(0)
    for between in (forward, lambda stream: layer.backward(**backward_tensors, **kept, stream=stream)):
        first(0)
        between(0)
        fake.launches.clear()
        with pytest.raises(ArgumentError, match="came between the parts of this one, and other rows may lie there"):
            rest(0)
        assert not fake.launches
    apart = RankedLayer(layer._library, layer.record, ranks=layer.ranks, tokens=200)
    first(0)
    apart.forward(**tensors(apart, FORWARD), **memory(apart), stream=0)
    rest(0)
    layer.ranks.close()
