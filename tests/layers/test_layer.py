"""A layer on a fake driver: which kernels are launched on which memory, and what is refused."""

import copy
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from fusekit.errors import ArgumentError, DriverError, NotBuiltError
from fusekit.library import Library
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE, QUANTISE
from fusekit.plan.layer.record import unproved
from fusekit.plan.operations import OPERATIONS
from fusekit.runtime import Driver
from tests.layers.samples import library
from tests.plan.test_layer_program import CASES, options
from tests.plans import plan_of
from tests.runtime.samples import Torchlike
from tests.soak import sample

T = 40
TYPES = {"bf16": "torch.bfloat16", "f32": "torch.float32", "i32": "torch.int32", "e4m3": "torch.float8_e4m3fn"}
KEPT, SCRATCH = 0x7000_0000, 0x8000_0000


def opened(tmp_path, name="gpt-oss", **more):
    opened_library, fake = library(tmp_path / "store", options(**CASES[name] | more))
    return opened_library.layer("layers/moe"), fake


def tensors(layer, which, tokens=T):
    """What a pass is given, each tensor at an address of its own."""
    inputs, outputs = layer.arguments(which)
    dims = layer.dims(tokens)
    return {
        name: Torchlike(buffer.extents(dims), TYPES[buffer.dtype], 0x100_0000 * (number + 1))
        for number, (name, buffer) in enumerate((inputs | outputs).items())
    }


def memory(layer, tokens=T):
    sizes = layer.sizes(tokens)
    kept = Torchlike((sizes.kept,), "torch.uint8", KEPT)
    return {"kept": kept, "scratch": Torchlike((sizes.scratch,), "torch.uint8", SCRATCH)}


@pytest.mark.parametrize("name", sample(CASES, "gpt-oss", "fp8-gpt-oss-squares"))
@pytest.mark.parametrize(("bound", "in_place"), [(True, False), (False, False), (True, True), (False, True)])
def test_every_launch_is_given_the_memory_of_its_buffers(tmp_path, name, bound, in_place):
    layer, fake = opened(tmp_path, name)
    given, backward_tensors = tensors(layer, FORWARD), tensors(layer, BACKWARD)
    kept = memory(layer)
    if bound:
        forward = layer.bind_forward(**given, **kept)
        backward = layer.bind_backward(**backward_tensors, **kept, in_place=in_place)
        fake.launches.clear()
        forward(0)
        backward(0)
    else:
        layer.forward(**given, **kept, stream=0)
        layer.backward(**backward_tensors, **kept, in_place=in_place, stream=0)
    steps = [(FORWARD, step) for step in plan_of(layer).steps[FORWARD]]
    moved = plan_of(layer).needed(BACKWARD, layer.outputs(BACKWARD), in_place=in_place)
    steps += [(BACKWARD, step) for step in moved]
    assert len(fake.launches) == len(steps)
    dims = layer.dims(T)
    places = plan_of(layer).kept(dims)[0]
    for launch, (which, step) in zip(fake.launches, steps, strict=True):
        arguments = given if which == FORWARD else backward_tensors
        scratch, total = plan_of(layer).scratch(which, set(layer.outputs(which)), dims, in_place=in_place)
        names = {**step.reads, **step.writes}
        got = [int.from_bytes(each, "little") for each in launch.parameters]
        for address, argument in zip(got, sorted(names), strict=True):
            buffer = names[argument]
            if buffer in places:
                assert address == KEPT + places[buffer]
            elif buffer in scratch:
                home, begin = scratch[buffer]
                assert address == ({"scratch": SCRATCH, "kept": KEPT}.get(home) or arguments[home].address) + begin
                assert home != "scratch" or begin < total
            else:
                assert address == arguments[buffer].address


