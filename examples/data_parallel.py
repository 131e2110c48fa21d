"""PyTorch: gradients of one layer are summed over two GPUs by NCCL while the next layer computes its own.

fusekit build examples/data-parallel.toml
torchrun --nproc-per-node=2 data_parallel.py [margin ...]      SMs for NCCL; without any: 0, 4, 8, 16, 32

The backward pass of two layers, each with all experts on every GPU. "without": each layer's gradients are summed before
the next one begins. "with": those of the last layer are summed while the first layer's weight gradients run. A margin
is the SMs that these leave to NCCL, and the most that NCCL takes; 0: no margin, and NCCL takes what it likes. Prints a
line of JSON for each margin: medians in ms, of the slower GPU.
"""

import json
import os
import statistics
import sys
from math import prod

import torch
from torch import distributed

import fusekit

T, STEPS, ROUNDS = 8192, 4, 9
margins = [int(each) for each in sys.argv[1:]] or [0, 4, 8, 16, 32]
rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
distributed.init_process_group("nccl")
count = distributed.get_world_size()
main, side = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
torch.cuda.set_stream(main)

layer = fusekit.open_library().layer("data-parallel/moe", device=rank)
X, K, H, I = layer.options.experts, layer.options.topk, layer.options.hidden, layer.options.intermediate
sizes = layer.sizes(T)
scratch = torch.empty(sizes.scratch, dtype=torch.uint8, device=device)


def communicator(margin):
    """One that takes as many SMs. They may lie far apart, so its blocks form no clusters."""
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if margin:
        options.config.max_ctas, options.config.cga_cluster_size = margin, 0
    return distributed.new_group(pg_options=options)


class Block:
    """A layer of the model: parameters, one tensor of all gradients, what it gave to the next layer."""

    def __init__(self, x, dy):
        torch.manual_seed(0)  # parameters are the same on every GPU
        self.w1 = torch.randn(X, 2 * I, H, device=device, dtype=torch.bfloat16) * H**-0.5
        self.w2 = torch.randn(X, H, I, device=device, dtype=torch.bfloat16) * I**-0.5
        torch.manual_seed(1 + rank)  # tokens are not
        self.indices = torch.rand(T, X, device=device).argsort(1)[:, :K].int()
        self.weights = torch.rand(T, K, device=device)
        self.x, self.dy = x, torch.randn_like(x) if dy is None else dy
        self.y, self.dx, self.dweights = torch.empty_like(x), torch.empty_like(x), torch.empty_like(self.weights)
        self.gradients = torch.empty(self.w1.numel() + self.w2.numel(), device=device, dtype=torch.bfloat16)
        self.kept = torch.empty(sizes.kept, dtype=torch.uint8, device=device)

    def forward(self):
        given = {"x": self.x, "w1": self.w1, "w2": self.w2, "indices": self.indices, "weights": self.weights}
        layer.forward(**given, y=self.y, kept=self.kept, scratch=scratch, stream=main)

    def bind(self, clusters=0):
        """The backward pass until dx, and the rest. clusters: those that GEMMs leave to other kernels."""
        dw1, dw2 = self.gradients.split([self.w1.numel(), self.w2.numel()])
        given = {"dy": self.dy, "x": self.x, "w1": self.w1, "w2": self.w2}
        gradients = {"dx": self.dx, "dw1": dw1.view_as(self.w1), "dw2": dw2.view_as(self.w2), "dweights": self.dweights}
        memory = {"kept": self.kept, "scratch": scratch}
        return layer.bind_backward(**given, **gradients, **memory, cluster_margin=clusters).split("dx")


def all_reduce(tensor, group, stream):
    """On `stream`, after what it holds; what is queued on it later waits for the sum."""
    with torch.cuda.stream(stream):
        distributed.all_reduce(tensor, group=group)


def without(group, kept=None):
    for block in (last, first):
        to_dx, weights = passes[block]
        to_dx(main)
        weights(main)
        keep(block, kept)
        all_reduce(block.gradients, group, main)


def overlapped(group, weights, kept=None):
    for each in passes[last]:
        each(main)
    keep(last, kept)
    passes[first][0](main)
    side.wait_stream(main)  # dx comes first: the layer before waits for it, or other GPUs do
    all_reduce(last.gradients, group, side)
    weights(main)
    keep(first, kept)
    side.wait_stream(main)
    all_reduce(first.gradients, group, side)
    main.wait_stream(side)


def keep(block, kept):
    """What this GPU alone computed."""
    if kept is not None:
        kept.append(block.gradients.clone())


def time(run, before=lambda: None):
    """Median ms of a run, of the slower GPU. before: is not timed."""
    times = []
    for _ in range(ROUNDS + 2):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(main)
        for _ in range(STEPS):
            run()
        end.record(main)
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) / STEPS, device=device)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        times.append(slowest.item())
    return round(statistics.median(times[2:]), 3)


torch.manual_seed(1 + rank)
first = Block(torch.randn(T, H, device=device, dtype=torch.bfloat16), None)
last = Block(first.y, None)
first.dy = last.dx
for block in (first, last):
    block.forward()
passes = {block: block.bind() for block in (first, last)}
cluster = max(prod(launch.kernel.record.cluster) for launch in passes[first][1].launches)  # SMs

reference = []
without(None, reference)
wanted = [block.gradients.clone() for block in (last, first)]
for each, total in zip(reference, wanted, strict=True):
    parts = [torch.empty_like(each) for _ in range(count)]
    distributed.all_gather(parts, each)
    for number in range(X):  # a piece at a time: float32 takes twice the memory
        exact = sum(part.chunk(X)[number].float() for part in parts)
        torch.testing.assert_close(total.chunk(X)[number].float(), exact, rtol=count * 2**-8, atol=1e-3)

for margin in margins:
    group, weights = communicator(margin), first.bind(margin // cluster)[1]
    again = []
    overlapped(group, weights, again)
    torch.cuda.synchronize()
    for value, before in zip(again, reference, strict=True):
        assert torch.equal(value, before), "this GPU's gradients have other bits"
    for block, before in zip((last, first), wanted, strict=True):
        torch.testing.assert_close(block.gradients, before, rtol=count * 2**-8, atol=1e-3)
    clear = last.gradients.zero_  # sums of sums would grow
    line = {
        "margin": margin,
        "without": time(lambda group=group: without(group)),
        "with": time(lambda group=group, weights=weights: overlapped(group, weights)),
        "weight_gradients": time(lambda weights=weights: weights(main)),
        "all_reduce": time(lambda group=group: all_reduce(last.gradients, group, main), clear),
        "MB": round(last.gradients.nbytes / 1e6),
    }
    if rank == 0:
        print(json.dumps(line), flush=True)
print(f"rank {rank}: right", flush=True)
torch.cuda.synchronize()
distributed.destroy_process_group()
