"""fusekit.interop.jax.ragged_dot and grouped_mlp next to jax.lax.ragged_dot, forward and with gradients, on one GPU.

    fusekit build ragged-dot
    python tests/benchmarks/run.py ragged_dot [--rounds 7] [--peers xla,xla-fusion,xla-triton] [--shapes N,...]

Prints a line of JSON for each shape and peer, in milliseconds (medians of interleaved rounds). Each peer is a process
of its own, as XLA reads its flags once, and measures fusekit again (`fusekit`); `ratio` is the time of the peer over
fusekit's in that process. Rows are shared unevenly among the experts, and as many as the sizes: no row is spare.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

# XLA's and JAX's own switches for its kernels.
FLAGS = {
    "xla": {},
    "xla-fusion": {"XLA_FLAGS": "--xla_gpu_experimental_use_ragged_dot_fusion=true"},
    "xla-triton": {"JAX_RAGGED_DOT_USE_GPU_PALLAS_TRITON_LOWERING": "1"},
}
# E, M, H, I: Qwen3-30B-A3B at 8192 tokens, Mixtral 8x7B at 8192, few tokens.
SHAPES = {
    "qwen3-30b": (128, 65536, 2048, 768),
    "mixtral-8x7b": (8, 16384, 4096, 14336),
    "qwen3-30b-512": (128, 4096, 2048, 768),
}


def measure(peer: str, shape: tuple[int, int, int, int], rounds: int) -> dict:
    import jax
    import jax.numpy as jnp

    from fusekit.interop.jax import grouped_mlp, ragged_dot

    theirs = jax.lax.ragged_dot
    e, m, h, i = shape
    keys = jax.random.split(jax.random.key(0), 5)
    bf16 = jnp.bfloat16
    x = jax.random.normal(keys[0], (m, h)).astype(bf16)
    w13 = (jax.random.normal(keys[1], (e, h, 2 * i)) / h**0.5).astype(bf16)
    w2 = (jax.random.normal(keys[2], (e, i, h)) / i**0.5).astype(bf16)
    share = jax.random.uniform(keys[3], (e,), minval=0.5, maxval=1.5)
    ends = jnp.round(jnp.cumsum(share / share.sum()) * m).astype(jnp.int32).at[-1].set(m)
    sizes = jnp.diff(ends, prepend=0)
    dy13, dy = (jax.random.normal(keys[4], (m, n)).astype(bf16) for n in (2 * i, h))

    def mlp(x, w13, w2, sizes):
        gate, up = jnp.split(theirs(x, w13, sizes), 2, axis=1)
        return theirs((jax.nn.silu(gate.astype("float32")) * up).astype(bf16), w2, sizes)

    def forward(f):
        return lambda sizes, *given: f(*given, sizes)

    def with_gradients(f):
        def step(dy, sizes, *given):
            y, pull = jax.vjp(lambda *given: f(*given, sizes), *given)
            return y, pull(dy)

        return step

    found = {}
    for name, ours, other, given, grad in (
        ("dot", ragged_dot, theirs, (x, w13), dy13),
        ("mlp", grouped_mlp, mlp, (x, w13, w2), dy),
    ):
        for what, make, more in (
            ("forward", forward, (sizes,)),
            ("forward and backward", with_gradients, (grad, sizes)),
        ):
            row = {}
            runs = {}
            for label, f in (("fusekit", ours), (peer, other)):
                try:
                    call = jax.jit(make(f))
                    jax.block_until_ready(call(*more, *given))
                    runs[label] = call
                except Exception as error:
                    row[label] = f"{type(error).__name__}: {str(error)[:160]}"
            times = {label: [] for label in runs}
            for _ in range(rounds):
                for label, call in runs.items():
                    jax.block_until_ready(call(*more, *given))
                    start = time.perf_counter()
                    for _ in range(4):
                        result = call(*more, *given)
                    jax.block_until_ready(result)
                    times[label].append((time.perf_counter() - start) / 4 * 1e3)
            row |= {label: round(statistics.median(values), 3) for label, values in times.items()}
            if len(times) == 2:
                row["ratio"] = round(row[peer] / row["fusekit"], 2)
            found[f"{name}, {what}"] = row
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", default="xla,xla-fusion,xla-triton")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--timeout", type=int, default=120, help="seconds of a peer's process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        peer, name = options.one.split(":")
        json.dump(measure(peer, SHAPES[name], options.rounds), sys.stdout)
        return 0
    for name in options.shapes.split(","):
        e, m, h, i = SHAPES[name]
        for peer in options.peers.split(","):
            command = [sys.executable, sys.argv[0].split()[0], "ragged_dot", "--one", f"{peer}:{name}"]
            command += ["--rounds", str(options.rounds)]
            environment = os.environ | FLAGS[peer]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=options.timeout, check=False
                )
                found = json.loads(done.stdout) if done.returncode == 0 else done.stderr[-400:]
            except subprocess.TimeoutExpired:
                found = f"no result in {options.timeout} s"
            line = {"shape": name, "E": e, "M": m, "H": h, "I": i, "peer": peer, "ms": found}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return 0
