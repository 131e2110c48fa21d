"""Row order and moved rows: by hand, and the checks that judge a kernel."""

import numpy as np
import pytest

from fusekit.reference import (
    encode,
    formats,
    permutation,
    permutation_check,
    permutation_inputs,
    token_output_shapes,
)
from fusekit.spec import parse_text

TYPES = {"f32": np.float32, "i32": np.int32, "bf16": np.uint16}


def spec_of(op, **keys):
    plain = op.startswith(("router-", "rms-")) or op in ("moe-zero", "moe-gate", "moe-gate-bwd")
    keys = ({} if plain else {"topk": 2}) | keys
    lines = "\n".join(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}".replace("'", '"')
                      for key, value in keys.items())  # fmt: skip
    (spec,) = parse_text(f'schema = 1\n[[kernel]]\nname = "k"\narch = "sm_90a"\nop = "{op}"\n{lines}\n', "s")
    return spec


def test_rows_are_stable_and_nobodys_choices_have_none():
    order = permutation.index(np.array([[2, 0], [-1, 2], [0, 5], [2, 0]], np.int32), 3)
    assert order["offsets"].tolist() == [3, 3, 6]
    assert order["order"].tolist() == [1, 4, 7, 0, 3, 6]
    assert order["token"].tolist() == [0, 2, 3, 0, 1, 3, -1, -1]
    assert order["inverse"].tolist() == [[3, 0], [-1, 4], [1, -1], [5, 2]]


def test_rows_end_at_a_bound():
    indices = np.array([[2, 0], [-1, 2], [0, 5], [2, 0]], np.int32)
    whole, bounded = permutation.index(indices, 3), permutation.index(indices, 3, bound=4)
    assert bounded["wanted"] == whole["wanted"] == [6] and bounded["offsets"].tolist() == [3, 3, 4]
    assert bounded["order"].tolist() == whole["order"][:4].tolist() and bounded["token"].tolist() == [0, 2, 3, 0]
    assert np.array_equal(bounded["inverse"], np.where(whole["inverse"] < 4, whole["inverse"], -1))
    assert permutation.index(indices, 3, bound=9)["token"].tolist() == [*whole["token"][:6], -1, -1, -1]


def test_permute_and_unpermute_are_transposed():
    """<permute(x), y> = <x, unpermute(y)>: each is the other's backward."""
    rng = np.random.default_rng(0)
    inverse = permutation.index(rng.integers(-1, 4, (9, 3)), 4)["inverse"]
    x, y = rng.standard_normal((9, 5)), rng.standard_normal((27, 5))
    permuted = np.zeros_like(y)
    tokens, places = np.nonzero(inverse >= 0)
    permuted[inverse[tokens, places]] = x[tokens]
    gathered, _ = permutation.unpermute(y, inverse, None)
    assert np.isclose((permuted * y).sum(), (x * gathered).sum())


def test_the_backward_of_unpermute_is_the_derivative():
    rng = np.random.default_rng(1)
    inverse = permutation.index(rng.integers(-1, 4, (4, 2)), 4)["inverse"]
    x, weights = rng.standard_normal((8, 3)), rng.standard_normal((4, 2))
    gradient = rng.standard_normal((4, 3))
    grad_x = permutation.spread(gradient, weights)
    grad_weights, _ = permutation.weight_gradient(gradient, x, inverse)

    def loss(rows, factors):
        return float((permutation.unpermute(rows, inverse, factors)[0] * gradient).sum())

    for index in np.ndindex(weights.shape):
        step = np.zeros_like(weights)
        step[index] = 1e-6
        assert np.isclose((loss(x, weights + step) - loss(x, weights - step)) / 2e-6, grad_weights[index], atol=1e-8)
        if (row := inverse[index]) >= 0:
            step = np.zeros_like(x)
            step[row] = 1e-6
            assert np.isclose((loss(x + step, weights) - loss(x - step, weights)) / 2e-6, grad_x[index].sum())


@pytest.mark.parametrize(
    ("op", "keys"),
    [
        ("moe-index", {"experts": 5}), ("moe-permute", {}), ("moe-permute", {"scaled": True}), ("moe-permute-bwd", {}),
        ("moe-unpermute", {}), ("moe-unpermute", {"addends": 1}), ("moe-unpermute-bwd", {}),
        ("moe-weights-bwd", {"experts": 5}),
        ("moe-weights-bwd", {"experts": 5, "addend": True}), ("moe-bias-bwd", {"experts": 5}),
        ("moe-zero", {}), ("moe-gate", {}), ("moe-gate-bwd", {}), ("router-split", {}),
        ("router-sum", {"experts": 5, "bias": True}), ("rms-norm", {"residual": True}), ("rms-norm-bwd", {}),
        ("rms-norm-wgrad", {}),
        ("moe-index", {"experts": 5, "tokens": True, "bounded": True}),
    ],
)  # fmt: skip
def test_poison_is_wrong(op, keys):
    """A kernel that writes nothing does not pass."""
    spec = spec_of(op, **keys)
    inputs = permutation_inputs(spec, T=11, H=8, seed=1)
    outputs = {
        name: np.frombuffer(b"\xff" * int(np.prod(shape)) * np.dtype(TYPES[dtype]).itemsize, TYPES[dtype]).reshape(
            shape
        )
        for name, (shape, dtype) in token_output_shapes(spec, T=11, H=8).items()
    }
    measured, problems = permutation_check(spec, inputs, outputs)
    assert problems or not all(each.ok for each in measured)


