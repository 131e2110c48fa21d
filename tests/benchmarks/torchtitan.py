"""torchtitan 0.3 with its own experts and with fusekit's overrides: MoE blocks of its debug models, and its Trainer.

    fusekit build tests/benchmarks/torchtitan.toml
    python tests/benchmarks/run.py torchtitan [--models qwen3,deepseek_v3,gpt_oss] [--parts blocks,trainer]

blocks: one block, forward and backward, beside torchtitan's own: how far results and gradients are apart (%), and
whether a block that is captured in a CUDA graph gives the bits of an eager pass on rows that it was not captured with.
trainer: `--steps` steps of torchtitan's Trainer on one GPU, on bytes of Python's standard library; own is its own
experts, routed and grouped are fusekit's overrides, +graph its `disable_cuda_graphs = False`. Each run is a process.
Prints a line of JSON each: losses at some steps, and ms of a step (median, with the read-back of the loss).

torchtitan 0.3 is for a nightly PyTorch. `fill_in` adds what PyTorch 2.11 to 2.13 lack and one process does not use.
"""

import argparse
import importlib
import inspect
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass

MODELS = {
    "qwen3": ("qwen3_configs", "debugmodel_moe", "qwen3_moe_debug"),
    "deepseek_v3": ("deepseekv3_configs", "debugmodel", "deepseek_v3_debugmodel"),
    "gpt_oss": ("gptoss_configs", "debugmodel", "gpt_oss_debugmodel_flex"),
}
OVERRIDES = ("routed", "grouped")
SHOWN = (1, 2, 5, 10, 20)


def fill_in() -> None:
    """Names that torchtitan imports or calls, and that this PyTorch may lack."""
    import torch
    from torch.distributed import fsdp
    from torch.nn.attention import flex_attention

    make = flex_attention.create_block_mask
    if "separate_full_blocks" not in inspect.signature(make).parameters:  # which are always separate

        def create_block_mask(*given, separate_full_blocks=True, **more):
            return make(*given, **more)

        flex_attention.create_block_mask = create_block_mask
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda timeout, group=None: None
    if not hasattr(fsdp, "DataParallelMeshDims"):  # named by annotations, and made for meshes of full DTensors alone
        fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})


def imports(override: str, model: str, layer: str | None = None) -> list:
    """torchtitan's `override.imports` for one of OVERRIDES; none for its own experts."""
    if override not in OVERRIDES:
        return []
    return [(f"fusekit.interop.torchtitan.{override}", {"layer": layer or f"torchtitan/{model}-{override}"})]


def block(model: str, given=(), hidden: int | None = None):
    """The first MoE block of a debug model, with overrides, on the default device. hidden: another width of experts."""
    import torch
    from torchtitan.config.override import OverrideConfig, apply_overrides

    table, name, _ = MODELS[model]
    make = getattr(importlib.import_module(f"torchtitan.models.{model}"), table)[name]
    settings = {"attn_backend": "flex", "moe_comm_backend": "standard"}
    config = make(**{each: settings[each] for each in inspect.signature(make).parameters if each in settings})
    apply_overrides(OverrideConfig(imports=list(given)), config)
    moe = next(layer.moe for layer in config.layers if getattr(layer, "moe", None) is not None)
    if hidden is not None:
        moe.routed_experts.inner_experts.hidden_dim = hidden
    torch.manual_seed(0)
    built = moe.build()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(std=0.05)
    return built.bfloat16() if model == "gpt_oss" else built  # whose own experts give bf16


def passes(moe, x):
    """y, and the gradients of x and the parameters, w1 and w3 as one."""
    import torch

    x = x.detach().requires_grad_()
    y = moe(x)
    names, parameters = zip(*((name, each) for name, each in moe.named_parameters() if each.requires_grad), strict=True)
    loss = torch.sin(3 * y.float()).sum()
    grads = torch.autograd.grad(loss, [x, *parameters], allow_unused=True)
    found = {name: grad for name, grad in zip(("x", *names), grads, strict=True) if grad is not None}
    inner = "routed_experts.inner_experts."
    if f"{inner}w1_EFD" in found:
        found[f"{inner}w13"] = torch.stack([found.pop(f"{inner}{name}_EFD") for name in ("w1", "w3")], 2)
    return {"y": y.detach()} | found


def compare(results, wanted) -> dict[str, float]:
    """Relative Frobenius errors."""
    assert results.keys() == wanted.keys()
    return {
        name: ((results[name].float() - right.float()).norm() / right.float().norm()).item()
        for name, right in wanted.items()
    }


