"""Mixture-of-experts blocks of Transformers with `experts_implementation="fusekit"`, and with its own `grouped_mm`.

    python tests/benchmarks/run.py torch_blocks --spec > experts.toml && fusekit build experts.toml    on any machine
    python tests/benchmarks/run.py torch_blocks [CASE ...] [--tokens 8192 --tokens 24576] [--seconds 2] [--in-place]

Each block is Transformers' own class at a model's sizes, in bf16, with random weights and its own router. Both backends
run on the same weights and inputs, in turns: the forward pass without gradients, and forward and backward together.
Prints one JSON document: median milliseconds, memory beyond weights and input at its peak (gradients included), how
many times as fast fusekit is, and how far its result is from the other's.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from fusekit.bench.timing import median

BACKENDS = ("fusekit", "grouped_mm")
TOKENS = (8192, 24576)
LEAST_ROUNDS = 5
GPT_OSS = (
    'activation = { kind = "swiglu", alpha = 1.702, limit = 7.0, up_offset = 1.0 }\nglu_layout = "interleaved"\n'
    'bias = true\nb_major = "n"\n'
)


@dataclass(frozen=True, slots=True)
class Case:
    """A block: its module below transformers.models, its classes, and the config's sizes. spec: of its layer."""

    module: str
    block: str
    config: str
    sizes: dict[str, Any]
    shape: tuple[int, int, int, int]
    spec: str = ""

    def table(self, name: str, tokens: int) -> str:
        """Its layer in a spec file."""
        sizes = zip(("hidden", "intermediate", "experts", "topk"), self.shape, strict=True)
        lines = [f'name = "{name}"', 'kind = "moe"', 'arch = "sm_90a"', *(f"{key} = {value}" for key, value in sizes)]
        lines += ['router = { input = "choices" }', f"{self.spec}problem = {{ T = {tokens} }}"]
        return "\n".join(["[[kernel]]", *lines, ""])


CASES = {
    "qwen3-30b-a3b": Case(
        "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
         "norm_topk_prob": True},
        (2048, 768, 128, 8),
    ),
    "gpt-oss-20b": Case(
        "gpt_oss", "GptOssMLP", "GptOssConfig",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
        (2880, 2880, 32, 4), GPT_OSS,
    ),
    "mixtral-8x7b": Case(
        "mixtral", "MixtralSparseMoeBlock", "MixtralConfig",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
        (4096, 14336, 8, 2),
    ),
}  # fmt: skip


class Block:
    """One block and its input on `device`; either backend runs it."""

    def __init__(self, case: Case, tokens: int, device: str) -> None:
        import torch

        config_class = getattr(
            import_module(f"transformers.models.{case.module}.configuration_{case.module}"), case.config
        )
        block = getattr(import_module(f"transformers.models.{case.module}.modeling_{case.module}"), case.block)
        self.config = config_class(**case.sizes, num_hidden_layers=1)
        torch.manual_seed(0)
        with torch.device(device):
            self.module = block(self.config).to(torch.bfloat16)
            self.x = torch.randn(1, tokens, self.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        for parameter in self.module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)

    def forward(self, backend: str) -> Any:
        """y."""
        self.config._experts_implementation = backend
        y = self.module(self.x)
        return y[0] if isinstance(y, tuple) else y

    def clear(self) -> None:
        """Frees the gradients."""
        self.module.zero_grad(set_to_none=True)
        self.x.grad = None

    def both(self, backend: str) -> None:
        """Forward and backward, all gradients."""
        self.clear()
        self.forward(backend).square().mean().backward()


def measure(case: Case, tokens: int, seconds: float, backends: Sequence[str], device: str = "cuda") -> dict[str, Any]:
    """The document of one block. A backend that cannot run it has `error` and no times."""
    import torch

    block = Block(case, tokens, device)
    figures: dict[str, Any] = {backend: {} for backend in backends}
    blocks = {}
    for backend in backends:
        try:
            with torch.no_grad():
                blocks[backend] = block.forward(backend).float()
            block.both(backend)
            block.clear()
            figures[backend]["peak_bytes"] = _peak(partial(block.both, backend))
        except Exception as error:  # a backend that cannot run this is a result too
            figures[backend]["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            blocks.pop(backend, None)
    working = [backend for backend in backends if backend in blocks]
    with torch.no_grad():
        for backend, ms in _rounds(block.forward, working, seconds):
            figures[backend]["forward_ms"] = ms
    for backend, ms in _rounds(block.both, working, seconds):
        figures[backend]["both_ms"] = ms
    document: dict[str, Any] = {"tokens": tokens, "backends": figures}
    if len(working) == len(backends) == len(BACKENDS):
        ours, theirs = (figures[backend] for backend in backends)
        left, right = (blocks[backend] for backend in backends)
        document |= {
            "forward_speedup": theirs["forward_ms"] / ours["forward_ms"],
            "both_speedup": theirs["both_ms"] / ours["both_ms"],
            "peak_share": ours["peak_bytes"] / max(theirs["peak_bytes"], 1),
            "apart": ((left - right).norm() / right.norm()).item(),
        }
    return document


def _peak(run: Callable[[], None]) -> int:
    """Bytes that a run has beyond what is there before it."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def _rounds(run: Callable[[str], Any], backends: Sequence[str], seconds: float) -> Iterator[tuple[str, float]]:
    """The median milliseconds of each, in rounds that begin with another one each time."""
    import torch

    times: dict[str, list[float]] = {backend: [] for backend in backends}
    spent, rounds = 0.0, 0
    while backends and (rounds < LEAST_ROUNDS or spent < 1e3 * seconds * len(backends)):
        turn = rounds % len(backends)
        for backend in (*backends[turn:], *backends[:turn]):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(backend)
            end.record()
            torch.cuda.synchronize()
            times[backend].append(start.elapsed_time(end))
            spent += times[backend][-1]
        rounds += 1
    yield from ((backend, median(each)) for backend, each in times.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = ArgumentParser(description="Blocks of Transformers.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--tokens", type=int, action="append", help="of a batch; default: 8192, and 24576")
    parser.add_argument("--seconds", type=float, default=2.0, help="device time for each backend's rounds")
    parser.add_argument("--in-place", action="store_true", help="fusekit's backward pass writes dz over z")
    parser.add_argument("--spec", action="store_true", help="print the spec file of the layers that are needed")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.cases) - CASES.keys())
    if unknown:
        parser.error(f"there is no case {unknown[0]}; they are {', '.join(CASES)}")
    cases = {name: CASES[name] for name in given.cases or CASES}
    tokens = given.tokens or TOKENS
    if given.spec:
        tables = [case.table(name, max(tokens)) for name, case in cases.items()]
        sys.stdout.write("\n".join(["schema = 1", "", *tables]))
        return 0
    import torch

    from fusekit.interop import transformers

    transformers.register(in_place=given.in_place)
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(), "blocks": []}
    for name, case in cases.items():
        for count in tokens:
            document["blocks"].append({"case": name, **measure(case, count, given.seconds, BACKENDS)})
            torch.cuda.empty_cache()
    sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 0
