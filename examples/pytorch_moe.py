"""PyTorch: a stored kernel called on tensors, as an operator under torch.compile, and in a CUDA graph."""

import math

import torch

import fusekit
from fusekit.interop.torch import operator

E, M, K, I = 8, 1000, 512, 768
library = fusekit.open_library()
fc1 = library.load("quickstart/moe-fc1")

torch.manual_seed(0)
x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
w = (torch.randn(E, 2 * I, K, device="cuda") / math.sqrt(K)).bfloat16()
offsets = torch.tensor([100, 100, 350, 351, 600, 800, 999, 1000], device="cuda", dtype=torch.int32)


def reference(rows: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """silu(gate) * up of every group, in float32."""
    results, start = [], 0
    for weight, end in zip(w, ends, strict=True):
        gate, up = (rows[start:end].float() @ weight.float().T).chunk(2, dim=1)
        results.append(torch.nn.functional.silu(gate) * up)
        start = end
    return torch.cat(results)


def check(what: str, result: torch.Tensor, wanted: torch.Tensor) -> None:
    error = ((result.float() - wanted).norm() / wanted.norm()).item()
    print(f"{what}: relative error {error:.2e}")
    assert error < 4e-3, what


torch.backends.cuda.matmul.allow_tf32 = False
wanted = reference(x, offsets.tolist())

# 1. On tensors, into an output of one's own, on the current stream.
y = torch.empty(M, I, device="cuda", dtype=torch.bfloat16)
fc1(x=x, w=w, offsets=offsets, y=y, stream=torch.cuda.current_stream())
check("call", y, wanted)

# 2. As an operator: it allocates its output, and torch.compile sees its shape without running it.
moe_fc1 = operator(fc1, "fusekit_example::moe_fc1")
torch.library.opcheck(moe_fc1, (x, w, offsets))


@torch.compile(fullgraph=True)
def layer(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return moe_fc1(rows * 0.5, weight, ends).float() * 2


check("compiled", layer(x, w, offsets) / 2, reference(x * 0.5, offsets.tolist()))

# 3. In a graph that is replayed with other counts: the host never learns them.
graph = torch.cuda.CUDAGraph()
launch = fc1.bind(x=x, w=w, offsets=offsets, y=y)
with torch.cuda.graph(graph):
    launch(torch.cuda.current_stream())
for ends in ([0, 0, 1000, 1000, 1000, 1000, 1000, 1000], [125 * group for group in range(1, 9)]):
    offsets.copy_(torch.tensor(ends, dtype=torch.int32))
    graph.replay()
    check(f"graph with {ends}", y, reference(x, ends))
