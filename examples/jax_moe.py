"""JAX: a stored kernel inside jax.jit, through the XLA FFI; XLA's buffers and stream, no copy."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to others

import jax
import jax.numpy as jnp

import fusekit
from fusekit.interop.jax import operator

E, M, K, I = 8, 1000, 512, 768
library = fusekit.open_library()
moe_fc1 = operator(library.load("quickstart/moe-fc1"), "fusekit_example_moe_fc1")

keys = jax.random.split(jax.random.key(0), 2)
x = jax.random.normal(keys[0], (M, K), jnp.bfloat16)
w = (jax.random.normal(keys[1], (E, 2 * I, K)) / K**0.5).astype(jnp.bfloat16)
ends = [100, 100, 350, 351, 600, 800, 999, 1000]


@jax.jit
def layer(x, w, offsets):
    """Work before and after on the same stream: the launch must wait for one and be waited for by the other."""
    scaled = jnp.tanh(x.astype(jnp.float32)).astype(jnp.bfloat16)
    return moe_fc1(x=scaled, w=w, offsets=offsets).astype(jnp.float32) * 2


def reference(x, w, ends):
    scaled = jnp.tanh(x.astype(jnp.float32)).astype(jnp.bfloat16).astype(jnp.float32)
    results, start = [], 0
    for weight, end in zip(w.astype(jnp.float32), ends, strict=True):
        z = jnp.matmul(scaled[start:end], weight.T, precision="highest")
        results.append(jax.nn.silu(z[:, :I]) * z[:, I:])
        start = end
    return jnp.concatenate(results) * 2


for counts in (ends, [1000] * 8, [125 * group for group in range(1, 9)]):
    result = layer(x, w, jnp.array(counts, jnp.int32))
    wanted = reference(x, w, counts)
    error = float(jnp.linalg.norm(result - wanted) / jnp.linalg.norm(wanted))
    print(f"jit with ends {counts}: relative error {error:.2e}")
    assert error < 4e-3

try:  # a wrong argument is an error of the computation, not a crash
    layer(x, w[:, :, :-8], jnp.array(ends, jnp.int32)).block_until_ready()
except Exception as error:
    print("refused:", str(error).splitlines()[0])
    assert "must have" in str(error)
else:
    raise AssertionError("weights of another K were taken")
