"""A layer's program, run formula by formula, against the definition; its memory; what a call leaves out."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH
from fusekit.plan.layer import program
from fusekit.plan.layer.options import ROUTER_FIELDS, Options
from fusekit.plan.layer.program import BACKWARD, FORWARD, INFERENCE, QUANTISE
from fusekit.plan.layer.record import pinned
from fusekit.plan.operations import OPERATIONS
from fusekit.reference import layer as definition
from fusekit.spec import Activation
from tests.soak import sample

from . import layer_meaning
from .layer_memory import apart_in_memory

H, I, J, X, K, T = 24, 8, 16, 8, 3, 7  # noqa: E741 - the field's own names
WIDE = {"hidden": 144, "intermediate": 192, "tokens": 400}  # blocks of 128, and what is left of them
CASES = {
    "plain": {"activation": {"kind": "silu"}},
    "gpt-oss": {"bias": True, "activation": {"kind": "swiglu", "alpha": 1.702, "limit": 0.9, "up_offset": 1.0},
                "glu_layout": "interleaved", "router": {"bias": True}},
    "gpt-oss-as-stored": {"bias": True, "b_major": "n", "glu_layout": "interleaved", "router": {"bias": True}},
    "deepseek": {"shared": J, "router": {"score_function": "sigmoid", "expert_bias": True, "num_groups": 4,
                                         "group_topk": 3, "scaling_factor": 2.5, "aux_loss": True}},
    "router-f32": {"router": {"bias": True, "weight_dtype": "f32"}},
    "qwen2-moe": {"shared": J, "shared_gate": True, "router": {"pre_softmax": True}},
    "residual": {"shared": J, "residual": True},
    "recompute-gate": {"keep": "x", "shared": J, "shared_gate": True, "activation": {"kind": "silu"}},
    "llama4": {"shared": J, "router": {"score_function": "sigmoid", "scale": "input"}},
    "llama4-choices": {"router": {"scale": "input", "input": "choices"}},
    "recompute": {"keep": "x", "bias": True, "shared": J},
    "recompute-scaled-input": {"keep": "x", "router": {"scale": "input", "pre_softmax": True}},
    "logits": {"router": {"input": "logits", "aux_loss": True}},
    "choices": {"bias": True, "router": {"input": "choices"}},
    "mlp": {"kind": "mlp", "bias": True},
    "mlp-as-stored": {"kind": "mlp", "b_major": "n", "activation": {"kind": "gelu"}, "keep": "x"},
    "fp8": {"recipe": "fp8-block", **WIDE},
    "fp8-gpt-oss": {"recipe": "fp8-block", **WIDE, "bias": True, "b_major": "n", "glu_layout": "interleaved",
                    "router": {"bias": True}},
    "fp8-deepseek": {"recipe": "fp8-block", **WIDE, "shared": 64, "router": {"score_function": "sigmoid",
                     "expert_bias": True, "num_groups": 4, "group_topk": 3, "aux_loss": True}},
    "fp8-llama4": {"recipe": "fp8-block", **WIDE, "shared": 64, "keep": "x", "router": {"scale": "input"},
                   "activation": {"kind": "silu"}},
    "fp8-choices": {"recipe": "fp8-block", **WIDE, "intermediate": 256, "keep": "x", "router": {"input": "choices"}},
    "fp8-squares": {"recipe": "fp8-block", **WIDE, "x_blocks": "128x128", "shared": 64},
    "fp8-gpt-oss-squares": {"recipe": "fp8-block", **WIDE, "x_blocks": "128x128", "bias": True, "b_major": "n",
                            "glu_layout": "interleaved", "router": {"bias": True}, "shared": 64},
    "fp8-llama4-squares": {"recipe": "fp8-block", **WIDE, "x_blocks": "128x128", "keep": "x",
                           "router": {"scale": "input"}},
    "fp8-mlp-squares": {"recipe": "fp8-block", **WIDE, "kind": "mlp", "x_blocks": "128x128"},
    "fp8-gate": {"recipe": "fp8-block", **WIDE, "shared": 64, "shared_gate": True},
    "fp8-masters": {"recipe": "fp8-block", **WIDE, "shared": 64, "weight_dtype": "f32"},
    "fp8-interleaved": {"recipe": "fp8-block", **WIDE, "glu_layout": "interleaved"},
    "fp8-recompute": {"recipe": "fp8-block", **WIDE, "shared": 64, "recompute_fp8": True},
    "fp8-recompute-as-stored": {"recipe": "fp8-block", **WIDE, "bias": True, "b_major": "n",
                                "glu_layout": "interleaved", "router": {"bias": True}, "recompute_fp8": True},
    "fp8-mlp": {"recipe": "fp8-block", **WIDE, "kind": "mlp"},
    "fp8-mlp-as-stored": {"recipe": "fp8-block", **WIDE, "kind": "mlp", "b_major": "n", "keep": "x",
                          "activation": {"kind": "gelu"}},
}  # fmt: skip
SERVED = {"keep": "none", "bias": True, "shared": J, "router": {"input": "choices"}}
FEW = 64 // K  # tokens whose choices fc1 of a layer for inference puts in order itself
PLAIN = [name for name, said in CASES.items() if "recipe" not in said]  # whose results are those of plain formulas


def options(**message):
    """The options of a layer; said: what differs from the plainest one."""
    activation = message.get("activation", {"kind": "swiglu"})
    gated = activation["kind"].endswith("glu")
    values = {
        "file": "layers", "name": "moe", "kind": "moe", "dtype": "bf16", "hidden": H, "intermediate": I, "experts": X,
        "topk": K, "bias": False, "b_major": "k", "shared": 0, "keep": "z", "grad_dtype": "f32", "accumulate": False,
        "tokens": T, "glu_layout": "concat" if gated else "none", **message, "activation": activation,
    }  # fmt: skip
    if values["kind"] == "mlp":
        return Options(**values | {"experts": 0, "topk": 0, "router": {}})
    router = {key.name: key.default for key in ROUTER_FIELDS} | message.get("router", {})
    return Options(**values | {"router": router})


def test_launches_of_training_begin_in_their_turn():
    assert not any("pdl" in keys for keys in program(options()).parts.values())


def tensors_of(plan, rng):
    """Every parameter, as the layer's buffers have them."""
    names = {name[1:] for name in plan.arguments(BACKWARD)[1] if name not in ("dx", "dlogits", "dweights")}
    result = {name: rng.standard_normal(plan.buffers[name].shape) for name in sorted(names)}
    if "expert_bias" in plan.buffers:
        result["expert_bias"] = rng.standard_normal(X)
    return result


