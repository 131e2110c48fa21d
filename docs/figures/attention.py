"""FlashAttention 4 compiles its forward pass for a GPU that is not there, from stand-ins for tensors."""

import time

import torch
from flash_attn.cute.interface import _flash_attn_fwd
from torch._subclasses.fake_tensor import FakeTensorMode

for size in (64, 128):
    for causal in (False, True):
        begin = time.process_time()
        with FakeTensorMode():
            q, k, v = (torch.empty(2, 512, heads, size, dtype=torch.bfloat16, device="cuda") for heads in (16, 4, 4))
            _flash_attn_fwd(q, k, v, causal=causal)
        print(f"head size {size:3}, causal {causal!s:5}: {time.process_time() - begin:5.1f} s of CPU time", flush=True)  # noqa: T201
