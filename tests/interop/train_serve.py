"""A small language model that is trained and then serves: log-probabilities of the same tokens from both.

Only its experts are a layer of fusekit: one for training, and one with `keep = "none"` for serving. What is outside
gives a row the same bits in any call, because it is made of elementwise operations alone: `total` adds halves to each
other, and products, norms, softmax and attention sum by it, over extents that do not depend on the call.
"""

import random

import torch
from torch import nn

from fusekit.interop.torch import MoE
from tests.interop import training

VOCABULARY, HEADS, WIDTH = 32, 2, 16
LENGTH = 16  # of a sequence


def total(x):
    """The sum over the last dimension, a power of two, in an order that does not depend on the other ones."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def linear(x, weight):
    """[R, K] and [N, K] to [R, N]."""
    return total(x[:, None] * weight)


def normed(x, weight):
    """RMSNorm."""
    return x / (total(x * x)[:, None] / x.shape[-1] + 1e-6).sqrt() * weight


class Block(nn.Module):
    """Attention over the sequence of each row, then a layer of fusekit. dtype: of the layer, for float32 parameters."""

    def __init__(self, moe, hidden):
        super().__init__()
        self.norms = nn.Parameter(torch.ones(2, hidden))
        self.qkv = nn.Parameter(torch.randn(3 * HEADS * WIDTH, hidden) * hidden**-0.5)
        self.out = nn.Parameter(torch.randn(hidden, HEADS * WIDTH) * (HEADS * WIDTH) ** -0.5)
        self.moe = moe

    def forward(self, x, sequences, positions, cache):
        """x [R, H] and keys and values [2, S, LENGTH, heads, width] to the same with these rows in them."""
        q, *new = linear(normed(x, self.norms[0]), self.qkv).view(len(x), 3, HEADS, WIDTH).unbind(1)
        keys, values = cache = [old.index_put((sequences, positions), row) for old, row in zip(cache, new, strict=True)]
        scores = total(q[:, None] * keys[sequences]).transpose(1, 2) * WIDTH**-0.5  # [R, heads, LENGTH]
        later = torch.arange(LENGTH, device=x.device) > positions[:, None]
        scores = scores.masked_fill(later[:, None], -torch.inf)
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        shares = shares / total(shares)[..., None]
        mixed = total(shares[:, :, None] * values[sequences].permute(0, 2, 3, 1))  # [R, heads, width]
        x = x + linear(mixed.flatten(1), self.out)
        rows = normed(x, self.norms[1])
        with torch.autocast(x.device.type, self.moe.operator.dtype, enabled=self.norms.requires_grad):
            y = self.moe(rows.to(self.moe.operator.dtype))
        return x + y.float(), cache


class Model(nn.Module):
    """moes: a layer for each block."""

    def __init__(self, moes, hidden, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(VOCABULARY, hidden))
        self.blocks = nn.ModuleList(Block(moe, hidden) for moe in moes)
        self.norm = nn.Parameter(torch.ones(hidden))
        self.head = nn.Parameter(torch.randn(VOCABULARY, hidden) * hidden**-0.5)

    def caches(self, sequences):
        """Keys and values of each block."""
        shape = sequences, LENGTH, HEADS, WIDTH
        return [[torch.zeros(shape, device=self.head.device) for _ in range(2)] for _ in self.blocks]

    def forward(self, ids, nexts, sequences, positions, caches):
        """Log-probabilities [R] of `nexts` after `ids`, which are at `positions` of `sequences`; all [R]."""
        x = self.embedding[ids]
        for number, block in enumerate(self.blocks):
            x, caches[number] = block(x, sequences, positions, caches[number])
        logits = linear(normed(x, self.norm), self.head)
        most = logits.amax(-1)
        wanted = logits.gather(1, nexts[:, None])[:, 0]
        return wanted - most - total((logits - most[:, None]).exp()).log()


def trained_on(model, ids):
    """The log-probabilities [S, LENGTH] of the next tokens in ids [S, LENGTH + 1], all in one call, as in training."""
    device, count = ids.device, len(ids)
    sequences = torch.arange(count, device=device).repeat_interleave(LENGTH)
    positions = torch.arange(LENGTH, device=device).repeat(count)
    rows = ids[:, :-1].flatten(), ids[:, 1:].flatten(), sequences, positions
    return model(*rows, model.caches(count)).view(count, LENGTH)


def train(model, steps, rows, seed=0):
    """The loss of each step, with AdamW on float32 parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for ids in training.batches(steps, rows, LENGTH + 1, seed, model.head.device):
        loss = -trained_on(model, ids).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def serving(model, layer, **place):
    """The model for serving, with the weights of `model` in modules of `layer`."""
    moes = [MoE(layer, **place) for _ in model.blocks]
    served = Model(moes, model.norm.shape[0]).to(model.head.device)
    served.load_state_dict(model.state_dict())  # casts the experts to the layer's type, as autocast does
    return served.requires_grad_(False)


@torch.no_grad()
def serve(model, ids, batch, seed=0):
    """The log-probabilities [S, LENGTH] again, and the rows of each call. `batch` sequences run at a time.

    Prompts of different lengths come in one call, then a token of each sequence in a call, in any order; sequences that
    have ended make room for others.
    """
    chance, caches = random.Random(seed), model.caches(len(ids))
    waiting, running, place = list(range(len(ids))), [], [0] * len(ids)
    found, calls = torch.full((len(ids), LENGTH), torch.nan, device=ids.device), []
    while waiting or running:
        began = [waiting.pop() for _ in range(min(batch - len(running), len(waiting)))]
        running += began
        counts = {sequence: chance.randint(1, LENGTH // 2) if sequence in began else 1 for sequence in running}
        rows = [(each, place[each] + step) for each, count in counts.items() for step in range(count)]
        chance.shuffle(rows)
        sequences, positions = torch.tensor(rows, device=ids.device).T
        tokens = ids[sequences, positions], ids[sequences, positions + 1]
        found[sequences, positions] = model(*tokens, sequences, positions, caches)
        calls.append(len(rows))
        for each, count in counts.items():
            place[each] += count
        running = [each for each in running if place[each] < LENGTH]
    return found, calls
