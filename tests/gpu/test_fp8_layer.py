"""Layers with a recipe on the GPU: against the definition, FP8 values bit for bit, the same bits, graphs, hard batches.

fusekit --store STORE build tests/gpu/fp8-layers.toml      on any machine
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_fp8_layer.py
"""

from dataclasses import replace

import numpy as np
import pytest

from fusekit import reference
from fusekit.bench.layer_tensors import definitions
from fusekit.bench.layer_trial import LayerTrial
from fusekit.bench.replay import Replay
from fusekit.bench.timing import own_stream
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE, QUANTISE
from fusekit.reference import layer as definition
from fusekit.spec import Activation
from tests.layers import blocks_of_te
from tests.plans import plan_of

NAMES = (
    "qwen3",
    "gpt-oss",
    "interleaved",
    "deepseek",
    "qwen3-next",
    "llama4",
    "choices",
    "mlp",
    "masters",
    "squares",
    "squares-of-dy",
    "qwen3-recompute",
    "gpt-oss-recompute",
    "masters-recompute",
)


@pytest.fixture(scope="module")
def layers(opened):
    if not opened.store.names("fp8-layers/*"):
        pytest.skip(f"no kernels of fp8-layers in {opened}; build tests/gpu/fp8-layers.toml there and name the store")
    return opened


@pytest.fixture
def trial(layers):
    trials = []

    def make(name, tokens, seed=3):
        trials.append(LayerTrial(layers, layers.layer(f"fp8-layers/{name}"), tokens, seed))
        return trials[-1]

    yield make
    for item in trials:
        item.close()


def bits(trial, name):
    return np.frombuffer(trial.arrays[name].download(), np.uint8)


def place(trial, name, values):
    """Other numbers into an input of the layer's dtype, for the launches and for the definition."""
    block = reference.encode(np.asarray(values, np.float64), "bf16").reshape(-1)
    trial.tensors[name] = replace(trial.tensors[name], block=block)
    trial.tensors[name].place(trial.arrays[name])


def run(trial, *passes):
    """Queues passes one after the other, and waits."""
    bound = [trial.bind(which) for which in passes]
    with own_stream(trial.devices, trial.device) as stream:
        for item in bound:
            item(stream)
        trial._wait(stream)


@pytest.mark.parametrize("tokens", [1, 127, 256, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_its_definition(trial, name, tokens):
    one = trial(name, tokens)
    one.launch()
    verdict, _ = one.check()
    assert verdict.ok, "\n".join(verdict.problems)


def test_errors_are_not_above_those_of_transformer_engines_recipe(trial):
    """Against float64 of the numbers that FP8 values are made of."""
    one = trial("choices", 1000)
    one.launch()
    tensors = definitions(
        one.options, {name: tensor for name, tensor in one.tensors.items() if name not in one.outputs}
    )
    tensors |= {name: np.stack([tensors[name][index] for index in range(one.options.experts)]) for name in ("w1", "w2")}
    tensors["router"] = np.zeros((one.options.experts, one.options.hidden))
    keys = {"op": "router-topk", "experts": one.options.experts, "topk": one.options.topk, "dtype": "f32",
            "out_dtype": "f32", "outputs": "compact", "routing_map": "none", "score_function": "softmax",
            "pre_softmax": False, "expert_bias": False, "num_groups": 0, "group_topk": 0,
            "scaling_factor": 1.0}  # fmt: skip
    meant = definition.Layer(keys, Activation(**one.options.activation), one.options.glu_layout)
    x, dy = (one.tensors[name].whole() for name in ("x", "dy"))
    choices = one.tensors["indices"].whole().astype(np.int64), one.tensors["weights"].whole()
    y, _, kept = definition.forward(meant, x, tensors, choices)
    back = definition.backward(meant, tensors, kept, dy)
    exact = {"y": y, "dx": back["x"], "dw1": back["w1"], "dw2": back["w2"]}
    yardstick = blocks_of_te.layer(meant.activation, meant.glu_layout, tensors, kept, dy)
    off = {}
    for name, want in exact.items():
        actual = np.frombuffer(one.arrays[name].download(), np.uint16).reshape(want.shape)
        actual = reference.decode(actual, "bf16").astype(np.float64)
        off[name] = blocks_of_te.error(actual, want), blocks_of_te.error(yardstick[name], want)
    print({name: tuple(f"{item:.4f}" for item in both) for name, both in off.items()})  # noqa: T201 - of the page
    assert all(ours <= 1.03 * theirs for ours, theirs in off.values()), off


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(trial, name):
    one = trial(name, 0)
    run(one, QUANTISE, INFERENCE, FORWARD, BACKWARD)
    if not one.options.accumulate:
        assert not bits(one, "dw1").any()


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek", "mlp", "masters"])
def test_fp8_values_of_weights_are_the_references_bit_for_bit(trial, name):
    one = trial(name, 1)
    run(one, QUANTISE)
    buffers = plan_of(one.layer).buffers
    for weight in one.layer.inputs(QUANTISE):
        shape, dtype = buffers[weight].shape, buffers[weight].dtype
        keys = {"op": "quantise", "out": "fp8-block", "blocks": "128x128", "scales": "pow2", "transpose": True,
                "groups": len(shape) == 3, "dtype": dtype}  # fmt: skip
        given = {"w": np.frombuffer(one.arrays[weight].download(), reference.held(dtype)).reshape(shape)}
        got = {
            f"w_{end}": np.frombuffer(one.arrays[f"{weight}_{end}"].download(), kind).reshape(
                buffers[f"{weight}_{end}"].shape
            )
            for end, kind in (("q", np.uint8), ("s", np.float32), ("t", np.uint8), ("ts", np.float32))
        }
        assert reference.quantise_check(keys, given, got) == []


@pytest.mark.parametrize("tokens", [1, 300, 1000])
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "masters"])
def test_fp8_weights_that_the_backward_pass_makes_give_the_same_bits(trial, name, tokens):
    """With all outputs, in whose memory they lie; and for dx alone, in scratch memory."""
    kept, again = trial(name, tokens), trial(f"{name}-recompute", tokens)
    assert not again.layer.inputs(BACKWARD).keys() & again.layer.outputs(QUANTISE).keys()
    for one in (kept, again):
        run(one, QUANTISE, FORWARD, BACKWARD)
    assert {*kept.outputs} == {*again.outputs}
    for item in again.outputs:
        assert np.array_equal(bits(again, item), bits(kept, item)), item
    dx = bits(again, "dx").copy()
    again.arrays["dx"].fill(0xFF)
    again.arrays["scratch"].fill(0xFF)
    given = {name: again.arrays[name] for name in (*again.layer.inputs(BACKWARD), "dx", "kept", "scratch")}
    bound = again.layer.bind_backward(**given)
    with own_stream(again.devices, again.device) as stream:
        bound(stream)
        again._wait(stream)
    assert np.array_equal(bits(again, "dx"), dx)