@pytest.mark.parametrize("bound", [True, False])
def test_gemms_hold_back_the_clusters_of_a_margin(tmp_path, bound):
    layer, fake = opened(tmp_path)
    backward_tensors = tensors(layer, BACKWARD) | memory(layer)
    given = {which: tensors(layer, which) | memory(layer) for which in (FORWARD, INFERENCE)}
    given[INFERENCE].pop("kept")
    for margin, blocks in ((None, 132), (8, 124), (0, 132), (131, 1)):
        fake.launches.clear()
        for which in (FORWARD, INFERENCE, BACKWARD):
            arguments = backward_tensors if which == BACKWARD else given[which]
            if bound:
                bind = layer.bind_backward if which == BACKWARD else layer.bind_forward
                bind(**arguments, cluster_margin=margin)(0)
            else:
                (layer.backward if which == BACKWARD else layer.forward)(**arguments, stream=0, cluster_margin=margin)
        steps = [step for which in (FORWARD, INFERENCE, BACKWARD) for step in plan_of(layer).steps[which]]
        gemms = [OPERATIONS[plan_of(layer).parts[step.part]["op"]].gemm for step in steps]
        assert [launch.grid[0] for launch in fake.launches] == [blocks if gemm else 1 for gemm in gemms]
        assert any(gemms) and not all(gemms)
    fake.launches.clear()
    with pytest.raises(ArgumentError, match="cluster_margin is -1"):
        layer.forward(**given[FORWARD], stream=0, cluster_margin=-1)
    assert not fake.launches


@pytest.mark.parametrize("bound", [True, False])
def test_gemms_are_as_wide_as_the_stream_or_as_the_caller_says(tmp_path, bound):
    layer, fake = opened(tmp_path)
    given = {which: tensors(layer, which) | memory(layer) for which in (FORWARD, BACKWARD)}
    fake.greens[70] = 64
    for stream, count, blocks in ((9, None, 132), (70, None, 64), (70, 20, 20), (0, None, 132), (0, 20, 20)):
        fake.launches.clear()
        if bound:
            layer.bind_forward(**given[FORWARD], sm_count=count)(stream)
            layer.bind_backward(**given[BACKWARD], sm_count=count)(stream)
        else:
            layer.forward(**given[FORWARD], stream=stream, sm_count=count)
            layer.backward(**given[BACKWARD], stream=stream, sm_count=count)
        assert {launch.grid[0] for launch in fake.launches} == {1, blocks}
    with pytest.raises(ArgumentError, match="sm_count is 133"):
        layer.forward(**given[FORWARD], sm_count=133)


@pytest.mark.parametrize("name", sample(CASES, "gpt-oss", "deepseek", "fp8-gpt-oss-squares"))
def test_a_pass_is_split_where_an_output_is_there(tmp_path, name):
    layer, fake = opened(tmp_path, name)
    backward = layer.bind_backward(**tensors(layer, BACKWARD), **memory(layer))
    steps = plan_of(layer).steps[BACKWARD]
    for output in layer.outputs(BACKWARD):
        first, rest = backward.split(output)
        assert (*first.launches, *rest.launches) == backward.launches
        assert output in steps[len(first.launches) - 1].writes.values()
        assert all(output not in step.writes.values() for step in steps[len(first.launches) :])
    first, rest = backward.split("dx")
    assert {"dw1", "dw2"} <= {each for step in steps[len(first.launches) :] for each in step.writes.values()}
    again = rest.split("dw2")
    assert (*again[0].launches, *again[1].launches) == rest.launches
    fake.launches.clear()
    first(0)
    assert len(fake.launches) == len(first.launches)
    with pytest.raises(ArgumentError, match="the pass does not write dx; its outputs are d"):
        rest.split("dx")


def test_passes_are_nvtx_ranges(tmp_path, monkeypatch):
    opened_library, fake = library(tmp_path / "store", options(**CASES["gpt-oss"]))
    names = []

    @contextmanager
    def annotate(name, domain):
        names.append(name)
        yield
        names.append("end")

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    opened_library._driver = Driver(fake, nvtx=True)
    layer = opened_library.layer("layers/moe")
    layer.forward(**tensors(layer, FORWARD), **memory(layer), stream=7)
    assert names[0] == "layers/moe forward"
    assert names[1::2] == [f"{layer.kernel_name(step.part, T)}" for step in plan_of(layer).steps[FORWARD]] + ["end"]
    names.clear()
    for part in layer.bind_backward(**tensors(layer, BACKWARD), **memory(layer)).split("dx"):
        part(7)
    assert names.count("layers/moe backward") == 2
    assert names[-1] == "end"


