"""The gate of a shared expert: its rows times sigmoid(x . shared_gate), as Qwen2-MoE and Qwen3-Next have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusekit.abi.layer_pass import KEPT
from fusekit.plan.layer.program import BOTH, DGRAD, WGRAD

if TYPE_CHECKING:
    from fusekit.plan.layer.passes import Passes

SCALE, GRAD_SCALE = "shared_scale", "shared_grad_scale"
"""The factor of each token's row, which the second projection multiplies by, and its gradient."""


def gate(p: Passes) -> None:
    """The factors, before the shared expert needs them."""
    p.parameter("shared_gate", 1, p.options.hidden, grad="f32")
    p.buffer(SCALE, "T", dtype="f32", place=KEPT)
    p.step(BOTH, "shared-gate", _table(p, "moe-gate"), {"x": "x", "w": "shared_gate"}, {"y": SCALE})


def gate_backward(p: Passes, addend: str, dx: str) -> None:
    """From the factors' gradient to those of shared_gate and of x; addend: what else of dx there is."""
    h = p.options.hidden
    p.buffer(dx, "T", h)
    reads = {"grad_y": GRAD_SCALE, "scale": SCALE, "w": "shared_gate", "addend": addend}
    writes = {
        "grad_logits": p.buffer("shared_dlogit", "T", dtype="f32"),
        "token": p.buffer("shared_token", "T", dtype="i32"),
        "offsets": p.buffer("shared_offsets", 1, dtype="i32"),
        "dx": dx,
    }
    p.step(DGRAD, "shared-gate-dgrad", _table(p, "moe-gate-bwd"), reads, writes)
    keys = {**_table(p, "moe-bias-bwd"), "experts": 1, "topk": 1}
    reads = {"grad_y": "x", "token": "shared_token", "row_scale": "shared_dlogit", "offsets": "shared_offsets"}
    p.step(WGRAD, "shared-gate-wgrad", keys, reads, {"grad_bias": "dshared_gate"})


def _table(p: Passes, op: str) -> dict[str, Any]:
    return {"op": op, "dtype": p.options.dtype, "problem": {"T": p.options.tokens, "H": p.options.hidden}}
