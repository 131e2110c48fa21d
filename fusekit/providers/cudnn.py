"""cuDNN frontend (nvidia-cudnn-frontend; Apache-2.0 and MIT by file): grouped and dense block-scaled GEMMs, sm_100a.

The grouped kernels share the names of their arguments, so one table makes the fakes of all: a kernel takes those that
its signature names. M tokens, N columns of B, K depth, E experts; D has N2 columns (N, or N / 2 behind a GLU, or 2 N
behind its derivative). `precision`: mxfp8 (e4m3 codes, e8m0 scales of 32), nvfp4 (e2m1, e4m3 of 16), bf16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from fusekit.compiler.intercept import Traced, traced
from fusekit.dtypes import DTYPES

_GROUPED = "cudnn.gemm.cutedsl.grouped"
_DENSE = "cudnn.gemm.cutedsl.dense"
# (what stands behind the product, precision) -> (module, class)
_KERNELS = {
    ("glu", "mxfp8"): ("glu.moe_blockscaled_grouped_gemm_glu_bias", "BlockScaledMoEGroupedGemmGluBiasKernel"),
    ("glu", "nvfp4"): ("glu.moe_blockscaled_grouped_gemm_glu_bias", "BlockScaledMoEGroupedGemmGluBiasKernel"),
    ("glu", "bf16"): ("glu.moe_grouped_gemm_glu_bias", "MoEGroupedGemmGluBiasBf16Kernel"),
    ("dglu", "mxfp8"): ("dglu.moe_blockscaled_grouped_gemm_dglu_dbias", "BlockScaledMoEGroupedGemmDgluDbiasKernel"),
    ("dglu", "nvfp4"): ("dglu.moe_blockscaled_grouped_gemm_dglu_dbias", "BlockScaledMoEGroupedGemmDgluDbiasKernel"),
    ("dglu", "bf16"): ("dglu.moe_grouped_gemm_dglu_dbias", "MoEGroupedGemmDgluDbiasBf16Kernel"),
    ("quant", "mxfp8"): ("quant.grouped_gemm_quant", "BlockScaledMoEGroupedGemmQuantKernel"),
    ("quant", "nvfp4"): ("quant.grouped_gemm_quant", "BlockScaledMoEGroupedGemmQuantKernel"),
    ("srelu", "mxfp8"): ("srelu.moe_blockscaled_grouped_gemm_srelu_quant", "BlockScaledMoEGroupedGemmQuantKernel"),
    ("dsrelu", "mxfp8"): (
        "dsrelu.moe_blockscaled_grouped_gemm_dsrelu_quant", "BlockScaledMoEGroupedGemmQuantBwdKernel",
    ),
    ("gemm", "bf16"): ("unfused.moe_grouped_gemm", "MoEGroupedGemmBf16Kernel"),
    ("glu_hadamard", "nvfp4"): (
        "glu_hadamard.moe_blockscaled_grouped_gemm_glu_hadamard", "BlockScaledMoEGroupedGemmGluHadamardKernel",
    ),
}  # fmt: skip


_RANK_3 = ("srelu", "dsrelu")  # which take matrices in one batch, and B as [N, K, experts]


def grouped(
    kind: str, precision: str, experts: int, tile: Sequence[int] = (256, 256), cluster: Sequence[int] = (2, 1),
    schedule: str = "static", weights: str = "dense", activation: str = "", max_active_clusters: int = 74,
) -> Traced:  # fmt: skip
    """Rows of A in groups times one B an expert, with what `kind` names behind it.

    weights: "dense" (one tensor [E, N, K]) or "discrete" (a pointer an expert). schedule: "static" or "dynamic".
    """
    module, name = _KERNELS[kind, precision]
    kernel_class = getattr(import_module(f"{_GROUPED}.{module}"), name)
    modes = import_module(f"{_GROUPED}.moe_utils").MoEWeightMode
    import cutlass

    codes_out = precision == "mxfp8"
    options = {
        "sf_vec_size": _precision(precision)[3],
        "acc_dtype": cutlass.Float32,
        "use_2cta_instrs": tile[0] == 256,
        "mma_tiler_mn": tuple(tile),
        "cluster_shape_mn": tuple(cluster),
        "vectorized_f32": True,
        "generate_sfd": codes_out,
        "discrete_col_sfd": codes_out,
        "generate_c": True,
        "enable_bias": False,
        "expert_cnt": experts,
        "weight_mode": modes.DISCRETE if weights == "discrete" else modes.DENSE,
        "use_dynamic_sched": schedule == "dynamic",
        "epilogue_type": 1,  # squared ReLU or its gradient, of the kernels that have the choice
        "act_func": activation or ("dswiglu" if kind == "dglu" else "swiglu"),
    }
    kernel = kernel_class(**_named(kernel_class.__init__, options))
    fakes = _grouped_fakes(kind, precision, experts, weights, max_active_clusters)
    return kernel, (), _named(kernel_class.__call__, fakes)


def wgrad(
    precision: str, experts: int, tile: Sequence[int] = (256, 256), cluster: Sequence[int] = (2, 1),
    accumulate: bool = False, max_active_clusters: int = 74,
) -> Traced:  # fmt: skip
    """dW[e] = A[:, tokens of e] . B[tokens of e], [E, H, I]; accumulate: added to what is there."""
    import cutlass
    from cutlass.cute import sym_int, sym_int64
    from cutlass.cute.runtime import make_fake_tensor

    scaled = precision != "bf16"
    module = "moe_blockscaled_grouped_gemm_wgrad" if scaled else "moe_grouped_gemm_wgrad"
    name = "BlockScaledMoEGroupedGemmWgradKernel" if scaled else "MoEGroupedGemmWgradBF16Kernel"
    kernel_class = getattr(import_module(f"{_GROUPED}.wgrad.{module}"), name)
    codes, scales, step, block = _precision(precision)
    options = {
        "sf_vec_size": block, "acc_dtype": cutlass.Float32, "use_2cta_instrs": tile[0] == 256,
        "mma_tiler_mn": tuple(tile), "cluster_shape_mn": tuple(cluster), "accumulate_on_output": accumulate,
        "expert_cnt": experts,
    }  # fmt: skip
    kernel = kernel_class(**_named(kernel_class.__init__, options))
    rows, tokens, columns = (sym_int(divisibility=128) for _ in range(3))
    out_type = cutlass.Float32 if accumulate else cutlass.BFloat16
    strides = (sym_int64(divisibility=8), sym_int64(divisibility=8), 1)
    stride = sym_int64(divisibility=step)
    along = (1, stride) if precision == "nvfp4" else (stride, 1)
    fakes = {
        "mat_a": _matrix(codes, rows, tokens, step),
        # 4-bit codes lie along the tokens in both.
        "mat_b": make_fake_tensor(codes, (tokens, columns), along, assumed_align=16),
        "scale_a": _flat(scales),
        "scale_b": _flat(scales),
        "global_scale_a": _vector(cutlass.Float32, experts) if precision == "nvfp4" else None,
        "global_scale_b": _vector(cutlass.Float32, experts) if precision == "nvfp4" else None,
        "out": make_fake_tensor(out_type, (experts, rows, columns), strides, assumed_align=16),
        "offs": _vector(cutlass.Int32, experts, 4),
        "workspace": make_fake_tensor(cutlass.Uint8, (max(kernel.get_workspace_bytes(), 1),), (1,), assumed_align=128),
        "max_active_clusters": max_active_clusters,
        "stream": _stream(),
    }
    return kernel, (), _named(kernel_class.__call__, fakes)


def nvfp4_quantise(k: int) -> Traced:
    """Codes and scales of 16 of a bf16 matrix of k columns."""
    module = import_module("cudnn.ops._nvfp4_block_scale_kernels")
    return traced(module.compile_nvfp4_block_scale_quantize, k=k)


def nvfp4_dequantise(k: int) -> Traced:
    """The matrix back from codes and scales."""
    module = import_module("cudnn.ops._nvfp4_block_scale_kernels")
    return traced(module.compile_nvfp4_block_scale_dequantize, k=k)


def block_sparse_attention(head: int = 128, dtype: str = "bf16") -> Traced:
    """Forward attention over blocks of 128 keys that an index names, sm_90a; q, k, o [S, D, H, B], v [D, S, H, B].

    A row of 128 queries looks at counts of the blocks that indices names for it; sizes says how many keys each has.
    """
    import cutlass
    from cutlass.cute import sym_int, sym_int64
    from cutlass.cute.runtime import make_fake_tensor

    module = import_module("cudnn.block_sparse_attention.csrc.fwd.sm90_blk128.bsa_fwd_sm90")
    element = getattr(cutlass, DTYPES[dtype].cutlass)
    queries, keys, heads, batch, blocks, most = (sym_int() for _ in range(6))

    def outer(count: int, step: int = 8) -> tuple[Any, ...]:
        return tuple(sym_int64(divisibility=step) for _ in range(count))

    def rows(length: Any) -> Any:
        stride, *rest = outer(3)
        return make_fake_tensor(element, (length, head, heads, batch), (stride, 1, *rest), assumed_align=16)

    values = make_fake_tensor(element, (head, keys, heads, batch), (1, *outer(3)), assumed_align=16)
    lse = make_fake_tensor(cutlass.Float32, (queries, heads, batch), (1, *outer(2, 1)), assumed_align=4)
    indices = make_fake_tensor(cutlass.Int32, (most, blocks, heads, batch), (1, *outer(3, 1)), assumed_align=4)
    counts = make_fake_tensor(cutlass.Int32, (blocks, heads, batch), (1, *outer(2, 1)), assumed_align=4)
    sizes = _vector(cutlass.Int32, sym_int(), 4)
    kernel = module.BlockSparseAttnForwardSm90Blk128(
        head, head, variable_count=True, block_sizes_mode=1, has_kv_tail=True
    )
    rest = (cutlass.Float32(1), cutlass.Int32(0), _stream())
    return kernel, (rows(queries), rows(keys), values, rows(queries), lse, indices, counts, sizes, *rest), {}


def dense_swiglu(
    tile: Sequence[int] = (256, 256), cluster: Sequence[int] = (2, 1), max_active_clusters: int = 74
) -> Traced:
    """AB12 = alpha A B^T and C = swiglu of its interleaved halves, bf16."""
    import cutlass
    from cutlass.cute import sym_int, sym_int64
    from cutlass.cute.runtime import make_fake_tensor

    module = import_module(f"{_DENSE}.swiglu.dense_gemm_persistent_swiglu")
    kernel = module.PersistentDenseGemmKernel(cutlass.Float32, tile[0] == 256, tuple(tile), tuple(cluster))
    m, n, half, k, batch = (
        sym_int(),
        sym_int(divisibility=64),
        sym_int(divisibility=32),
        sym_int(divisibility=8),
        sym_int(),
    )

    def matrix(rows: Any, columns: Any) -> Any:
        strides = (sym_int64(divisibility=8), 1, sym_int64(divisibility=8))
        return make_fake_tensor(cutlass.BFloat16, (rows, columns, batch), strides, assumed_align=16)

    args = (
        matrix(m, k),
        matrix(n, k),
        matrix(m, n),
        matrix(m, half),
        cutlass.Float32(1),
        max_active_clusters,
        _stream(),
    )
    return kernel, args, {}


def dense_amax(
    precision: str, tile: Sequence[int] = (256, 256), cluster: Sequence[int] = (2, 1), max_active_clusters: int = 74
) -> Traced:
    """C = A B^T of block-scaled codes, bf16, and the largest magnitude in C."""
    import cutlass
    from cutlass.cute import sym_int, sym_int64
    from cutlass.cute.runtime import make_fake_tensor

    module = import_module(f"{_DENSE}.amax.dense_blockscaled_gemm_persistent_amax")
    codes, scales, step, block = _precision(precision)
    kernel = module.Sm100BlockScaledPersistentDenseGemmKernel(block, tuple(tile), tuple(cluster))
    m, n, k, batch = sym_int(), sym_int(divisibility=8), sym_int(divisibility=128), sym_int()

    def matrix(element: Any, rows: Any, columns: Any, step: int) -> Any:
        strides = (sym_int64(divisibility=step), 1, sym_int64(divisibility=step))
        return make_fake_tensor(element, (rows, columns, batch), strides, assumed_align=16)

    amax = make_fake_tensor(cutlass.Float32, (1, 1, 1), (1, 1, 1), assumed_align=16)
    a, b, c = matrix(codes, m, k, step), matrix(codes, n, k, step), matrix(cutlass.BFloat16, m, n, 8)
    return kernel, (a, b, _flat(scales), _flat(scales), c, amax, max_active_clusters, _stream()), {}


def _grouped_fakes(kind: str, precision: str, experts: int, weights: str, clusters: int) -> dict[str, Any]:
    import cutlass
    from cutlass import cute
    from cutlass.cute import sym_int, sym_int64
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_fake_tensor, make_ptr, nullptr

    codes, scales, step, _ = _precision(precision)
    m, n, n2, k = (
        sym_int(divisibility=256),
        sym_int(divisibility=64),
        sym_int(divisibility=32),
        sym_int(divisibility=128),
    )
    out = codes if precision == "mxfp8" else cutlass.BFloat16
    d_columns = n if kind in ("quant", "gemm", *_RANK_3) else n2
    c_columns = n2 if kind == "dglu" else n

    def per_expert() -> Any:
        return make_ptr(cutlass.Int64, 0, cute.AddressSpace.gmem, assumed_align=16)

    discrete = weights == "discrete"
    b_strides = (sym_int64(divisibility=step), sym_int64(divisibility=step), 1)
    amax = make_fake_tensor(cutlass.Float32, (experts, 1), (1, 1), assumed_align=16)
    coded = precision == "mxfp8"
    fakes = {
        "a": _matrix(codes, m, k, step),
        "b": per_expert() if discrete else make_fake_tensor(codes, (experts, n, k), b_strides, assumed_align=16),
        "sfa": _flat(scales), "sfb": per_expert() if discrete else _flat(scales),
        "n": cutlass.Int32(0), "k": cutlass.Int32(0), "b_stride_size": cutlass.Int64(0),
        "b_major_mode": OperandMajorMode.K,
        "workspace_ptr": make_ptr(cutlass.Uint8, 0, cute.AddressSpace.gmem, assumed_align=128),
        "c": _matrix(cutlass.BFloat16, m, c_columns, 8), "d": _matrix(out, m, d_columns, 16),
        "d_col": _matrix(out, m, d_columns, 16),
        "sfd_row_tensor": _flat(scales) if coded else None, "sfd_col_tensor": _flat(scales) if coded else None,
        "amax_tensor": None if coded else amax,
        "norm_const_tensor": _vector(cutlass.Float32, 1) if coded else None,
        "padded_offsets": _vector(cutlass.Int32, experts), "alpha": _vector(cutlass.Float32, experts),
        "beta": _vector(cutlass.Float32, experts), "prob": _vector(cutlass.Float32, m),
        "dprob": _vector(cutlass.Float32, m), "dbias_tensor": None, "bias": None, "row_scale": None,
        "scheduler_counter": None, "d_srelu": None, "sfd_col_d_srelu_tensor": None,
        "max_active_clusters": clusters, "stream": _stream(), "epilogue_op": lambda x: x,
        "linear_offset": cutlass.Float32(0), "geglu_alpha": cutlass.Float32(1.702),
        "glu_clamp_max": cutlass.Float32(7), "glu_clamp_min": cutlass.Float32(-7),
        "situ_beta1": cutlass.Float32(4), "situ_beta2": cutlass.Float32(25),
    }  # fmt: skip
    if kind == "glu_hadamard":
        fakes |= {
            "post_rht_amax_tensor": make_fake_tensor(cutlass.Float32, (experts, 1), (1, 1), assumed_align=16),
            "hadamard_tensor": make_fake_tensor(cutlass.BFloat16, (16, 16), (16, 1), assumed_align=16),
            "workspace_ptr": nullptr(dtype=cutlass.Uint8, assumed_align=128),
        }
    if kind in _RANK_3:
        fakes |= {name: _batched(fakes[name]) for name in ("a", "c", "d", "d_col")}
        fakes |= {name: make_fake_tensor(cutlass.Float32, (m, 1, 1), (1, 1, 1), assumed_align=16)
                  for name in ("prob", "dprob")}  # fmt: skip
        fakes["b"] = make_fake_tensor(codes, (n, k, experts), (b_strides[0], 1, b_strides[1]), assumed_align=16)
    if kind == "dglu" and precision == "nvfp4":
        fakes["amax_tensor"] = make_fake_tensor(cutlass.Float32, (experts, 2, 1), (2, 1, 1), assumed_align=16)
    if kind == "dglu" and precision != "bf16":
        fakes |= {name: float(value) for name, value in (
            ("linear_offset", 0), ("geglu_alpha", 1.702), ("glu_clamp_max", 7), ("glu_clamp_min", -7),
            ("situ_beta1", 4), ("situ_beta2", 25))}  # fmt: skip
    return fakes


def _precision(name: str) -> tuple[Any, Any, int, int]:
    """(type of the codes, of their scales, what strides are multiples of, codes in a scale's block)."""
    import cutlass

    return {
        "mxfp8": (cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU, 16, 32),
        "nvfp4": (cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, 32, 16),
        "bf16": (cutlass.BFloat16, None, 8, 32),
    }[name]


def _named(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in inspect.signature(function).parameters if name in values}


def _vector(element: Any, count: Any, align: int = 16) -> Any:
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(element, (count,), (1,), assumed_align=align)


def _matrix(element: Any, rows: Any, columns: Any, step: int) -> Any:
    from cutlass.cute import sym_int64
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(element, (rows, columns), (sym_int64(divisibility=step), 1), assumed_align=16)


def _batched(matrix: Any) -> Any:
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(matrix.element_type, (*matrix.shape, 1), (*matrix.stride, 1), assumed_align=16)


def _flat(element: Any) -> Any:
    from cutlass.cute import sym_int

    return None if element is None else _vector(element, sym_int())


def _stream() -> Any:
    from cuda.bindings.driver import CUstream

    return CUstream(0)
