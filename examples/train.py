"""Trains a small mixture-of-experts layer: on a GPU with its kernels, without one by its definition, slowly."""

import torch

from fusekit.interop.torch import MoE

on = "cuda" if torch.cuda.is_available() else "cpu"
moe = MoE("layer/moe", device=on)
optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-3)
x, target = torch.randn(2, 64, 512, device=on, dtype=torch.bfloat16)
for step in range(5):
    loss = torch.nn.functional.mse_loss(moe(x), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
assert loss < 0.9, "the layer did not learn"
