"""The CuTe DSL kernels of examples/cute inside jax.jit; `test_own_kernel.py` runs it."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to others

import jax
import jax.numpy as jnp

import fusekit
from fusekit.interop.jax import operator

library = fusekit.open_library()
silu_add = operator(library.load("kernels/silu-add"), "fusekit_silu_add", scale=0.5)
gemm = operator(library.load("kernels/gemm"), "fusekit_gemm")
square_sum = operator(library.load("kernels/square-sum@cluster4"), "fusekit_square_sum")
total = operator(library.load("kernels/total"), "fusekit_total")


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def close(found, wanted, most):
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    error = float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))
    assert error < most, error


@jax.jit
def chain(a, b, residual):
    """Five launches of four records in XLA's stream, its own work between them."""
    product = gemm(a=jnp.tanh(a), b=b)
    activated = silu_add(x=product.reshape(-1), residual=residual)
    rows = activated.reshape(product.shape).astype(jnp.float32)
    sums = square_sum(x=rows)
    return activated, sums, total(x=sums * 2)


@jax.jit
def wanted(a, b, residual):
    product = jnp.matmul(jnp.tanh(a).astype(jnp.float32), b.astype(jnp.float32).T, precision="highest")
    activated = jax.nn.silu(0.5 * product.astype(jnp.bfloat16).astype(jnp.float32)).reshape(-1) + residual
    rows = activated.astype(jnp.bfloat16).astype(jnp.float32).reshape(product.shape)
    sums = (rows**2).sum(axis=1)
    return activated, sums, (sums * 2).sum()[None]


for m, n, k in ((1000, 520, 776), (64, 128, 64), (1000, 520, 776)):
    arguments = normal(0, m, k), normal(1, n, k), normal(2, m * n)
    for found, right in zip(chain(*arguments), wanted(*arguments), strict=True):
        close(found, right, 8e-3)

try:  # a shape that does not fit is an error of the computation, not a crash
    jax.jit(silu_add)(x=normal(0, 12), residual=normal(1, 12)).block_until_ready()
except Exception as error:
    assert "multiple of 8" in str(error), error
else:
    raise AssertionError("12 elements were taken")