def test_without_kept_memory_nothing_is_kept(tmp_path):
    layer, fake = opened(tmp_path)
    given = tensors(layer, INFERENCE)
    layer.bind_forward(**given, scratch=memory(layer)["scratch"])(0)
    assert all(KEPT not in [int.from_bytes(each, "little") for each in launch.parameters] for launch in fake.launches)
    assert len(fake.launches) == len(plan_of(layer).steps[INFERENCE])


def test_a_layer_for_inference_refuses_a_backward_pass(tmp_path):
    layer, fake = opened(tmp_path, keep="none")
    sizes = layer.sizes(T)
    assert (sizes.kept, sizes.backward) == (0, 0) and sizes.scratch == sizes.inference
    given = tensors(layer, INFERENCE)
    scratch = Torchlike((sizes.scratch,), "torch.uint8", SCRATCH)
    layer.bind_forward(**given, scratch=scratch)(0)
    layer.load()
    assert fake.loaded == len(plan_of(layer).parts) == len(plan_of(layer).steps[INFERENCE])
    rule = (
        r'layers/moe was built for inference alone \(keep = "none"\) and has no backward pass; build it with keep = "z"'
    )
    with pytest.raises(ArgumentError, match=rule):
        layer.bind_backward(dy=given["x"], x=given["x"], kept=scratch, scratch=scratch)
    with pytest.raises(ArgumentError, match=rule):
        layer.sizes(T, gradients=["dx"])


def test_a_gradient_that_is_not_asked_for_is_not_computed(tmp_path):
    layer, fake = opened(tmp_path)
    given = tensors(layer, BACKWARD)
    wanted = {name: tensor for name, tensor in given.items() if name in layer.inputs(BACKWARD) or name == "dx"}
    layer.bind_backward(**wanted, **memory(layer))(0)
    assert len(fake.launches) == len(plan_of(layer).needed(BACKWARD, ["dx"])) < len(plan_of(layer).steps[BACKWARD])
    assert layer.sizes(T, gradients=["dx"]).backward <= layer.sizes(T).backward


def test_kernels_are_loaded_once(tmp_path):
    """Those of a copy are the layer's own: a copied module holds one."""
    layer, fake = opened(tmp_path)
    layer.load(T)
    assert copy.deepcopy({"layer": layer})["layer"] is layer
    loaded = fake.loaded
    assert loaded == len(plan_of(layer).parts)
    layer.bind_forward(**tensors(layer, FORWARD), **memory(layer))
    layer.bind_forward(**tensors(layer, FORWARD, 7), **memory(layer, 7))
    assert fake.loaded == loaded


def test_a_new_number_of_tokens_reads_nothing_of_the_store_and_no_record_again(tmp_path, monkeypatch):
    layer, _ = opened(tmp_path)

    def passes(tokens):
        layer.bind_forward(**tensors(layer, FORWARD, tokens), **memory(layer, tokens))
        layer.bind_backward(**tensors(layer, BACKWARD, tokens), **memory(layer, tokens))

    passes(T)
    for name in ("names", "listing", "variants", "find_name", "load"):
        monkeypatch.setattr(layer._library.store, name, None)
    monkeypatch.setattr("fusekit.abi.record.check", None)
    passes(T + 3)
    with pytest.raises(TypeError):
        layer._library.find("layers/moe.fc2")


def test_kernels_are_made_ready_on_devices_before_a_capture(tmp_path):
    layer, fake = opened(tmp_path)
    fake.devices = layer._library.devices.count = 2
    layer.load(T, devices=[1])
    assert {device for _, device in fake.settings} == {0, 1} and fake.loaded == len(plan_of(layer).parts)
    fake.cuCtxPushCurrent(1001)
    fake.cuStreamBeginCapture(77, "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL")
    there = {**tensors(layer, FORWARD), **memory(layer)}
    layer.bind_forward(**{name: replace(tensor, device=1) for name, tensor in there.items()})
    assert fake.cuStreamEndCapture(77)[1] == "graph"


