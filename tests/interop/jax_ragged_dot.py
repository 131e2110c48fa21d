"""ragged_dot, the grouped MLP and their gradients next to jax.lax.ragged_dot, with kernels that are JAX's formulas.

`test_jax.py` runs it.
"""

import pytest

from fusekit.errors import ArgumentError, NotBuiltError

jax = pytest.importorskip("jax", reason="JAX is not installed")
from fusekit.interop import jax_ragged as ragged  # noqa: E402
from tests.soak import sample  # noqa: E402

jnp = jax.numpy
BF16 = jnp.bfloat16
M, E, K, N = 40, 5, 16, 24
SIZES = jnp.array([7, 0, 20, 1, 5], jnp.int32)  # seven rows are spare
SPARE = slice(33, M)


def group_of(x, offsets):
    return jnp.searchsorted(offsets, jnp.arange(x.shape[0]), side="right")


def product(x, w, offsets, equation="mk,mkn->mn"):
    """float32; NaN in rows of no group, which kernels do not write."""
    group = group_of(x, offsets)
    weights = w.astype("float32")[jnp.minimum(group, w.shape[0] - 1)]
    y = jnp.einsum(equation, x.astype("float32"), weights)
    return jnp.where((group < w.shape[0])[:, None], y, jnp.nan)


def activated(z):
    gate, up = jnp.split(z, 2, axis=1)
    return jax.nn.silu(gate) * up


def weight_gradient(dy, x, offsets):
    """dy^T . x of each group; the spare rows of both are not read."""
    member = jax.nn.one_hot(group_of(x, offsets), offsets.shape[0])
    dy, x = (jnp.nan_to_num(each.astype("float32")) for each in (dy, x))
    return jnp.einsum("me,mn,mk->enk", member, dy, x).astype(BF16)


def dswiglu(x, w, preactivation, offsets):
    a, pull = jax.vjp(activated, preactivation.astype("float32"))
    (dz,) = pull(product(x, w, offsets, "mk,mnk->mn"))
    return dz.astype(BF16), a.astype(BF16)


FORMULAS = {
    "dot": lambda x, w, offsets: product(x, w, offsets).astype(BF16),
    "dot-f32": product,
    "dlhs": lambda x, w, offsets: product(x, w, offsets, "mk,mnk->mn").astype(BF16),
    "drhs": weight_gradient,
    "swiglu-infer": lambda x, w, offsets: activated(product(x, w, offsets)).astype(BF16),
    "swiglu": lambda x, w, offsets: (activated(z := product(x, w, offsets)).astype(BF16), z.astype(BF16)),
    "dswiglu": dswiglu,
}
ORDER = {"drhs": ("dy", "x", "offsets"), "dswiglu": ("x", "w", "preactivation", "offsets")}


@pytest.fixture
def calls(monkeypatch):
    """(kernel, E, M, N, K) of each call; ragged_dot takes kernels, as on a GPU."""
    seen = []

    def kernel(library, name, *sizes):
        zeros = ragged.ZEROS.get(name)

        def call(**arrays):
            seen.append((name, *sizes))
            given = [arrays.pop(each) for each in ORDER.get(name, ("x", "w", "offsets"))]
            assert not arrays
            y = FORMULAS[name](*given)
            return jnp.where((group_of(given[0], given[-1]) < E)[:, None], y, 0) if zeros else y

        return call

    monkeypatch.setattr(ragged, "_kernel", kernel)
    monkeypatch.setattr(ragged, "_on_gpu", lambda: True)
    return seen


def arrays(*shapes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(key, shape).astype(BF16) for key, shape in zip(keys, shapes, strict=True)]


def gradients(f, *given):
    def loss(*given):
        y = f(*given, SIZES)
        return (jnp.sin(y.astype("float32")) * jnp.arange(1, y.shape[1] + 1)).sum(), y

    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(given))), has_aux=True))(*given)


def agree(found, wanted, most=2e-2):
    def check(a, b):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = a.astype("float32"), b.astype("float32")
        assert float(jnp.linalg.norm(a - b)) <= most * float(jnp.linalg.norm(b)) > 0

    jax.tree.map(check, found, wanted)