def defined(o, tensors):
    """The layer and its tensors in the terms of the definition; an mlp is a layer of one expert."""
    tensors = dict(tensors)
    if o.kind == "mlp":
        tensors = {name: tensor[None] for name, tensor in tensors.items()} | {"router": np.zeros((1, o.hidden))}
    if o.b_major == "n":
        tensors |= {name: tensors[name].transpose(0, 2, 1) for name in ("w1", "w2")}
    keys = {"op": "router-topk", "experts": max(o.experts, 1), "topk": max(o.topk, 1), "score_function": "softmax"}
    keys |= {
        "dtype": "f32",
        "out_dtype": "f32",
        "outputs": "compact",
        "routing_map": "none",
        "pre_softmax": False,
        "expert_bias": False,
        "num_groups": 0,
        "group_topk": 0,
        "scaling_factor": 1.0,
    }
    keys |= {name: o.router[name] for name in keys if name in o.router}
    aux = 0.25 if o.router.get("aux_loss") else None
    scale = o.router.get("scale", "output")
    layer = definition.Layer(keys, Activation(**o.activation), o.glu_layout, scale, aux, o.recipe, o.squared(o.b_major))
    return layer, tensors


@cache
def forward(name, which=FORWARD):
    """Both sides of a forward pass: program, its buffers, the definition's results, and what its backward needs. Tests
    share them, and change none.
    """
    o = options(**CASES[name])
    plan, rng = program(o), np.random.default_rng(len(name))
    tensors, x = tensors_of(plan, rng), rng.standard_normal((o.tokens, o.hidden))
    router = rng.standard_normal((X, o.hidden))
    layer, theirs = defined(o, {"router": router} | tensors if o.kind == "moe" else tensors)
    residual = rng.standard_normal(x.shape)
    y, loss, kept = definition.forward(layer, x, theirs | ({"residual": residual} if o.residual else {}))
    given = {**tensors, "x": x, "logits": kept.logits, "indices": kept.indices, "weights": kept.weights}
    given |= {"total_tokens": np.array([o.tokens]), "aux_coefficient": np.array([0.25])}
    given |= {"residual": residual} if o.residual else {}
    given |= layer_meaning.run(plan, QUANTISE, tensors, o.tokens)
    used = {item: value for item, value in given.items() if item in plan.arguments(which)[0]}
    return plan, given, layer_meaning.run(plan, which, used, o.tokens), (layer, theirs, y, loss, kept)