@pytest.mark.parametrize("name", ["w2", "b2", "y"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda it: replace(it, address=it.address + 2), "must begin at a multiple of"),
        (lambda it: replace(it, address=0), "null address"),
        (lambda it: replace(it, device=1), "is on device"),
        (lambda it: replace(it, strides=(*it.stride()[:-1], 2)), "has stride 2 at dim"),
    ],
)
def test_nothing_of_a_pass_is_queued_where_a_later_kernel_refuses(tmp_path, name, change, text):
    layer, fake = opened(tmp_path)
    given = tensors(layer, FORWARD) | memory(layer)
    with pytest.raises(ArgumentError, match=text):
        layer.forward(**given | {name: change(given[name])}, stream=7)
    assert not fake.launches
    layer.forward(**given, stream=7)
    assert len(fake.launches) == len(plan_of(layer).steps[FORWARD])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bias": Torchlike((1,))}, "has no bias; its inputs are x, router"),
        ({"w1": Torchlike((8, 16, 23))}, r"w1 is bf16 \[8, 16, 23\]; for 40 tokens it must be bf16 \[8, 16, 24\]"),
        ({"x": Torchlike((T, 24), "torch.float32")}, r"x is f32 \[40, 24\]; for 40 tokens it must be bf16"),
        ({"w2": None}, r"the forward pass needs w2, too; give w2 \[8, 24, 8\]"),
        ({"x": None}, "x is missing, whose rows are the tokens"),
        ({"kept": Torchlike((10,), "torch.uint8", KEPT)}, "kept is 10 bytes .*it must be [0-9]+ contiguous bytes"),
        ({"scratch": Torchlike((1 << 20,), "torch.uint8", SCRATCH + 16)}, "at a multiple of 128"),
        ({"scratch": None}, "scratch is missing; give [0-9]+ bytes on device 0"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(tmp_path, change, text):
    layer, fake = opened(tmp_path)
    given = tensors(layer, FORWARD) | memory(layer) | change
    with pytest.raises(ArgumentError, match=text):
        layer.bind_forward(**given)
    assert not fake.launches


def test_fp8_values_of_weights_are_made_by_a_pass_of_their_own(tmp_path):
    layer, fake = opened(tmp_path, "fp8-deepseek")
    fp8, given = tensors(layer, QUANTISE), tensors(layer, FORWARD)
    assert {*layer.inputs(QUANTISE)} == {"w1", "w2", "shared_w1", "shared_w2"}
    assert {"w1_q", "w1_s", "shared_w2_q", "shared_w2_s"} <= {*given} and "w1" not in given
    assert {"w1_t", "w1_ts", "shared_w2_t"} <= {*layer.inputs(BACKWARD)} and "w1_q" not in layer.inputs(BACKWARD)
    sizes = {each.dtype: 0 for each in layer.outputs(QUANTISE).values()}
    for each in layer.outputs(QUANTISE).values():
        sizes[each.dtype] += each.bytes({})
    assert sizes["e4m3"] == 2 * sum(each.bytes({}) // 2 for each in layer.inputs(QUANTISE).values())
    assert layer.sizes(T).fp8_weights == sum(sizes.values())
    bound = layer.bind_quantise(**fp8)
    assert len(bound.launches) == 4 and not fake.launches
    bound(0)
    layer.quantise(**fp8, stream=0)
    assert len(fake.launches) == 8
    addresses = {int.from_bytes(each, "little") for launch in fake.launches for each in launch.parameters}
    assert addresses == {tensor.address for tensor in fp8.values()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"w1_s": None}, r"the quantise pass needs w1_s, too; give w1_s \[8, 3, 2\]"),
        ({"w2": None}, r"needs w2, too; give w2 \[8, 144, 192\]"),
        ({"w2_t": Torchlike((8, 192, 143), "torch.float8_e4m3fn")}, r"; it must be e4m3 \[8, 192, 144\]"),
        ({f"{w}_{end}": None for w in ("w1", "w2") for end in ("q", "s", "t", "ts")}, "no FP8 output is given"),
        ({"x": Torchlike((8, 144))}, "the quantise pass has no x"),
    ],
)  # fmt: skip
def test_fp8_values_that_do_not_fit_are_refused_in_words(tmp_path, change, text):
    layer, fake = opened(tmp_path, "fp8")
    with pytest.raises(ArgumentError, match=text):
        layer.bind_quantise(**tensors(layer, QUANTISE) | change)
    assert not fake.launches


