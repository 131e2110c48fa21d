"""The router's definition: by hand on small rows, gradients by finite differences, the checks that judge a kernel."""

import numpy as np
import pytest

from fusekit.reference import encode, route, router_check, router_inputs, token_output_shapes
from fusekit.reference.router import order_of, pack_map, unpack_map
from fusekit.spec import RouterSpec, parse_text
from tests.gpu.test_router import FINITE, ODD, with_logits
from tests.gpu.test_router import SPECS as GPU_SPECS

NUMPY = {"f32": np.float32, "i32": np.int32, "u8": np.uint8}


def spec_of(op: str = "router-topk", **keys) -> RouterSpec:
    keys = {"experts": 12, "topk": 3} | keys
    lines = "\n".join(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}".replace("'", '"')
                      for key, value in keys.items())  # fmt: skip
    (spec,) = parse_text(f'schema = 1\n[[kernel]]\nname = "k"\narch = "sm_90a"\nop = "{op}"\n{lines}\n', "s")
    assert isinstance(spec, RouterSpec)
    return spec


def rounded(spec: RouterSpec, outputs: dict, tokens: int) -> dict:
    """The outputs as a kernel stores them."""
    shapes = token_output_shapes(spec, T=tokens)
    return {
        name: encode(value, "bf16") if shapes[name][1] == "bf16" else value.astype(NUMPY[shapes[name][1]])
        for name, value in outputs.items()
    }


def row(*values: float) -> dict:
    return {"logits": np.array([values], np.float32)}


def test_ties_go_to_the_lower_expert():
    spec = spec_of(experts=5, topk=3, outputs="compact")
    assert route(spec, row(1, 2, 2, 1, 2))["indices"].tolist() == [[1, 2, 4]]
    assert route(spec, row(0.0, -0.0, 0.0, -0.0, 0.0))["indices"].tolist() == [[0, 1, 2]]


def test_a_nan_ranks_first_and_shows():
    spec = spec_of(experts=4, topk=2, outputs="compact")
    outputs = route(spec, row(1, np.inf, np.nan, 0))
    assert outputs["indices"].tolist() == [[2, 1]]
    assert np.isnan(outputs["weights"]).all()


def test_infinities():
    assert np.isnan(route(spec_of(experts=3, topk=2, outputs="compact"), row(np.inf, 1, 0))["weights"]).all()
    low = route(spec_of(experts=3, topk=2, outputs="compact"), row(-np.inf, 1, -np.inf))
    assert low["indices"].tolist() == [[1, 0]]
    assert low["weights"].tolist() == [[1, 0]]
    sure = route(spec_of(experts=3, topk=2, score_function="sigmoid"), row(np.inf, -np.inf, -np.inf))
    assert sure["probs"].tolist() == [[1, 0, 0]]


def test_softmax_before_and_after_the_selection():
    logits = np.log(np.array([4, 3, 2, 1])).tolist()
    after = route(spec_of(experts=4, topk=2, scaling_factor=2.0), row(*logits))["probs"]
    assert np.allclose(after, [[8 / 7, 6 / 7, 0, 0]])
    before = route(spec_of(experts=4, topk=2, pre_softmax=True), row(*logits))["probs"]
    assert np.allclose(before, [[0.4, 0.3, 0, 0]])


def test_the_bias_selects_and_does_not_weigh():
    spec = spec_of(experts=4, topk=2, score_function="sigmoid", expert_bias=True, outputs="compact")
    outputs = route(spec, row(0, 0, 0, 0) | {"expert_bias": np.array([0, 1, 0, 2], np.float32)})
    assert outputs["indices"].tolist() == [[3, 1]]
    assert np.allclose(outputs["weights"], 0.5)


def test_groups_by_the_sum_of_their_best():
    spec = spec_of(experts=6, topk=2, num_groups=3, group_topk=1, outputs="compact")
    # The best expert is in the first group, the best pair in the last.
    assert route(spec, row(9, -9, 1, 1, 4, 5))["indices"].tolist() == [[5, 4]]


