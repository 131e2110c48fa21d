"""JAX: a layer whose experts are on two GPUs, inside jax.shard_map.

python jax_ranks.py                             one process with both GPUs
python jax_ranks.py RANK HOST:PORT              one of two processes; RANK is 0 or 1, the address that of rank 0
With --leave behind, rank 1 stays away in the end, and rank 0 says so in time.
"""

import os
import sys
import time

# XLA takes its memory now: to take more later could wait for launches, and these wait for the other rank.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".3")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fusekit
from fusekit.errors import PeerTimeoutError
from fusekit.interop.jax import moe

leave = "--leave" in sys.argv
process = [word for word in sys.argv[1:] if word != "--leave"]
if process:
    jax.distributed.initialize(process[1], 2, int(process[0]), local_device_ids=[int(process[0])])
if jax.device_count() < 2:
    raise SystemExit("needs two GPUs: ranks that wait for each other need one each")

T = 300  # tokens of a rank
mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("experts",))
layer = fusekit.open_library().layer("ranks/moe", tokens=T)
f = moe(layer, "fusekit_example_ranks", mesh=mesh, axis="experts", timeout=2000 if leave else 60_000)
X, K, H, I = layer.options.experts, layer.options.topk, layer.options.hidden, layer.options.intermediate

source = np.random.default_rng(0)  # the same in every process, which then takes its part


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * source.standard_normal(shape), jnp.bfloat16)


x, dy = normal(2 * T, H), normal(2 * T, H)
params = {"w1": normal(X, 2 * I, H, scale=H**-0.5), "w2": normal(X, H, I, scale=I**-0.5)}
more = {
    "indices": jnp.asarray(source.random((2 * T, X)).argsort(axis=1)[:, :K], jnp.int32),
    "weights": jnp.asarray(source.random((2 * T, K)), jnp.float32),
}


def loss(f, x, params, weights, indices, dy):
    y = f(x, params, weights=weights, indices=indices)
    return (y.astype(jnp.float32) * dy.astype(jnp.float32)).sum()


def of_rank(x, params, weights, indices, dy):
    """y and gradients: those of w1 and w2 are of this rank's experts, over the tokens of both ranks."""
    y = f(x, params, weights=weights, indices=indices)
    return y, jax.grad(loss, argnums=(1, 2, 3))(f, x, params, weights, indices, dy)


step = jax.jit(jax.shard_map(of_rank, mesh=mesh, in_specs=P("experts"), out_specs=P("experts")))


def plain(x, params, weights, indices):
    """All experts see all tokens, in float32 on one GPU."""
    x, w1, w2 = (each.astype(jnp.float32) for each in (x, params["w1"], params["w2"]))
    gate, up = jnp.split(jnp.einsum("th,enh->ten", x, w1), 2, axis=-1)
    rows = jnp.einsum("tei,ehi->teh", jax.nn.silu(gate) * up, w2)
    return jnp.einsum("teh,tke,tk->th", rows, jax.nn.one_hot(indices, X), weights)


def placed(array):
    """A half on each rank; a process makes what its own devices have."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P("experts")), lambda place: array[place])


arguments = (x, params, more["weights"], more["indices"], dy)
given = jax.tree.map(placed, arguments)
for _ in range(3):
    y, gradients = step(*given)
with jax.default_matmul_precision("highest"):
    wanted = jax.jit(plain)(*arguments[:-1])
    right = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)(plain, *arguments)
names = ["y", "x", "w1", "w2", "weights"]
for name, value, want in zip(names, jax.tree.leaves((y, gradients)), jax.tree.leaves((wanted, right)), strict=True):
    for shard in value.addressable_shards:
        got, part = (np.asarray(each, np.float64) for each in (shard.data, want[shard.index]))
        error = np.linalg.norm(got - part) / np.linalg.norm(part)
        assert error < 2e-2, (name, error)
f.check()
for device in mesh.local_devices:
    print(f"rank {list(mesh.devices).index(device)}: right", flush=True)

if leave:
    if process and process[0] == "1":
        os._exit(0)

    def without(x, params, weights, indices, dy):
        """In one process: rank 1 launches nothing."""
        skip = (jax.lax.axis_index("experts") == 1) & (not process)
        return jax.lax.cond(skip, lambda: x, lambda: f(x, params, weights=weights, indices=indices))

    lonely = jax.jit(jax.shard_map(without, mesh=mesh, in_specs=P("experts"), out_specs=P("experts")))
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 30:
            jax.block_until_ready(lonely(*given))
            f.check()
    except (PeerTimeoutError, jax.errors.JaxRuntimeError) as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    f.close(alone=True)
    os._exit(0)  # without an orderly end, for which JAX's processes meet

jax.block_until_ready(gradients)
f.close()