def test_float32_weights_give_the_bits_of_their_rounding(trial):
    """y and dx, and the gradients of the weights in float32: the same with weights that bf16 holds."""
    one = trial("masters", 300)
    outputs = ("y", "dx", "dw1", "dw2", "dshared_w1", "dshared_w2")
    run(one, QUANTISE, FORWARD, BACKWARD)
    wide = {output: bits(one, output).copy() for output in outputs}
    for name in one.layer.inputs(QUANTISE):
        block = one.tensors[name].block
        rounded = reference.decode(reference.encode(block, "bf16"), "bf16")
        assert one.tensors[name].dtype == "f32" and (rounded != block).any()
        one.tensors[name] = replace(one.tensors[name], block=rounded)
        one.tensors[name].place(one.arrays[name])
    run(one, QUANTISE, FORWARD, BACKWARD)
    for item in outputs:
        assert np.array_equal(bits(one, item), wide[item]), item


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_and_a_graph_give_the_same_bits(trial, name):
    one = trial(name, 600)
    outputs = [
        output for output in one.outputs if not (one.options.accumulate and output.startswith(("dw", "dshared", "dr")))
    ]
    run(one, QUANTISE, FORWARD, BACKWARD)
    first = {output: bits(one, output).copy() for output in outputs}
    one.arrays["scratch"].fill(0xFF)
    one.devices.synchronize(one.device)
    run(one, FORWARD, BACKWARD)
    for item in outputs:
        assert np.array_equal(bits(one, item), first[item]), item
    forward, backward = one.bind(FORWARD), one.bind(BACKWARD)
    with own_stream(one.devices, one.device) as stream:
        graph = Replay(one.devices, [forward, backward], 2, stream)
        one._wait(stream)
        x = one.tensors["x"].whole()
        place(one, "x", x[::-1])  # other tokens in the same graph
        one.devices.synchronize(one.device)
        graph(stream)
        one._wait(stream)
        graph.close()
    replayed = {output: bits(one, output).copy() for output in outputs}
    run(one, FORWARD, BACKWARD)
    for entry in outputs:
        assert np.array_equal(bits(one, entry), replayed[entry]), entry
    assert not np.array_equal(replayed["y"], first["y"])


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "deepseek", "mlp"])
def test_a_token_has_the_same_bits_in_another_batch(trial, name):
    many, few = trial(name, 700), trial(name, 90)
    x = many.tensors["x"].whole()
    place(few, "x", x[300:390])
    for one in (many, few):
        run(one, QUANTISE, INFERENCE)
    whole = np.frombuffer(many.arrays["y"].download(), np.uint16).reshape(700, -1)
    part = np.frombuffer(few.arrays["y"].download(), np.uint16).reshape(90, -1)
    assert np.array_equal(part, whole[300:390])


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_equal_logits_leave_experts_without_tokens(trial, name):
    """All tokens go to the first experts: groups of 0 and of all rows."""
    one = trial(name, 300)
    place(one, "router", np.zeros(one.arrays["router"].shape))
    if "router_bias" in one.tensors:
        place(one, "router_bias", np.zeros(one.arrays["router_bias"].shape))
    one.launch()
    verdict, _ = one.check()
    wrong = [line for line in verdict.problems if "drouter" not in line]  # the gradient of equal weights is near 0
    assert not wrong, "\n".join(wrong)
    unused = bits(one, "dw1").reshape(one.options.experts, -1)[one.options.topk :]
    assert not unused.any()


@pytest.mark.parametrize("name", ["qwen3", "mlp"])
def test_a_nan_stays_with_its_token(trial, name):
    one = trial(name, 200)
    run(one, QUANTISE, FORWARD, BACKWARD)
    clean = {item: np.frombuffer(one.arrays[item].download(), np.uint16).reshape(200, -1) for item in ("y", "dx")}
    x = one.tensors["x"].whole()
    x[77, 5] = np.nan
    place(one, "x", x)
    run(one, FORWARD, BACKWARD)
    others = np.arange(200) != 77
    for entry, before in clean.items():
        after = np.frombuffer(one.arrays[entry].download(), np.uint16).reshape(200, -1)
        assert np.array_equal(after[others], before[others]), entry
    y = reference.decode(np.frombuffer(one.arrays["y"].download(), np.uint16).reshape(200, -1)[77], "bf16")
    assert np.isnan(y).all()
