"""What a PyTorch program runs instead of a fused router or a fused permutation: eager code, or Transformer Engine.

Each function gives work that computes what the kernel of a spec computes, from the kernel's own input tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusekit.bench.torch_gemm import on_stream, view

__all__ = ["Captured", "eager", "transformer_engine", "view"]

Work = Callable[[], Any]


class Captured:
    """A graph of `count` runs of `works` in turn. Calling it launches the graph in the stream of a handle."""

    def __init__(self, works: Sequence[Work], count: int, device: int, stream: int) -> None:
        self.count = count
        for work in works:
            on_stream(work, device)(stream)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        capture_stream = torch.cuda.ExternalStream(stream, device=f"cuda:{device}")
        with torch.cuda.graph(self._graph, stream=capture_stream, capture_error_mode="thread_local"):
            for index in range(count):
                works[index % len(works)]()
        self._run = on_stream(self._graph.replay, device)

    def __call__(self, stream: int) -> None:
        self._run(stream)

    def close(self) -> None:
        """Gives the graph and its memory back."""
        self._graph.reset()


def eager(spec: Mapping[str, Any], tensors: Mapping[str, Tensor], defaults: Mapping[str, float]) -> Work | None:
    """Plain PyTorch for the kernel of `spec` (canonical form); None where it has no such twin here."""
    scale, t = float(defaults.get("scaling_factor", 1.0)), tensors
    match spec["op"]:
        case "router-topk" if spec["routing_map"] != "bits":
            return lambda: _outputs(spec, *_select(spec, t["logits"], t.get("expert_bias"), scale))
        case "router-aux-score" if spec["routing_map"] != "bits":
            return lambda: _aux(spec, t["logits"])
        case "moe-index":
            return lambda: _index(t["indices"], spec["experts"], bool(spec.get("tokens")))
        case "moe-permute":
            token = _token_of_row(t["inverse"])
            if spec["scaled"]:
                scale = _weight_of_row(t["inverse"], t["weights"])[:, None]
                return lambda: (t["x"].index_select(0, token) * scale).to(t["x"].dtype)
            weights = _weight_of_row(t["inverse"], t["weights"]) if spec["weighted"] else None
            return lambda: (t["x"].index_select(0, token), weights)
        case "moe-unpermute":
            dropped, rows = t["inverse"] < 0, t["inverse"].clamp(min=0).long()
            factor = (t["weights"] if spec["weighted"] else torch.ones_like(rows, dtype=torch.float32)).masked_fill(
                dropped, 0.0
            )
            added = [t[f"addend{number}"] for number in range(spec.get("addends", 0))]
            return lambda: sum(added, (t["x"][rows] * factor[..., None]).sum(dim=1)).to(t["x"].dtype)
        case _:
            return None


def transformer_engine(
    spec: Mapping[str, Any], tensors: Mapping[str, Tensor], defaults: Mapping[str, float]
) -> Work | None:
    """Transformer Engine's fused router for the kernel of `spec`, forward and backward; None for what it has not.

    Its backward starts from its own choices among random logits. Raises ImportError where it is not installed.
    """
    from transformer_engine.pytorch import router

    op, topk = spec["op"], spec["topk"]
    aux = op in ("router-aux-score", "router-aux-score-bwd")
    if spec["routing_map"] == "bits" or not (aux or op in ("router-topk", "router-topk-bwd")):
        return None

    def forward(logits: Tensor) -> Tensor:
        if aux:
            scores: Tensor = router.fused_compute_score_for_moe_aux_loss(logits, topk, spec["score_function"])[1]
            return scores
        groups, limit = (spec["num_groups"], spec["group_topk"]) if spec["num_groups"] else (None, None)
        scale = float(defaults.get("scaling_factor", 1.0))
        probs: Tensor = router.fused_topk_with_score_function(
            logits, topk, spec["pre_softmax"], groups, limit, scale, spec["score_function"], tensors.get("expert_bias")
        )[0]
        return probs

    if op in ("router-topk", "router-aux-score"):
        return lambda: forward(tensors["logits"])
    given = tensors.get("logits")
    like = given if given is not None else torch.randn_like(tensors["grad_scores"])
    logits = like.detach().clone().requires_grad_()
    result: list[Tensor] = []

    def backward() -> Tensor:
        if not result:  # the first run, before a capture: in the stream in which gradients will be computed
            result.append(forward(logits))
        return torch.autograd.grad(result[0], logits, torch.ones_like(result[0]), retain_graph=True)[0]

    return backward


def _scores(function: str, logits: Tensor) -> Tensor:
    if function == "sigmoid":
        return torch.sigmoid(logits)
    return functional.softplus(logits).sqrt() if function == "sqrtsoftplus" else torch.softmax(logits, dim=-1)


def _select(
    spec: Mapping[str, Any], logits: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Indices [T, K], weights [T, K] and the shape of the logits."""
    topk, function = spec["topk"], spec["score_function"]
    logits = logits.float()
    if function == "softmax" and not spec["pre_softmax"] and bias is None and not spec["num_groups"]:
        chosen, indices = logits.topk(topk, dim=-1)
        return indices, torch.softmax(chosen, dim=-1) * scale, tuple(logits.shape)
    late = function == "softmax" and not spec["pre_softmax"]
    scores = logits if late else _scores(function, logits)
    selection = scores if bias is None else scores + bias
    if spec["num_groups"]:
        grouped = selection.unflatten(-1, (spec["num_groups"], -1))
        best = grouped.topk(topk // spec["group_topk"], dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(spec["group_topk"], dim=-1).indices, True)
        selection = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    indices = selection.topk(topk, dim=-1).indices
    weights = scores.gather(1, indices)
    if late:
        weights = torch.softmax(weights, dim=-1)
    elif function != "softmax" and topk > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return indices, weights * scale, tuple(logits.shape)


def _outputs(spec: Mapping[str, Any], indices: Tensor, weights: Tensor, shape: tuple[int, ...]) -> dict[str, Tensor]:
    if spec["outputs"] == "compact":
        return {"indices": indices.int(), "weights": weights}
    probs = torch.zeros(shape, dtype=weights.dtype, device=weights.device).scatter_(1, indices, weights)
    return {"probs": probs, "routing_map": _map(indices, shape)}


def _map(indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=indices.device).scatter_(1, indices, 1)


def _aux(spec: Mapping[str, Any], logits: Tensor) -> dict[str, Tensor]:
    logits = logits.float()
    scores = _scores(spec["score_function"], logits)
    if spec["score_function"] != "softmax":
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    indices = logits.topk(spec["topk"], dim=-1).indices
    return {"scores": scores, "routing_map": _map(indices, tuple(logits.shape))}


def _index(indices: Tensor, experts: int, tokens: bool = False) -> dict[str, Tensor]:
    flat = indices.reshape(-1)
    owner = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = torch.argsort(owner, stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(flat.numel(), device=flat.device))
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(
        0, owner.long(), torch.ones_like(owner, dtype=torch.int64)
    )
    arrays = {
        "offsets": counts[:experts].cumsum(0).int(),
        "order": order.int(),
        "inverse": inverse.int().view_as(indices),
    }
    if tokens:
        arrays["token"] = torch.where(owner[order] < experts, order // indices.shape[1], -1).int()
    return arrays


def _choices(inverse: Tensor) -> Tensor:
    """Which choice (t * K + k) each row is."""
    flat = inverse.reshape(-1)
    choice = torch.nonzero(flat >= 0).flatten()
    order = torch.empty_like(choice)
    order[flat[choice].long()] = choice
    return order


def _token_of_row(inverse: Tensor) -> Tensor:
    return _choices(inverse) // inverse.shape[1]


def _weight_of_row(inverse: Tensor, weights: Tensor) -> Tensor:
    return weights.reshape(-1)[_choices(inverse)]
