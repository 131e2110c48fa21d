"""Generation with models of Transformers at real widths and few layers, on one GPU: tokens a second, and which tokens.

    fusekit build tests/benchmarks/generate.toml
    python tests/benchmarks/run.py generate [--models qwen3-30b-a3b] [--backends grouped_mm,fusekit] [--batches 1]

Backends: grouped_mm, Transformers' own; fusekit, its experts; blocks, whole blocks; skip, without experts: what the
rest takes. Models whose names end in -fp8 have e4m3 experts with 128 x 128 scales, those of -mxfp4 blocks and scales of
MXFP4, as checkpoints have them; grouped_mm then has what they dequantise to in bf16, and own is Transformers' own way
with FP8, if its kernels can be loaded. Each backend generates greedily, by `generate` (eager), and by a step with a
static cache in one CUDA graph (graph).
Where the tokens of a sequence first differ from those of grouped_mm in eager mode, `gap` is how far the logit of the
other token is below the best one there, in standard deviations of the logits. Where two scores of a router are close,
a rounding sends a token to another expert, so grouped_mm in a graph differs from itself, too. A gap above 0.1 and above
the largest of those of the model makes the exit status 1; not of blocks, whose router does not round its logits.
Prints a line of JSON each, and a table.
"""

import argparse
import copy
import json
import statistics
import sys
import time

from fusekit.plan.quant import MX_SIDE
from fusekit.reference import mxfp4

VOCABULARY, PROMPT, WITHIN, ROUNDS = 32768, 32, 0.1, 3
SIDE, LARGEST = 128, 448  # of a block with one scale; the largest e4m3 value
MODELS = {
    "gpt-oss-20b": ("GptOssConfig", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4,
        "layer_types": ["full_attention"] * 4,  # the counter of a sliding window is the host's, so not in a graph
    }),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "num_hidden_layers": 4,
    }),
}  # fmt: skip
MODELS["qwen3-30b-a3b-fp8"] = MODELS["qwen3-30b-a3b"]
MODELS["gpt-oss-20b-mxfp4"] = MODELS["gpt-oss-20b"]
BACKENDS = ("grouped_mm", "fusekit", "blocks", "skip")
FUSEKIT = BACKENDS[1]
OWN = "own"
PROJECTIONS = "gate_up_proj", "down_proj"


def register(library=None, layers="generate/*") -> None:
    """The backends. library: default, that of the environment."""
    from transformers.integrations.moe import ExpertsInterface

    from fusekit.interop import transformers as door

    door.register(library, FUSEKIT, layers)
    door.register(library, "blocks", layers, blocks=True)
    ExpertsInterface.register("skip", lambda module, x, index, weights: x * weights.sum(-1, keepdim=True).to(x.dtype))


def network_of(kind: str, sizes: dict, device: str):
    """A model with random weights in bf16, whose backend is grouped_mm."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, kind)(
        **sizes, vocab_size=VOCABULARY, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0
    )
    with torch.device(device):
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        ).eval()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for path, parameter in network.named_parameters():
            if "norm" not in path:
                parameter.normal_(std=0.02 if parameter.dim() > 1 else 0.1, generator=generator)
    return network


def twin_of(model: str, network):
    """A copy of the network with weights as a checkpoint of such a model has them, or None. The experts of the network
    become what those dequantise to.
    """
    make = {"fp8": in_fp8, "mxfp4": in_mxfp4}.get(model.rpartition("-")[2])
    return make and make(network).eval()


def in_fp8(network):
    """A copy whose experts are FP8 modules of Transformers."""
    import torch
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    twin, apart = copy.deepcopy(network), [".*self_attn", "lm_head"]
    given = FineGrainedFP8Config(modules_to_not_convert=apart)
    replace_with_fp8_linear(twin, modules_to_not_convert=apart, quantization_config=given)
    for layer, plain in zip(twin.model.layers, network.model.layers, strict=True):
        for name in PROJECTIONS:
            weights = getattr(plain.mlp.experts, name).data
            blocks = weights.float().unflatten(-1, (-1, SIDE)).unflatten(-3, (-1, SIDE))
            scales = blocks.abs().amax((-3, -1), keepdim=True) / LARGEST
            values = (blocks / scales).to(torch.float8_e4m3fn)
            weights.copy_((values.float() * scales).reshape(weights.shape))
            for end, tensor in (("", values.reshape(weights.shape)), ("_scale_inv", scales[..., 0, :, 0].contiguous())):
                setattr(layer.mlp.experts, f"{name}{end}", torch.nn.Parameter(tensor, requires_grad=False))
    return twin


def in_mxfp4(network):
    """A copy that Transformers loads, for fusekit's experts, from a checkpoint with MXFP4 experts."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    state = network.state_dict()
    for path in [path for path in state if path.endswith(PROJECTIONS)]:
        weights = state.pop(path)
        blocks, scales = packed(weights.mT)  # [X, N, K]
        state |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
        weights.copy_(convert_moe_packed_tensors(blocks, scales))
    config = copy.deepcopy(network.config)
    config.quantization_config = {"quant_method": "mxfp4"}
    state = {path: tensor.cpu() for path, tensor in state.items()}
    twin = type(network).from_pretrained(
        None, config=config, state_dict=state, dtype=network.dtype, experts_implementation=FUSEKIT
    )
    return twin.to(network.device)


