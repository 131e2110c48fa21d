"""Training of a small model of Transformers on random data with structure: a fixed Markov chain of second order."""

from contextlib import nullcontext

import torch

SYMBOLS, SUCCESSORS = 16, (0.7, 0.2, 0.1)
"""Token ids are 1 to SYMBOLS. Each pair of tokens has three successors, with these probabilities: 0.80 nats. The last
token alone says less of the next one."""


def batches(steps, rows, length, seed=0, device="cpu"):
    """Token ids [steps, rows, length] of the chain."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(SYMBOLS, SYMBOLS, SYMBOLS, generator=generator).argsort(-1)[..., : len(SUCCESSORS)]
    count = steps * rows
    ids = torch.empty(count, length, dtype=torch.int64)
    ids[:, :2] = torch.randint(SYMBOLS, (count, 2), generator=generator)
    choices = torch.multinomial(torch.tensor(SUCCESSORS), count * length, True, generator=generator).view(count, length)
    for place in range(2, length):
        ids[:, place] = table[ids[:, place - 2], ids[:, place - 1], choices[:, place]]
    return (ids + 1).view(steps, rows, length).to(device)


def train(model, ids, rate=1e-3, warm_up=20):
    """The loss of each step, with AdamW. ids: [steps, rows, length]. A float32 model runs under autocast to bf16."""
    device = ids.device.type
    masters = next(model.parameters()).dtype
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    losses = []
    for batch in ids:
        with torch.autocast(device, torch.bfloat16) if masters == torch.float32 else nullcontext():
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def without_experts(model, ids):
    """The loss on one batch when the experts give nothing."""
    with torch.no_grad(), torch.autocast(ids.device.type, torch.bfloat16):
        for path, parameter in model.named_parameters():
            if ".experts.down_proj" in path:
                parameter.zero_()
        return model(input_ids=ids, labels=ids).loss.item()
