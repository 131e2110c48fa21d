"""FlashAttention's kernels for Hopper from their launch records alone, against float64.

fusekit --store STORE build examples/attention.toml --allow-extern     on any machine, with flash-attn-4
FUSEKIT_STORE=STORE python -m pytest tests/gpu/test_attention.py         on the machine with the GPU and PyTorch
"""

import math
from itertools import pairwise

import pytest

LIMIT = 4e-3  # relative Frobenius error: what bf16 leaves of a result, and of the probabilities
SIZE, HEADS, KEYS = 128, 16, 4  # of a head; heads of queries, and of keys


@pytest.fixture
def launch(opened, torch):
    """launch(name, **arguments), on PyTorch's stream."""
    if not opened.store.names("attention/*"):
        pytest.skip(f"no kernels of attention.toml in {opened}; build it there with --allow-extern and name the store")

    def run(name, **arguments):
        kernel = opened.load(f"attention/{name}", arch="sm_90a")
        kernel(**arguments, stream=torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()

    return run


def rand(torch, *shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def poisoned(torch, *shape, dtype="bfloat16"):
    return torch.full(shape, math.nan, device="cuda", dtype=getattr(torch, dtype))


def attention(torch, q, k, v, causal=True, sink=None):
    """(o, the logarithms of the sums) of q [B, S, heads, SIZE] in float64; the last query sees the last key."""
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(SIZE)
    if causal:
        queries, keys = scores.shape[-2:]
        later = torch.ones(queries, keys, device="cuda", dtype=torch.bool).triu(keys - queries + 1)
        scores = scores.masked_fill(later, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2), scores.logsumexp(-1)


def close(found, wanted):
    error = float((found.double() - wanted).norm() / wanted.norm())
    assert error <= LIMIT, f"relative error {error:.2e}"


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (127, 127), (1000, 1000), (77, 1900), (2048, 2048)])
def test_forward(torch, launch, queries, keys):
    q, k, v = (rand(torch, 2, *shape, SIZE) for shape in ((queries, HEADS), (keys, KEYS), (keys, KEYS)))
    o = poisoned(torch, *q.shape)
    launch("forward", mQ=q, mK=k, mV=v, mO=o, softmax_scale=SIZE**-0.5)
    close(o, attention(torch, q, k, v)[0])


def test_a_learned_sink(torch, launch):
    q, k, v = (rand(torch, 2, 1000, heads, SIZE) for heads in (HEADS, KEYS, KEYS))
    o, sink = poisoned(torch, *q.shape), rand(torch, HEADS)
    launch("forward-sink", mQ=q, mK=k, mV=v, mO=o, learnable_sink=sink, softmax_scale=SIZE**-0.5)
    close(o, attention(torch, q, k, v, causal=False, sink=sink)[0])


def test_sequences_over_a_paged_cache(torch, launch):
    """Their keys lie in pages of 128 tokens, which a table names in any order."""
    ends, used = [0, 900, 901, 1700, 3000], [900, 5, 1300, 2048]
    pages, page = 64, 128
    table = torch.randperm(pages, device="cuda").int().view(4, 16)
    q, o = rand(torch, 3000, HEADS, SIZE), poisoned(torch, 3000, HEADS, SIZE)
    k, v = (rand(torch, pages, page, KEYS, SIZE) for _ in range(2))
    starts, seen = (torch.tensor(item, dtype=torch.int32, device="cuda") for item in (ends, used))
    given = {"mCuSeqlensQ": starts, "mSeqUsedK": seen, "mPageTable": table, "softmax_scale": SIZE**-0.5}
    launch("forward-paged", mQ=q, mK=k, mV=v, mO=o, **given)
    for number, (begin, end) in enumerate(pairwise(ends)):
        lying = [cache[table[number].long()].flatten(0, 1)[None, : used[number]] for cache in (k, v)]
        close(o[begin:end], attention(torch, q[None, begin:end], *lying)[0][0])


def test_backward(torch, launch):
    batch, tokens, scale = 2, 1024, SIZE**-0.5
    q, k, v, do = (rand(torch, batch, tokens, heads, SIZE) for heads in (HEADS, KEYS, KEYS, HEADS))
    wide = [item.double().requires_grad_() for item in (q, k, v)]
    o, lse = attention(torch, *wide)
    o.backward(do.double())
    sums, logs = (poisoned(torch, batch, HEADS, tokens, dtype="float32") for _ in range(2))
    dq = poisoned(torch, batch, HEADS, tokens * SIZE, dtype="float32")
    dk, dv = (torch.zeros(batch, KEYS, tokens * SIZE, device="cuda") for _ in range(2))
    given = {"mLSE": lse.detach().float().contiguous(), "mPdPsum": sums, "mLSElog2": logs, "mdQaccum": dq}
    launch("backward-prepare", mO=o.detach().bfloat16(), mdO=do, softmax_scale=scale, **given)
    given = {"mLSE": logs, "mdPsum": sums, "mdQaccum": dq, "mdK": dk, "mdV": dv, "softmax_scale": scale}
    launch("backward", mQ=q, mK=k, mV=v, mdO=do, **given)
    rounds = (("round-queries", dq, q, scale), ("round-keys", dk, k, scale), ("round-keys", dv, v, 1.0))
    for (name, total, like, factor), wanted in zip(rounds, wide, strict=True):
        filled = poisoned(torch, *like.shape)
        launch(name, mdQaccum=total, mdQ=filled, scale=factor)
        close(filled, wanted.grad)
