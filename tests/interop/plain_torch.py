"""A mixture-of-experts layer in plain PyTorch, whose gradients are autograd's: what the layers are compared with.

It runs in the dtype of its tensors (float32 or float64), on their device.
"""

import torch
from torch.nn import functional


def forward(o, t, x, *, indices=None, weights=None, logits=None, coefficient=0.0, total_tokens=None):
    """(y, loss) of a layer with the options `o`. t: its parameters by the layer's names."""
    if o.kind == "mlp":
        one = {name: tensor[None] for name, tensor in t.items()}
        return _expert(o, one, x, 0), None
    loss = None
    if indices is None:
        if logits is None:
            logits = functional.linear(x, t["router"], t.get("router_bias"))
        indices, weights = choose(o, logits, t.get("expert_bias"))
        if o.router["aux_loss"]:
            loss = balance(o, logits, indices, coefficient, total_tokens)
    y = torch.zeros_like(x)
    for expert in range(o.experts):
        token, place = torch.where(indices == expert)
        weight = weights[token, place, None].to(x.dtype)
        rows = x[token]
        if o.router["scale"] == "input":
            y = y.index_add(0, token, _expert(o, t, weight * rows, expert))
        else:
            y = y.index_add(0, token, weight * _expert(o, t, rows, expert))
    if o.shared:
        shared = {"w1": t["shared_w1"][None], "w2": t["shared_w2"][None]}
        rows = _expert(o, shared, x, 0, major="k")
        y = y + (rows * torch.sigmoid(functional.linear(x, t["shared_gate"])) if o.shared_gate else rows)
    return y, loss


def choose(o, logits, expert_bias=None):
    """(indices, weights) of each token. An equal score: the lower expert."""
    r = o.router
    scores = score(r, logits)
    if r["score_function"] == "softmax" and not r["pre_softmax"]:
        scores = logits
    ranked = scores.detach() + (0 if expert_bias is None else expert_bias)
    if r["num_groups"]:
        size, chosen = o.experts // r["num_groups"], r["group_topk"]
        groups = ranked.unflatten(1, (-1, size)).topk(o.topk // chosen, dim=2).values.sum(2)
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter(1, _first(groups, chosen), True)
        ranked = ranked.masked_fill(~kept.repeat_interleave(size, 1), float("-inf"))
    indices = _first(ranked, o.topk)
    weights = scores.gather(1, indices)
    if r["score_function"] != "softmax":
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) if o.topk > 1 else weights
    elif not r["pre_softmax"]:
        weights = weights.softmax(1)
    return indices, weights * r["scaling_factor"]


def _first(values, count):
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def margins(o, logits, expert_bias=None):
    """[T]: the least difference that decides a token's choice, of scores or of groups' scores."""
    r = o.router
    ranked = logits if r["score_function"] == "softmax" else score(r, logits)
    ranked = ranked + (0 if expert_bias is None else expert_bias)
    got = _gap(ranked, o.topk)
    if r["num_groups"]:
        size, chosen = o.experts // r["num_groups"], r["group_topk"]
        within = ranked.unflatten(1, (-1, size))
        got = torch.minimum(got, _gap(within.topk(o.topk // chosen, dim=2).values.sum(2), chosen))
        # Which experts decide a group's score, and which of the chosen groups' are chosen: any two that are close.
        ordered = ranked.sort(dim=1).values
        got = torch.minimum(got, (ordered[:, 1:] - ordered[:, :-1]).min(dim=1).values)
    return got


def _gap(values, count):
    ordered = values.sort(dim=1, descending=True).values
    if count == values.shape[1]:
        return torch.full_like(ordered[:, 0], float("inf"))
    return ordered[:, count - 1] - ordered[:, count]


def score(r, logits):
    if r["score_function"] == "softmax":
        return logits.softmax(1)
    return logits.sigmoid() if r["score_function"] == "sigmoid" else functional.softplus(logits).sqrt()


def balance(o, logits, indices, coefficient, total_tokens=None):
    """The load-balancing loss."""
    scores = score(o.router, logits)
    if o.router["score_function"] != "softmax":
        scores = scores / (scores.sum(1, keepdim=True) + 1e-20)
    counts = torch.bincount(indices.reshape(-1), minlength=o.experts).to(scores.dtype)
    total = max(len(logits), 1) if total_tokens is None else total_tokens
    return coefficient * o.experts / (o.topk * total * total) * (scores.sum(0) * counts).sum()


def activate(o, z):
    """The activation of z, gated or not."""
    act = {"alpha": 1.0, "limit": None, "up_offset": 0.0, **o.activation}
    plain = {
        "silu": functional.silu, "relu": torch.relu, "gelu": _gelu(act), "srelu": lambda v: torch.relu(v).square(),
        "identity": lambda v: v,
    }  # fmt: skip
    if act["kind"] in plain:
        return plain[act["kind"]](z)
    gate, up = split(z, o.glu_layout)
    if act["limit"] is not None and act["limit"] != float("inf"):
        gate, up = gate.clamp(max=act["limit"]), up.clamp(-act["limit"], act["limit"])
    gates = {
        "swiglu": lambda v: v * torch.sigmoid(act["alpha"] * v), "reglu": torch.relu, "geglu": _gelu(act),
    }  # fmt: skip
    return gates[act["kind"]](gate) * (up + act["up_offset"])


def _gelu(act):
    return lambda v: functional.gelu(v, approximate=act.get("approximate", "none"))


def split(z, layout):
    """(gate, up) of the columns of z."""
    if layout == "concat":
        return z.chunk(2, dim=-1)
    block = 1 if layout == "interleaved" else 32
    parts = z.unflatten(-1, (-1, 2, block))
    return parts[..., 0, :].flatten(-2), parts[..., 1, :].flatten(-2)


def _expert(o, t, rows, expert, major=None):
    w1, w2 = t["w1"][expert], t["w2"][expert]
    if (major or o.b_major) == "k":
        w1, w2 = w1.T, w2.T
    z = rows @ w1 + (t["b1"][expert] if "b1" in t else 0)
    return activate(o, z) @ w2 + (t["b2"][expert] if "b2" in t else 0)
