"""PyTorch: a layer whose experts are on two GPUs, a process for each.

torchrun --nproc-per-node=2 moe_ranks.py
torchrun --nproc-per-node=2 moe_ranks.py --leave      one process leaves, and the other says so in time
"""

import os
import sys
import time

import torch
from torch import distributed
from torch.nn.functional import silu

import fusekit
from fusekit.errors import PeerTimeoutError
from fusekit.interop.torch import MoE

leave = "--leave" in sys.argv
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
distributed.init_process_group("gloo")

layer = fusekit.open_library().layer("ranks/moe", tokens=512)
moe = MoE(layer, device="cuda", group=distributed.group.WORLD, timeout=2000 if leave else 60_000)
X, K, H, I = layer.options.experts, layer.options.topk, layer.options.hidden, layer.options.intermediate

torch.manual_seed(0)  # the same on every rank
w1 = (torch.randn(X, 2 * I, H) * H**-0.5).cuda().bfloat16()
w2 = (torch.randn(X, H, I) * I**-0.5).cuda().bfloat16()
moe.load_state_dict({"experts.gate_up_proj": w1, "experts.down_proj": w2})  # takes the experts of this rank

torch.manual_seed(1 + rank)
count = 200 + 100 * rank
x = torch.randn(count, H, device="cuda").bfloat16().requires_grad_()
indices = torch.rand(count, X, device="cuda").argsort(1)[:, :K].int()
weights = torch.rand(count, K, device="cuda", requires_grad=True)


def plain(x, w1, w2, weights):
    """All experts on one GPU, in float64."""
    y = torch.zeros_like(x)
    for choice in range(K):
        for expert in range(X):
            rows = indices[:, choice] == expert
            gate, up = (x[rows] @ w1[expert].T).chunk(2, dim=1)
            y[rows] = y[rows] + weights[rows, choice, None] * ((silu(gate) * up) @ w2[expert].T)
    return y


def step():
    for each in (x, weights, *moe.parameters()):
        each.grad = None
    y = moe(x, indices, weights)
    y.backward(x.detach())
    return y


def close(result, want, limit):
    error = ((result.double() - want).norm() / want.norm()).item()
    assert error < limit, error


for _ in range(3):
    y = step()
theirs = [each.detach().double().requires_grad_() for each in (x, w1, w2, weights)]
want = plain(*theirs)
want.backward(x.detach().double())
close(y, want, 6e-3)
close(x.grad, theirs[0].grad, 1e-2)
close(weights.grad, theirs[3].grad, 2e-2)
for parameter, whole in zip((moe.experts.gate_up_proj, moe.experts.down_proj), theirs[1:3], strict=True):
    total = whole.grad.cpu()
    distributed.all_reduce(total)  # a rank's experts see the tokens of all ranks
    close(parameter.grad.cpu(), total.chunk(2)[rank], 1e-2)
print(f"rank {rank}: right", flush=True)

if leave:
    if rank == 1:
        os._exit(0)
    begin = time.monotonic()
    try:
        while True:
            step()
            torch.cuda.synchronize()
    except PeerTimeoutError as error:
        print(f"after {time.monotonic() - begin:.1f} s: {error}", flush=True)
    moe.layer.ranks.close(alone=True)
    os._exit(0)  # without the collectives of an orderly end

torch.cuda.synchronize()
moe.layer.ranks.close()
distributed.destroy_process_group()