def test_the_gradients_of_a_norm_are_its_derivatives():
    rng = np.random.default_rng(4)
    x, w, dy = rng.standard_normal((3, 8)), rng.standard_normal((1, 8)), rng.standard_normal((3, 8))
    rstd = permutation.rms_norm(x, w, 1e-3)[1]
    dx, each = permutation.rms_norm_gradient(dy, x, w, rstd)

    def loss(tokens, weights):
        return float((permutation.rms_norm(tokens, weights, 1e-3)[0] * dy).sum())

    for tensor, got in ((x, dx), (w, each.sum(axis=0, keepdims=True))):
        for index in np.ndindex(tensor.shape):
            step = np.zeros_like(tensor)
            step[index] = 1e-6
            sides = [(x + s * step, w) if tensor is x else (x, w + s * step) for s in (1, -1)]
            assert np.isclose((loss(*sides[0]) - loss(*sides[1])) / 2e-6, got[index], atol=1e-7)


def test_a_norm_with_one_wrong_number_is_seen():
    """Each output of a norm and of its gradient is compared."""
    for op, keys in (
        ("rms-norm", {"residual": True, "dtype": "f32"}),
        ("rms-norm-bwd", {"addend": True, "dtype": "f32"}),
    ):
        spec = spec_of(op, **keys)
        inputs = permutation_inputs(spec, T=70, H=8, seed=3)
        wide = {name: array.astype(np.float64) for name, array in inputs.items()}
        if op == "rms-norm":
            added = (inputs["x"] + inputs["residual"]).astype(np.float32)
            y, rstd = permutation.rms_norm(added.astype(np.float64), wide["w"], spec.eps)
            outputs = {"y": y, "sum": added, "rstd": rstd}
        else:
            dx, each = permutation.rms_norm_gradient(wide["dy"], wide["x"], wide["w"], wide["rstd"])
            sums = np.stack([each[start : start + 32].sum(axis=0) for start in (0, 32, 64)])
            outputs = {"dx": dx + wide["addend"], "partial": sums}
        outputs = {name: array.astype(np.float32) for name, array in outputs.items()}
        assert all(each.ok for each in permutation_check(spec, inputs, outputs)[0])
        for name, array in outputs.items():
            wrong = array.copy()
            wrong.reshape(-1)[-1] *= 1 + 2**-12
            measured = permutation_check(spec, inputs, {**outputs, name: wrong})[0]
            assert next(each.name for each in measured if not each.ok) == name


def test_spare_rows_alone_become_zeros():
    spec = spec_of("moe-zero", dtype="f32")
    offsets = permutation_inputs(spec, T=11, H=8, seed=1)["offsets"]
    end = int(offsets[-1])
    y = np.full((11, 8), -1, np.int32).view(np.float32)
    y[end:] = 0
    assert 0 < end < 11 and permutation_check(spec, {"offsets": offsets}, {"y": y}) == ([], [])
    y[end - 1, 3] = 0
    assert permutation_check(spec, {"offsets": offsets}, {"y": y})[1] == ["y: rows of groups were written to"]


def test_the_backward_of_a_scaled_permute_is_the_derivative():
    rng = np.random.default_rng(2)
    inverse = permutation.index(rng.integers(-1, 4, (4, 3)), 4)["inverse"]
    x, weights, there = rng.standard_normal((4, 5)), rng.standard_normal((4, 3)), inverse >= 0
    gradient = rng.standard_normal((12, 5))
    grad_x, _ = permutation.unpermute(gradient, inverse, weights)
    grad_weights, _ = permutation.weight_gradient(x, gradient, inverse)

    def loss(tokens, factors):
        return float((permutation.spread(tokens, factors)[there] * gradient[inverse[there]]).sum())

    for tensor, got in ((x, grad_x), (weights, grad_weights)):
        for index in np.ndindex(tensor.shape):
            step = np.zeros_like(tensor)
            step[index] = 1e-6
            sides = [(x + s * step, weights) if tensor is x else (x, weights + s * step) for s in (1, -1)]
            assert np.isclose((loss(*sides[0]) - loss(*sides[1])) / 2e-6, got[index], atol=1e-8)


