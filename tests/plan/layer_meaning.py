"""Each launch of a layer's program as one formula in float64, so that a program can be run without a device."""

import numpy as np

from fusekit.reference import activations, decode, encode, layouts, permutation, router
from fusekit.spec import Activation

# What the definitions of the router want to be told beside a table's own keys.
TYPES = {"routing_map": "bytes", "dtype": "f32", "out_dtype": "f32"}


def run(program, which, given, tokens, wanted=None):
    """Every buffer after a pass; given: the arguments, and what was kept. wanted: the outputs asked for."""
    known, dims = dict(given), program.dims(tokens)
    outputs = program.arguments(which)[1]
    for step in program.needed(which, outputs if wanted is None else wanted):
        keys = program.parts[step.part]
        reads = {name: known[buffer] for name, buffer in step.reads.items()}
        made = OPERATIONS[keys["op"]](keys, reads, dims)
        assert set(step.writes) <= set(made), (step.part, set(step.writes) - set(made))
        for name, buffer in step.writes.items():
            assert made[name].shape == program.buffers[buffer].extents(dims), (step.part, name)
            known[buffer] = made[name]
    return known


def gemm(keys, given, dims):
    dense = keys["op"] == "dense-gemm"
    rows = chosen(keys, given, "x")
    w = given["w"][None] if dense else given["w"]
    if keys.get("b_major", "k") == "n":
        w = w.transpose(0, 2, 1)
    bias = given.get("bias")
    z = np.zeros((len(rows), w.shape[1]))
    groups = [slice(0, len(rows))] if dense else slices(given["offsets"])
    for group, own in enumerate(groups):
        z[own] = rows[own] @ w[group].T
        if keys.get("bias"):
            z[own] += bias if dense else bias[group]
    kind = keys.get("activation", {"kind": "identity"})["kind"]
    layout = keys.get("glu_layout", "none")
    if kind == "identity":
        return {"y": z}
    if not kind.startswith("d"):
        return {"y": activations.activate(Activation(**keys["activation"]), layout, z), "preactivation": z}
    da, saved = z, given["preactivation"]
    act = Activation(**{**keys["activation"], "kind": kind[1:]})
    a, slopes = activations.derivative(act, layout, saved)
    scale = given["row_scale"][:, None] if keys.get("row_scale") else np.ones((len(da), 1))
    back = da * scale
    dz = back * slopes[0] if len(slopes) == 1 else layouts.join(back * slopes[0], back * slopes[1], layout)
    found = {"dz": dz, "y": a * scale, "dprob": (da * a).sum(axis=1)}
    found["dbias"] = dz.sum(axis=0) if dense else np.stack([dz[own].sum(axis=0) for own in groups])
    return found


def wgrad(keys, given, dims):
    dy, x = chosen(keys, given, "dy"), chosen(keys, given, "x")
    if keys["op"] == "dense-wgrad":
        return {"dw": dy.T @ x, "dbias": dy.sum(axis=0)}
    return {"dw": np.stack([dy[own].T @ x[own] for own in slices(given["offsets"])])}


def chosen(keys, given, name):
    """An operand, its rows chosen by the index where the kernel gathers it."""
    if keys.get("gather") != name:
        return given[name]
    index = given["index"]
    return np.where((index >= 0)[:, None], given[name][index], 0.0)


def slices(offsets):
    return [slice(start, end) for start, end in zip([0, *offsets[:-1]], offsets, strict=True)]


def topk(keys, given, dims):
    keys = {**TYPES, **keys}
    indices = router.select(keys, given)
    return {"indices": indices.astype(np.int64), "weights": router.weights(keys, given, indices)}


def topk_bwd(keys, given, dims):
    made = router.topk_gradient({**TYPES, **keys}, given)[0]
    return {"grad_logits": made + given.get("addend", 0.0)}