def test_a_layer_without_a_recipe_quantises_nothing(tmp_path):
    layer, _ = opened(tmp_path)
    assert layer.inputs(QUANTISE) == {} and layer.sizes(T).fp8_weights == 0
    with pytest.raises(ArgumentError, match="has no recipe"):
        layer.bind_quantise(w1=Torchlike((8, 16, 24)))


def test_a_pass_that_is_none_is_named(tmp_path):
    layer, _ = opened(tmp_path)
    for ask in (layer.inputs, layer.outputs):
        with pytest.raises(
            ArgumentError, match="no pass 'forwards'; the passes are forward, inference, backward, quantise"
        ):
            ask("forwards")


@pytest.mark.parametrize("gradients", [5, "dx", [5], ["dx", 5], ["x"], ["w1"], ["y"], [[]]])
def test_gradients_that_are_none_are_named(tmp_path, gradients):
    """An input is no gradient: a pass without outputs needs no memory, and sizes of it would be too small."""
    layer, _ = opened(tmp_path)
    with pytest.raises(ArgumentError, match=r"gradients = .*; it must be a list of outputs .*, such as \['.*'\]; they"):
        layer.sizes(T, gradients)
    assert layer.sizes(T, {"dx"}) == layer.sizes(T, ["dx"]) == layer.sizes(T, iter(["dx"]))


def test_kept_memory_that_is_left_out_is_named(tmp_path):
    """As any other argument of a pass."""
    layer, fake = opened(tmp_path)
    given = tensors(layer, BACKWARD) | memory(layer)
    del given["kept"]
    for call in (layer.backward, layer.bind_backward):
        with pytest.raises(ArgumentError, match=r"kept is missing; give [0-9]+ bytes on device 0"):
            call(**given)
    assert not fake.launches


def test_parts_and_devices_that_are_none_are_named(tmp_path):
    layer, fake = opened(tmp_path)
    with pytest.raises(ArgumentError, match=r"layers/moe has no part 'fc3'; its parts are .*fc1"):
        layer.kernel_name("fc3", T)
    with pytest.raises(ArgumentError, match=r"tokens = 4\.0"):
        layer.kernel_name("fc2", 4.0)
    for devices, text in ((1, r"devices = 1; it must be ordinals, such as \[0, 1\]"), ([0.0], r"device is 0\.0; it")):
        with pytest.raises(ArgumentError, match=text):
            layer.load(T, devices=devices)
    for device in (0.0, False, "0"):  # 0.0 and False are equal to 0, and so would the layers be
        with pytest.raises(ArgumentError, match=r"device is .*; it must be the ordinal of a GPU"):
            layer._library.layer("layers/moe", device=device)
    assert not fake.loaded


def test_kernel_names_need_no_driver(tmp_path, monkeypatch):
    def missing(**_):
        raise DriverError("no NVIDIA driver")

    with_driver, _ = opened(tmp_path)
    monkeypatch.setattr("fusekit.library.Driver", missing)
    layer = Library(with_driver._library.store).layer("layers/moe")
    for part in plan_of(layer).parts:
        assert layer.kernel_name(part, T) == with_driver.kernel_name(part, T)