def test_one_choice_is_not_normalised():
    outputs = route(spec_of(topk=1, score_function="sigmoid", experts=2), row(0, -1))
    assert outputs["probs"].tolist() == [[0.5, 0]]


@pytest.mark.parametrize("topk", [1, 2])
def test_scores_over_all_experts_are_normalised_for_every_k(topk):
    outputs = route(spec_of("router-aux-score", topk=topk, score_function="sigmoid", experts=2), row(0, np.log(3)))
    assert np.allclose(outputs["scores"], [[0.4, 0.6]])
    assert np.allclose(outputs["score_sum"], [1.25])


@pytest.mark.parametrize("experts", [1, 31, 32, 33, 64, 100])
def test_packed_maps(experts):
    spec = spec_of("router-topk", experts=experts, topk=1, routing_map="bits").canonical()
    chosen = np.arange(experts)[:, None]
    packed = pack_map(spec, chosen)
    assert packed.shape == (experts, -(-experts // 32))
    assert (np.flatnonzero(packed[experts - 1].view(np.uint32)) == (experts - 1) // 32).all()
    assert np.array_equal(unpack_map(spec, packed), np.eye(experts, dtype=bool))


def test_keys_keep_the_order():
    values = np.array([np.nan, np.inf, 3e38, 1, 1e-45, 0, -0.0, -1e-45, -1, -np.inf], np.float32)
    order = order_of(values)
    assert (order[:5] > order[1:6]).all() and (order[6:-1] > order[7:]).all()
    assert order[5] == order[6]
    assert np.array_equal(np.argsort(order_of(values.astype(np.float64))), np.argsort(order))


BACKWARDS = [
    {"score_function": "softmax"},
    {"score_function": "softmax", "pre_softmax": True, "scaling_factor": 2.5},
    {"score_function": "sigmoid"},
    {"score_function": "sigmoid", "topk": 1},
    {"score_function": "sqrtsoftplus", "scaling_factor": 0.5},
    {"score_function": "sqrtsoftplus", "topk": 1},
]


def differences(function, logits, step=1e-6):
    """The gradient of a scalar function of float64 logits [T, X], by central differences."""
    result = np.zeros_like(logits)
    for index in np.ndindex(logits.shape):
        moved = logits.copy()
        moved[index] += step
        above = function(moved)
        moved[index] -= 2 * step
        result[index] = (above - function(moved)) / (2 * step)
    return result


@pytest.mark.parametrize("keys", BACKWARDS, ids=str)
@pytest.mark.parametrize("outputs", ["dense", "compact"])
def test_topk_backward_is_the_derivative(keys, outputs):
    from fusekit.reference.router import weights

    forward = spec_of("router-topk", outputs=outputs, **keys).canonical()
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 12)) * 2
    chosen = np.stack([rng.permutation(12)[: forward["topk"]] for _ in range(4)])
    gradient = rng.standard_normal(chosen.shape).astype(np.float32)
    want = differences(lambda x: float((weights(forward, {"logits": x}, chosen) * gradient).sum()), logits)
    inputs = {"logits": logits, "indices": chosen, "grad_weights": gradient}
    if outputs == "dense":
        dense = np.zeros_like(logits)
        np.put_along_axis(dense, chosen, gradient.astype(np.float64), axis=1)
        inputs = {"logits": logits, "routing_map": pack_map(forward, chosen), "grad_probs": dense}
    got = route(spec_of("router-topk-bwd", outputs=outputs, **keys), inputs)["grad_logits"]
    assert np.allclose(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("keys", [keys for keys in BACKWARDS if "pre_softmax" not in keys], ids=str)
def test_aux_backward_is_the_derivative(keys):
    keys = {key: value for key, value in keys.items() if key != "scaling_factor"}
    forward = spec_of("router-aux-score", **keys)
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((3, 12)) * 2
    gradient = rng.standard_normal(logits.shape)
    want = differences(lambda x: float((route(forward, {"logits": x})["scores"] * gradient).sum()), logits)
    routed = route(forward, {"logits": logits})
    inputs = {"scores": routed["scores"], "grad_scores": gradient}
    if "score_sum" in routed:
        inputs["score_sum"] = routed["score_sum"]
    got = route(spec_of("router-aux-score-bwd", **keys), inputs)["grad_logits"]
    assert np.allclose(got, want, rtol=1e-5, atol=1e-8)


def test_the_loss_by_hand():
    spec = spec_of("moe-aux-loss", experts=2, topk=1, coefficient=0.5)
    inputs = {"scores": np.array([[0.25, 0.75], [0.5, 0.5]], np.float32), "counts": np.array([3, 1], np.int32)}
    # 0.5 * 2 / (1 * 4^2) * (3 * 0.75 + 1 * 1.25)
    assert route(spec, inputs | {"total_tokens": 4, "tokens": 2})["loss"].tolist() == [0.5 * 2 / 16 * 3.5]


@pytest.mark.parametrize("experts", [1, 12, 61])
def test_the_loss_backward_is_the_derivative(experts):
    keys = {"experts": experts, "topk": 1, "coefficient": 0.25}
    rng = np.random.default_rng(4)
    counts, total = rng.integers(0, 9, experts, dtype=np.int32), 40

    def loss(scores):
        given = {"scores": scores, "counts": counts, "total_tokens": total, "tokens": len(scores)}
        return float(route(spec_of("moe-aux-loss", **keys), given)["loss"][0]) * 0.75

    want = differences(loss, rng.random((3, experts)))
    inputs = {"counts": counts, "total_tokens": total, "tokens": 3, "grad_loss": np.array([0.75], np.float32)}
    got = route(spec_of("moe-aux-loss-bwd", **keys), inputs)["grad_scores"]
    assert np.allclose(got, want, rtol=1e-5, atol=1e-9)


def test_scalars_of_the_device_are_those_of_a_launch():
    scores, counts = np.array([[0.25, 0.75]], np.float32), np.array([3, 1], np.int32)
    launch, device = (spec_of("moe-aux-loss", experts=2, topk=1, scalars=each) for each in ("launch", "device"))
    assert (launch.defaults(), device.defaults()) == ({"coefficient": 1.0}, {})

    def loss(spec, total, coefficient):
        return route(
            spec, {"scores": scores, "counts": counts, "total_tokens": total, "coefficient": coefficient, "tokens": 1}
        )["loss"].tolist()

    there = np.array([0.5], np.float32)
    assert loss(device, np.array([4], np.int32), there) == loss(launch, 4, 0.5)
    assert loss(device, np.array([0], np.int32), there) == loss(launch, 1, 0.5)


def test_two_gradients_of_logits_in_two_launches():
    """router-aux-score-bwd's float32 gradient is added before bf16 rounds; no expert outside [0, X) takes part."""
    keys = {"outputs": "compact", "score_function": "sigmoid"}
    spec = spec_of("router-topk-bwd", addend=True, grad_dtype="bf16", **keys)
    inputs = router_inputs(spec, T=9, seed=1)
    inputs["indices"][3], inputs["indices"][4, 1] = -1, 12
    alone = route(spec_of("router-topk-bwd", **keys), inputs)["grad_logits"]
    assert (alone[3] == 0).all() and np.count_nonzero(alone[4]) == 2
    outputs = rounded(spec, route(spec, inputs), 9)
    measured, problems = router_check(spec, inputs, outputs)
    assert not problems and all(each.ok for each in measured)
    late = {"grad_logits": encode(alone, "bf16")}
    assert not all(each.ok for each in router_check(spec, inputs, late)[0])


CHECKED = [
    spec_of(),
    spec_of(outputs="compact", dtype="bf16"),
    spec_of(routing_map="bits", score_function="sigmoid", expert_bias=True, num_groups=4, group_topk=3),
    spec_of("router-aux-score", score_function="sqrtsoftplus", dtype="bf16"),
    spec_of("router-topk-bwd"),
    spec_of("router-aux-score-bwd", score_function="sigmoid"),
    spec_of("router-topk-bwd", addend=True, outputs="compact", grad_dtype="bf16"),
    spec_of("moe-aux-loss", scalars="device"),
    spec_of("moe-aux-loss-bwd", scalars="device"),
]


@pytest.mark.parametrize("spec", CHECKED, ids=lambda spec: f"{spec.op}-{spec.outputs}-{spec.score_function}")
def test_the_check_passes_what_is_right_and_no_more(spec):
    inputs = router_inputs(spec, T=40, seed=3)
    outputs = rounded(spec, route(spec, inputs), 40)
    measured, problems = router_check(spec, inputs, outputs)
    assert not problems and all(each.ok for each in measured)
    for name, value in outputs.items():
        wrong = value.copy()
        if wrong.dtype == np.float32:
            at = np.unravel_index(np.argmax(np.abs(wrong)), wrong.shape)
            wrong[at] *= np.float32(1 + 1e-4)
        elif name == "indices":
            wrong[7] = np.roll(wrong[7], 1)
        elif name == "routing_map":
            wrong[7] = np.roll(wrong[7], 1) if wrong.shape[1] > 1 else wrong[7] ^ 3
        else:
            wrong.reshape(-1)[np.argmax(wrong & 0x7FFF)] += 3
        measured, problems = router_check(spec, inputs, outputs | {name: wrong})
        assert problems or not all(each.ok for each in measured), name


@pytest.mark.parametrize("name", [name for name, spec in GPU_SPECS.items() if not spec.op.startswith("moe-")])
def test_the_check_passes_what_is_right_of_any_logits(name):
    spec = GPU_SPECS[name]
    for values in (*FINITE, *ODD):
        inputs = with_logits(spec, values, 3) if spec.op != "router-aux-score-bwd" else router_inputs(spec, T=3)
        outputs = rounded(spec, route(spec, inputs), 3)
        measured, problems = router_check(spec, inputs, outputs)
        assert not problems and all(each.ok for each in measured), values.__name__


@pytest.mark.parametrize(
    "keys", [{}, {"score_function": "sigmoid", "expert_bias": True}, {"num_groups": 4, "group_topk": 3}]
)
def test_a_nan_that_does_not_show_is_wrong(keys):
    spec = spec_of(outputs="compact", **keys)
    inputs = router_inputs(spec, T=2)
    inputs["logits"][1, 5] = np.nan
    outputs = rounded(spec, route(spec, inputs), 2)
    assert outputs["indices"][1, 0] == 5 and np.isnan(outputs["weights"][1]).any()
    hidden = outputs["weights"].copy()
    hidden[1] = 0.25
    measured, problems = router_check(spec, inputs, outputs | {"weights": hidden})
    assert problems or not all(each.ok for each in measured)
    passed_over = outputs["indices"].copy()
    passed_over[1, 0] = next(expert for expert in range(12) if expert not in outputs["indices"][1])
    measured, problems = router_check(spec, inputs, outputs | {"indices": passed_over})
    assert problems


def test_a_near_tie_may_go_either_way_with_a_bias():
    spec = spec_of(experts=4, topk=1, score_function="sigmoid", expert_bias=True, outputs="compact")
    inputs = row(0, 0, -5, -5) | {"expert_bias": np.array([1, 1 + 2e-7, 0, 0], np.float32)}
    outputs = rounded(spec, route(spec, inputs), 1)
    assert outputs["indices"].tolist() == [[1]]
    other = {"indices": np.array([[0]], np.int32), "weights": outputs["weights"]}
    assert router_check(spec, inputs, other)[1] == []
    third = {"indices": np.array([[2]], np.int32), "weights": outputs["weights"]}
    assert router_check(spec, inputs, third)[1] != []