def index(keys, given, dims):
    made = permutation.index(given["indices"], keys["experts"])
    order = np.full(dims["M"], -1)
    order[: len(made["order"])] = made["order"]
    scale = np.full(dims["M"], np.nan)
    if keys.get("weighted"):
        scale[order >= 0] = given["weights"].reshape(-1)[order[order >= 0]]
    counts = np.diff(made["offsets"], prepend=0)
    return {**made, "order": order, "row_scale": scale, "counts": counts}


def permute(keys, given, dims):
    made = np.full((dims["M"], given["x"].shape[1]), np.nan)
    for k in range(keys["topk"]):
        there = given["inverse"][:, k] >= 0
        made[given["inverse"][there, k]] = (given["x"] * given["weights"][:, k, None])[there]
    return {"y": made}


def permute_bwd(keys, given, dims):
    gradient = permutation.unpermute(given["grad_y"], given["inverse"], given["weights"])[0]
    weights = permutation.weight_gradient(given["x"], given["grad_y"], given["inverse"])[0]
    return {"grad_x": gradient, "grad_weights": weights}


def unpermute(keys, given, dims):
    made = permutation.unpermute(given["x"], given["inverse"], given.get("weights"))[0]
    return {"y": made + sum(given[f"addend{number}"] for number in range(keys.get("addends", 0)))}


def weights_bwd(keys, given, dims):
    inverse = given["inverse"]
    made = np.where(inverse >= 0, given["dprob"][inverse], 0.0)
    if keys.get("addend"):
        made = np.where(inverse >= 0, made + np.take_along_axis(given["addend"], given["indices"], axis=1), 0.0)
    return {"grad_weights": made}


def probs(keys, given, dims):
    made = np.zeros((dims["T"], keys["experts"]))
    np.put_along_axis(made, given["indices"], given["weights"], axis=1)
    return {"probs": made}


def split(keys, given, dims):
    """The last term is all that is left, so that their sum is exact in float64, too."""
    found, rest = [], given["w"]
    for _ in range(keys["terms"] - 1):
        found.append(decode(encode(rest, "bf16"), "bf16").astype(np.float64))
        rest = rest - found[-1]
    return {"terms": np.concatenate([*found, rest])}


def summed(keys, given, dims):
    x = given["x"]
    made = x.reshape(len(x), keys["terms"], keys["experts"]).sum(axis=1)
    return {"y": made + given["bias"] if keys["bias"] else made}


def aux_score(keys, given, dims):
    scores, total = router.aux_scores({**TYPES, **keys}, given)
    return {
        "scores": scores,
        "score_sum": None if total is None else total[:, 0],
        "routing_map": np.zeros(scores.shape, np.uint8),
    }


def aux_score_bwd(keys, given, dims):
    return {"grad_logits": router.aux_gradient({**TYPES, **keys}, given)[0]}


def aux_loss(keys, given, dims):
    return {"loss": np.array([loss_factor(keys, given) * (given["counts"] * given["scores"]).sum()])}


def aux_loss_bwd(keys, given, dims):
    each = given["grad_loss"][0] * loss_factor(keys, given) * given["counts"]
    return {"grad_scores": np.broadcast_to(each, (dims["T"], keys["experts"]))}


def loss_factor(keys, given):
    tokens = float(given["total_tokens"][0])
    return given["coefficient"][0] * keys["experts"] / (keys["topk"] * tokens * tokens) if tokens else 0.0


OPERATIONS = {
    "dense-gemm": gemm, "grouped-gemm": gemm, "dense-wgrad": wgrad, "grouped-wgrad": wgrad, "router-topk": topk,
    "router-topk-bwd": topk_bwd, "moe-index": index, "moe-permute": permute, "moe-permute-bwd": permute_bwd,
    "moe-unpermute": unpermute, "moe-weights-bwd": weights_bwd, "moe-probs": probs, "router-aux-score": aux_score,
    "router-aux-score-bwd": aux_score_bwd, "moe-aux-loss": aux_loss, "moe-aux-loss-bwd": aux_loss_bwd,
    "router-split": split, "router-sum": summed,
}  # fmt: skip