def test_a_part_whose_bits_follow_its_tile_has_one_variant_for_any_number_of_tokens():
    """The layer scales outputs by the router's weights, so fc2-dgrad has sums over a tile's columns."""
    o = options(**CASES[next(name for name in CASES if options(**CASES[name]).router.get("scale") == "output")])
    record = unproved(o, "sm_90a", lambda part, tokens: f"{part} of {min(tokens, 4096)}")
    assert record.parts["fc2-dgrad"] == ((None, f"fc2-dgrad of {min(o.tokens, 4096)}"),)
    assert record.parts["fc1-fwd"][0] == (1, "fc1-fwd of 1") and len(record.parts["fc1-fwd"]) > 4


def test_a_layer_that_is_not_there(tmp_path):
    opened_library, _ = library(tmp_path / "store", options())
    with pytest.raises(NotBuiltError, match="layers/other"):
        opened_library.layer("layers/other")


def test_sizes_load_nothing_and_grow_with_tokens(tmp_path):
    layer, fake = opened(tmp_path)
    small, large = layer.sizes(1), layer.sizes(1000)
    assert small.kept < large.kept and small.scratch < large.scratch and not fake.loaded
    assert layer.sizes(np.int64(1000)) == large
    for wrong in (-1, np.int64(-1), 1.0, True):
        with pytest.raises(ArgumentError, match=r"tokens = .*; it must be a whole number, 0 or more"):
            layer.sizes(wrong)


@pytest.mark.parametrize(
    ("which", "output", "other"), [(FORWARD, "y", "x"), (BACKWARD, "dx", "dy"), (BACKWARD, "dw1", "dw2")]
)
def test_an_output_has_memory_of_its_own(tmp_path, which, output, other):
    """Until it is written it may serve as scratch memory."""
    layer, fake = opened(tmp_path)
    given = tensors(layer, which)
    call = layer.forward if which == FORWARD else layer.backward
    given[output] = replace(given[output], address=given[other].address + 64)
    with pytest.raises(
        ArgumentError, match=rf"the output ({output}|{other}) shares memory with ({output}|{other}); give"
    ):
        call(**given, **memory(layer), stream=0)
    assert not fake.launches


@pytest.mark.parametrize("more", [{"activation": {"kind": "geglu"}}, {"accumulate": True}])
def test_a_layer_that_is_open_keeps_its_record(tmp_path, monkeypatch, more):
    layer, _ = opened(tmp_path, "llama4")
    kept = memory(layer)
    layer.bind_forward(**tensors(layer, FORWARD), **kept)
    edited, _ = opened(tmp_path, "llama4", **more)
    assert edited.record.key != layer.record.key
    loaded, load = [], layer._library.load_key
    monkeypatch.setattr(
        layer._library, "load_key", lambda kernel, key, *rest: loaded.append(key) or load(kernel, key, *rest)
    )
    layer.bind_backward(**tensors(layer, BACKWARD), **kept)
    assert loaded and layer.record.kernels.keys() >= {*loaded}


def test_all_layers_and_one_are_of_the_same_table(tmp_path):
    """A table that was edited has left kernels behind; of one for inference there are fewer than before."""
    opened(tmp_path, "llama4")
    changed = {"keep": "none", "activation": {"kind": "geglu"}}
    opened_library, _ = library(tmp_path / "store", options(**CASES["llama4"] | changed))
    assert opened_library.layers()["layers/moe"] == opened_library.layer("layers/moe").options
    assert opened_library.layer("layers/moe").options.keep == "none"


def test_the_stride_of_one_token_says_nothing(tmp_path):
    """An output of one row is contiguous, whatever its row stride, and lends its memory."""
    layer, fake = opened(tmp_path, "plain")
    given, sizes = tensors(layer, BACKWARD, 1), layer.sizes(1, gradients=[*layer.outputs(BACKWARD)])
    more = memory(layer, 1) | {"scratch": Torchlike((sizes.backward,), "torch.uint8", SCRATCH)}
    launches = []
    for dx in (given["dx"], replace(given["dx"], strides=(given["dx"].shape[1] + 64, 1))):
        fake.launches.clear()
        layer.bind_backward(**{**given, "dx": dx}, **more)(0)
        launches.append([launch.parameters for launch in fake.launches])
    assert launches[0] == launches[1]
