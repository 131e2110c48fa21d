"""QuACK's kernels as QuACK itself calls them: the inputs, the outputs and the call, by the name in quack.toml."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple


class Call(NamedTuple):
    """inputs: what both read. outputs: makes what each writes, anew. own: QuACK's own launch on all of them."""

    inputs: dict[str, Any]
    outputs: Callable[[], dict[str, Any]]
    own: Callable[[dict[str, Any]], None]


def rows(torch, count, columns, dtype="bfloat16", seed=0, room=0):
    """Random rows, `room` elements between one and the next."""
    generator = torch.Generator("cuda").manual_seed(seed)
    whole = torch.randn(count, columns + room, device="cuda", generator=generator).to(getattr(torch, dtype))
    return whole[:, :columns]


def empty(torch, *shape, dtype="bfloat16"):
    """Not a number everywhere: what a kernel leaves out shows."""
    tensor = torch.empty(*shape, device="cuda", dtype=getattr(torch, dtype))
    return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor.fill_(-1)


def made_by(torch, **shapes):
    """Makes outputs: name -> shape; float32 where the shape ends in "float32", int32 likewise."""

    def make():
        return {
            name: empty(torch, *(e for e in shape if e is not dtype), dtype=dtype)
            for name, shape in shapes.items()
            for dtype in [shape[-1] if isinstance(shape[-1], str) else "bfloat16"]
        }

    return make


def norm(torch, m, n, residual=False, layernorm=False):
    def own(a):
        from quack.rmsnorm import _rmsnorm_fwd

        saved = {"rstd": a.get("mRstd"), "mean": a.get("mMean")}
        _rmsnorm_fwd(a["mX"], a["mW"], a["mO"], residual=a.get("mRes"), residual_out=a.get("mResO"), eps=1e-6,
                     is_layernorm=layernorm, **saved)  # fmt: skip

    inputs = {"mX": rows(torch, m, n), "mW": torch.rand(n, device="cuda")}
    shapes = {"mO": (m, n)}
    if residual:
        inputs["mRes"] = rows(torch, m, n, seed=1)
        shapes["mResO"] = (m, n)
    if residual or layernorm:
        shapes["mRstd"] = (m, "float32")
    if layernorm:
        shapes["mMean"] = (m, "float32")
    return Call(inputs, made_by(torch, **shapes), own)


def norm_backward(torch, m, n, residual=False):
    def own(a):
        from cutlass import BFloat16, Float32
        from quack.rmsnorm import _compile_rmsnorm_bwd

        sums = BFloat16 if residual else None
        compiled = _compile_rmsnorm_bwd(n, BFloat16, BFloat16, BFloat16, Float32, False, sums, sums, True)
        compiled(a["mX"], a["mW"], a["mdO"], a.get("mdResO"), a["mRstd"], None, a["mdX"], a["mdW"], a.get("mdRes"),
                 None, len(a["mdW"]))  # fmt: skip

    x = rows(torch, m, n)
    inputs = {"mX": x, "mW": torch.rand(n, device="cuda"), "mdO": rows(torch, m, n, seed=1),
              "mRstd": x.float().square().mean(1).rsqrt()}  # fmt: skip
    shapes = {"mdX": (m, n), "mdW": (torch.cuda.get_device_properties(0).multi_processor_count, n, "float32")}
    if residual:
        inputs["mdResO"] = rows(torch, m, n, seed=2)
        shapes["mdRes"] = (m, n)
    return Call(inputs, made_by(torch, **shapes), own)


def softmax(torch, m, n):
    def own(a):
        from quack.softmax import _softmax_fwd

        _softmax_fwd(a["mX"], a["mO"])

    return Call({"mX": rows(torch, m, n)}, made_by(torch, mO=(m, n)), own)


def softmax_backward(torch, m, n):
    def own(a):
        from quack.softmax import _softmax_backward

        _softmax_backward(a["mdY"], a["mY"], a["mdX"])

    inputs = {"mdY": rows(torch, m, n, seed=1), "mY": rows(torch, m, n).softmax(1)}
    return Call(inputs, made_by(torch, mdX=(m, n)), own)


def cross_entropy(torch, m, n, dx=False):
    def own(a):
        from quack.cross_entropy import cross_entropy_fwd_out

        cross_entropy_fwd_out(a["mX"], a["mTarget"], None, a["mLoss"], a["mLSE"], a.get("mdX"), None, -100)

    inputs = {"mX": rows(torch, m, n), "mTarget": torch.arange(m, device="cuda") * 37 % n}
    shapes = {"mLoss": (m, "float32"), "mLSE": (m, "float32")} | ({"mdX": (m, n)} if dx else {})
    return Call(inputs, made_by(torch, **shapes), own)


def cross_entropy_backward(torch, m, n):
    def own(a):
        from quack.cross_entropy import _cross_entropy_backward

        _cross_entropy_backward(a["mX"], a["mTarget"], a["mDLoss"], a["mLSE"], a["mdX"])

    x = rows(torch, m, n)
    inputs = {"mX": x, "mTarget": torch.arange(m, device="cuda") * 37 % n, "mDLoss": torch.rand(m, device="cuda"),
              "mLSE": x.float().logsumexp(1)}  # fmt: skip
    return Call(inputs, made_by(torch, mdX=(m, n)), own)


def topk(torch, m, n, k, softmax=False):
    def own(a):
        from quack.topk import _topk_fwd

        _topk_fwd(a["mX"], k, softmax, a["mValues"], a["mIndices"])

    return Call({"mX": rows(torch, m, n)}, made_by(torch, mValues=(m, k), mIndices=(m, k, "int32")), own)


