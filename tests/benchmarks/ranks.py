"""Layers over ranks next to `all_to_all_single` of PyTorch, and how much of their communication is hidden.

    python tests/benchmarks/run.py ranks --spec > bench-ranks.toml && fusekit build bench-ranks.toml      on any machine
    torchrun --nproc-per-node=2 tests/benchmarks/run.py ranks [CASE ...] [--tokens 1024 --tokens 8192] [--overlap]

The experts of a model's layer are spread over the processes, each with a GPU and as many tokens, whose experts and
weights are random and given. Prints one JSON document. Times are medians of rounds, each of the slowest rank:

- `ms`, `tflops` of a GPU: the forward or backward pass as a CUDA graph;
- `compute_ms`: those of its launches that a rank makes alone, on the rows that came, in turns with the pass;
  `communication_ms`: the others, which move rows between ranks; `ratio`: `ms` over the larger of both;
- `alone_ms`: the same pass of one GPU that has the tokens of all ranks, and the rank's experts alone, in turns with the
  pass. So it also adds up a token's rows, which over ranks is part of the communication; `alone_ratio`: `ms` over the
  larger of this and `communication_ms`;
- `peer_ms`: the same pass as one writes it in PyTorch. Counts go out by all_to_all_single, the host waits for them, a
  row goes out for each choice, fusekit's layer of one GPU computes on what came, and all comes back; autograd does the
  backward pass. `speedup`: how many times as fast the layer over ranks is; `apart`: how far both results are apart.

With `--overlap`, said both times, the layers have `overlap = true`; others are in the same spec.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

from fusekit.bench.replay import Replay
from fusekit.bench.timing import median
from fusekit.layers import Layer, Pass
from fusekit.library import Library, open_library
from fusekit.plan.layer.program import BACKWARD, FORWARD
from tests.plans import plan_of

from .torch_blocks import CASES as BLOCKS
from .torch_blocks import Case

FILE = "bench-ranks"
CASES = ("qwen3-30b-a3b", "mixtral-8x7b")
TOKENS = (1024, 8192)
OVERLAP = "-overlap"  # ends the names of layers with it
ROUNDS = 9
ROUND_MS = 20.0
TIMEOUT = 20_000  # ms that a rank waits for another


def tables(name: str, case: Case, tokens: int, ranks: int, overlap: bool = False) -> list[str]:
    """In a spec file: the layer over ranks, with overlap as well, the one that computes on rows of one choice, and the
    one of a rank's experts for all ranks' tokens.
    """
    hidden, intermediate, experts, topk = case.shape
    over = replace(case, spec=f"{case.spec}ranks = {ranks}\n")
    rows = replace(case, shape=(hidden, intermediate, experts // ranks, 1))
    tables = [over.table(f"{name}-{tokens}", tokens)]
    if overlap:
        over = replace(over, spec=f"{over.spec}overlap = true\n")
        tables.append(over.table(f"{name}-{tokens}{OVERLAP}", tokens))
    alone = replace(rows, shape=(hidden, intermediate, experts // ranks, topk))
    tables.append(rows.table(f"{name}-{tokens}-rows", tokens * topk))
    tables.append(alone.table(f"{name}-{tokens}-alone", tokens * ranks))
    return tables


def parts(layer: Layer, bound: Pass, which: str) -> dict[str, Pass]:
    """A pass with all outputs, and its launches apart: by what they are called in the document."""
    steps = plan_of(layer).needed(which, layer.outputs(which))
    launches: dict[bool, list[Any]] = {True: [], False: []}
    for launch, step in zip(bound.launches, steps, strict=True):
        launches[bool(step.window)].append(launch)
    alone, together = (Pass(launches[window], {}, {}) for window in (False, True))
    return {"ms": bound, "compute_ms": alone, "communication_ms": together}


class Ours:
    """The layer `name` with its tensors, on a stream: that of a rank, or one of one GPU, without `ranks`."""

    def __init__(self, library: Any, name: str, ranks: Any, tokens: int, stream: Any) -> None:
        import torch

        from fusekit.interop.torch_layer import DTYPES

        self._devices, self._stream, self.tokens = library.devices, stream, tokens
        self.layer = layer = library.layer(name, **({"ranks": ranks, "tokens": tokens} if ranks else {}))
        self.options, sizes = layer.options, layer.sizes(tokens)
        torch.manual_seed(1 + (ranks.rank if ranks else 0))
        passes, dims = (FORWARD, BACKWARD), layer.dims(tokens)
        inputs = {each: buffer for which in passes for each, buffer in layer.inputs(which).items()}
        outputs = {each: buffer for which in passes for each, buffer in layer.outputs(which).items()}
        self.tensors = {
            each: torch.zeros(buffer.extents(dims), dtype=DTYPES[buffer.dtype], device="cuda")
            for each, buffer in (inputs | outputs).items()
        }
        for each in inputs:
            fill(each, self.tensors[each], self.options)
        self._memory = {
            each: torch.empty(size, dtype=torch.uint8, device="cuda")
            for each, size in (("kept", sizes.kept), ("scratch", sizes.scratch))
        }
        self.passes = {which: self._bound(which) for which in passes}

    def _bound(self, which: str) -> Any:
        bind = self.layer.bind_backward if which == BACKWARD else self.layer.bind_forward
        names = (*self.layer.inputs(which), *self.layer.outputs(which))
        return bind(**{each: self.tensors[each] for each in names}, **self._memory)

    def choose(self, indices: Any, rank: int) -> None:
        """Takes the choices of all ranks' tokens, [ranks * T, K], as far as they are experts of `rank`."""
        local = indices - rank * self.options.experts
        self.tensors["indices"].copy_(local.where((local >= 0) & (local < self.options.experts), local.new_tensor(-1)))

    def measure(self, which: str, alone: Ours) -> dict[str, float]:
        """Times of a pass, and what comes of them."""
        times: dict[str, float] = {}
        handle = self._stream.cuda_stream
        runs = parts(self.layer, self.passes[which], which) | {"alone_ms": alone.passes[which]}
        with ExitStack() as graphs:
            for labels in (("ms", "compute_ms", "alone_ms"), ("communication_ms",)):
                replays = {label: Replay(self._devices, [runs[label]], 1, handle) for label in labels}
                for graph in replays.values():
                    graphs.callback(graph.close)
                times |= in_turns({label: partial(graph, handle) for label, graph in replays.items()})
        o = self.options
        flops = 6.0 * self.tokens * o.topk * o.hidden * o.intermediate * (2 if which == BACKWARD else 1)
        times["tflops"] = flops / times["ms"] / 1e9
        ratios = {"ratio": "compute_ms", "alone_ratio": "alone_ms"}
        return times | {
            ratio: times["ms"] / max(times[label], times["communication_ms"]) for ratio, label in ratios.items()
        }

    def sent(self, ranks: int, rank: int) -> int:
        """Bytes of rows that a dispatch sends to other ranks."""
        import torch

        there = torch.zeros(self.tokens, ranks, dtype=torch.bool, device="cuda")
        there.scatter_(1, (self.tensors["indices"] // self.options.local).long(), True)
        there[:, rank] = False
        return int(2 * self.options.hidden * there.sum())


def fill(name: str, tensor: Any, options: Any) -> None:
    """Makes up an input of the layer."""
    if name == "indices":
        tensor.copy_(tensor.new_empty(len(tensor), options.experts).float().uniform_().argsort(1)[:, : options.topk])
    elif name == "weights":
        tensor.copy_(tensor.uniform_().softmax(1))
    else:
        tensor.normal_(std={"w1": options.hidden**-0.5, "w2": options.intermediate**-0.5}.get(name, 1.0))


class Peer:
    """The same with all_to_all_single around `layer`, a layer of one GPU with this rank's experts and one choice a row.

    tensors: the layer's over ranks. experts: of all ranks.
    """

    def __init__(self, layer: Layer, tensors: Mapping[str, Any], experts: int) -> None:
        from torch import distributed

        from fusekit.interop.torch import MoE

        self.ranks, self.local = distributed.get_world_size(), experts // distributed.get_world_size()
        self.x, self.weights = (tensors[name].detach().requires_grad_() for name in ("x", "weights"))
        self.indices, self.dy = tensors["indices"], tensors["dy"]
        self.moe = MoE(layer, device=self.x.device)
        self.parameters = {name: self.moe.get_parameter(path) for name, path in self.moe.names.items()}
        for name, parameter in self.parameters.items():
            parameter.data = tensors[name]

    def forward(self) -> Any:
        """y."""
        import torch
        from torch import distributed

        chosen = self.indices.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.ranks * self.local)
        theirs = torch.empty_like(counts)  # of each rank for each expert of this one
        distributed.all_to_all_single(theirs, counts)
        outgoing, incoming = torch.stack([each.view(self.ranks, -1).sum(1) for each in (counts, theirs)]).tolist()
        rows = exchange()(self.x[order // self.indices.shape[1]], outgoing, incoming)
        experts = torch.arange(self.local, device=rows.device, dtype=torch.int32).repeat(self.ranks)
        experts = experts.repeat_interleave(theirs, output_size=len(rows))
        y = self.moe(rows, experts[:, None], torch.ones(len(rows), 1, device=rows.device))
        back = exchange()(y, incoming, outgoing)
        by_choice = torch.empty_like(back).index_copy(0, order, back).view(*self.indices.shape, self.x.shape[1])
        return (by_choice * self.weights.to(back.dtype)[..., None]).sum(1)

    def both(self) -> dict[str, Any]:
        """y and all gradients, by their names in the layer."""
        import torch

        y = self.forward()
        wanted = {"x": self.x, "weights": self.weights, **self.parameters}
        gradients = torch.autograd.grad(y, list(wanted.values()), self.dy)
        return {"y": y.detach(), **{f"d{name}": each for name, each in zip(wanted, gradients, strict=True)}}

    def measure(self) -> dict[str, float]:
        """ms of each pass."""
        forward, both = slowest(self.forward), slowest(self.both)
        return {FORWARD: forward, BACKWARD: both - forward}


@cache
def exchange() -> Any:
    """exchange(rows, outgoing, incoming): rows to and from each rank, with a gradient."""
    import torch
    from torch import distributed

    class Exchange(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, rows: Any, outgoing: list[int], incoming: list[int]) -> Any:
            ctx.back = incoming, outgoing
            out = rows.new_empty(sum(incoming), rows.shape[1])
            distributed.all_to_all_single(out, rows.contiguous(), incoming, outgoing)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return Exchange.apply(grad, *ctx.back), None, None

    return Exchange.apply


def slowest(run: Callable[[], Any]) -> float:
    """The median of rounds, each the milliseconds of a run on the slowest rank. Every rank calls this."""
    return in_turns({"": run})[""]


def in_turns(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Times of each run. They take turns, since GEMMs run at the power limit: the clock falls with time."""
    import torch

    def once(run: Callable[[], Any], repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        agree([0.0])
        run()  # after which no rank is far ahead
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / repeats

    for run in runs.values():
        once(run, 2)
    estimates = agree([once(run, 2) for run in runs.values()])
    counted = [
        (run, max(2, min(20, int(ROUND_MS / max(ms, 1e-3))))) for run, ms in zip(runs.values(), estimates, strict=True)
    ]
    rounds = [agree([once(run, repeats) for run, repeats in counted]) for _ in range(ROUNDS)]
    return {label: median([each[index] for each in rounds]) for index, label in enumerate(runs)}


def agree(values: list[float]) -> list[float]:
    """The largest of all ranks, each."""
    import torch
    from torch import distributed

    tensor = torch.tensor(values, dtype=torch.float64)
    distributed.all_reduce(tensor, distributed.ReduceOp.MAX)
    return list(tensor.tolist())


def measure(library: Library, name: str, tokens: int, ranks: Any, peer: bool, end: str = "") -> dict[str, Any]:
    """The part of the document of one layer and count of tokens. Every rank calls this. end: of the layer's name."""
    import torch
    from torch import distributed

    stream = torch.cuda.current_stream()
    ours = Ours(library, f"{FILE}/{name}-{tokens}{end}", ranks, tokens, stream)
    alone = Ours(library, f"{FILE}/{name}-{tokens}-alone", None, tokens * ranks.count, stream)
    indices = ours.tensors["indices"]
    chosen = [torch.empty_like(indices) for _ in range(ranks.count)]
    distributed.all_gather(chosen, indices)
    alone.choose(torch.cat(chosen), ranks.rank)
    for each in (FORWARD, BACKWARD):
        ours.passes[each](stream)
        alone.passes[each](stream)
    figures: dict[str, Any] = {"case": name, "tokens": tokens, "sent_mb": ours.sent(ranks.count, ranks.rank) / 1e6}
    if peer:
        other = Peer(
            library.layer(f"{FILE}/{name}-{tokens}-rows", device=ranks.device), ours.tensors, ours.options.experts
        )
        runs = other.both()
        shared = [each for each in ("y", "dx", "dw1", "dw2") if each in runs]
        errors = [float((runs[each] - ours.tensors[each]).norm() / runs[each].norm()) for each in shared]
        figures["apart"] = dict(zip(shared, agree(errors), strict=True))
    for which in (FORWARD, BACKWARD):
        figures[which] = ours.measure(which, alone)
    if peer:
        for which, ms in other.measure().items():
            figures[which] |= {"peer_ms": ms, "speedup": ms / figures[which]["ms"]}
    ours.layer.check()
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's docstring."""
    parser = ArgumentParser(description="Layers over ranks.")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(BLOCKS)}; {' and '.join(CASES)}")
    parser.add_argument("--tokens", type=int, action="append", help="of each rank; default: 1024, and 8192")
    parser.add_argument("--no-peer", action="store_true", help="time the layers over ranks alone")
    parser.add_argument("--overlap", action="store_true", help="layers whose products begin while rows come")
    parser.add_argument("--spec", action="store_true", help=f"print {FILE}.toml, the layers that are needed")
    parser.add_argument("--ranks", type=int, default=2, help="that the layers of --spec are for")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.cases) - BLOCKS.keys())
    if unknown:
        parser.error(f"there is no case {unknown[0]}; they are {', '.join(BLOCKS)}")
    wanted = [(name, tokens) for name in given.cases or CASES for tokens in given.tokens or TOKENS]
    if given.spec:
        lines = [
            table for name, tokens in wanted for table in tables(name, BLOCKS[name], tokens, given.ranks, given.overlap)
        ]
        sys.stdout.write("\n".join(["schema = 1", "", *lines]))
        return 0
    import torch
    from torch import distributed

    from fusekit.interop.torch_ranks import ranks_of

    torch.cuda.set_device(distributed.get_node_local_rank())
    distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    torch.cuda.set_stream(torch.cuda.Stream())
    library = open_library()
    ranks = ranks_of(library.devices, timeout=TIMEOUT)
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(), "ranks": ranks.count, "layers": []}
    for name, tokens in wanted:
        end = OVERLAP if given.overlap else ""
        document["layers"].append(
            measure(library, name, tokens, ranks, not given.no_peer, end) | {"overlap": bool(end)}
        )
        torch.cuda.empty_cache()
        if ranks.rank == 0:  # so that a run that ends early has printed its figures
            sys.stderr.write(f"{json.dumps(document['layers'][-1])}\n")
    if ranks.rank == 0:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    torch.cuda.synchronize()
    ranks.close()
    distributed.destroy_process_group()
    return 0
