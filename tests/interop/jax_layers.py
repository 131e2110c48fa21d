"""Whole layers inside jax.jit on XLA's CPU: XLA's buffers and derivatives, the layer's memory, kernels by formula.

`test_jax.py` runs it.
"""

import itertools

import numpy as np
import pytest

from fusekit.errors import ArgumentError
from fusekit.layers import memory
from tests.plan.test_layer_program import CASES, PLAIN, H, K, T, X, options

jax = pytest.importorskip("jax", reason="JAX is not installed")
from tests.layers.host import HostLayer  # noqa: E402
from tests.soak import sample  # noqa: E402

from .plain_jax import arguments, plain  # noqa: E402

jnp = jax.numpy
STREAM = 0x77
_NUMBERS = itertools.count()


@pytest.fixture
def jax_layer(monkeypatch):
    """jax_layer(options) -> (layer, f). XLA's CPU has no streams."""
    from fusekit.interop import jax as interop

    monkeypatch.setattr(interop.xla, "stream_of", lambda frame: (None, STREAM))

    def make(said, **more):
        layer = HostLayer(said)
        return layer, interop.moe(layer, f"fusekit_test_layer_{next(_NUMBERS)}", platform="cpu", **more)

    return make


def layer_of(case, **more):
    return options(**{**CASES[case], "dtype": "f32", **more})


def inputs_of(layer, tokens=T, seed=0):
    given = {**layer.inputs("forward"), **layer.inputs("quantise")}
    given = {name: buffer for name, buffer in given.items() if name not in layer.outputs("quantise")}
    return arguments(layer.options, given, tokens, jax.random.key(seed))


def parts(layer):
    return [part for part, _ in layer.launched]


def total(f):
    """A number that every result of f has a part in."""

    def loss(x, params, more):
        result = f(x, params, **more)
        y, aux = result if isinstance(result, tuple) else (result, 0.0)
        return (jnp.sin(y.astype(jnp.float32)) * jnp.arange(1, y.shape[-1] + 1)).sum() + 3 * aux

    return loss


def close(found, wanted, tolerance=1e-5):
    def check(a, b):
        size = max(1.0, float(jnp.abs(b).max(initial=0)))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * size)

    jax.tree.map(check, found, wanted)


def floats(more):
    return {name: array for name, array in more.items() if name in ("logits", "weights")}


@pytest.mark.parametrize("case", sample(PLAIN, "residual", "mlp-as-stored"))
def test_values_and_gradients_are_those_of_plain_jax(jax_layer, case):
    layer, f = jax_layer(layer_of(case))
    x, params, more = inputs_of(layer)
    wanted = plain(layer.options)
    with jax.default_matmul_precision("highest"):
        close(jax.jit(f)(x, params, **more), wanted(x, params, **more))
        assert "index" in parts(layer) or layer.options.kind == "mlp"

        def both(g):
            return jax.jit(
                jax.value_and_grad(lambda x, p, some: total(g)(x, p, {**more, **some}), argnums=(0, 1, 2))
            )(x, params, floats(more))  # fmt: skip

        got, right = both(f), both(wanted)
    close(got, right, 1e-4)
    assert {stream for _, stream in layer.launched} == {STREAM}


@pytest.mark.parametrize("case", sample(["fp8-gpt-oss", "fp8-deepseek", "fp8-mlp"], "fp8-mlp"))
def test_a_layer_with_a_recipe(jax_layer, case):
    """Near to plain JAX, and with FP8 values for several calls the same bits."""
    layer, f = jax_layer(layer_of(case))
    x, params, more = inputs_of(layer, tokens=60)
    wanted = plain(layer.options)

    def both(g, params):
        return jax.jit(jax.value_and_grad(lambda x, p: total(g)(x, p, more), argnums=(0, 1)))(x, params)

    got, right = both(f, params), both(wanted, params)
    quantise = [part for part in parts(layer) if part.startswith("quantise") and part.endswith(("w1", "w2"))]
    assert len(quantise) == len(layer.inputs("quantise"))
    for each, want in zip(jax.tree.leaves(got[1]), jax.tree.leaves(right[1]), strict=True):
        if want.any():
            assert jnp.linalg.norm(each - want) < 0.2 * jnp.linalg.norm(want)
    fp8 = jax.jit(f.quantise)(params)
    assert set(fp8) == set(layer.outputs("quantise"))
    layer.launched.clear()
    again = jax.jit(jax.grad(lambda x, p: total(f)(x, {**p, **fp8}, more), argnums=(0, 1)))(x, params)
    jax.tree.map(np.testing.assert_array_equal, again, got[1])
    assert not [part for part in parts(layer) if part in quantise]