@pytest.mark.parametrize("which", [FORWARD, INFERENCE])
@pytest.mark.parametrize("name", sample(CASES, most=15))
def test_a_forward_pass_is_the_definition(name, which):
    _, _, result, (layer, _, y, loss, _) = forward(name, which)
    np.testing.assert_allclose(result["y"], y, rtol=1e-9, atol=1e-9)
    if layer.aux is not None:
        np.testing.assert_allclose(result["loss"][0], loss, rtol=1e-12)


@pytest.mark.parametrize("name", sample(CASES, most=15))
def test_a_backward_pass_is_the_definition(name):
    plan, given, actual, (layer, theirs, _, _, kept) = forward(name)
    tokens = len(given["x"])
    dy = np.random.default_rng(1).standard_normal(given["x"].shape)
    stays = {item: actual[item] for item, buffer in plan.buffers.items() if buffer.place == KEPT}
    given = given | stays | {"dy": dy, "dloss": np.array([0.4])}
    given = {item: value for item, value in given.items() if item in plan.arguments(BACKWARD)[0] or item in stays}
    back = layer_meaning.run(plan, BACKWARD, given, tokens)
    want = definition.backward(layer, theirs, kept, dy, grad_loss=0.4 if layer.aux is not None else 0.0)
    want["weights"] = back.get("dweights")  # the definition gives what comes after it
    outputs = plan.arguments(BACKWARD)[1]
    assert {"dx", "dw1", "dw2"} <= set(outputs)
    for output in outputs:
        expected = want[output.removeprefix("d")]
        if output == "dx" and "router" not in plan.buffers and plan.parts.get("index"):
            expected = expected - want["logits"] @ theirs["router"]  # what reaches x through logits is the caller's
        if plan.buffers[output].shape != expected.shape and expected.shape[:1] == (1,):
            expected = expected[0]
        if output in ("dw1", "dw2") and back[output].shape != expected.shape:
            expected = expected.swapaxes(-1, -2)
        np.testing.assert_allclose(back[output], expected, rtol=1e-9, atol=1e-9, err_msg=output)


def test_a_gradient_that_is_no_number_reaches_the_experts_of_its_token_alone():
    """And both weights of an expert that a token chooses twice count."""
    plan, rng = program(options(**CASES["choices"])), np.random.default_rng(3)
    indices = np.array([[1, 1, 2], [4, 0, 2]])
    given = {name: rng.standard_normal(buffer.extents(plan.dims(2))) for name, buffer in plan.buffers.items()
             if buffer.place == ARGUMENT} | {"indices": indices}  # fmt: skip
    arguments = {argument: given[argument] for argument in plan.arguments(FORWARD)[0]}
    result = layer_meaning.run(plan, FORWARD, arguments, 2)
    given["dy"][1] = np.nan
    back = layer_meaning.run(
        plan, BACKWARD, result | {argument: given[argument] for argument in plan.arguments(BACKWARD)[0]}, 2
    )
    np.testing.assert_allclose(back["db2"][1], given["weights"][0, :2].sum() * given["dy"][0])
    assert [bool(row) for row in np.isnan(back["db2"]).all(axis=1)] == [expert in (0, 2, 4) for expert in range(X)]
    assert [bool(row) for row in np.isnan(back["db1"]).all(axis=1)] == [expert in (0, 2, 4) for expert in range(X)]


