"""A dense MLP: the layer itself, or the shared expert of a layer of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusekit.abi.layer_pass import ARGUMENT, KEPT, SCRATCH
from fusekit.plan.layer.factors import Rows
from fusekit.plan.layer.program import BOTH, DGRAD

if TYPE_CHECKING:
    from fusekit.plan.layer.passes import Passes


def mlp(p: Passes, prefix: str, width: int, y: str, dx: str, *, scale: str = "", grad_scale: str = "") -> None:
    """y of x, and dx of dy; both are arguments where the MLP is the layer, whose prefix is "".

    scale: a buffer with a factor of each row of y; grad_scale: one for its gradient.
    """
    o, place = p.options, SCRATCH if prefix else ARGUMENT
    major = "k" if prefix else o.b_major
    bias = o.bias and not prefix
    h, n = o.hidden, o.sides * width
    part, name = prefix.replace("_", "-"), prefix
    w1, dw1 = p.parameter(f"{name}w1", *((n, h) if major == "k" else (h, n)), major=major)
    w2, dw2 = p.parameter(f"{name}w2", *((h, width) if major == "k" else (width, h)), major=major)
    b1 = {"bias": p.parameter("b1", n, grad="f32")[0]} if bias else {}
    b2 = {"bias": p.parameter("b2", h, grad="f32")[0]} if bias else {}
    z = p.buffer(f"{name}z", "T", n, place=KEPT if o.keep == "z" else SCRATCH)
    p.buffer(y, "T", h, place=place)
    p.buffer(dx, "T", h, place=place)
    rows, gradients = (o.squared(major) == side for side in ("rows", "gradients"))
    x, dy = Rows("x", h, "T", fp8=f"{name}x", squares=rows), Rows("dy", h, "T", fp8=f"{name}dy", squares=gradients)
    between, back = Rows(f"{name}a", width, "T", squares=rows), Rows(f"d{name}z", n, "T", squares=gradients)
    given = p.factors.product(p.firsts, x, w1, major)
    first = {**p.gemm("dense-gemm", n, h, bias=bias), **given.keys}
    p.first(f"{part}fc1", first, {**given.reads, **b1}, between, z)
    given = p.factors.product(BOTH, between, w2, major)
    second = {**p.gemm("dense-gemm", h, width, bias=bias), **given.keys}
    scaled = {"row_scale": scale} if scale else {}
    if scale:
        second["row_scale"] = True
        p.buffer(grad_scale, "T", dtype="f32")
    p.step(BOTH, f"{part}fc2", second, {**given.reads, **b2, **scaled}, {"y": y})
    given = p.factors.product(DGRAD, dy, w2, major, backward=True) | p.factors.gradient(back, between)
    keys = p.gemm("dense-gemm", width, h, recompute=True, dbias=bias)
    keys |= {"row_scale": True, "dprob": True} if scale else {}
    writes = {**given.writes, **({"dbias": "db1"} if bias else {}), **({"dprob": grad_scale} if scale else {})}
    p.step(DGRAD, f"{part}fc2-dgrad", {**keys, **p.activation("d"), **given.keys},
              {**given.reads, "preactivation": z, **scaled}, writes)  # fmt: skip
    given = p.factors.product(DGRAD, back, w1, major, backward=True)
    keys = {**p.gemm("dense-gemm", h, n), **given.keys}
    p.step(DGRAD, f"{part}fc1-dgrad", keys, given.reads, {"y": dx})
    sums = {"dbias": "db2"} if bias else {}
    p.wgrad(f"{part}fc2-wgrad", "dense-wgrad", dy, between, major, {"dw": dw2, **sums})
    p.wgrad(f"{part}fc1-wgrad", "dense-wgrad", back, x, major, {"dw": dw1})