def measure_block(model: str, override: str) -> dict:
    import torch

    with torch.device("cuda"):
        theirs, ours = block(model), block(model, imports(override, model))
    ours.load_state_dict(theirs.state_dict())
    first = next(theirs.parameters())
    dim = next(iter(theirs.routed_experts.parameters())).shape[-1]
    torch.manual_seed(1)
    rows = [torch.randn(2, 1024, dim, device="cuda", dtype=first.dtype) for _ in range(2)]
    errors = compare(passes(ours, rows[0]), passes(theirs, rows[0]))
    static, side = rows[0].clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        passes(ours, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = passes(ours, static)
    static.copy_(rows[1])
    graph.replay()
    eager = passes(ours, rows[1])
    worst = max((name for name in errors if name != "y"), key=errors.__getitem__)
    return {
        "model": model, "override": override, "y_percent": round(100 * errors["y"], 3),
        "worst_gradient": worst, "worst_percent": round(100 * errors[worst], 3),
        "graph_differs_in": [name for name in eager if not torch.equal(eager[name], captured[name])],
    }  # fmt: skip


def trainer_config(model: str, variant: str, steps: int, layer: str | None = None):
    """The debug model's own configuration, with bytes as its data."""
    import torch
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    from .convergence import corpus

    class Bytes(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, *, tokenizer_path=None):
            super().__init__()

        def encode(self, text, **_):
            return list(text.encode())

        def decode(self, tokens, **_):
            return bytes(tokens).decode(errors="replace")

        def get_vocab_size(self):
            return 256

    class Windows(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, seq_len, local_batch_size, **_):
            self.length, self.rows = seq_len, local_batch_size

        def __iter__(self):
            text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
            generator = torch.Generator().manual_seed(0)
            places = torch.arange(self.length).expand(self.rows, -1)
            while True:
                starts = torch.randint(len(text) - self.length, (self.rows,), generator=generator).tolist()
                batch = torch.stack([text[start : start + self.length + 1] for start in starts]).long()
                yield {"input": batch[:, :-1].contiguous(), "positions": places.clone()}, batch[:, 1:].contiguous()

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    override, _, graph = variant.partition("+")
    config = getattr(importlib.import_module(f"torchtitan.models.{model}.config_registry"), MODELS[model][2])()
    config.tokenizer, config.dataloader = Bytes.Config(), Windows.Config()
    config.training.steps, config.training.disable_cuda_graphs = steps, not graph
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed = 1
    config.loss = config.loss.loss_fn  # in chunks, PyTorch 2.11's FSDP frees lm_head before its backward pass
    config.override.imports = imports(override, model, layer)
    return config


def draw(model) -> None:
    """The same weights with and without overrides: those of a state dict, by name."""
    import torch
    from torch.distributed.tensor import DTensor

    state = model.state_dict()
    with torch.no_grad():
        for name, value in state.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            if local.ndim > 1 and local.is_floating_point():
                local.normal_(std=0.02, generator=torch.Generator(local.device).manual_seed(zlib.crc32(name.encode())))
        model.load_state_dict(state)


def measure_trainer(config) -> tuple[list[float], list[float]]:
    """Losses and seconds of torchtitan's Trainer."""
    trainer = config.build()
    model, masks = trainer.model_parts[0], []
    draw(model)
    make = model.get_attention_masks

    def same(positions):  # in each batch; to PyTorch 2.11 a graph's masks are equal if their functions are
        masks.extend([] if masks else [make(positions=positions)])
        return masks[0]

    model.get_attention_masks = same
    log, losses, times = trainer.metrics_processor.log, [], [time.perf_counter()]

    def recorded(step, loss, *given, **more):
        losses.append(loss)
        times.append(time.perf_counter())
        return log(step, loss, *given, **more)

    trainer.metrics_processor.log = recorded
    try:
        trainer.train()
    finally:
        trainer.close()
    return losses, [after - before for before, after in itertools.pairwise(times)]


def measure(part: str, model: str, variant: str, steps: int) -> dict:
    import torch

    fill_in()
    if part == "blocks":
        return measure_block(model, variant)
    from torch.nn.attention.flex_attention import flex_attention
    from torchtitan.models.common.attention import FlexAttention

    untuned = FlexAttention.inductor_configs | {"max_autotune": False, "coordinate_descent_tuning": False}
    FlexAttention._compiled_flex_attn = torch.compile(flex_attention, options=untuned)  # minutes less
    losses, seconds = measure_trainer(trainer_config(model, variant, steps))
    torch.distributed.destroy_process_group()
    late = seconds[len(seconds) // 4 :]
    return {
        "model": model, "variant": variant, "ms": round(statistics.median(late) * 1e3, 1),
        "losses": {step: round(losses[step - 1], 4) for step in SHOWN if step <= len(losses)},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }  # fmt: skip


def port() -> str:
    """A free one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def apart(part: str, model: str, variant: str, steps: int, seconds: float) -> dict:
    """What a process measures."""
    command = [sys.executable, *sys.argv[0].split(), "--one", part, model, variant, "--steps", str(steps)]
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}
    row = {"model": model, "variant": variant}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=os.environ | environment)
    except subprocess.TimeoutExpired as late:
        return row | {"error": f"not done after {seconds:.0f} s; last: {(late.stderr or b'').decode()[-600:]}"}
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(results[0].partition(" ")[2]) if results else row | {"error": done.stderr.strip()[-1200:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--parts", default="blocks,trainer")
    parser.add_argument("--variants", default="own,routed,grouped,own+graph,routed+graph,grouped+graph")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of a process")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write("RESULT " + json.dumps(measure(*options.one, options.steps)) + "\n")
        return 0
    failed = False
    for part in options.parts.split(","):
        for model in options.models.split(","):
            for variant in OVERRIDES if part == "blocks" else options.variants.split(","):
                row = apart(part, model, variant, options.steps, options.timeout)
                failed |= "error" in row
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    return int(failed)
