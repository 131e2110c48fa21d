"""A layer in plain JAX, in the type of its arrays: every expert sees every token, so only for small sizes."""

import jax
import jax.numpy as jnp

ROWS = ("x", "logits", "indices", "weights")
CONSTANTS = ("aux_coefficient", "total_tokens")


def plain(options):
    """f(x, params, **more) -> y, or (y, loss), as `fusekit.interop.jax.moe` makes one; x is [T, H]."""

    def layer(x, params, **more):
        if options.kind == "mlp":
            p = as_kept(options, params)
            return mlp(options, x, p["w1"], p["w2"], p.get("b1", 0), p.get("b2", 0))
        return experts(options, x, as_kept(options, params), more)

    return jax.jit(layer)  # one program in place of one for each operation


def as_kept(options, params):
    """w1 [.., N, H] and w2 [.., H, I]."""
    turned = {"w1", "w2"} if options.b_major == "n" else ()
    return {name: array.swapaxes(-1, -2) if name in turned else array for name, array in params.items()}


def mlp(options, x, w1, w2, b1=0, b2=0):
    return activate(options, x @ w1.T + b1) @ w2.T + b2


def experts(options, x, p, more):
    r = options.router
    if r["input"] == "choices":
        indices, weights = more["indices"], more["weights"]
    else:
        logits = more["logits"] if r["input"] == "logits" else x @ p["router"].T + p.get("router_bias", 0)
        indices = jax.lax.stop_gradient(select(options, logits, p.get("expert_bias", 0)))
        weights = weights_of(options, logits, indices)
    chosen = jax.nn.one_hot(indices, options.experts, dtype=x.dtype)  # [T, K, X]
    weight, there = jnp.einsum("tke,tk->te", chosen, weights.astype(x.dtype)), chosen.sum(axis=1)
    into, out_of = (weight, there) if r["scale"] == "input" else (jnp.ones_like(weight), weight)
    z = jnp.einsum("th,enh->ten", x, p["w1"]) * into[..., None] + p.get("b1", 0)
    o = jnp.einsum("tei,ehi->teh", activate(options, z), p["w2"]) + p.get("b2", 0)
    y = jnp.einsum("teh,te->th", o, out_of)
    if options.shared:
        gate = jax.nn.sigmoid(x @ p["shared_gate"].T) if options.shared_gate else 1
        y += gate * mlp(options, x, p["shared_w1"], p["shared_w2"])
    y += p.get("residual", 0)
    if not r["aux_loss"]:
        return y
    scores = jax.nn.softmax(logits) if r["score_function"] == "softmax" else normalised(score(r, logits))
    counts = jax.lax.stop_gradient(there.sum(axis=0))
    factor = more["aux_coefficient"] * options.experts / (options.topk * more.get("total_tokens", len(x)) ** 2)
    return y, factor * (scores @ counts).sum()


def score(r, logits):
    if r["score_function"] == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jnp.sqrt(jax.nn.softplus(logits))


def normalised(scores):
    return scores / (scores.sum(axis=-1, keepdims=True) + 1e-20)


def select(options, logits, bias):
    """[T, K], with the lower of equal experts first."""
    r, softmax = options.router, options.router["score_function"] == "softmax"
    by = logits if softmax else score(r, logits) + bias
    if r["num_groups"]:
        summed = jax.nn.softmax(by) if softmax and r["pre_softmax"] else by
        members = summed.reshape(len(by), r["num_groups"], options.experts // r["num_groups"])
        sums = jax.lax.top_k(members, options.topk // r["group_topk"])[0].sum(axis=-1)
        allowed = jax.nn.one_hot(jax.lax.top_k(sums, r["group_topk"])[1], r["num_groups"]).sum(axis=1) > 0
        by = jnp.where(jnp.repeat(allowed, members.shape[-1], axis=1), by, -jnp.inf)
    return jax.lax.top_k(by, options.topk)[1]


def weights_of(options, logits, indices):
    r = options.router
    picked = jnp.take_along_axis(logits, indices, axis=1)
    if r["score_function"] == "softmax":
        every = jnp.take_along_axis(jax.nn.softmax(logits), indices, axis=1)
        weights = every if r["pre_softmax"] else jax.nn.softmax(picked)
    else:
        weights = normalised(score(r, picked)) if options.topk > 1 else score(r, picked)
    return weights * r["scaling_factor"]


def activate(options, z):
    act = {"alpha": 1.0, "limit": None, "up_offset": 0.0, "approximate": "none", **options.activation}
    kind = act["kind"]
    if not options.gated:
        plain_kinds = {
            "identity": lambda z: z, "relu": jax.nn.relu, "srelu": lambda z: jax.nn.relu(z) ** 2,
            "silu": jax.nn.silu, "gelu": lambda z: jax.nn.gelu(z, approximate=act["approximate"] == "tanh"),
        }  # fmt: skip
        return plain_kinds[kind](z)
    width = z.shape[-1] // 2
    block = {"concat": width, "interleaved": 1, "interleaved-32": 32}[options.glu_layout]
    parts = z.reshape(*z.shape[:-1], width // block, 2, block)
    gate, up = (parts[..., side, :].reshape(*z.shape[:-1], width) for side in (0, 1))
    if act["limit"] is not None:
        gate, up = jnp.minimum(gate, act["limit"]), jnp.clip(up, -act["limit"], act["limit"])
    assert kind == "swiglu", kind
    return gate * jax.nn.sigmoid(act["alpha"] * gate) * (up + act["up_offset"])


def arguments(options, buffers, tokens, key, scale=1.0):
    """(x, params, more): normal values for the inputs of a forward pass, weights by the length of their sums."""
    x, params, more = None, {}, {}
    for number, (name, buffer) in enumerate(buffers.items()):
        shape = buffer.extents({"T": tokens, "M": tokens * options.topk})
        values = jax.random.normal(jax.random.fold_in(key, number), shape)
        if name == "indices":
            order = jnp.argsort(jax.random.normal(key, (tokens, options.experts)), axis=1)
            more[name] = order[:, : options.topk].astype(jnp.int32)
        elif name == "weights":
            more[name] = jax.nn.softmax(values)
        elif name == "aux_coefficient":
            more[name] = jnp.float32(0.25)
        elif name in CONSTANTS:
            continue
        elif name in ROWS:
            x, more = (values, more) if name == "x" else (x, {**more, name: values})
        else:
            long = {"w2": options.intermediate, "shared_w2": options.shared}.get(name, options.hidden)
            params[name] = scale * values / (long**0.5 if len(shape) > 1 else 1.0)
    kinds = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "f32": jnp.float32, "i32": jnp.int32}
    cast = {name: array.astype(kinds[buffers[name].dtype]) for name, array in {**params, **more, "x": x}.items()}
    return cast.pop("x"), {name: cast[name] for name in params}, {name: cast[name] for name in more}
