"""What dispatch and combine mean for all ranks, against one GPU that has all experts."""

from __future__ import annotations

import numpy as np
import pytest

from fusekit.reference import encode
from fusekit.reference import exchange as reference
from fusekit.reference.formats import values
from fusekit.reference.permutation import index, unpermute
from fusekit.reference.quantise import blocks

EXPERTS, TOPK, HIDDEN, CAPACITY = 24, 4, 16, 128


def spec_of(ranks, **more):
    return {"ranks": ranks, "experts": EXPERTS, "topk": TOPK, "dtype": "bf16", **more}


def tokens_of(ranks, seed=0):
    source = np.random.default_rng(seed)
    tokens = [int(each) for each in source.integers(0, CAPACITY, ranks)]
    tokens[-1] = 0 if ranks > 1 else tokens[-1]
    x = [encode(source.standard_normal((each, HIDDEN)).astype(np.float32), "bf16") for each in tokens]
    chosen = [source.integers(-2, EXPERTS + 2, (each, TOPK)).astype(np.int32) for each in tokens]
    weights = [source.random((each, TOPK)).astype(np.float32) for each in tokens]
    return x, chosen, weights


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_choice_is_at_the_rank_of_its_expert_and_nowhere_else(ranks):
    x, chosen, weights = tokens_of(ranks)
    received = reference.dispatch(spec_of(ranks), x, chosen, weights, CAPACITY)
    local = EXPERTS // ranks
    for source in range(ranks):
        for token in range(len(x[source])):
            place = source * CAPACITY + token
            for choice, expert in enumerate(chosen[source][token]):
                there = [each["indices"][place, choice] for each in received]
                known = 0 <= expert < EXPERTS
                assert [rank * local + e for rank, e in enumerate(there) if e >= 0] == ([expert] if known else [])
                factors = [each["weights"][place, choice] for each in received if each["weights"][place, choice]]
                assert factors == ([weights[source][token, choice]] if known else [])
            for target in range(ranks):
                sent = received[target]["sent"][place]
                assert sent == (received[target]["indices"][place] >= 0).any()
                assert not sent or np.array_equal(received[target]["rows"][place], x[source][token])
    for each in received:
        assert each["indices"].shape == (ranks * CAPACITY, TOPK)
    sent = {"rows": {"rows", "sent"}, "choices": {"indices", "weights"}, "nothing": set()}
    for sends, names in sent.items():
        parts = reference.dispatch(spec_of(ranks, sends=sends), x, chosen, weights, CAPACITY)
        for whole, part in zip(received, parts, strict=True):
            assert set(part) == names
            assert all(np.array_equal(part[name], whole[name]) for name in part)


def test_fp8_values_come_with_their_scales():
    """Those of a row that was sent are the same on the rank of its expert as at home."""
    x, chosen, _ = tokens_of(3)
    fp8, scales = zip(*(quantise_rows(values(each, "bf16")) for each in x), strict=True)
    received = reference.dispatch(spec_of(3, dtype="e4m3"), fp8, chosen, None, CAPACITY, scales)
    for each in received:
        assert each["rows"].dtype == np.uint8 and each["scales"].shape == (1, 3 * CAPACITY)
        for source, (rows_of_source, theirs) in enumerate(zip(fp8, scales, strict=True)):
            place = slice(source * CAPACITY, source * CAPACITY + len(rows_of_source))
            sent = each["sent"][place]
            assert np.array_equal(each["rows"][place][sent], rows_of_source[sent])
            assert np.array_equal(each["scales"][:, place], theirs)


def quantise_rows(rows):
    values, scale = blocks(rows, 1, 128, "pow2")
    return values, scale.T


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_way_there_and_back_is_that_of_one_gpu(ranks, weighted):
    """Each expert multiplies by a number of its own. On one rank the bits are those of moe-unpermute."""
    x, chosen, weights = tokens_of(ranks, 3)
    scale = np.float32(2.0) ** (np.arange(EXPERTS) % 5)  # exact in bf16
    spec, local = spec_of(ranks), EXPERTS // ranks
    received = reference.dispatch(spec, x, chosen, weights, CAPACITY)
    rows, inverse = [], []
    for rank, each in enumerate(received):
        order = index(each["indices"], local)
        choice = order["order"]
        expert = each["indices"].reshape(-1)[choice] + rank * local
        rows.append(encode(values(each["rows"], "bf16")[choice // TOPK] * scale[expert][:, None], "bf16"))
        inverse.append(order["inverse"])
    given = [each["weights"] for each in received] if weighted else None
    got = reference.combine(spec, rows, inverse, given, chosen, CAPACITY)
    for rank in range(ranks):
        order = index(chosen[rank], EXPERTS)
        expert = chosen[rank].reshape(-1)[order["order"]]
        whole = values(x[rank], "bf16")[order["order"] // TOPK] * scale[expert][:, None]
        right, size = unpermute(whole.astype(np.float64), order["inverse"], weights[rank] if weighted else None)
        y, magnitude = got[rank]
        assert np.allclose(magnitude, size)
        error = np.abs(values(y, "bf16") - right)
        assert (error <= 2.0**-8 * (np.abs(right) + size)).all()
        if ranks == 1:
            assert np.array_equal(y, encode(right.astype(np.float32), "bf16"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_come_from_the_ranks_of_the_experts(ranks):
    _, chosen, _ = tokens_of(ranks, 5)
    source = np.random.default_rng(9)
    gradients = [source.standard_normal((ranks * CAPACITY, TOPK)).astype(np.float32) for _ in range(ranks)]
    got = reference.returned(spec_of(ranks), gradients, chosen, CAPACITY)
    local = EXPERTS // ranks
    for rank in range(ranks):
        for token, choice in np.ndindex(chosen[rank].shape):
            expert = chosen[rank][token, choice]
            right = gradients[expert // local][rank * CAPACITY + token, choice] if 0 <= expert < EXPERTS else 0
            assert got[rank][token, choice] == right


def test_addends_are_added_before_the_sum_is_rounded():
    x, chosen, _ = tokens_of(2, 5)
    spec = spec_of(2)
    received = reference.dispatch(spec, x, chosen, None, CAPACITY)
    orders = [index(each["indices"], EXPERTS // 2) for each in received]
    source = np.random.default_rng(1)
    rows = [encode(source.standard_normal((len(each["order"]), HIDDEN)).astype(np.float32), "bf16") for each in orders]
    inverse = [each["inverse"] for each in orders]
    more = [[encode(source.standard_normal(each.shape).astype(np.float32), "bf16")] for each in x]
    plain = reference.combine(spec, rows, inverse, None, chosen, CAPACITY)
    for rank, (y, _) in enumerate(reference.combine(spec, rows, inverse, None, chosen, CAPACITY, more)):
        parts = values(plain[rank][0], "bf16")
        close = np.abs(values(y, "bf16") - parts - values(more[rank][0], "bf16"))
        assert (close <= 2.0**-7 * (np.abs(parts) + np.abs(values(y, "bf16")) + 1e-6)).all()
    nothing = [[np.zeros_like(each)] for each in x]
    for (y, _), (same, _) in zip(
        reference.combine(spec, rows, inverse, None, chosen, CAPACITY, nothing), plain, strict=True
    ):
        assert np.array_equal(y, same)