def test_a_layer_of_the_cpu():
    from fusekit.cpu import CpuLayer
    from fusekit.interop import jax as interop

    layer = CpuLayer(layer_of("gpt-oss"))
    f = interop.moe(layer, "fusekit_test_cpu")  # for XLA's CPU, which has no streams
    x, params, more = inputs_of(layer)
    plain_of = plain(layer.options)
    close(jax.jit(f)(x, params, **more), plain_of(x, params, **more))
    gradients, wanted = (jax.jit(jax.grad(total(each), (0, 1)))(x, params, more) for each in (f, plain_of))
    close(gradients, wanted)


def test_nothing_is_kept_without_a_derivative(jax_layer):
    layer, f = jax_layer(layer_of("gpt-oss"))
    x, params, _ = inputs_of(layer)
    inference = jax.jit(f).lower(x, params).as_text()
    jax.jit(f)(x, params).block_until_ready()
    assert "fc1-infer" in parts(layer) and "fc1-fwd" not in parts(layer)
    assert str(layer.sizes(T).kept) not in inference
    assert str(layer.sizes(T).kept) in jax.jit(jax.grad(total(f))).lower(x, params, {}).as_text()


def test_only_the_gradients_asked_for_are_computed(jax_layer):
    layer, f = jax_layer(layer_of("gpt-oss"))
    x, params, _ = inputs_of(layer)
    jax.jit(jax.grad(total(f)))(x, params, {}).block_until_ready()
    assert "unpermute-dx" in parts(layer) and not any(part.endswith("wgrad") for part in parts(layer))
    layer.launched.clear()

    def frozen(w2):
        return total(f)(x, {**jax.lax.stop_gradient(params), "w2": w2}, {})

    jax.jit(jax.grad(frozen))(params["w2"]).block_until_ready()
    assert [part for part in parts(layer) if part.endswith("wgrad")] == ["fc2-wgrad"]
    assert "unpermute-dx" not in parts(layer)


def test_a_bias_of_the_choice_alone_has_no_gradient(jax_layer):
    layer, f = jax_layer(layer_of("deepseek"))
    x, params, more = inputs_of(layer)
    loss = jax.jit(jax.grad(lambda bias: total(f)(x, {**params, "expert_bias": bias}, more)))
    gradient = loss(params["expert_bias"])
    assert not gradient.any() and not any("dgrad" in part for part in parts(layer))


def test_the_loss_alone(jax_layer):
    """y has no gradient then."""
    layer, f = jax_layer(layer_of("deepseek"))
    x, params, more = inputs_of(layer)

    def loss(g):
        return jax.jit(jax.grad(lambda p: g(x, p, **more)[1]))(params)

    close(loss(f), loss(plain(layer.options)))


def test_tokens_of_the_whole_step_and_a_traced_coefficient(jax_layer):
    layer, f = jax_layer(layer_of("logits"))
    x, params, more = inputs_of(layer)
    run = jax.jit(lambda factor, tokens: f(x, params, **{**more, "aux_coefficient": factor}, total_tokens=tokens)[1])
    close(run(0.5, 3 * T), 2 / 9 * run(0.25, T))
    assert run(0.5, T).shape == ()


@pytest.mark.parametrize(
    "tokens", sample([0, 1, T - 1, np.int64(T), np.uint8(9), [T], np.array([T]), [jnp.int32(T)], 2**31 - 1], most=4)
)
def test_any_count_of_tokens_for_the_loss(jax_layer, tokens):
    """0 counts as 1. Fewer than the tokens of x are right where some rows of x are padding."""
    layer, f = jax_layer(layer_of("logits"))
    x, params, more = inputs_of(layer)
    count = max(int(np.asarray(tokens).item()), 1)
    close(f(x, params, **more, total_tokens=tokens)[1], (T / count) ** 2 * f(x, params, **more)[1])


