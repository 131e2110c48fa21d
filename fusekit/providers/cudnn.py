"""cuDNN frontend (nvidia-cudnn-frontend; Apache-2.0 and MIT by file): grouped and dense block-scaled GEMMs, sm_100a.

The grouped kernels share the names of their arguments, so one table makes the fakes of all: a kernel takes those that
its signature names. M tokens, N columns of B, K depth, E experts; D has N2 columns (N, or N / 2 after a GLU, or 2 N
after its derivative). `precision`: mxfp8 (e4m3 values, e8m0 scales of 32), nvfp4 (e2m1, e4m3 of 16), bf16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from fusekit.compiler.intercept import Traced, traced
from fusekit.dtypes import DTYPES

with suppress(ImportError):  # once for all kernels: each is made in a fork of the process that imported this module
    import cudnn.gemm.cutedsl.grouped.moe_utils  # noqa: F401

_GROUPED = "cudnn.gemm.cutedsl.grouped"
_DENSE = "cudnn.gemm.cutedsl.dense"
# (epilogue, precision) -> (module, class)
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
    """Rows of A in groups times one B an expert, with what `kind` names after it.

    weights: "dense" (one tensor [E, N, K]) or "discrete" (a pointer an expert). schedule: "static" or "dynamic".
    """
    module, name = _KERNELS[kind, precision]
    kernel_class = getattr(import_module(f"{_GROUPED}.{module}"), name)
    modes = import_module(f"{_GROUPED}.moe_utils").MoEWeightMode
    import cutlass

    fp8_out = precision == "mxfp8"
    options = {
        "sf_vec_size": _precision(precision)[3],
        "acc_dtype": cutlass.Float32,
        "use_2cta_instrs": tile[0] == 256,
        "mma_tiler_mn": tuple(tile),
        "cluster_shape_mn": tuple(cluster),
        "vectorized_f32": True,
        "generate_sfd": fp8_out,
        "discrete_col_sfd": fp8_out,
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

    scaled = precision != "bf16"
    module = "moe_blockscaled_grouped_gemm_wgrad" if scaled else "moe_grouped_gemm_wgrad"
    name = "BlockScaledMoEGroupedGemmWgradKernel" if scaled else "MoEGroupedGemmWgradBF16Kernel"
    kernel_class = getattr(import_module(f"{_GROUPED}.wgrad.{module}"), name)
    values, scales, step, block = _precision(precision)
    options = {
        "sf_vec_size": block, "acc_dtype": cutlass.Float32, "use_2cta_instrs": tile[0] == 256,
        "mma_tiler_mn": tuple(tile), "cluster_shape_mn": tuple(cluster), "accumulate_on_output": accumulate,
        "expert_cnt": experts,
    }  # fmt: skip
    kernel = kernel_class(**_named(kernel_class.__init__, options))
    rows, tokens, columns = _extents(128, 128, 128)
    (stride,) = _strides(step)
    nvfp4 = precision == "nvfp4"
    fakes = {
        "mat_a": _matrix(values, rows, tokens, step),
        # 4-bit values lie along the tokens in both.
        "mat_b": _tensor(values, (tokens, columns), (1, stride) if nvfp4 else (stride, 1)),
        "scale_a": _flat(scales),
        "scale_b": _flat(scales),
        "global_scale_a": _vector("Float32", experts) if nvfp4 else None,
        "global_scale_b": _vector("Float32", experts) if nvfp4 else None,
        "out": _tensor("Float32" if accumulate else "BFloat16", (experts, rows, columns), (*_strides(8, 8), 1)),
        "offs": _vector("Int32", experts, 4),
        "workspace": _vector("Uint8", max(kernel.get_workspace_bytes(), 1), 128),
        "max_active_clusters": max_active_clusters,
        "stream": _stream(),
    }
    return kernel, (), _named(kernel_class.__call__, fakes)


def nvfp4_quantise(k: int) -> Traced:
    """4-bit values and scales of 16 of a bf16 matrix of k columns."""
    module = import_module("cudnn.ops._nvfp4_block_scale_kernels")
    return traced(module.compile_nvfp4_block_scale_quantize, k=k)


def nvfp4_dequantise(k: int) -> Traced:
    """The matrix back from 4-bit values and scales."""
    module = import_module("cudnn.ops._nvfp4_block_scale_kernels")
    return traced(module.compile_nvfp4_block_scale_dequantize, k=k)


def block_sparse_attention(head: int = 128, dtype: str = "bf16") -> Traced:
    """Forward attention over blocks of 128 keys that an index names, sm_90a; q, k, o [S, D, H, B], v [D, S, H, B].

    A row of 128 queries looks at counts of the blocks that indices names for it; sizes has how many keys each has.
    """
    import cutlass

    module = import_module("cudnn.block_sparse_attention.csrc.fwd.sm90_blk128.bsa_fwd_sm90")
    element = DTYPES[dtype].cutlass
    queries, keys, heads, batch, blocks, most = _extents(1, 1, 1, 1, 1, 1)

    def rows(length: Any) -> Any:
        stride, *rest = _strides(8, 8, 8)
        return _tensor(element, (length, head, heads, batch), (stride, 1, *rest))

    kernel = module.BlockSparseAttnForwardSm90Blk128(
        head, head, variable_count=True, block_sizes_mode=1, has_kv_tail=True
    )
    args = (
        rows(queries),
        rows(keys),
        _tensor(element, (head, keys, heads, batch), (1, *_strides(8, 8, 8))),
        rows(queries),
        _tensor("Float32", (queries, heads, batch), (1, *_strides(1, 1)), 4),
        _tensor("Int32", (most, blocks, heads, batch), (1, *_strides(1, 1, 1)), 4),
        _tensor("Int32", (blocks, heads, batch), (1, *_strides(1, 1)), 4),
        _vector("Int32", _extents(1)[0], 4),
    )
    return kernel, (*args, cutlass.Float32(1), cutlass.Int32(0), _stream()), {}


def dense_swiglu(
    tile: Sequence[int] = (256, 256), cluster: Sequence[int] = (2, 1), max_active_clusters: int = 74
) -> Traced:
    """AB12 = alpha A B^T and C = swiglu of its interleaved halves, bf16."""
    import cutlass

    module = import_module(f"{_DENSE}.swiglu.dense_gemm_persistent_swiglu")
    kernel = module.PersistentDenseGemmKernel(cutlass.Float32, tile[0] == 256, tuple(tile), tuple(cluster))
    m, n, half, k, batch = _extents(1, 64, 32, 8, 1)
    matrices = [_matrix("BFloat16", *sides, 8, batch) for sides in ((m, k), (n, k), (m, n), (m, half))]
    return kernel, (*matrices, cutlass.Float32(1), max_active_clusters, _stream()), {}


def dense_amax(
    precision: str, tile: Sequence[int] = (256, 256), cluster: Sequence[int] = (2, 1), max_active_clusters: int = 74
) -> Traced:
    """C = A B^T of block-scaled values, bf16, and the largest magnitude in C."""
    module = import_module(f"{_DENSE}.amax.dense_blockscaled_gemm_persistent_amax")
    values, scales, step, block = _precision(precision)
    kernel = module.Sm100BlockScaledPersistentDenseGemmKernel(block, tuple(tile), tuple(cluster))
    m, n, k, batch = _extents(1, 8, 128, 1)
    a, b = (_matrix(values, rows, k, step, batch) for rows in (m, n))
    c, amax = _matrix("BFloat16", m, n, 8, batch), _tensor("Float32", (1, 1, 1), (1, 1, 1))
    return kernel, (a, b, _flat(scales), _flat(scales), c, amax, max_active_clusters, _stream()), {}


def _grouped_fakes(kind: str, precision: str, experts: int, weights: str, clusters: int) -> dict[str, Any]:
    import cutlass
    from cutlass import cute
    from cutlass.cute.nvgpu import OperandMajorMode
    from cutlass.cute.runtime import make_ptr, nullptr

    values, scales, step, _ = _precision(precision)
    m, n, n2, k = _extents(256, 64, 32, 128)
    coded = precision == "mxfp8"
    out = values if coded else "BFloat16"
    d_columns = n if kind in ("quant", "gemm", *_RANK_3) else n2
    c_columns = n2 if kind == "dglu" else n

    def per_expert() -> Any:
        return make_ptr(cutlass.Int64, 0, cute.AddressSpace.gmem, assumed_align=16)

    discrete = weights == "discrete"
    b_strides = _strides(step, step)
    amax = _tensor("Float32", (experts, 1), (1, 1))
    fakes = {
        "a": _matrix(values, m, k, step),
        "b": per_expert() if discrete else _tensor(values, (experts, n, k), (*b_strides, 1)),
        "sfa": _flat(scales), "sfb": per_expert() if discrete else _flat(scales),
        "n": cutlass.Int32(0), "k": cutlass.Int32(0), "b_stride_size": cutlass.Int64(0),
        "b_major_mode": OperandMajorMode.K,
        "workspace_ptr": make_ptr(cutlass.Uint8, 0, cute.AddressSpace.gmem, assumed_align=128),
        "c": _matrix("BFloat16", m, c_columns, 8), "d": _matrix(out, m, d_columns, 16),
        "d_col": _matrix(out, m, d_columns, 16),
        "sfd_row_tensor": _flat(scales) if coded else None, "sfd_col_tensor": _flat(scales) if coded else None,
        "amax_tensor": None if coded else amax,
        "norm_const_tensor": _vector("Float32", 1) if coded else None,
        "padded_offsets": _vector("Int32", experts), "alpha": _vector("Float32", experts),
        "beta": _vector("Float32", experts), "prob": _vector("Float32", m),
        "dprob": _vector("Float32", m), "dbias_tensor": None, "bias": None, "row_scale": None,
        "scheduler_counter": None, "d_srelu": None, "sfd_col_d_srelu_tensor": None,
        "max_active_clusters": clusters, "stream": _stream(), "epilogue_op": lambda x: x,
        "linear_offset": cutlass.Float32(0), "geglu_alpha": cutlass.Float32(1.702),
        "glu_clamp_max": cutlass.Float32(7), "glu_clamp_min": cutlass.Float32(-7),
        "situ_beta1": cutlass.Float32(4), "situ_beta2": cutlass.Float32(25),
    }  # fmt: skip
    if kind == "glu_hadamard":
        fakes |= {
            "post_rht_amax_tensor": _tensor("Float32", (experts, 1), (1, 1)),
            "hadamard_tensor": _tensor("BFloat16", (16, 16), (16, 1)),
            "workspace_ptr": nullptr(dtype=cutlass.Uint8, assumed_align=128),
        }
    if kind in _RANK_3:
        for name, element in (("a", values), ("c", "BFloat16"), ("d", out), ("d_col", out)):
            fakes[name] = _tensor(element, (*fakes[name].shape, 1), (*fakes[name].stride, 1))
        fakes |= {name: _tensor("Float32", (m, 1, 1), (1, 1, 1)) for name in ("prob", "dprob")}
        fakes["b"] = _tensor(values, (n, k, experts), (b_strides[0], 1, b_strides[1]))
    if kind == "dglu" and precision == "nvfp4":
        fakes["amax_tensor"] = _tensor("Float32", (experts, 2, 1), (2, 1, 1))
    if kind == "dglu" and precision != "bf16":
        fakes |= {name: float(value) for name, value in (
            ("linear_offset", 0), ("geglu_alpha", 1.702), ("glu_clamp_max", 7), ("glu_clamp_min", -7),
            ("situ_beta1", 4), ("situ_beta2", 25))}  # fmt: skip
    return fakes


def _precision(name: str) -> tuple[str, str, int, int]:
    """(DSL type of the values, of their scales, what strides are multiples of, values in a scale's block)."""
    return {
        "mxfp8": ("Float8E4M3FN", "Float8E8M0FNU", 16, 32),
        "nvfp4": ("Float4E2M1FN", "Float8E4M3FN", 32, 16),
        "bf16": ("BFloat16", "", 8, 32),
    }[name]


def _named(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in inspect.signature(function).parameters if name in values}


def _extents(*divisors: int) -> tuple[Any, ...]:
    from cutlass.cute import sym_int

    return tuple(sym_int(divisibility=divisor) for divisor in divisors)


def _strides(*divisors: int) -> tuple[Any, ...]:
    from cutlass.cute import sym_int64

    return tuple(sym_int64(divisibility=divisor) for divisor in divisors)


def _tensor(element: str, shape: Sequence[Any], strides: Sequence[Any], align: int = 16) -> Any:
    import cutlass
    from cutlass.cute.runtime import make_fake_tensor

    return make_fake_tensor(getattr(cutlass, element), tuple(shape), tuple(strides), assumed_align=align)


def _vector(element: str, count: Any, align: int = 16) -> Any:
    return _tensor(element, (count,), (1,), align)


def _matrix(element: str, rows: Any, columns: Any, step: int, *batch: Any) -> Any:
    """Row by row; with `batch`, that many of them, in the last mode."""
    stride, *outer = _strides(step, *(step for _ in batch))
    return _tensor(element, (rows, columns, *batch), (stride, 1, *outer))


def _flat(element: str) -> Any:
    return _vector(element, _extents(1)[0]) if element else None


def _stream() -> Any:
    from cuda.bindings.driver import CUstream

    return CUstream(0)
