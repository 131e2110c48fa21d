"""A layer inside jax.jit against plain JAX: values, gradients, training; `test_jax_moe.py` runs it.

python layers_in_jax.py LAYER
"""

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to others

import jax
import jax.numpy as jnp

import fusekit
from fusekit.interop.jax import moe
from tests.interop.plain_jax import arguments, plain

jax.config.update("jax_default_matmul_precision", "highest")
layer = fusekit.open_library().layer(sys.argv[1])
fused, right = moe(layer, "fusekit_layer"), plain(layer.options)
in_place = moe(layer, "fusekit_layer_in_place", in_place=True)
FLOATS = ("logits", "weights")


def wide(tree):
    """float32 of what is less."""
    return jax.tree.map(lambda each: each.astype("float32") if each.dtype == layer_type else each, tree)


def close(found, wanted, most, what):
    found, wanted = found.astype("float32"), wanted.astype("float32")
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    error = float(jnp.linalg.norm(found - wanted) / jnp.maximum(jnp.linalg.norm(wanted), 1e-30))
    sys.stdout.write(f"{what}: {error:.2e}\n")
    assert error < most or not (found - wanted).any(), (what, error)


def loss(f):
    def of(x, params, floats, more):
        result = f(x, params, **{**more, **floats})
        y, aux = result if isinstance(result, tuple) else (result, 0.0)
        ramp = jnp.linspace(0.5, 1.5, y.shape[-1])
        return (jnp.sin(2 * y.astype("float32")) * ramp).sum() + 10 * aux, (y, aux)

    return of


def both(f, x, params, more):
    floats = {name: item for name, item in more.items() if name in FLOATS}
    step = jax.jit(jax.value_and_grad(loss(f), argnums=(0, 1, 2), has_aux=True))
    return step(x, params, floats, more)


layer_type = {"bf16": "bfloat16", "fp16": "float16"}[layer.options.dtype]
for tokens in (1000, 127, 1, 0):
    x, params, more = arguments(layer.options, layer.inputs("forward"), tokens, jax.random.key(tokens))
    (_, (y, aux)), gradients = both(fused, x, params, more)
    (_, (wanted_y, wanted_aux)), wanted = both(right, wide(x), wide(params), more)
    again = both(in_place, x, params, more)[1]
    assert all(map(jnp.array_equal, jax.tree.leaves(again), jax.tree.leaves(gradients)))
    assert y.dtype == x.dtype and gradients[1]["w1"].dtype == params["w1"].dtype
    if tokens == 0:
        assert y.shape == x.shape and not any(leave.any() for leave in jax.tree.leaves(gradients))
        continue
    close(y, wanted_y, 1e-2, f"{tokens} tokens: y")
    if layer.options.router.get("aux_loss"):
        close(aux, wanted_aux, 1e-4, f"{tokens} tokens: loss")
    most = 2e-2 if tokens > 1 else 4e-2  # one token: a gradient through a router is a difference of few terms
    close(gradients[0], wanted[0], most, f"{tokens} tokens: x")
    for group in (1, 2):
        for name, element in wanted[group].items():
            close(gradients[group][name], element, most, f"{tokens} tokens: {name}")
    if not more:
        result = jax.jit(fused)(x, params)
        assert (result == y).all(), "inference has other bits"
    (_, _), again = both(fused, x, params, more)
    assert all((one == other).all() for one, other in zip(*map(jax.tree.leaves, (gradients, again)), strict=True))

x, params, more = arguments(layer.options, layer.inputs("forward"), 333, jax.random.key(3))
stacked = jax.tree.map(lambda each: jnp.stack([each, each / 2, -each]), params)


def deep(f, x, stacked):
    """Three layers in a scan; XLA stacks what each keeps."""

    def body(x, params):
        result = f(x, params, **more)
        y, aux = result if isinstance(result, tuple) else (result, 0.0)
        return x + y / 4, aux

    last, aux = jax.lax.scan(body, x, stacked)
    return (last.astype("float32") ** 2).mean() + jnp.sum(aux)


if not {"router"} & params.keys():  # the choice of a deep layer hangs on the rounding of x
    for f in (fused, jax.checkpoint(fused)):
        found = jax.jit(jax.grad(deep, argnums=2), static_argnums=0)(f, x, stacked)
        wanted = jax.jit(jax.grad(deep, argnums=2), static_argnums=0)(right, wide(x), wide(stacked))
        for name, each in wanted.items():
            close(found[name], each, 3e-2, f"scan: {name}")
else:
    found = jax.jit(jax.grad(deep, argnums=2), static_argnums=0)(fused, x, stacked)
    again = jax.jit(jax.grad(deep, argnums=2), static_argnums=0)(jax.checkpoint(fused), x, stacked)
    for name, entry in found.items():
        close(again[name], entry, 3e-2, f"scan with recomputation: {name}")


def train(f, params, x, target):
    """The losses of 20 steps, on float32 parameters; the layer sees them in its own type."""

    def distance(params):
        typed = jax.tree.map(lambda each, like: each.astype(like.dtype), params, given)
        result = f(x, typed, **more)
        y = result[0] if isinstance(result, tuple) else result
        return ((y.astype("float32") - target) ** 2).sum(axis=1).mean()

    @jax.jit
    def step(params):
        value, gradients = jax.value_and_grad(distance)(params)
        return jax.tree.map(lambda each, slope: each - 0.02 * slope, params, gradients), value

    given, losses = params, []
    params = jax.tree.map(lambda each: each.astype("float32"), params)
    for _ in range(20):
        params, value = step(params)
        losses.append(float(value))
    return losses


target = jax.random.normal(jax.random.key(4), x.shape)
found, wanted = train(fused, params, x, target), train(right, wide(params), wide(x), target)
sys.stdout.write(f"losses: {found}\nwanted: {wanted}\n")
assert wanted[-1] < 0.9 * wanted[0], wanted
assert all(abs(one - other) < 0.01 * other for one, other in zip(found, wanted, strict=True)), (found, wanted)