@pytest.mark.parametrize("name", sample(CASES, most=10))
@pytest.mark.parametrize(
    ("which", "in_place"), [(FORWARD, 0), (FORWARD, 1), (INFERENCE, 1), (BACKWARD, 0), (BACKWARD, 1)]
)
@pytest.mark.parametrize("tokens", [1, 100])
def test_buffers_that_are_needed_at_the_same_time_lie_apart(name, which, in_place, tokens):
    plan = program(options(**CASES[name]))
    outputs = [*plan.arguments(which)[1]]
    for given in (set(outputs), {*outputs[:1]}, {*outputs[1::2]}, {*outputs[:-1]}):
        for lent in (None, {*sorted(given)[:1]}, ()):
            apart_in_memory(plan, which, given, plan.dims(tokens), lent, in_place=bool(in_place))


def test_what_no_output_needs_is_not_launched():
    plan = program(options(bias=True))
    every = plan.arguments(BACKWARD)[1]
    assert {step.part for step in plan.needed(BACKWARD, every)} == {step.part for step in plan.steps[BACKWARD]}
    parts = [step.part for step in plan.needed(BACKWARD, ["dx"])]
    assert not any(part.endswith("-wgrad") for part in parts) and parts[-1] == "unpermute-dx"
    frozen = plan.needed(BACKWARD, ["dw2"])
    assert [step.part for step in frozen] == ["fc2-dgrad", "fc2-wgrad"]
    dims = plan.dims(100)
    assert plan.scratch(BACKWARD, ["dx"], dims)[1] > plan.scratch(BACKWARD, ["dw2"], dims)[1]


def test_z_and_the_routing_are_all_that_is_kept():
    plan = program(options(bias=True, hidden=2048, intermediate=768, experts=128, topk=8, tokens=24576))
    kept = {name: buffer for name, buffer in plan.buffers.items() if buffer.place == KEPT}
    assert set(kept) == {"z", "logits", "indices", "weights", "offsets", "inverse", "token", "row_scale"}
    rest = plan.kept(plan.dims(24576))[1] - kept["z"].bytes(plan.dims(24576))
    assert rest < 0.03 * kept["z"].bytes(plan.dims(24576))
    assert "z" not in {n for n, buffer in program(options(keep="x")).buffers.items() if buffer.place == KEPT}
    assert program(options(keep="x")).buffers["z"].place == SCRATCH


RECOMPUTED = ("fp8-recompute", "fp8-recompute-as-stored")


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_backward_pass_that_makes_its_fp8_weights_is_the_definition(name):
    test_a_backward_pass_is_the_definition(name)


