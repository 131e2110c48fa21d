"""QuACK (quack-kernels, Apache-2.0): normalisation, softmax, cross-entropy, top-k, GEMMs for sm_90a and sm_100a.

Every function calls QuACK's own compile function, with QuACK's own fake arguments. `dtype` and the like are names of
`fusekit.dtypes`; None leaves an optional tensor out. `arch` comes from the spec: it decides QuACK's kernel class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from fusekit.compiler.intercept import Traced, traced
from fusekit.dtypes import DTYPES

with suppress(ImportError):  # once for all kernels: each is made in a fork of the process that imported this module
    import quack.epilogue.library
    import quack.gemm
    import quack.rmsnorm  # noqa: F401


def rmsnorm(
    n: int, dtype: str = "bf16", out: str = "bf16", residual: str | None = None, weight: str | None = "f32",
    bias: str | None = None, residual_out: str | None = None, rstd: bool = False, layernorm: bool = False,
) -> Traced:  # fmt: skip
    """y = norm(x + residual) . weight + bias over rows of n; rstd [B] and residual_out for the backward pass."""
    from quack.rmsnorm import _compile_rmsnorm_fwd

    types = [_type(name) for name in (dtype, out, residual, weight, bias, residual_out)]
    return _traced(_compile_rmsnorm_fwd, *types, n, rstd, layernorm, layernorm, False)


def rmsnorm_bwd(n: int, dtype: str = "bf16", weight: str | None = "f32", residual: str | None = None) -> Traced:
    """dx, partial sums of dw a block, and dresidual of `rmsnorm`."""
    from quack.rmsnorm import _compile_rmsnorm_bwd

    x, w, r = _type(dtype), _type(weight), _type(residual)
    return _traced(_compile_rmsnorm_bwd, n, x, x, x, w, False, r, r, w is not None)


def softmax(n: int, dtype: str = "bf16") -> Traced:
    """Softmax over rows of n."""
    from quack.softmax import Softmax

    return _traced(Softmax.compile, _type(dtype), _type(dtype), n)


def softmax_bwd(n: int, dtype: str = "bf16") -> Traced:
    """dx = y . (dy - sum(y . dy)) over rows of n."""
    from quack.softmax import SoftmaxBackward

    return _traced(SoftmaxBackward.compile, _type(dtype), _type(dtype), _type(dtype), n)


def cross_entropy(n: int, dtype: str = "bf16", lse: bool = True, dx: bool = False) -> Traced:
    """Loss of rows of n logits against int64 targets; lse and dx on request."""
    from quack.cross_entropy import CrossEntropy

    return _traced(CrossEntropy.compile, _type(dtype), _type("i64"), None, n, lse, dx, None, 1)


def cross_entropy_bwd(n: int, dtype: str = "bf16") -> Traced:
    """dx of `cross_entropy` from dloss and lse."""
    from quack.cross_entropy import CrossEntropyBackward

    return _traced(CrossEntropyBackward.compile, _type(dtype), _type("i64"), n, None)


def topk(n: int, k: int, dtype: str = "bf16", softmax: bool = False) -> Traced:
    """The k largest of rows of n, with their indices."""
    from quack.topk import TopK

    return _traced(TopK.compile, _type(dtype), n, k, softmax)


def topk_bwd(n: int, k: int, dtype: str = "bf16", softmax: bool = False) -> Traced:
    """dx of `topk`."""
    from quack.topk import TopKBackward

    x = _type(dtype)
    return _traced(TopKBackward.compile, x, x if softmax else None, x, n, k, softmax)


def hadamard(n: int, dtype: str = "bf16") -> Traced:
    """Walsh-Hadamard transform of rows of n."""
    from quack.transform.hadamard import HadamardTransform

    return _traced(HadamardTransform.compile, _type(dtype), n, False)


def rotary(dim: int, dtype: str = "bf16", interleaved: bool = False, conjugate: bool = False) -> Traced:
    """Rotary embedding of [B, S, heads, dim]."""
    from quack.rotary import RotaryKernel

    return _traced(RotaryKernel.compile, _type(dtype), _type(dtype), None, None, dim, interleaved, conjugate)


def gemm(
    arch: str, tile: Sequence[int], cluster: Sequence[int], dtype: str = "bf16", out: str = "bf16",
    c: str | None = None, b_major: str = "k", pingpong: bool = False, varlen_m: bool = False, varlen_k: bool = False,
    gather: bool = False, dynamic: bool = False,
) -> Traced:  # fmt: skip
    """D = A B^T (+ C), batched; varlen_m: rows of A in groups; varlen_k: groups along K; gather: rows of A by index."""
    from quack.gemm import _compile_gemm
    from quack.rounding import RoundingMode

    x = _type(dtype)
    a_major = "m" if varlen_k else "k"
    return _traced(
        _compile_gemm, x, x, _type(out), _type(c), a_major, "n" if varlen_k else b_major, "n", "n" if c else None,
        tuple(tile), (*cluster, 1), pingpong, True, dynamic, None, None, 0, 0, 0, False, (), varlen_m, varlen_k, gather,
        False, False, _capability(arch), RoundingMode.RN, 0, None,
    )  # fmt: skip


def gemm_gated(
    tile: Sequence[int], cluster: Sequence[int], activation: str = "swiglu", dtype: str = "bf16",
    preactivation: bool = True, varlen_m: bool = False,
) -> Traced:  # fmt: skip
    """The gate of A B, of its even and odd columns, and D = A B where `preactivation`; varlen_m: as in `gemm`."""
    import torch
    from quack.epilogue.library import linear_act_mod
    from quack.gemm_config import GemmConfig

    mod = linear_act_mod(activation, gated=True, has_c=False, has_rowvec=False, has_colvec=False)
    config = GemmConfig(
        tile_m=tile[0], tile_n=tile[1], cluster_m=cluster[0], cluster_n=cluster[1], pingpong=False,
        is_dynamic_persistent=False,
    )  # fmt: skip
    # QuACK plans from tensors, of which it takes types and layouts; none of these numbers stays.
    size, element = 256, getattr(torch, DTYPES[dtype].framework)
    a = torch.empty(size, size, dtype=element)
    b = torch.empty(2, size, size, dtype=element).mT if varlen_m else torch.empty(size, size, dtype=element).mT
    out = {"mAuxOut": torch.empty(size, size // 2, dtype=element)}
    out |= {"D": torch.empty(size, size, dtype=element)} if preactivation else {}
    ends = torch.tensor([0, 128, 256], dtype=torch.int32) if varlen_m else None
    return traced(mod.plan, a, b, out=out, config=config, cu_seqlens_m=ends)


def _type(name: str | None) -> Any:
    import cutlass

    return None if name is None else getattr(cutlass, DTYPES[name].cutlass)


def _capability(arch: str) -> tuple[int, int]:
    return {"sm_90a": (9, 0), "sm_100a": (10, 0)}[arch]


def _traced(compile_function: Callable[..., Any], *args: Any) -> Traced:
    # QuACK's own disk cache lies around each of them.
    return traced(compile_function.__wrapped__, *args)  # type: ignore[attr-defined]
