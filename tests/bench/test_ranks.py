"""The benchmark of layers over ranks: the layers that it asks for, its launches apart, and its peer on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusekit.plan.layer import program
from fusekit.plan.layer.program import BACKWARD, FORWARD
from fusekit.spec import parse_text
from tests.benchmarks import ranks
from tests.benchmarks.ranks import CASES, FILE, main, parts
from tests.plan.test_layer_ranks import over

ROOT = Path(__file__).parents[2]


def layers_of(text: str) -> dict[str, Any]:
    return {spec.layer.name: spec.layer for spec in parse_text(text, FILE)}


def test_the_spec_has_the_layers_of_each_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--spec"]) == 0
    layers = layers_of(capsys.readouterr().out)
    ends = ("", "-rows", "-alone")
    assert [*layers] == [f"{case}-{tokens}{end}" for case in CASES for tokens in (1024, 8192) for end in ends]
    whole, rows = layers["qwen3-30b-a3b-8192"], layers["qwen3-30b-a3b-8192-rows"]
    assert (whole.hidden, whole.intermediate, whole.experts, whole.topk) == (2048, 768, 128, 8)
    assert (whole.ranks, whole.tokens, whole.router["input"]) == (2, 8192, "choices")
    assert (rows.experts, rows.topk, rows.ranks, rows.tokens) == (64, 1, 1, 65536)
    alone = layers["qwen3-30b-a3b-8192-alone"]
    assert (alone.experts, alone.topk, alone.ranks, alone.tokens) == (64, 8, 1, 16384)
    assert main(["gpt-oss-20b", "--spec", "--tokens", "512", "--ranks", "4"]) == 0
    layers = layers_of(capsys.readouterr().out)
    whole, rows = layers["gpt-oss-20b-512"], layers["gpt-oss-20b-512-rows"]
    assert (whole.bias, whole.ranks, rows.bias, rows.experts, rows.tokens) == (True, 4, True, 8, 2048)
    assert main(["qwen3-30b-a3b", "--spec", "--tokens", "512", "--overlap"]) == 0
    layers = layers_of(capsys.readouterr().out)
    assert {name: layer.overlap for name, layer in layers.items()} == {
        "qwen3-30b-a3b-512": False, "qwen3-30b-a3b-512-overlap": True, "qwen3-30b-a3b-512-rows": False,
        "qwen3-30b-a3b-512-alone": False,
    }  # fmt: skip
    with pytest.raises(SystemExit):
        main(["gpt-5"])


@pytest.mark.parametrize("which", [FORWARD, BACKWARD])
def test_launches_that_wait_for_other_ranks_are_apart(which: str) -> None:
    options = over(2, "choices")
    layer_program = program(options)
    sizes = {"capacity": 64, "rows": 128}
    layer: Any = SimpleNamespace(options=options, outputs=lambda each: layer_program.arguments(each)[1], **sizes)
    steps = layer_program.needed(which, layer_program.arguments(which)[1])
    bound: Any = SimpleNamespace(launches=tuple(step.part for step in steps))
    got = parts(layer, bound, which)
    together = {FORWARD: ["dispatch", "combine"], BACKWARD: ["dispatch", "combine-dx", "dispatch"]}
    assert [*got["communication_ms"].launches] == together[which]
    assert [each for each in bound.launches if each not in together[which]] == [*got["compute_ms"].launches]
    assert got["ms"] is bound


def test_passes_take_turns_and_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def run(name: str, ms: float) -> None:
        ran.append(name)
        clock[0] += ms

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=Event)))
    monkeypatch.setattr(ranks, "agree", lambda values: [value + 1 for value in values])  # another rank takes 1 ms more
    got = ranks.in_turns({"long": lambda: run("long", 9.0), "short": lambda: run("short", 0.5)})
    assert got == {"long": pytest.approx(10), "short": pytest.approx(1.5)}
    turns = [name for index, name in enumerate(ran) if ran[index - 1] != name]
    assert turns[-2 * ranks.ROUNDS :] == ["long", "short"] * ranks.ROUNDS
    assert ran[-15:].count("short") == 14  # of a round: 20 ms by the estimate of 1.5, and one before


PEER = """
import sys
import torch
from torch import distributed
from tests.benchmarks.ranks import Peer, agree
from fusekit.layers import memory
from tests.layers.host import ALIGNMENT, host

memory.ALIGNMENT = ALIGNMENT
rank, count, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", store=distributed.FileStore(file, count), rank=rank, world_size=count)
X, K, H, I, T = 8, 3, 16, 8, [5, 0, 30][rank]
torch.manual_seed(0)
w1, w2 = torch.randn(X, 2 * I, H), torch.randn(X, H, I)
torch.manual_seed(1 + rank)
own = slice(rank * X // count, (rank + 1) * X // count)
tensors = {
    "x": torch.randn(T, H), "dy": torch.randn(T, H), "w1": w1[own].clone(), "w2": w2[own].clone(),
    "indices": torch.rand(T, X).argsort(1)[:, :K].int(), "weights": torch.rand(T, K).softmax(1),
}
said = {"hidden": H, "intermediate": I, "topk": 1, "router": {"input": "choices"}, "activation": {"kind": "swiglu"}}
found = Peer(host(experts=X // count, **said), tensors, X).both()

x, weights, w1, w2 = (each.clone().requires_grad_() for each in (tensors["x"], tensors["weights"], w1, w2))
y = torch.zeros(T, H)
for choice in range(K):
    chosen = tensors["indices"][:, choice].long()
    gate, up = torch.einsum("th,tnh->tn", x, w1[chosen]).chunk(2, 1)
    y = y + weights[:, choice, None] * torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, w2[chosen])
dx, dweights, dw1, dw2 = torch.autograd.grad(y, [x, weights, w1, w2], tensors["dy"])
for total in (dw1, dw2):
    distributed.all_reduce(total)
wanted = {"y": y, "dx": dx, "dweights": dweights, "dw1": dw1[own], "dw2": dw2[own]}
assert {*found} == {*wanted}, found.keys()
for name, tensor in wanted.items():
    torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")
assert agree([float(rank), -1.0]) == [count - 1.0, -1.0]
print("right")
"""


def test_the_peer_computes_what_the_layer_does(tmp_path: Path) -> None:
    """On processes with gloo; the second has no tokens."""
    pytest.importorskip("torch", reason="torch is not installed")
    for count in (2, 1):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", PEER, str(rank), str(count), str(tmp_path / f"store{count}")], cwd=ROOT,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        for each in started:
            out, problems = each.communicate(timeout=100)
            assert out == "right\n", problems
