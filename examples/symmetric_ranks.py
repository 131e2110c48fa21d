"""A layer over two ranks through TVM-FFI, its windows in PyTorch's symmetric memory; compared with the layer in Python.

fusekit export --lang tvm-ffi ranks.so ranks/moe
torchrun --nproc-per-node=2 symmetric_ranks.py ranks.so        two GPUs; one for both ranks with
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 before it
"""

import os
import sys

import torch
import torch.distributed._symmetric_memory as symmetric
import tvm_ffi
from torch import distributed

import fusekit
from fusekit.exchange import Ranks

MOST = 512  # tokens of a rank, at most
rank = int(os.environ["LOCAL_RANK"])
device = rank % torch.cuda.device_count()
torch.cuda.set_device(device)
distributed.init_process_group("gloo")
moe = tvm_ffi.load_module(sys.argv[1])
moe.prepare(device)

capacity, checked = MOST, torch.zeros(16, dtype=torch.uint8, device="cuda")
words, windows = [rank, 0, capacity, 0, checked.data_ptr(), 0, 0, 0], []
for name in ("sent", "grads", "sums", "returned"):  # in the order that `export` prints
    window = symmetric.empty(moe[f"ranks_moe_{name}_bytes"](capacity), dtype=torch.uint8, device=f"cuda:{device}")
    window.zero_()
    handle = symmetric.rendezvous(window, distributed.group.WORLD)
    words += [window.numel(), *handle.buffer_ptrs]
    windows.append((window, handle))  # keeps them
for (window, _), (following, _) in zip(windows, windows[1:] + windows[:1], strict=True):  # if a rank does not come, all
    window[64:72].view(torch.int64).fill_(following.data_ptr() + 16)  # launches after the first that waits end at once
ranks = torch.tensor(words)


def gather(value):
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


group = Ranks.of_process(fusekit.open_library().devices, device, rank, gather)
layer = fusekit.open_library().layer("ranks/moe", ranks=group, tokens=MOST)
H, I, X, K = (getattr(layer.options, name) for name in ("hidden", "intermediate", "experts", "topk"))


def inputs(count, seed):
    """Tokens and routing of this rank, and its experts."""
    torch.manual_seed(seed + rank)
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    given = {name: torch.randn(count, H, **bf16) for name in ("x", "dy")}
    given |= {"w1": torch.randn(X // 2, 2 * I, H, **bf16) * H**-0.5, "w2": torch.randn(X // 2, H, I, **bf16) * I**-0.5}
    given["indices"] = torch.rand(count, X, device="cuda").argsort(1)[:, :K].int()
    return given | {"weights": torch.rand(count, K, device="cuda")}


def empty(count):
    """All outputs, by name, as NaN or large numbers."""
    dims, types = layer.dims(count), {"bf16": torch.bfloat16, "f32": torch.float32}
    outputs = layer.outputs("forward") | layer.outputs("backward")
    return {
        name: torch.full(each.extents(dims), torch.nan, dtype=types[each.dtype], device="cuda")
        for name, each in outputs.items()
    }


def by_python(given, outputs):
    sizes, which = layer.sizes(), {**given, **outputs}
    kept, scratch = (torch.empty(size, dtype=torch.uint8, device="cuda") for size in (sizes.kept, sizes.scratch))
    for name, call in (("forward", layer.forward), ("backward", layer.backward)):
        names = (*layer.inputs(name), *layer.outputs(name))
        call(**{each: which[each] for each in names}, kept=kept, scratch=scratch, stream=torch.cuda.current_stream())
    torch.cuda.synchronize()
    layer.check()


def by_tvm_ffi(given, outputs):
    which, count = {**given, **outputs}, len(given["x"])
    kept = torch.empty(moe.ranks_moe_kept_bytes(count, capacity), dtype=torch.uint8, device="cuda")
    for name in ("forward", "backward"):
        names = (*layer.inputs(name), *layer.outputs(name))
        moe[f"ranks_moe_{name}"](*(which[each] for each in names), kept, ranks)
    torch.cuda.synchronize()
    assert not checked.any(), checked


distributed.barrier()  # the windows are zeros on every rank
for count in (300 + 100 * rank, MOST, 77 * rank, 1 + rank):
    given, python, ours = inputs(count, count), empty(count), empty(count)
    by_python(given, python)
    by_tvm_ffi(given, ours)
    for name, want in python.items():
        assert torch.equal(ours[name].view(torch.uint8), want.view(torch.uint8)), f"rank {rank}: {name} differs"
        assert not want.isnan().any(), name
print(
    f"rank {rank}: right, on cuda:{device}, windows of {symmetric.get_backend(torch.device('cuda', device))}",
    flush=True,
)
torch.cuda.synchronize()
group.close()
distributed.destroy_process_group()