def test_layers_in_a_scan_with_recomputation(jax_layer, soak):
    """What is kept is stacked by XLA: every layer's own comes back."""
    layer, f = jax_layer(layer_of("gpt-oss"))
    x, params, _ = inputs_of(layer)
    stacked = jax.tree.map(lambda each: jnp.stack([each, 0.5 * each, -each]), params)

    def loss(g, remat):
        def body(x, p):
            return x + g(x, p), None

        def run(x, stacked):
            return (jax.lax.scan(jax.checkpoint(body) if remat else body, x, stacked)[0] ** 2).sum()

        return jax.jit(jax.value_and_grad(run, argnums=(0, 1)))(x, stacked)

    wanted = loss(plain(layer.options), remat=False)
    for remat in (False, True) if soak else (True,):
        close(loss(f, remat=remat), wanted, 2e-4)


@pytest.mark.parametrize("case", sample(["gpt-oss", "deepseek", "recompute", "mlp", "fp8-gpt-oss"], "gpt-oss"))
def test_backward_passes_in_place(jax_layer, case):
    """The same bits, also of a second pass over what the same forward pass kept: XLA copies that before the first."""
    layer, f = jax_layer(layer_of(case), in_place=True)
    _, apart = jax_layer(layer_of(case))
    x, params, more = inputs_of(layer, tokens=60 if case.startswith("fp8") else T)
    got, wanted = (jax.jit(jax.grad(total(g), argnums=(0, 1)))(x, params, more) for g in (f, apart))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert layer.in_place == [True]

    @jax.jit
    def twice(x, params):
        _, pull = jax.vjp(lambda x, params: total(f)(x, params, more), x, params)
        return pull(1.0), pull(2.0)

    once, double = twice(x, params)
    jax.tree.map(np.testing.assert_array_equal, once, wanted)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, 2 * b, rtol=1e-3, atol=1e-3 * np.abs(b).max()), double, once
    )
    _, pull = jax.vjp(lambda x, params: total(f)(x, params, more), x, params)
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, pull(1.0), wanted)


def test_rows_have_leading_dims(jax_layer):
    layer, f = jax_layer(layer_of("choices"))
    x, params, more = inputs_of(layer, tokens=6)
    cut = {name: each.reshape(2, 3, K) for name, each in more.items()}
    y = f(x.reshape(2, 3, H), params, **cut)
    close(y, f(x, params, **more).reshape(2, 3, H), 0)


@pytest.mark.parametrize("case", sample(["gpt-oss", "deepseek", "choices", "mlp"], most=2))
def test_no_tokens(jax_layer, case):
    layer, f = jax_layer(layer_of(case))
    x, params, more = inputs_of(layer, tokens=0)
    y = jax.tree.leaves(jax.jit(f)(x, params, **more))[0]
    assert y.shape == (0, H)
    gradients = jax.jit(jax.grad(total(f), argnums=(0, 1)))(x, params, more)
    assert all(not each.any() for each in jax.tree.leaves(gradients))


