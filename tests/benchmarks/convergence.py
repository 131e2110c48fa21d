"""A language model with experts, trained on the sources of Python's standard library: losses by backend, on one GPU.

    fusekit build tests/benchmarks/convergence.toml
    python tests/benchmarks/run.py convergence [--backends grouped_mm,bf16,fp8] [--steps 2000] [--out losses.json]

Qwen3-MoE of Transformers, 10 layers, 96 million active parameters of 286, bytes as tokens, 8192 a step, AdamW with bf16
parameters. All backends have the same first weights and the same batches, and are captured in a CUDA graph: grouped_mm
is Transformers' own; bf16 and fp8 are whole blocks in fusekit, fp8 with the recipe "fp8-block". Prints the mean loss of
each `--window` steps as JSON, the loss of bytes that were not trained on, and the seconds.
"""

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path

LENGTH, ROWS, WARM_UP, PEAK = 1024, 8, 100, 1e-3


def corpus() -> bytes:
    """The modules of the standard library, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return b"\n".join(path.read_bytes() for path in files)


def train(backend: str, steps: int, window: int, seed: int) -> dict:
    import torch
    import transformers

    from fusekit.interop import transformers as door

    for name, recipe in (("bf16", "none"), ("fp8", "fp8-block")):
        door.register(name=name, layers=f"convergence/{name}", recipe=recipe, blocks=True)
    config = transformers.Qwen3MoeConfig(
        hidden_size=768, intermediate_size=768, moe_intermediate_size=768, num_attention_heads=12,
        num_key_value_heads=12, head_dim=64, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        num_hidden_layers=10, vocab_size=256, max_position_embeddings=LENGTH, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=backend
        ).train()
    text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)
    held = text[-(64 * ROWS * LENGTH) :]
    text = text[: -len(held)]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros((ROWS, LENGTH), dtype=torch.int64, device="cuda")
    rate = torch.tensor(0.0, device="cuda")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=True
    )

    def batch() -> None:
        starts = torch.randint(len(text) - LENGTH, (ROWS,), generator=generator)
        ids.copy_(torch.stack([text[start : start + LENGTH] for start in starts]))

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        batch()
        for _ in range(3):  # with a rate of 0
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    begin, losses = time.monotonic(), torch.zeros(steps, device="cuda")
    for index in range(steps):
        batch()
        rate.fill_(PEAK * min((index + 1) / WARM_UP, 1 - 0.9 * index / steps))
        graph.replay()
        losses[index] = loss
    means = losses.reshape(-1, window).mean(1).tolist()
    seconds = time.monotonic() - begin
    model.eval()
    with torch.no_grad():
        rows = held.reshape(-1, ROWS, LENGTH).cuda().long()
        unseen = torch.stack([model(input_ids=each, labels=each, use_cache=False).loss for each in rows]).mean()
    return {
        "backend": backend, "seed": seed, "steps": steps, "window": window, "seconds": round(seconds, 1),
        "held_out": round(unseen.item(), 4), "losses": [round(mean, 4) for mean in means],
        "device": torch.cuda.get_device_name(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="grouped_mm,bf16,fp8")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--window", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    rows = []
    for backend in options.backends.split(","):
        rows.append(train(backend, options.steps, options.window, options.seed))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    if options.out:
        Path(options.out).write_text(json.dumps(rows) + "\n")
    return 0
