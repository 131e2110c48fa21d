"""The logits of a layer's own router, and how a gradient goes back through it.

Float32 weights are split into bf16 terms: one dense GEMM multiplies x by all of them, and their products are summed.
The gradient of x is rounded to bf16 like that of the logits, so it takes the weights rounded, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusekit.plan.layer.options import F32
from fusekit.plan.layer.program import BOTH

if TYPE_CHECKING:
    from fusekit.plan.layer.passes import Passes

TERMS = 3  # bf16 numbers that are a float32 one


def logits(p: Passes) -> None:
    """x . router^T + router_bias."""
    o = p.options
    bias, dtypes = o.router["bias"], {"dtype": F32, "grad": F32} if _wide(p) else {}
    w = p.parameter("router", o.experts, o.hidden, **dtypes)[0]
    biased = {"bias": p.parameter("router_bias", o.experts, **{"grad": F32} | dtypes)[0]} if bias else {}
    if not dtypes:
        keys = p.gemm("dense-gemm", o.experts, o.hidden, out_dtype=F32, bias=bias)
        p.step(BOTH, "router", keys, {"x": "x", "w": w, **biased}, {"y": "logits"})
        return
    terms = p.buffer("router_terms", TERMS * o.experts, o.hidden)
    products = p.buffer("router_products", "T", TERMS * o.experts, dtype=F32)
    p.step(BOTH, "router-split", _split(p, TERMS), {"w": w}, {"terms": terms})
    keys = p.gemm("dense-gemm", TERMS * o.experts, o.hidden, out_dtype=F32)
    p.step(BOTH, "router", keys, {"x": "x", "w": terms}, {"y": products})
    keys = {"op": "router-sum", "experts": o.experts, "terms": TERMS, "bias": bias, "problem": {"T": o.tokens}}
    p.step(BOTH, "router-sum", keys, {"x": products, **biased}, {"y": "logits"})


def rounded(p: Passes, which: str) -> str:
    """The router's weights as bf16, made in the pass `which` where they are not."""
    if not _wide(p):
        return "router"
    terms = p.buffer("router_rounded", p.options.experts, p.options.hidden)
    p.step(which, "router-round", _split(p, 1), {"w": "router"}, {"terms": terms})
    return terms


def _wide(p: Passes) -> bool:
    return bool(p.options.router["weight_dtype"] == F32)


def _split(p: Passes, terms: int) -> dict[str, Any]:
    return {"op": "router-split", "terms": terms, "problem": {"T": p.options.experts, "H": p.options.hidden}}