def packed(weights):
    """MXFP4 of weights [..., K]: bytes [..., K / 32, 16] of the nearest two values, and scales [..., K / 32] of which
    the largest value of the 32 is 4 to 8 times.
    """
    import torch

    magnitudes = torch.tensor(mxfp4.MAGNITUDES, device=weights.device)
    numbers = weights.float().unflatten(-1, (-1, MX_SIDE))
    exponents = numbers.abs().amax(-1, keepdim=True).log2().floor() - 2
    numbers = numbers / exponents.exp2()
    codes = torch.bucketize(numbers.abs().contiguous(), (magnitudes[1:] + magnitudes[:-1]) / 2) + 8 * (numbers < 0)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).byte(), (exponents[..., 0] + 127).byte()


def generated(network, ids, new: int):
    """Tokens [B, new] and logits [B, new, V] of `generate`, and the milliseconds of a token."""
    import torch

    def run(count: int):
        return network.generate(
            ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, return_dict_in_generate=True,
            output_logits=True, attention_mask=torch.ones_like(ids),
        )  # fmt: skip

    def timed(count: int) -> float:
        start = now(ids)
        run(count)
        return now(ids) - start

    result = run(new)
    times = [timed(new) - timed(1) for _ in range(ROUNDS)]
    ms = statistics.median(times) / (new - 1) * 1e3
    return result.sequences[:, ids.shape[1] :], torch.stack(result.logits, 1), ms


