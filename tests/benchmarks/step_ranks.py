"""Training steps over several GPUs: experts over the ranks, the rest of the model data parallel.

    fusekit build tests/benchmarks/step_ranks.toml
    torchrun --nproc-per-node=2 tests/benchmarks/run.py step_ranks [--models qwen3-30b-a3b] [--tokens 4096]

The models of training_step.py, with each block in one of two ways. `fusekit`: a layer over ranks, whose kernels move
the rows. `all_to_all`: the block as one writes it in PyTorch: counts go out by all_to_all_single, the host waits for
them, rows go out, Transformers' `grouped_mm` computes, all comes back. Gradients of the rest are summed by NCCL as soon
as the backward pass has them. `+graph`: forward, backward and optimiser in one CUDA graph, which waiting for counts
rules out. Prints a line of JSON for each variant: `ms` of a step of the slowest rank, tokens a second of all ranks,
peak memory.
"""

import argparse
import copy
import gc
import itertools
import json
import os
import statistics
import sys
import zlib
from datetime import timedelta

import torch
from torch import distributed, nn

from .training_step import LENGTH, MODELS, VOCABULARY, register

VARIANTS = ("all_to_all", "fusekit", "fusekit+graph")
TIMEOUT = 20_000  # ms that a rank waits for another
WARM = 3


class Exchanged(torch.autograd.Function):
    """Rows to their ranks by all_to_all_single; gradients go back the same way."""

    @staticmethod
    def forward(ctx, rows, received, sent):
        ctx.counts = sent, received
        result = rows.new_empty(sum(received), *rows.shape[1:])
        distributed.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx, grad):
        return Exchanged.apply(grad, *ctx.counts), None, None


