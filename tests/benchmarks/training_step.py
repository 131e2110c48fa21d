"""Training steps of models of Transformers at real widths and few layers, on one GPU: forward, backward and AdamW.

    fusekit build tests/benchmarks/training_step.toml rms-norm
    python tests/benchmarks/run.py training_step [--models qwen3-30b-a3b] [--variants grouped_mm,fusekit,...]

A variant is BACKEND[+norms][+mlps][+residuals][+hold][+recompute][+recompute-all][+compile][+graph]. Backends:
grouped_mm, Transformers' own; fusekit, its experts; blocks and blocks-fp8, whole blocks; skip, without experts: what
the rest takes; torch: of a dense model. +norms, +mlps, +residuals: RMSNorms, dense MLPs and residuals by fusekit;
+hold: the weights' FP8 values are made after the optimiser's step, and count as part of it; +recompute, +recompute-all:
the backward pass of the first block, or of each, makes those that it reads; +compile: torch.compile of the model;
+graph: the whole step in one CUDA graph. Each variant is a process of its own, with the same weights and data. Prints a
line of JSON each, and a table: `ms` of a step, `passes_ms` without the optimiser (timed alone), peak memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

LENGTH, VOCABULARY, WARM = 4096, 32768, 3
MODELS = {
    "gpt-oss-20b": ("GptOssConfig", "flex_attention", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
        "num_hidden_layers": 6,
    }),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", "causal", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "num_hidden_layers": 4,
    }),
    "llama-3-8b": ("LlamaConfig", "causal", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "num_hidden_layers": 4,
    }),
}  # fmt: skip
VARIANTS = (
    "grouped_mm", "fusekit", "blocks", "blocks+norms", "blocks+norms+residuals", "blocks-fp8", "grouped_mm+graph",
    "blocks+norms+graph", "grouped_mm+compile+graph", "fusekit+compile+graph", "blocks+compile+graph",
    "blocks+norms+compile+graph", "blocks+residuals+compile+graph", "blocks-fp8+compile+graph",
    "blocks-fp8+recompute+compile+graph", "blocks-fp8+recompute-all+compile+graph", "blocks-fp8+hold+compile+graph",
    "skip+compile+graph",
)  # fmt: skip
DENSE = ("torch", "torch+norms", "torch+norms+mlps", "torch+compile+graph", "torch+mlps+compile+graph")
LAYERS = {"fusekit": ("{}", "none"), "blocks": ("{}*", "none"), "blocks-fp8": ("{}*", "fp8-block")}


def register(model: str) -> None:
    """The backends, and an attention without a mask, the same for all of them."""
    import torch
    from transformers import AttentionInterface
    from transformers.integrations.moe import ExpertsInterface

    from fusekit.interop import transformers as door

    for name, (layers, recipe) in LAYERS.items():
        door.register(
            name=name, layers=f"training_step/{layers.format(model)}", recipe=recipe, blocks=name != "fusekit"
        )

    def skip(module, x, index, weights):
        return x * weights.sum(-1, keepdim=True).to(x.dtype)

    def causal(module, query, key, value, mask=None, scaling=None, dropout=0.0, **more):
        y = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=True
        )
        return y.transpose(1, 2).contiguous(), None

    ExpertsInterface.register("skip", skip)
    AttentionInterface.register("causal", causal)


def measure(model: str, variant: str, tokens: int, steps: int) -> dict:
    import torch
    import transformers

    from fusekit.interop import transformers as interop

    transformers.logging.set_verbosity_error()
    backend, *flags = variant.split("+")
    register(model)
    kind, attention, sizes = MODELS[model]
    config = getattr(transformers, kind)(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False, attn_implementation=attention
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        experts = {} if backend == "torch" else {"experts_implementation": backend}
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **experts).train()
    fused = {flag: flag in flags for flag in ("norms", "mlps", "residuals")}
    if any(fused.values()):
        interop.fuse(network, compiled=True, layers=f"training_step/{model}", **fused)
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            if "norm" not in path:
                parameter.normal_(std=0.02)
    if "recompute" in flags or "recompute-all" in flags:
        interop.recompute_fp8(network, 1 if "recompute" in flags else None)
    if "hold" in flags:
        interop.hold_fp8(network)
    generator = torch.Generator().manual_seed(1)
    shape = (max(tokens // LENGTH, 1), min(tokens, LENGTH))
    batches = [torch.randint(VOCABULARY, shape, generator=generator).cuda() for _ in range(4)]
    ids = batches[0].clone()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True, capturable=True)
    run = torch.compile(network, dynamic=False) if "compile" in flags else network

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for index in range(WARM):
            ids.copy_(batches[index % 4])
            losses.append(step().item())
    torch.cuda.current_stream().wait_stream(side)
    alone = timed(optimizer.step, 5)  # moves the weights a little, in every variant alike
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if "graph" in flags:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()

        def call():
            graph.replay()
            return result
    else:
        call = step
    times = []
    for index in range(steps):
        ids.copy_(batches[(WARM + index) % 4])
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = call()
        end.record()
        times.append((begin, end))
        if index in (0, steps - 1):
            losses.append(loss.item())
    torch.cuda.synchronize()
    ms = statistics.median(begin.elapsed_time(end) for begin, end in times[2:])
    return {
        "model": model, "variant": variant, "tokens": tokens, "ms": round(ms, 2), "passes_ms": round(ms - alone, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2), "losses": [round(loss, 4) for loss in losses],
        "device": torch.cuda.get_device_name(),
    }  # fmt: skip


def timed(call, count: int) -> float:
    """The median of a call's milliseconds."""
    import torch

    events = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)


