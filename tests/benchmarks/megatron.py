"""A small GPT trained by Megatron-Core 0.19, with its own experts and with fusekit's, on one or several GPUs.

    fusekit build tests/benchmarks/megatron.toml
    torchrun --nproc-per-node=2 tests/benchmarks/run.py megatron [--variants megatron,fused,whole+graph] [--steps 100]

Two layers, hidden 512, 8 experts of 768, two for each token, 2048 bytes of Python's standard library on each GPU a
step. Megatron's DistributedDataParallel with overlapped reduction, its distributed optimizer, and expert parallelism
over all GPUs. Variants, all with the same first weights and batches: megatron, its own experts (SequentialMLP);
megatron+turned, the same with each batch's rows in the opposite order, so that sums round differently: how far two
runs of the same experts drift apart; fused and whole, `fused(spec)` and `fused(spec, whole=True)`; whole+graph, with
forward, backward and reduction in one CUDA graph. The dispatcher is alltoall; the whole
layer has fusekit's own exchange. Prints a line of JSON each: losses at some steps, their mean over the last 20, the
largest and the last relative distance (%) from the first variant's losses, and ms of a step (median).
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed

from .convergence import corpus

LENGTH, ROWS, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 256, 8, 512, 768, 8, 2
VARIANTS = ("megatron", "megatron+turned", "fused", "whole", "whole+graph")
WARM_UP, SHOWN = 20, (1, 2, 6, 25, 50, 75, 100)


def layers(variant: str):
    """The spec of the model's layers."""
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    kind, ranks = variant.partition("+")[0], distributed.get_world_size()
    if kind == "megatron":
        return spec
    from fusekit.interop.megatron import fused

    name = f"whole-x{ranks}" if kind == "whole" else f"experts-{EXPERTS // ranks}"
    return fused(spec, whole=kind == "whole", layer=f"megatron/{name}")


def model_of(spec, **more):
    """The model, its DistributedDataParallel and its optimizer."""
    given = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 8, "moe_ffn_hidden_size": INTERMEDIATE,
        "ffn_hidden_size": INTERMEDIATE, "num_moe_experts": EXPERTS, "moe_router_topk": TOPK, "add_bias_linear": False,
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bf16": True,
        "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "normalization": "RMSNorm",
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "expert_model_parallel_size": distributed.get_world_size(),
        # what needs Apex or Transformer Engine
        "bias_activation_fusion": False, "bias_dropout_fusion": False, "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
    }  # fmt: skip
    config = TransformerConfig(**given | more)
    model = GPTModel(config, spec, 256, LENGTH, share_embeddings_and_output_weights=False)
    model = model.bfloat16().to(torch.cuda.current_device())
    settings = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**settings), model)
    given = {"optimizer": "adam", "lr": 0.0, "bf16": True, "use_distributed_optimizer": True, "clip_grad": 1.0}
    return model, ddp, get_megatron_optimizer(OptimizerConfig(**given), [ddp])


def train(variant: str, steps: int, rate: float, spec, **more) -> tuple[list[float], dict]:
    """The mean loss of all ranks in each step, and what else is printed. spec, more: the model's, and settings."""
    model_parallel_cuda_manual_seed(1, use_cudagraphable_rng=True, force_reset_rng=True)
    torch.manual_seed(1)
    model, ddp, optimizer = model_of(spec, **more)
    weights = sum(parameter.detach().double().abs().sum() for parameter in model.parameters()).reshape(1)
    distributed.all_reduce(weights)
    device, generator = torch.cuda.current_device(), torch.Generator().manual_seed(distributed.get_rank())
    text, tokens = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8), torch.zeros(ROWS, LENGTH + 1)
    tokens = tokens.to(device, torch.int64)
    places = torch.arange(LENGTH, device=device).expand(ROWS, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)

    def passes():
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        ddp.finish_grad_sync()
        return loss.detach()

    for _ in range(3):  # the weights stay
        passes()
    torch.cuda.synchronize()
    run, graph = passes, None
    if variant.endswith("+graph"):
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()  # on which the model and its reduction were made
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # NCCL's threads ask for events
            result = passes()

        def run():
            graph.replay()
            return result

    losses, times = [], []
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator)
        rows = torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])
        tokens.copy_(rows.flip(0) if variant.endswith("+turned") else rows)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses.append(run().clone())
        optimizer.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    if graph is not None:
        graph.reset()  # it holds NCCL's communicators, whose groups would not end
    mean = torch.stack(losses)
    distributed.all_reduce(mean)
    mean = (mean / distributed.get_world_size()).tolist()
    late = sorted(times[len(times) // 5 :])
    return mean, {
        "losses": {step: round(mean[step - 1], 4) for step in SHOWN if step <= steps},
        "last_20": round(statistics.mean(mean[-20:]), 4), "ms": round(statistics.median(late) * 1e3, 2),
        "ms_tenth": [round(late[len(late) * tenth // 10] * 1e3, 2) for tenth in (1, 9)], "weights": weights.item(),
    }  # fmt: skip


def apart(losses: list[float], first: list[float]) -> dict:
    """How far losses are from those of the first variant, %."""
    distances = [100 * abs(one / other - 1) for one, other in zip(losses, first, strict=True)]
    last = abs(statistics.mean(losses[-20:]) / statistics.mean(first[-20:]) - 1) * 100
    return {"most": round(max(distances), 3), "first_6": round(max(distances[:6]), 3), "last_20": round(last, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=5e-4, help="the learning rate after 20 steps")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    ranks = distributed.get_world_size()
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=ranks)
    torch.cuda.set_stream(torch.cuda.Stream())
    first = first_weights = None
    for variant in options.variants.split(","):
        losses, row = train(variant, options.steps, options.rate, layers(variant))
        if first is None:
            first, first_weights = losses, row["weights"]
        if abs(row.pop("weights") / first_weights - 1) > 1e-9:
            raise RuntimeError(f"{variant} began with other weights than {options.variants.partition(',')[0]}")
        row = {"variant": variant, "ranks": ranks} | row | {"apart": apart(losses, first)}
        if distributed.get_rank() == 0:
            sys.stdout.write(json.dumps(row | {"device": torch.cuda.get_device_name()}) + "\n")
            sys.stdout.flush()
        gc.collect()
    torch.cuda.synchronize()
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()
    return 0