class AllToAll(nn.Module):
    """A block whose experts are spread over the ranks, in PyTorch. block: of Transformers, on the meta device."""

    def __init__(self, block, config, is_tuple):
        super().__init__()
        ranks = distributed.get_world_size()
        router = "router" if hasattr(block, "router") else "gate"
        self.topk, self.router, self.is_tuple = config.num_experts_per_tok, router, is_tuple
        count, hidden = getattr(block, router).weight.shape
        self.local = count // ranks
        bias = getattr(getattr(block, router), "bias", None) is not None
        self.add_module(router + "_", nn.Linear(hidden, count, bias=bias))
        of_rank = copy.deepcopy(config)
        for name in ("num_experts", "num_local_experts"):
            if hasattr(of_rank, name):
                setattr(of_rank, name, self.local)
        of_rank._experts_implementation_internal = "grouped_mm"
        self.experts = type(block.experts)(of_rank)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        chosen, indices = getattr(self, self.router + "_")(rows).float().topk(self.topk, dim=-1)
        weights = chosen.softmax(-1).to(x.dtype)
        expert, order = indices.flatten().sort()
        sent = torch.bincount(expert // self.local, minlength=distributed.get_world_size())
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent)
        sent, received = torch.stack([sent, received]).tolist()  # the host waits
        theirs = expert.new_empty(sum(received))
        distributed.all_to_all_single(theirs, expert, received, sent)
        came = Exchanged.apply(rows[order // self.topk], received, sent)
        y = self.experts(came, (theirs % self.local)[:, None], came.new_ones(len(came), 1))
        back = Exchanged.apply(y, sent, received)
        ordered = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        y = (back[ordered].view(-1, self.topk, x.shape[-1]) * weights[..., None]).sum(1).view(x.shape)
        return (y, None) if self.is_tuple else y


def block_of(name: str, backend: str, block, config, tokens: int):
    """What takes the block's place."""
    is_tuple = hasattr(block, "router")
    if backend == "all_to_all":
        return AllToAll(block, config, is_tuple)
    from fusekit import open_library
    from fusekit.interop.torch import MoE

    class Fusekit(MoE):
        def forward(self, x):
            y = super().forward(x)
            return (y, None) if is_tuple else y

    layer = open_library().layer(f"step_ranks/{name}-x{distributed.get_world_size()}", tokens=tokens)
    return Fusekit(layer, device="cuda", group=distributed.group.WORLD, timeout=TIMEOUT)


def network_of(name: str, backend: str, tokens: int):
    """The model, with the same weights for each backend, and the names of its experts' parameters."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind, attention, sizes = MODELS[name]
    config = getattr(transformers, kind)(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, attn_implementation=attention
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        blocks = transformers.AutoModelForCausalLM.from_config(config).model.layers
        kinds = {type(layer.mlp) for layer in blocks}
    whole = copy.deepcopy(config)
    for each in ("num_experts", "num_local_experts"):
        if hasattr(whole, each):
            setattr(whole, each, 8)  # of blocks that are replaced
    with torch.device("cuda"):
        network = transformers.AutoModelForCausalLM.from_config(whole, dtype=torch.bfloat16).train()
        for layer, block in zip(network.model.layers, blocks, strict=True):
            layer.mlp = block_of(name, backend, block.mlp, config, tokens)
    assert not any(type(module) in kinds for module in network.modules())
    torch.set_default_dtype(torch.float32)
    experts, ranks, rank = set(), distributed.get_world_size(), distributed.get_rank()
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            path = path.replace("router_.", "router.").replace("gate_.", "gate.")
            if "norm" in path:
                continue
            generator = torch.Generator("cuda").manual_seed(zlib.crc32(path.encode()))
            shape = list(parameter.shape)
            if ".experts." in path:
                experts.add(parameter)
                shape[0] *= ranks
            drawn = torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
            parameter.copy_(0.02 * (drawn if len(drawn) == len(parameter) else drawn.chunk(ranks)[rank]))
    return network, experts


def measure(name: str, variant: str, tokens: int, steps: int) -> dict:
    backend, *flags = variant.split("+")
    ranks = distributed.get_world_size()
    network, experts = network_of(name, backend, tokens)
    works = []
    for parameter in network.parameters():
        if parameter not in experts:
            parameter.register_post_accumulate_grad_hook(
                lambda each: works.append(distributed.all_reduce(each.grad, async_op=True))
            )
    generator = torch.Generator().manual_seed(distributed.get_rank())
    shape = (max(tokens // LENGTH, 1), min(tokens, LENGTH))
    batches = [torch.randint(VOCABULARY, shape, generator=generator).cuda() for _ in range(4)]
    ids = batches[0].clone()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True, capturable=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = network(input_ids=ids, labels=ids, use_cache=False).loss / ranks
        loss.backward()
        for work in works:
            work.wait()
        works.clear()
        optimizer.step()
        return loss.detach()

    losses, side = [], torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(WARM):
            ids.copy_(batches[index % 4])
            losses.append(step())
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call, graph = step, None
    if "graph" in flags:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's threads ask for events meanwhile
            result = step()

        def call():
            graph.replay()
            return result

    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    distributed.barrier()
    events[0].record()
    for index in range(steps):
        ids.copy_(batches[(WARM + index) % 4])
        loss = call()
        events[index + 1].record()
    losses.append(loss)
    torch.cuda.synchronize()
    ms = statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(events[2:]))
    slowest = torch.tensor([ms, torch.cuda.max_memory_allocated() / 2**30], device="cuda")
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    losses = torch.stack(losses)
    distributed.all_reduce(losses)
    ms, peak = slowest.tolist()
    if graph is not None:
        graph.reset()  # it holds NCCL's communicators, whose groups would not end
    return {
        "model": name, "variant": variant, "ranks": ranks, "tokens": tokens, "ms": round(ms, 2),
        "tokens_per_s": round(tokens * ranks / ms * 1e3), "peak_gib": round(peak, 2),
        "losses": [round(loss, 4) for loss in losses.tolist()], "device": torch.cuda.get_device_name(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt-oss-20b,qwen3-30b-a3b")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--tokens", type=int, default=4096, help="of a rank")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", timeout=timedelta(seconds=120), device_id=torch.device("cuda", rank))
    register(options.models.partition(",")[0])  # the attention
    for model in options.models.split(","):
        for variant in options.variants.split(","):
            row = measure(model, variant, options.tokens, options.steps)
            if rank == 0:
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
            gc.collect()
            torch.cuda.empty_cache()
    distributed.destroy_process_group()
    return 0