def replayed(network, ids, new: int):
    """Tokens [B, new] and the milliseconds of a token, of a step with a static cache; on a GPU in one CUDA graph."""
    import torch
    from transformers import StaticCache

    length = ids.shape[1]
    cache = StaticCache(config=network.config, max_cache_len=length + new + 2)  # with the runs before a capture
    token, place = ids[:, :1].clone(), torch.zeros(1, dtype=torch.long, device=ids.device)
    tokens = torch.zeros(new, len(ids), dtype=ids.dtype, device=ids.device)

    columns, rows = torch.arange(length + new + 2, device=ids.device), torch.arange(length, device=ids.device)
    least = torch.full((), torch.finfo(network.dtype).min, dtype=network.dtype, device=ids.device)

    def step(given) -> None:
        # A mask of its own: the models' code for one copies from the host, which a capture refuses.
        last = rows[: given.shape[1]] + (place + (length - 1) if given is token else 0)
        mask = torch.where(columns <= last[:, None], torch.zeros_like(least), least)[None, None]
        logits = network(
            given, attention_mask=mask, position_ids=last[None], past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        token.copy_(logits.argmax(-1, keepdim=True))
        tokens.index_copy_(0, place, token.T)
        place.add_(1)

    def begin() -> None:
        cache.reset()
        place.zero_()
        step(ids)

    call = captured(lambda: step(token), begin) if ids.is_cuda else lambda: step(token)
    times = []
    for _ in range(ROUNDS):
        begin()
        start = now(ids)
        for _ in range(new - 1):
            call()
        times.append((now(ids) - start) / (new - 1) * 1e3)
    return tokens.T.clone(), statistics.median(times)


def captured(step, begin):
    """`step` as a CUDA graph, after runs of it on a stream of their own, which load what it launches."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        begin()
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def now(tensor) -> float:
    """Seconds, when the tensor's device is done."""
    import torch

    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def differences(tokens, wanted, logits) -> dict:
    """How `tokens` [B, N] differ from `wanted`, whose logits are [B, N, V]: after the first difference of a sequence
    its tokens have other contexts.
    """
    gaps = []
    for found, right, scores in zip(tokens, wanted, logits.float(), strict=True):
        apart = (found != right).nonzero()
        if len(apart):
            first = apart[0].item()
            row = scores[first]
            gaps.append(((row[right[first]] - row[found[first]]) / row.std()).item())
    return {"differ": len(gaps), "gap": round(max(gaps, default=0.0), 4)}


def measure(model: str, network, backends, batch: int, new: int, twin=None) -> list[dict]:
    """A row for each backend, the first of which the others are compared with. twin: of `twin_of`, which all others run
    then.
    """
    import torch

    plain, device = network, next(network.parameters()).device
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(1, VOCABULARY, (batch, PROMPT), generator=generator).to(device)
    rows, wanted = [], None
    for backend in backends:
        network = plain if twin is None or backend in (backends[0], "skip") else twin
        network.set_experts_implementation("grouped_mm" if backend == OWN else backend)
        with torch.inference_mode():
            try:
                tokens, logits, ms = generated(network, ids, new)
            except ImportError as error:
                if backend != OWN:
                    raise
                say(json.dumps({"model": model, "backend": backend, "not run": str(error)}))
                continue
            wanted = (tokens, logits) if wanted is None else wanted
            results = {"eager": (tokens, ms), "graph": replayed(network, ids, new)}
        for how, (found, each) in results.items():
            row = {"model": model, "backend": backend, "how": how, "batch": batch, "ms": round(each, 3),
                   "tokens_s": round(batch / each * 1e3, 1)}  # fmt: skip
            rows.append(row | (differences(found, *wanted) if backend != "skip" else {}))
    return rows


def table(rows: list[dict]) -> None:
    """Tokens a second, next to those of grouped_mm in the same way."""
    base = {(row["model"], row["how"], row["batch"]): row["ms"] for row in rows if row["backend"] == "grouped_mm"}
    say(f"{'model':16}{'T':>4} {'how':7}{'backend':12}{'ms':>9}{'tokens/s':>11}{'gain':>7}{'differ':>8}{'gap':>8}")
    for row in rows:
        other = base.get((row["model"], row["how"], row["batch"]))
        gain = f"{other / row['ms']:.2f}" if other else ""
        say(
            f"{row['model']:16}{row['batch']:4} {row['how']:7}{row['backend']:12}{row['ms']:9.3f}"
            f"{row['tokens_s']:11.1f}{gain:>7}{row.get('differ', ''):>8}{row.get('gap', ''):>8}"
        )


def say(line: str) -> None:
    """A line to stdout, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--backends", default=",".join(BACKENDS), help="the others are compared with the first")
    parser.add_argument("--batches", default="1,4,16,64", help="sequences at a time")
    parser.add_argument("--new", type=int, default=32, help="tokens of a sequence")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds; no batch begins after them")
    options = parser.parse_args()
    import torch

    register()
    rows, begin = [], time.monotonic()
    say(torch.cuda.get_device_name())
    for model in options.models.split(","):
        network = network_of(*MODELS[model], "cuda")
        twin = twin_of(model, network)
        backends = options.backends.split(",")
        if model.endswith("-fp8"):
            backends.insert(1, OWN)
        for batch in map(int, options.batches.split(",")):
            if time.monotonic() - begin > options.budget:
                say(f"not run: {model} with {batch}, the budget is spent")
                continue
            found = measure(model, network, backends, batch, options.new, twin)
            for row in found:
                say(json.dumps(row))
            rows += found
        del network, twin
        torch.cuda.empty_cache()
    table(rows)
    return int(bool(unexplained(rows)))


def unexplained(rows: list[dict]) -> list[dict]:
    """The rows whose gap is above `WITHIN` and above all of the model's first backend, which differs from itself."""
    own = {row["model"]: row["backend"] for row in reversed(rows)}
    most = {
        model: max(row["gap"] for row in rows if (row["model"], row["backend"]) == (model, first))
        for model, first in own.items()
    }
    judged = [row for row in rows if row["backend"] != "blocks"]
    return [row for row in judged if row.get("gap", 0) > max(WITHIN, most[row["model"]])]