@pytest.mark.parametrize("op", ["moe-permute", "moe-permute-bwd"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_is_right_passes_and_an_unscaled_row_does_not(op, dtype):
    spec = spec_of(op, dtype=dtype, **({"scaled": True} if op == "moe-permute" else {}))
    inputs = permutation_inputs(spec, T=7, H=16, seed=3)
    wide = {name: formats.values(inputs[name], dtype).astype(np.float64) for name in ("x", "grad_y") if name in inputs}
    inverse, weights, there = inputs["inverse"], inputs["weights"], inputs["inverse"] >= 0

    def outputs(factors):
        if op == "moe-permute-bwd":
            total, _ = permutation.unpermute(wide["grad_y"], inverse, factors)
            dots, _ = permutation.weight_gradient(wide["x"], wide["grad_y"], inverse)
            return {"grad_x": encode(total, dtype), "grad_weights": dots.astype(np.float32)}
        y = encode(np.zeros((inverse.size, 16)), dtype)
        y.view(np.uint8)[:] = 0xFF
        y[inverse[there]] = encode(permutation.spread(wide["x"], factors), dtype)[there]
        return {"y": y}

    measured, problems = permutation_check(spec, inputs, outputs(weights))
    assert not problems and all(each.ok for each in measured)
    measured, problems = permutation_check(spec, inputs, outputs(np.ones_like(weights)))
    assert not all(each.ok for each in measured)


def test_a_write_to_a_free_row_is_seen():
    spec = spec_of("moe-permute")
    inputs = permutation_inputs(spec, T=3, H=8, indices=np.array([[0, 1], [-1, 0], [1, -1]], np.int32))
    inverse, y = inputs["inverse"], np.full((6, 8), 0xFFFF, np.uint16)
    tokens, places = np.nonzero(inverse >= 0)
    y[inverse[tokens, places]] = inputs["x"][tokens]
    assert permutation_check(spec, inputs, {"y": y}) == ([], [])
    y[5, 3] = 0
    assert permutation_check(spec, inputs, {"y": y})[1] == ["y: rows that no choice has were written to"]


def test_the_gradient_of_a_weight_is_that_of_its_row():
    """By hand; a choice without a row has gradient 0, whatever its addend; a NaN reaches its own choice."""
    spec = spec_of("moe-weights-bwd", experts=3, addend=True)
    inputs = {
        "dprob": np.array([1, 2, np.nan, 8], np.float32),
        "inverse": np.array([[2, 0], [-1, 1], [3, -1]], np.int32),
        "indices": np.array([[1, 0], [-1, 2], [2, 0]], np.int32),
        "addend": np.array([[10, 20, 30], [np.nan, 50, 60], [np.nan, 80, 90]], np.float32),
    }
    want = np.array([[np.nan, 11], [0, 62], [98, 0]], np.float32)
    assert np.array_equal(permutation.by_choice(inputs), want, equal_nan=True)
    assert permutation_check(spec, inputs, {"grad_weights": want}) == ([], [])
    wrong = permutation_check(spec, inputs, {"grad_weights": np.nan_to_num(want)})[1]
    assert wrong == ["grad_weights: 1 of 6 elements are wrong"]


def test_the_bias_of_an_expert_that_a_token_names_twice_or_nobody():
    """Both weights count; a NaN stays with the experts of its token."""
    indices, weights = np.array([[2, 2], [-1, 0], [3, 0]], np.int32), np.array([[1, 2], [9, 4], [5, 6]], np.float32)
    grad_y = np.array([[1, 10], [np.nan, 100], [2, 1000]], np.float32)
    order = permutation.index(indices, 4)
    inputs = {"grad_y": grad_y, "row_scale": weights.reshape(-1)[order["order"]]}
    inputs |= {name: order[name] for name in ("token", "offsets")}
    want = np.array([[np.nan, 6400], [0, 0], [3, 30], [10, 5000]], np.float32)
    spec = spec_of("moe-bias-bwd", experts=4, dtype="f32")
    ((measured,), wrong) = permutation_check(spec, inputs, {"grad_bias": want})
    assert measured.ok and not wrong
    ((measured,), _) = permutation_check(spec, inputs, {"grad_bias": np.roll(want, 1, axis=0)})
    assert measured.wrong == 8


@pytest.mark.parametrize("tokens", [0, 1, 127])
@pytest.mark.parametrize(
    ("op", "keys"),
    [
        ("moe-weights-bwd", {"experts": 5, "topk": 1, "addend": True}),
        ("moe-bias-bwd", {"experts": 5, "topk": 1, "dtype": "f32"}),
        ("moe-bias-bwd", {"experts": 61, "topk": 8, "dtype": "f32"}),
    ],
)  # fmt: skip
def test_what_is_right_passes(op, keys, tokens):
    spec = spec_of(op, **keys)
    inputs = permutation_inputs(spec, T=tokens, H=8, seed=2)
    if op == "moe-bias-bwd":
        outputs = {"grad_bias": permutation.bias_gradient(*inputs.values())[0].astype(np.float32)}
    else:
        outputs = {"grad_weights": permutation.by_choice(inputs)}
    measured, wrong = permutation_check(spec, inputs, outputs)
    assert all(each.ok for each in measured) and not wrong


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_addends_count_and_are_not_rounded_on_the_way(dtype):
    spec = spec_of("moe-unpermute", dtype=dtype, weighted=True, addends=2)
    inputs = permutation_inputs(spec, T=7, H=16, seed=4)
    wide = {name: formats.values(inputs[name], dtype).astype(np.float64) for name in ("x", "addend0", "addend1")}
    total, _ = permutation.unpermute(wide["x"], inputs["inverse"], inputs["weights"])
    right = total + wide["addend0"] + wide["addend1"]
    for y, well in ((right, True), (total, False), (total + wide["addend0"], False)):
        measured, problems = permutation_check(spec, inputs, {"y": encode(y, dtype)})
        assert not problems and all(each.ok for each in measured) is well


def test_wrong_counts_are_seen():
    spec = spec_of("moe-index", experts=3, counts=True)
    inputs = {"indices": np.array([[2, 0], [-1, 2]], np.int32)}
    order = permutation.index(inputs["indices"], 3)
    outputs = order | {"order": np.array([*order["order"], -1], np.int32), "counts": np.array([1, 0, 2], np.int32)}
    assert permutation_check(spec, inputs, outputs) == ([], [])
    wrong = outputs | {"counts": order["offsets"]}
    assert permutation_check(spec, inputs, wrong)[1] == ["counts: 2 of 3 elements are wrong"]


def test_three_terms_are_all_of_a_float32():
    """From 2^-110 up to bf16's greatest; infinities and NaN stay what they are."""
    rng = np.random.default_rng(5)
    numbers = np.ldexp(rng.uniform(1, 2, 4000), rng.integers(-110, 127, 4000)) * rng.choice([-1, 1], 4000)
    w = np.append(numbers, [0, np.inf, -np.inf, np.nan, 1 + 2**-23, 2**-110 * (2 - 2**-23)]).astype(np.float32)[None]
    terms = formats.decode(permutation.split(w, 3), "bf16")
    assert np.array_equal(terms.astype(np.float64).sum(axis=0, keepdims=True), w, equal_nan=True)
    for count, bits in ((1, 8), (2, 16)):
        near = formats.decode(permutation.split(w[:, :4000], count), "bf16").astype(np.float64).sum(axis=0)
        assert (np.abs(near - w[0, :4000]) <= 2.0**-bits * np.abs(w[0, :4000])).all()


def test_terms_and_sums_are_checked_bit_for_bit():
    spec = spec_of("router-split", terms=2)
    inputs = {"w": np.array([[1 + 2**-9, 3.0, 0, 0, 0, 0, 0, 0]], np.float32)}
    right = {"terms": encode(np.array([[1, 3, 0, 0, 0, 0, 0, 0], [2**-9, 0, 0, 0, 0, 0, 0, 0]]), "bf16")}
    assert permutation_check(spec, inputs, right) == ([], [])
    assert permutation_check(spec, inputs, {"terms": right["terms"][::-1]})[1] == ["terms: 4 of 16 elements are wrong"]
    spec = spec_of("router-sum", experts=2, terms=3, bias=True)
    inputs = {"x": np.array([[1, 2, 10, 20, 100, 200]], np.float32), "bias": np.array([0.5, 0.25], np.float32)}
    assert permutation_check(spec, inputs, {"y": np.array([[111.5, 222.25]], np.float32)}) == ([], [])
    order = {"x": np.array([[2**24, 0, 1, 0, 1, 0]], np.float32), "bias": np.zeros(2, np.float32)}  # the smallest first
    assert permutation_check(spec, order, {"y": np.array([[2**24 + 2, 0]], np.float32)}) == ([], [])


def test_a_choice_without_a_row_takes_part_in_nothing():
    """Not even with an infinity in the token's row, nor where no choice has a row."""
    token, rows = np.array([[np.inf, 1.0]]), np.array([[2.0, 3.0]])
    products, sizes = permutation.weight_gradient(token, rows, np.array([[0, -1]], np.int32))
    assert products.tolist() == sizes.tolist() == [[np.inf, 0.0]]
    none, empty = np.full((1, 2), -1, np.int32), np.zeros((0, 2))
    assert not permutation.weight_gradient(token, empty, none)[0].any()
    assert not permutation.unpermute(empty, none, None)[0].any()
