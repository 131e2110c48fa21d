"""Megatron-Core on the CPU: what its local layers ask torch.cuda for, and small GPT models."""

import contextlib
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig

from fusekit.cpu import CpuLayer
from tests.plan.test_layer_program import options

E, H, I, K, VOCABULARY, LENGTH = 4, 64, 48, 2, 64, 16  # noqa: E741


class Stream:
    """A stream or an event that is always done."""

    cuda_stream = 0

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, _):
        return lambda *_, **__: Stream()


def without_cuda():
    """Has Megatron run without CUDA."""
    cuda, nothing = torch.cuda, contextlib.nullcontext
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.stream = lambda _: nothing()
    cuda.synchronize = cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda self, *_: None
    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else kind(self).replace("torch.", "torch.cuda.")
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda *tensors, **more: exchange(
        *tensors, **{name: [*map(int, each)] if isinstance(each, torch.Tensor) else each for name, each in more.items()}
    )
    random.CudaRNGStatesTracker.fork = lambda self, *_, **__: nothing()
    random.get_cuda_rng_tracker()


def on_cpu(create):
    def created(*given, device=None, **more):
        return create(*given, device="cpu" if str(device).startswith("cuda") else device, **more)

    return created


def start(rank, ranks, file, expert_parallel=1):
    """This process as one of `ranks`, over gloo."""
    without_cuda()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=expert_parallel)


def config(**more):
    given = {
        "num_layers": 2, "hidden_size": H, "num_attention_heads": 4, "moe_ffn_hidden_size": I, "ffn_hidden_size": I,
        "num_moe_experts": E, "moe_router_topk": K, "add_bias_linear": False, "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu, "bf16": True, "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16, "use_cpu_initialization": True, "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "normalization": "RMSNorm",
        "bias_activation_fusion": False, "bias_dropout_fusion": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
    }  # fmt: skip
    return TransformerConfig(**given | more)


def spec():
    return gpt_layer_specs.get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False, normalization="RMSNorm")


def gpt(settings, layers):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH, "share_embeddings_and_output_weights": False}
    return GPTModel(settings, layers, **sizes).bfloat16()


def layer(experts=E, topk=1, **more):
    table = {"dtype": "bf16", "hidden": H, "intermediate": I, "router": {"input": "choices"}, "grad_dtype": "f32"}
    name = "-".join(["moe", str(experts), str(topk), *more])  # layers of one name are one
    return CpuLayer(options(name=name, experts=experts, topk=topk, **table | more))


def loss(model, seed=0):
    """The loss of one batch."""
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(LENGTH).expand(2, -1)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    return model(ids, places, mask, labels=ids).float().mean()


def gradients(model, kind="grad"):
    """The attribute `kind` of all parameters in float32; SequentialMLP's experts stacked as fusekit's are."""
    found = {
        name: getattr(each, kind).float() for name, each in model.named_parameters() if ".local_experts." not in name
    }
    for number, block in enumerate(model.decoder.layers):
        if hasattr(block.mlp.experts, "local_experts"):
            for path, projection in (("w1", "linear_fc1"), ("w2", "linear_fc2")):
                weights = [getattr(expert, projection).weight for expert in block.mlp.experts.local_experts]
                stacked = torch.stack([getattr(weight, kind).float() for weight in weights])
                found[f"decoder.layers.{number}.mlp.experts.{path}"] = stacked
    return found


def error(result, wanted):
    return ((result - wanted).norm() / wanted.norm()).item()
