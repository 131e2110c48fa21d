"""Kernels of other packages, compiled by their own code from fake tensors. Argument: the package. Prints how many, the
CPU seconds that the calls took, and of each call the SHA-256 of the cubin that the process got.
"""

import json
import os
import sys
import time

os.environ |= {
    "CUTE_DSL_ARCH": "sm_100a" if sys.argv[1:] == ["cudnn"] else "sm_90a",
    "QUACK_ARCH": "90", "QUACK_CACHE_ENABLED": "0", "FLASH_ATTENTION_ARCH": "sm_90",
    "FLASH_ATTENTION_NUM_SMS": "132", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
}  # fmt: skip

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import make_ptr

from tests.cute.engines import Given

BF16 = cutlass.BFloat16


def quack():
    """RMSNorm for eight sizes."""
    from quack.rmsnorm import _compile_rmsnorm_fwd as compile_rmsnorm

    for size in (1024, 2048, 2880, 4096, 5120, 7168, 8192, 16384):
        yield lambda size=size: compile_rmsnorm(
            BF16, BF16, None, cutlass.Float32, None, None, size, False, False, False, False
        )


def flash_attn():
    """The forward pass of FlashAttention 4 for two head sizes, with and without a causal mask."""
    import torch
    from flash_attn.cute.interface import _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    def compile_forward(size, causal):
        with FakeTensorMode():
            q, k, v = (torch.empty(2, 512, n, size, dtype=torch.bfloat16, device="cuda") for n in (16, 4, 4))
            _flash_attn_fwd(q, k, v, causal=causal)

    for size in (64, 128):
        for causal in (False, True):
            yield lambda size=size, causal=causal: compile_forward(size, causal)


def flashinfer():
    """The first GEMM of FlashInfer's SM90 MoE for three tiles and two numbers of experts per token."""
    import flashinfer
    from flashinfer.fused_moe.cute_dsl import sm90_contiguous_gather_grouped_gemm_act_fusion as gemm

    def pointer(dtype, alignment):
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=alignment)

    def compile_gemm(tile, topk):
        values = [pointer(BF16, 16) for _ in range(3)]
        indices = [pointer(cutlass.Int32, 4) for _ in range(4)]
        sizes, swiglu = (64, 1024, 2048, 2048, 16), int(flashinfer.ActivationType.Swiglu)
        gemm._get_compiled_gather_kernel(
            *sizes, *values, *indices, 132, CUstream(0), BF16, BF16, tile, (1, 1), topk, 1, False, True, swiglu, 1.0,
            0.0, 7.0, None, None,
        )  # fmt: skip

    for tile in ((128, 128), (64, 128), (128, 256)):
        for topk in (4, 8):
            yield lambda tile=tile, topk=topk: compile_gemm(tile, topk)


def cudnn():
    """Grouped GEMMs of cuDNN frontend for Blackwell, with what stands behind them; their arguments are fusekit's."""
    from fusekit.providers.cudnn import grouped, wgrad

    def compile_gemm(make, *args, **options):
        kernel, args, keywords = make(*args, experts=8, **options)
        cute.compile(kernel, *args, **keywords)

    for kind, precision in (("glu", "mxfp8"), ("glu", "bf16"), ("quant", "nvfp4"), ("gemm", "bf16")):
        yield lambda kind=kind, precision=precision: compile_gemm(grouped, kind, precision)
    yield lambda: compile_gemm(wgrad, "bf16")
    yield lambda: compile_gemm(grouped, "gemm", "bf16", tile=(128, 256), cluster=(1, 1))


if __name__ == "__main__":
    packages = {"quack": quack, "flash_attn": flash_attn, "flashinfer": flashinfer, "cudnn": cudnn}
    calls, given, seconds, digests = list(packages[sys.argv[1]]()), Given(), 0.0, []
    for call in calls:
        begin = time.process_time()
        call()
        seconds += time.process_time() - begin
        digests.append(given.take())
    sys.stdout.write("\n" + json.dumps([len(calls), seconds, digests]))
