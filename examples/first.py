"""Launches a stored kernel on tensors of PyTorch and checks the result: gate and up projection of 8 experts, SwiGLU."""

import torch

import fusekit

E, M, H, I = 8, 1000, 512, 768  # experts, rows, hidden size, intermediate size
ends = [100, 100, 350, 351, 600, 800, 999, 1000]  # the row at which each expert's rows end; expert 1 has none

torch.manual_seed(0)
x = torch.randn(M, H, device="cuda", dtype=torch.bfloat16)  # rows of tokens, sorted by expert
w = torch.randn(E, 2 * I, H, device="cuda", dtype=torch.bfloat16) / H**0.5  # of each expert: gate, then up
offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
y = torch.empty(M, I, device="cuda", dtype=torch.bfloat16)  # the caller allocates every output

library = fusekit.open_library()
kernel = library.load("quickstart/moe-fc1")  # checks the bytes; never compiles
kernel(x=x, w=w, offsets=offsets, y=y)  # checks the arguments and launches

launch = kernel.bind(x=x, w=w, offsets=offsets, y=y)  # checks once, for many launches
launch(torch.cuda.current_stream())

for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
    gate, up = (x[begin:end].float() @ w[expert].float().T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y[begin:end].float(), expected, rtol=1e-2, atol=1e-2)
print("right")