@pytest.mark.parametrize("name", RECOMPUTED)
@pytest.mark.parametrize("in_place", [False, True])
def test_fp8_weights_that_the_backward_pass_makes_lie_in_gradients(name, in_place):
    """No pass takes FP8 weights that its own products do not read, and the backward pass takes no more memory."""
    shape = {"hidden": 2880, "intermediate": 2816, "experts": 32, "topk": 4, "tokens": 8192, "grad_dtype": "bf16"}
    plain = program(options(**CASES[name] | shape | {"recompute_fp8": False}))
    plan = program(options(**CASES[name] | shape))
    fp8 = plan.arguments(QUANTISE)[1].keys()
    assert fp8 == plan.arguments(FORWARD)[0].keys() & plain.arguments(QUANTISE)[1].keys()
    assert len(fp8) == len(plain.arguments(QUANTISE)[1]) / 2
    weights = plan.arguments(QUANTISE)[0].keys()
    assert weights <= plan.arguments(BACKWARD)[0].keys() and not fp8 & plan.arguments(BACKWARD)[0].keys()
    given, dims = set(plan.arguments(BACKWARD)[1]), plan.dims(8192)
    assert given == set(plain.arguments(BACKWARD)[1])
    total = plan.scratch(BACKWARD, given, dims, in_place=in_place)[1]
    assert total <= 1.05 * plain.scratch(BACKWARD, given, dims, in_place=in_place)[1]
    frozen = [step.part for step in plan.needed(BACKWARD, ["dw2"])]
    assert "quantise-w2-dgrad" in frozen and "quantise-w1-dgrad" not in frozen


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_have_places_too(tokens):
    plan = program(options(**CASES["deepseek"]))
    dims = plan.dims(tokens)
    places, total = plan.kept(dims)
    assert total >= 256 * len(places)
    for which in (FORWARD, INFERENCE, BACKWARD):
        outputs = plan.arguments(which)[1]
        homes = {home for home, _ in plan.scratch(which, outputs, dims)[0].values()} - {SCRATCH}
        assert all(0 not in outputs[home].extents(dims) for home in homes)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_for_inference_has_the_kernels_of_a_forward_pass_alone(name):
    o = options(**CASES[name] | {"keep": "none"})
    plan, whole = program(o), program(options(**CASES[name]))
    assert plan.steps[BACKWARD] == () and plan.steps[FORWARD] == plan.steps[INFERENCE]
    steps = (*whole.steps[INFERENCE], *whole.steps.get(QUANTISE, ()))
    assert plan.parts.keys() - {"fc1-few"} == {step.part for step in steps}
    assert plan.kept(plan.dims(100)) == ({}, 0)
    fp8 = plan.arguments(QUANTISE)[1].keys() - plan.arguments(INFERENCE)[0].keys()
    assert fp8 <= {"w1_q", "w1_s", "w2_q", "w2_s"} and (o.b_major == "n" or not fp8)
    assert plan.arguments(INFERENCE) == whole.arguments(INFERENCE)
    _, given, want, _ = forward(name, INFERENCE)
    for each in (plan, replace(plan, few={"fc1-few": 0}, many={})):  # choices in order in fc1, and before it
        actual = layer_meaning.run(each, INFERENCE, given, o.tokens)
        assert all(np.array_equal(actual[argument], want[argument]) for argument in plan.arguments(INFERENCE)[1])
    launched = [step.part for step in plan.steps[INFERENCE] if plan.launches(step.part, o.tokens)]
    assert ("index" in launched) != ("fc1-few" in launched) or o.kind == "mlp"


@pytest.mark.parametrize("tokens", [0, 1, FEW, FEW + 1, 8192])
def test_a_block_of_few_tokens_is_three_launches(tokens):
    plan = program(options(**SERVED | {"shared": 0}))
    launched = [step.part for step in plan.steps[INFERENCE] if plan.launches(step.part, tokens)]
    assert all(plan.parts[part]["pdl"] for part in launched)
    assert launched == [*(["fc1-few"] if tokens <= FEW else ["index", "fc1-infer"]), "fc2", "unpermute"]


def test_float32_weights_of_a_router_have_float32_gradients():
    plan = program(options(**CASES["router-f32"] | {"grad_dtype": "bf16"}))
    kinds = {name: plan.buffers[name].dtype for name in ("router", "router_bias", "drouter", "drouter_bias", "dw1")}
    assert kinds == dict.fromkeys(("router", "router_bias", "drouter", "drouter_bias"), "f32") | {"dw1": "bf16"}
    assert plan.parts["router-wgrad"]["out_dtype"] == "f32"
    assert plan.parts["router"]["problem"]["N"] == 3 * X
    frozen = [step.part for step in plan.needed(BACKWARD, ["dw2"])]
    assert "router-round" not in frozen