@pytest.mark.soak("in PyTorch, too; the door passes them on as they are")
def test_types_of_gradients_are_those_of_the_parameters(jax_layer):
    layer, f = jax_layer(layer_of("gpt-oss", dtype="bf16", grad_dtype="f32"))
    x, params, _ = inputs_of(layer)
    gradients = jax.jit(jax.grad(total(f), argnums=1))(x, params, {})
    assert {str(each.dtype) for each in gradients.values()} == {"bfloat16"}
    wanted = jax.grad(total(plain(layer.options)), argnums=1)(
        *jax.tree.map(lambda a: a.astype("float32"), (x, params)), {}
    )
    for name, each in gradients.items():
        error = jnp.linalg.norm(each.astype("float32") - wanted[name]) / jnp.linalg.norm(wanted[name])
        assert error < 2e-2, (name, error)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"total_tokens": 7.5}, r"total_tokens is 7.5, float32 \[\]; it must be one int32 number"),
        ({"total_tokens": True}, "total_tokens is True, bool"),
        ({"total_tokens": [7, 8]}, r"total_tokens is \[7, 8\], int32 \[2\]; it must be one int32 number"),
        ({"total_tokens": 2**40}, "total_tokens is a int, of which JAX makes no array"),
        ({"total_tokens": -1}, "total_tokens is -1; it must be a number from 0 to 2147483647"),
        ({"total_tokens": np.int32(-1)}, r"total_tokens is np.int32\(-1\); it must be a number from 0"),
        ({"total_tokens": [-7]}, r"total_tokens is \[-7\]; it must be a number from 0"),
        ({"total_tokens": np.uint32(2**31)}, r"total_tokens is np.uint32\(2147483648\); it must be a number from 0"),
        ({"total_tokens": np.int64(2**40)}, "total_tokens is .*1099511627776"),
        ({"aux_coefficient": "x"}, "aux_coefficient is a str, of which JAX makes no array"),
        ({"x": None}, "x is a NoneType, of which JAX makes no array"),
        ({"x": 1.0}, r"x is float32 \[\]; for"),
        ({"x": np.zeros((3, 0), np.float32)}, r"x is float32 \[3, 0\]; for 3 tokens it must be float32 \[3, 24\]"),
    ],
)
def test_wrong_arguments_are_named(jax_layer, change, text):
    layer, f = jax_layer(layer_of("deepseek"))
    x, params, more = inputs_of(layer)
    given = {"x": x, **more, **change}
    with pytest.raises(ArgumentError, match=text):
        f(given.pop("x"), params, **given)
    assert not layer.passes


def test_kernels_are_loaded_when_a_call_is_traced(jax_layer):
    layer, f = jax_layer(layer_of("plain"))
    x, params, _ = inputs_of(layer)
    jax.jit(f).lower(x, params)
    assert layer.loaded == [T] and not layer.launched
    assert layer.prepared == [device.local_hardware_id for device in jax.local_devices()]


def test_a_layer_for_inference_has_no_derivative(jax_layer):
    layer, f = jax_layer(layer_of("gpt-oss", keep="none"))
    x, params, _ = inputs_of(layer)
    with jax.default_matmul_precision("highest"):
        close(jax.jit(f)(x, params), plain(layer.options)(x, params))
    with pytest.raises(ArgumentError, match="has no backward pass"):
        jax.jit(jax.grad(total(f)))(x, params, {})


def test_gradients_that_are_added_to_are_refused(jax_layer):
    with pytest.raises(ArgumentError, match="accumulate = false and add in JAX"):
        jax_layer(layer_of("plain", accumulate=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w3": 1.0}, "takes x, router, .*missing: none; unknown: w3"),
        ({"w2": None}, "missing: w2; unknown: none"),
        ({"w1": jnp.ones((X, 3, H))}, rf"w1 is float32 \[8, 3, 24\]; for {T} tokens it must be float32 \[8, 8, 24\]"),
        ({"w1": jnp.ones((X, 8, H), jnp.bfloat16)}, r"w1 is bfloat16 \[8, 8, 24\]; .* float32 \[8, 8, 24\]"),
    ],
)
def test_wrong_arguments_are_refused_before_xla_sees_them(jax_layer, change, said):
    layer, f = jax_layer(layer_of("plain"))
    x, params, _ = inputs_of(layer)
    given = {name: each for name, each in {**params, **change}.items() if each is not None}
    with pytest.raises(ArgumentError, match=said):
        f(x, given)


def test_rows_of_another_count_are_refused(jax_layer):
    layer, f = jax_layer(layer_of("choices"))
    x, params, more = inputs_of(layer)
    with pytest.raises(
        ArgumentError, match=rf"indices is int32 \[3, {K}\]; for {T} tokens it must be int32 \[{T}, {K}\]"
    ):
        f(x, params, **{**more, "indices": more["indices"][:3]})


def test_memory_that_is_not_aligned_is_an_error_of_the_computation(jax_layer, monkeypatch):
    layer, f = jax_layer(layer_of("plain"))
    monkeypatch.setattr(memory, "ALIGNMENT", 1 << 60)
    x, params, _ = inputs_of(layer)
    with pytest.raises(Exception, match=r"scratch is .* contiguous bytes at a multiple of"):
        jax.jit(f)(x, params).block_until_ready()
    assert not layer.launched
