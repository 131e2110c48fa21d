"""ragged_dot and the grouped MLP on the GPU against float32 of plain JAX; `test_jax_moe.py` runs it."""

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to others

import jax
import jax.numpy as jnp

from fusekit.interop.jax import grouped_mlp, ragged_dot
from tests.interop.jax_ragged_dot import activated, group_of, product

jax.config.update("jax_default_matmul_precision", "highest")
BF16 = jnp.bfloat16
# Sizes of groups, spare rows, K and N: empty groups, one group, tiles that are full, one row more and one less, none.
CASES = [
    ([0, 127, 128, 0, 129, 1, 0], 77, 200, 328),
    ([300], 0, 64, 8),
    ([0, 0, 0], 19, 72, 136),
    ([5] * 128, 3, 2048, 768),
    ([1000, 0, 24], 0, 256, 1536),
]


def close(found, wanted, most, what):
    found, wanted = found.astype("float32"), wanted.astype("float32")
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    error = float(jnp.linalg.norm(found - wanted) / jnp.maximum(jnp.linalg.norm(wanted), 1e-30))
    sys.stdout.write(f"{what}: {error:.2e}\n")
    assert error < most or not (found - wanted).any(), (what, error)


def plain_dot(x, w, offsets):
    return jnp.where((group_of(x, offsets) < w.shape[0])[:, None], product(x, w, offsets), 0)


def plain_mlp(x, w13, w2, offsets):
    return plain_dot(activated(plain_dot(x, w13, offsets)), w2, offsets)


def step(f):
    def loss(given, groups):
        y = f(*given, groups)
        ramp = jnp.linspace(0.5, 1.5, y.shape[-1])
        return (jnp.sin(y.astype("float32")) * ramp).sum(), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def check(name, f, plain, shapes, sizes, spare):
    keys = jax.random.split(jax.random.key(len(sizes)), len(shapes))
    given = [jax.random.normal(key, shape).astype(BF16) for key, shape in zip(keys, shapes, strict=True)]
    given = [given[0], *(each / each.shape[1] ** 0.5 for each in given[1:])]
    groups, offsets = jnp.array(sizes, jnp.int32), jnp.cumsum(jnp.array(sizes, jnp.int32))
    rows = sum(sizes)
    poisoned = [given[0].at[rows:].set(jnp.nan), *given[1:]]
    (_, y), gradients = step(f)(poisoned, groups)
    clean = [each.astype("float32") for each in [given[0].at[rows:].set(0), *given[1:]]]
    (_, wanted_y), wanted = step(plain)(clean, offsets)
    assert y.dtype == BF16 or y.dtype == jnp.float32
    assert not y[rows:].any() and not gradients[0][rows:].any(), "spare rows are not 0"
    close(y, wanted_y, 6e-3, f"{name} {sizes[:3]} y")
    for number, (ours, theirs) in enumerate(zip(gradients, wanted, strict=True)):
        close(ours, theirs, 2e-2, f"{name} {sizes[:3]} gradient {number}")
    again = step(f)(poisoned, groups)
    assert all(map(jnp.array_equal, jax.tree.leaves(again), jax.tree.leaves(((again[0][0], y), gradients))))


for sizes, spare, k, n in CASES:
    rows, experts = sum(sizes) + spare, len(sizes)
    shapes = [(rows, k), (experts, k, n)]
    check("dot", ragged_dot, plain_dot, shapes, sizes, spare)
    in_f32 = lambda *given: ragged_dot(*given, preferred_element_type="float32")  # noqa: E731
    check("dot-f32", in_f32, plain_dot, shapes, sizes, spare)
    check("mlp", grouped_mlp, plain_mlp, [(rows, k), (experts, k, 2 * n), (experts, n, k)], sizes, spare)

# No rows at all; in a loop, so inside XLA's own control flow.
assert ragged_dot(jnp.zeros((0, 64), BF16), jnp.zeros((2, 64, 8), BF16), jnp.zeros(2, int)).shape == (0, 8)
x, w = jnp.ones((64, 64), BF16), jnp.ones((4, 64, 64), BF16) / 64
looped = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: ragged_dot(x, w, jnp.array([20, 0, 40, 0])), x))(x)
assert (looped[:60] == 1).all() and not looped[60:].any()
sys.stdout.write("finished\n")