# Keys of GEMMs in layers: a row's results have the same bits in every variant with these. `dbias` and `split` sum over
# the batch.
SAME_BITS = {
    "op", "dtype", "out_dtype", "problem", "b_major", "bias", "activation", "glu_layout", "save_preactivation",
    "row_scale", "recompute", "gather", "accumulate", "dbias", "split", "quant",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_key_of_a_gemm_is_known_to_keep_a_rows_bits_or_pins_its_variant(name):
    parts = program(options(**CASES[name])).parts
    gemms = {part: keys for part, keys in parts.items() if OPERATIONS[keys["op"]].gemm}
    for part, keys in gemms.items():
        assert set(keys) - SAME_BITS == ({"dprob"} if pinned(keys) else set()), part
    o = options(**CASES[name])
    wanted = ["shared-fc2-dgrad"] * o.shared_gate + ["fc2-dgrad"] * (o.router.get("scale") == "output")
    assert [part for part, keys in gemms.items() if pinned(keys)] == wanted
    # What works token by token has one variant, whatever the tokens.
    assert not any("warps" in keys or "tile" in keys for keys in parts.values())


def test_outputs_lend_their_memory_until_they_are_written():
    """Qwen3's layer: its rows of gradients then lie in dw1; outputs that are added to lend nothing."""
    shape = {"hidden": 2048, "intermediate": 768, "experts": 128, "topk": 8, "tokens": 24576}
    for accumulate in (False, True):
        plan = program(options(accumulate=accumulate, **shape))
        dims, given = plan.dims(24576), set(plan.arguments(BACKWARD)[1])
        places, total = plan.scratch(BACKWARD, given, dims)
        assert (places["drows"][0] in ("dw1", "dw2")) == (not accumulate)
        alone, most = plan.scratch(BACKWARD, given, dims, ())
        assert {home for home, _ in alone.values()} == {SCRATCH}
        assert most - total >= (0 if accumulate else plan.buffers["drows"].bytes(dims))


def test_a_backward_pass_in_place_needs_less_memory():
    """Qwen3's layer: less by dz, and by a, whose last reader comes first. Where z is recomputed, dz takes its place
    anyway.
    """
    shape = {"hidden": 2048, "intermediate": 768, "experts": 128, "topk": 8, "tokens": 24576}
    for keep, less in (("z", 1), ("x", 0)):
        plan = program(options(**shape, keep=keep))
        dims, given = plan.dims(24576), set(plan.arguments(BACKWARD)[1])
        apart, whole = plan.scratch(BACKWARD, given, dims, ())
        within, rest = plan.scratch(BACKWARD, given, dims, (), in_place=True)
        assert {home for home, _ in apart.values()} == {SCRATCH}
        assert (within["dz"][0] == KEPT) == bool(less)
        assert whole - rest == less * plan.buffers["dz"].bytes(dims) + plan.buffers["a"].bytes(dims)


@pytest.mark.parametrize("name", CASES)
def test_a_backward_pass_in_place_has_the_same_steps_in_an_order_that_works(name):
    plan = program(options(**CASES[name]))
    every = plan.arguments(BACKWARD)[1]
    steps, moved = plan.needed(BACKWARD, every), plan.needed(BACKWARD, every, in_place=True)
    assert sorted(step.part for step in steps) == sorted(item.part for item in moved)
    parts = [item.part for item in moved]
    if "fc2-wgrad" in parts and "quant" not in plan.parts["fc2-wgrad"]:
        assert parts.index("fc2-dgrad") < parts.index("fc2-wgrad") < parts.index("fc1-dgrad")
    last = {name: index for index, item in enumerate(moved) for name in item.writes.values()}
    for index, entry in enumerate(moved):
        assert all(last.get(name, -1) < index for name in entry.reads.values())
    assert plan.needed(FORWARD, plan.arguments(FORWARD)[1], in_place=True) == plan.needed(
        FORWARD, plan.arguments(FORWARD)[1]
    )