def say(line: str) -> None:
    """A line to stdout, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def table(rows: list[dict]) -> None:
    """Each variant beside what PyTorch and Transformers do under the same flags; gain: of the passes."""
    by_name = {(row["model"], row["variant"]): row for row in rows if "ms" in row}
    say(f"{'model':16}{'variant':28}{'ms':>9}{'passes':>9}{'gain':>7}{'peak GiB':>10}")
    for (model, variant), row in by_name.items():
        backend, *flags = variant.split("+")
        known = [flag for flag in flags if flag in ("compile", "graph")]
        base = by_name.get((model, "+".join(["torch" if backend == "torch" else "grouped_mm", *known])))
        gain = f"{base['passes_ms'] / row['passes_ms']:.2f}" if base else ""
        say(f"{model:16}{variant:28}{row['ms']:9.2f}{row['passes_ms']:9.2f}{gain:>7}{row['peak_gib']:10.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--variants", help="default: all of the model's")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds of a variant")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds in all; no variant begins after them")
    parser.add_argument("--out", help="a file that the lines of JSON are added to")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        say("RESULT " + json.dumps(measure(*options.one, options.tokens, options.steps)))
        return 0
    rows, begin = [], time.monotonic()
    for model in options.models.split(","):
        known = DENSE if model.startswith("llama") else VARIANTS
        for variant in options.variants.split(",") if options.variants else known:
            left = options.budget - (time.monotonic() - begin)
            if left <= 0:
                rows.append({"model": model, "variant": variant, "error": "not run: the budget is spent"})
            else:
                rows.append(apart(options, model, variant, min(left, options.timeout)))
            line = json.dumps(rows[-1])
            say(line)
            if options.out:
                with Path(options.out).open("a") as file:
                    file.write(line + "\n")
    table(rows)
    return int(any("error" in row for row in rows))


def apart(options: argparse.Namespace, model: str, variant: str, seconds: float) -> dict:
    """What a process measures of a variant."""
    command = [sys.executable, *sys.argv[0].split(), "--one", model, variant, "--tokens", str(options.tokens),
               "--steps", str(options.steps)]  # fmt: skip
    row = {"model": model, "variant": variant}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return row | {"error": f"not done after {seconds:.0f} s"}
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(results[0].partition(" ")[2]) if results else row | {"error": done.stderr.strip()[-600:]}