@pytest.mark.parametrize("out", sample([None, "float32"], "float32"))
def test_it_is_the_one_of_jax(calls, out):
    x, w = arrays((M, K), (E, K, N))
    x = x.at[SPARE].set(jnp.nan)  # reaches nothing
    ours = gradients(lambda *given: ragged.ragged_dot(*given, preferred_element_type=out), x, w)
    clean = x.at[SPARE].set(0)
    right = gradients(lambda *given: jax.lax.ragged_dot(*given, preferred_element_type=out), clean, w)
    agree(ours, right)
    (_, y), (dx, _) = ours
    assert not y[SPARE].any() and not dx[SPARE].any()
    name = "dot" if out is None else "dot-f32"
    assert calls == [(name, E, M, N, K), ("dlhs", E, M, K, N), ("drhs", E, M, K, N)]


def test_the_mlp(calls):
    x, w13, w2 = arrays((M, K), (E, K, 2 * N), (E, N, K))
    w13, w2 = w13 / 4, w2 / 4
    x = x.at[SPARE].set(jnp.nan)

    def plain(x, w13, w2, sizes):
        a = activated(jax.lax.ragged_dot(x, w13, sizes, preferred_element_type="float32"))
        return jax.lax.ragged_dot(a.astype(BF16), w2, sizes)

    ours, right = gradients(ragged.grouped_mlp, x, w13, w2), gradients(plain, x.at[SPARE].set(0), w13, w2)
    agree(ours, right)
    names = ["swiglu", "dot", "dswiglu", "dlhs", "drhs", "drhs"]
    assert [name for name, *_ in calls] == names
    assert calls[0][1:] == (E, M, 2 * N, K) and calls[2][1:] == (E, M, N, K)
    calls.clear()
    agree(jax.jit(ragged.grouped_mlp)(x, w13, w2, SIZES), right[0][1])
    assert [name for name, *_ in calls] == ["swiglu-infer", "dot"]


def test_without_a_gpu_it_is_jaxs():
    x, w13, w2 = arrays((M, K), (E, K, 2 * N), (E, N, K))
    assert (ragged.ragged_dot(x, w13, SIZES) == jax.lax.ragged_dot(x, w13, SIZES)).all()
    assert ragged.grouped_mlp(x, w13, w2, SIZES).shape == (M, K)


def test_tokamax_asks_in_its_own_way(calls):
    """As tokamax 0.0.12 calls an implementation."""
    x, w = arrays((M, K), (E, K, N))
    more = {"precision": None, "preferred_element_type": None, "activation": None}
    dims = jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0])
    given = {"group_sizes": SIZES, "ragged_dot_dimension_numbers": dims, **more}
    right = jax.lax.ragged_dot(x, w, SIZES)
    agree(ragged.tokamax_ragged_dot(x, w, **given), right)
    agree(ragged.tokamax_ragged_dot(x, w, **{**given, "activation": jax.nn.relu}), jax.nn.relu(right))
    with pytest.raises(NotImplementedError, match="float32"):
        ragged.tokamax_ragged_dot(x.astype("float32"), w, **given)
    turned = jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])
    with pytest.raises(NotImplementedError):
        ragged.tokamax_ragged_dot(x, w, **{**given, "ragged_dot_dimension_numbers": turned})


def test_what_no_kernel_computes(calls, monkeypatch):
    x, w = arrays((M, K), (E, K, N))
    for harm, words in [
        ({"precision": "highest"}, "precision is highest"),
        ({"preferred_element_type": "float16"}, "must be bfloat16 or float32"),
        ({"group_offset": jnp.zeros(1, int)}, "leave it out"),
    ]:
        with pytest.raises(NotImplementedError, match=words):
            ragged.ragged_dot(x, w, SIZES, **harm)
    with pytest.raises(ragged.UnsupportedError, match="multiple of 8 elements; pad them"):
        ragged.ragged_dot(x, w[..., :20], SIZES)
    for wrong in ((x[:, :8], w, SIZES), (x, w, SIZES[:3]), (x[0], w, SIZES)):
        with pytest.raises(ArgumentError, match=r"must be \[M, K\], \[E, K, N\] and \[E\]"):
            ragged.ragged_dot(*wrong)
    with pytest.raises(ArgumentError, match="must be int32"):
        ragged.ragged_dot(x, w, SIZES.astype("float32"))
    assert not calls


def test_kernels_that_were_not_built(monkeypatch, tmp_path):
    from fusekit.config import Config
    from fusekit.library import Library

    monkeypatch.setattr(ragged, "_on_gpu", lambda: True)
    x, w = arrays((M, K), (E, K, N))
    with pytest.raises(NotBuiltError, match="fusekit build ragged-dot/dot"):
        ragged.ragged_dot(x, w, SIZES, library=Library(Config(store=tmp_path)))