def topk_backward(torch, m, n, k):
    def own(a):
        from quack.topk import _topk_bwd

        _topk_bwd(a["mdValues"], None, a["mIndices"], k, False, a["mdX"])

    inputs = {"mdValues": rows(torch, m, k), "mIndices": rows(torch, m, n, seed=1).topk(k, dim=1).indices.int()}
    return Call(inputs, made_by(torch, mdX=(m, n)), own)


def hadamard(torch, m, n):
    def own(a):
        from cutlass import BFloat16
        from quack.transform.hadamard import HadamardTransform

        HadamardTransform.compile(BFloat16, n, False)(a["mX"], a["mO"], a["scale"], 0)

    return Call({"mX": rows(torch, m, n), "scale": n**-0.5}, made_by(torch, mO=(m, n)), own)


def rotary(torch, m, interleaved):
    def own(a):
        from quack.rotary import _rotary_fwd_out

        _rotary_fwd_out(a["mX"], a["mCos"], a["mSin"], None, None, a["mO"], m, interleaved, False)

    angles = torch.rand(m, 64, device="cuda") * 6
    inputs = {"mX": rows(torch, 2 * m * 5, 128).view(2, m, 5, 128), "mCos": angles.cos().bfloat16(),
              "mSin": angles.sin().bfloat16()}  # fmt: skip
    return Call(inputs, made_by(torch, mO=(2, m, 5, 128)), own)


def gemm(torch, m, tile=(128, 192), c=False, b_major="k", pingpong=False, dynamic=False, groups="", gather=False):
    """groups: of "rows" of A, or along "k"; the last one ends at the last row."""

    def own(a):
        from quack.gemm import gemm as launch

        launch(a["mA"], a["mB"], a["mD"], a.get("mC"), a.get("tile_count"), *tile, 2, 1, pingpong=pingpong,
               is_dynamic_persistent=dynamic, cu_seqlens_m=a.get("cu_seqlens_m"), cu_seqlens_k=a.get("cu_seqlens_k"),
               A_idx=a.get("a_index"))  # fmt: skip

    n, k, count = 520, 776, 3
    ends = torch.tensor([0, m // 3, m // 3 + 1, m], device="cuda", dtype=torch.int32)
    if groups == "k":  # A and B lie column by column
        wide, high = 72 + 8 * m, -(-m // 8) * 8
        ends = torch.tensor([0, 64, 72, wide], device="cuda", dtype=torch.int32)
        inputs = {"mA": rows(torch, wide, high).T, "mB": rows(torch, wide, n, seed=1).T, "cu_seqlens_k": ends}
        return Call(inputs, made_by(torch, mD=(count, high, n)), own)
    b = rows(torch, count * n, k, seed=1).view(count, n, k)
    if b_major == "n":
        b = rows(torch, count * k, n, seed=1).view(count, k, n).mT
    if groups == "rows":
        inputs = {"mA": rows(torch, m, k), "mB": b, "cu_seqlens_m": ends}
        if gather:
            inputs["a_index"] = torch.arange(m, device="cuda", dtype=torch.int32).flip(0).contiguous()
        return Call(inputs, made_by(torch, mD=(m, n)), own)
    inputs = {"mA": rows(torch, count * m, k).view(count, m, k), "mB": b}
    if c:
        inputs["mC"] = rows(torch, count * m, n, seed=2).view(count, m, n)
    make = made_by(torch, mD=(count, m, n))
    if dynamic:  # the kernel counts in it, so each launch has one of its own
        return Call(inputs, lambda: make() | {"tile_count": torch.zeros(1, device="cuda", dtype=torch.int32)}, own)
    return Call(inputs, make, own)


CALLS: dict[str, Callable[..., Call]] = {
    **{f"rmsnorm@n{n}": partial(norm, n=n) for n in (2880, 4096, 7168, 16384)},
    **{f"rmsnorm-residual@n{n}": partial(norm, n=n, residual=True) for n in (4096, 7168)},
    "layernorm@n4096": partial(norm, n=4096, layernorm=True),
    "rmsnorm-bwd@n4096": partial(norm_backward, n=4096),
    "rmsnorm-residual-bwd@n4096": partial(norm_backward, n=4096, residual=True),
    **{f"softmax@n{n}": partial(softmax, n=n) for n in (4096, 32768)},
    "softmax-bwd@n4096": partial(softmax_backward, n=4096),
    **{f"cross-entropy@n{n}": partial(cross_entropy, n=n) for n in (32000, 128256)},
    "cross-entropy-dx@n32000": partial(cross_entropy, n=32000, dx=True),
    "cross-entropy-bwd@n32000": partial(cross_entropy_backward, n=32000),
    **{f"topk@n1024-k{k}": partial(topk, n=1024, k=k) for k in (8, 32)},
    "topk-softmax@n256-k8": partial(topk, n=256, k=8, softmax=True),
    "topk-bwd@n1024-k8": partial(topk_backward, n=1024, k=8),
    "hadamard@n4096": partial(hadamard, n=4096),
    **{f"rotary@dim128-{'' if item else 'no'}interleaved": partial(rotary, interleaved=item) for item in (False, True)},
    "gemm@tile128x192": gemm,
    "gemm@tile128x256": partial(gemm, tile=(128, 256)),
    "gemm-c@tile128x192": partial(gemm, c=True),
    "gemm-nn@tile128x192": partial(gemm, b_major="n"),
    "gemm-pingpong@tile128x160": partial(gemm, tile=(128, 160), pingpong=True),
    "gemm-dynamic@tile128x192": partial(gemm, dynamic=True),
    "gemm-varlen-m@tile128x192": partial(gemm, groups="rows"),
    "gemm-gather@tile128x192": partial(gemm, groups="rows", gather=True),
    "gemm-varlen-k@tile128x192": partial(gemm, groups="k"),
}
